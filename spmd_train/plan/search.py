"""Every legal way to run a workload on a cluster, costed; the best first, and why not the others.

A mesh is legal if the trainer takes it (`shape_rules`), and placed well if `model`, whose
collectives come several times a layer, stays inside a node. The global batch is kept: the size of a
micro-batch decides how many there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from spmd_train.config import Config
from spmd_train.errors import RequestError, listed
from spmd_train.mesh import MeshShape, fitting_shapes
from spmd_train.plan.cluster import Cluster
from spmd_train.plan.memory import MemoryUse, memory_use
from spmd_train.plan.timing import StepTime, step_time
from spmd_train.plan.workload import Compute, Execution, Remat, ScheduleName, Workload, unmodelled
from spmd_train.shape_rules import sequence_parallel_on, validate_shape

USABLE = {"gpu": 0.94, "tpu": 1.0}
"""Share of an accelerator's memory that a step may take: on a GPU the CUDA context and NCCL's
buffers need some, and XLA takes only 75 % unless told (XLA_PYTHON_CLIENT_MEM_FRACTION)."""

MODEL_ERROR = 0.03
"""Share kept free since the memory model may be so far below the compiler."""

COMPUTE_OF_POLICY: dict[str, Compute] = {
    "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8",
}  # fmt: skip
POLICY_OF_COMPUTE = {compute: policy for policy, compute in COMPUTE_OF_POLICY.items()}


@dataclass(frozen=True)
class Fixed:
    """What is not to be searched; None leaves it free."""

    mesh: MeshShape | None = None
    zero: int | None = None
    microbatch_size: int | None = None
    microbatches: int | None = None
    schedule: ScheduleName | None = None
    remat: Remat | None = None
    compute: Compute | None = None

    @property
    def everything(self) -> bool:
        """Whether one candidate is left."""
        choices = (self.mesh, self.zero, self.schedule, self.remat, self.compute)
        return None not in choices and (self.microbatches or self.microbatch_size) is not None


@dataclass(frozen=True)
class Candidate:
    """One way to run the step, costed.

    Attributes:
        limit: bytes a step may take on a device.
    """

    execution: Execution
    memory: MemoryUse
    time: StepTime
    limit: int

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.limit

    @property
    def seconds(self) -> float:
        return self.time.total


@dataclass(frozen=True)
class Rejected:
    """What does not work on a mesh, and the reason with its numbers.

    Attributes:
        zero: the level that does not fit; None where no way works.
    """

    mesh: MeshShape
    reason: str
    zero: int | None = None


class Leanest(NamedTuple):
    """What needs the least memory, and how much."""

    memory: MemoryUse
    execution: Execution


@dataclass(frozen=True)
class Plan:
    """What a search found.

    Attributes:
        config: with the global batch that was planned for.
        candidates: of every mesh the fastest that fits, fastest first; with everything fixed the
            one candidate, fitting or not.
        pareto: those of all that fit which no other beats in both memory and time, fastest first.
        rejected: the other meshes.
        evaluated: how many candidates were costed.
        least: what needs the least memory of all; None where no mesh is legal.
        fitting: every candidate that fits, in no order.
    """

    config: Config
    workload: Workload
    cluster: Cluster
    candidates: tuple[Candidate, ...]
    pareto: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    evaluated: int
    least: Leanest | None
    fitting: tuple[Candidate, ...]

    @property
    def limit(self) -> int:
        """Bytes a step may take on a device."""
        return usable_bytes(self.cluster)


def usable_bytes(cluster: Cluster) -> int:
    """Bytes a step may take on one JAX device."""
    accelerator = cluster.accelerator
    share = USABLE[accelerator.kind] * (1 - MODEL_ERROR)
    return int(share * accelerator.memory_bytes / accelerator.devices)


def search(config: Config, cluster: Cluster, fixed: Fixed = Fixed()) -> Plan:
    """Cost every legal candidate.

    Raises:
        RequestError: the planner has no model of what the configuration asks for, or a fixed choice
            is impossible.
    """
    reason = unmodelled(config)
    if reason is not None:
        raise RequestError(reason)
    computes = _computes(config, cluster, fixed)
    workloads = {compute: workload_for(config, cluster, compute) for compute in computes}
    best: list[Candidate] = []
    rejected: list[Rejected] = []
    costed: list[_Costed] = []
    for mesh in _meshes(cluster, fixed):
        reason = _illegal(config, mesh, fixed) or _misplaced(cluster, mesh, fixed)
        if reason is not None and fixed.mesh is not None:
            raise RequestError(reason)
        if reason is not None:
            rejected.append(Rejected(mesh, reason))
            continue
        here = _cost(_executions(config, mesh, fixed, workloads), workloads, cluster, fixed)
        costed.append(here)
        if here.candidates:
            best.append(min(here.fitting or here.candidates, key=_rank))
        rejected.extend(_rejections(mesh, here, usable_bytes(cluster), fixed))
    fitting = [candidate for here in costed for candidate in here.fitting]
    leanest = [lean for here in costed for lean in here.leanest.values()]
    return Plan(
        config=config,
        workload=next(iter(workloads.values())),
        cluster=cluster,
        candidates=tuple(sorted(best, key=_rank)),
        pareto=tuple(_pareto(fitting)),
        rejected=tuple(rejected),
        evaluated=sum(here.evaluated for here in costed),
        least=min(leanest, key=_total, default=None),
        fitting=tuple(fitting),
    )


@dataclass(frozen=True)
class _Costed:
    """What was found on one mesh.

    Attributes:
        candidates: that fit, or all where everything is fixed.
        leanest: by ZeRO level, in the compute dtype that comes first.
        evaluated: how many were costed.
    """

    candidates: list[Candidate]
    leanest: dict[int, Leanest]
    evaluated: int

    @property
    def fitting(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate.fits]


def _cost(
    executions: Iterator[Execution],
    workloads: dict[Compute, Workload],
    cluster: Cluster,
    fixed: Fixed,
) -> _Costed:
    """Memory of every execution, and time of those that fit."""
    limit, first = usable_bytes(cluster), next(iter(workloads))
    candidates: list[Candidate] = []
    leanest: dict[int, Leanest] = {}
    evaluated = 0
    for e in executions:
        evaluated += 1
        workload = workloads[e.compute]
        memory = memory_use(workload, e)
        lean = leanest.get(e.zero)
        if e.compute == first and (lean is None or memory.total < lean.memory.total):
            leanest[e.zero] = Leanest(memory, e)
        if memory.total <= limit or fixed.everything:
            time = step_time(workload.transformer, e, cluster)
            candidates.append(Candidate(e, memory, time, limit))
    return _Costed(candidates, leanest, evaluated)


def _total(least: Leanest) -> int:
    return least.memory.total


def _rejections(mesh: MeshShape, here: _Costed, limit: int, fixed: Fixed) -> Iterator[Rejected]:
    """A mesh on which nothing fits; of one that was asked for, and of plain data parallelism, every
    ZeRO level on which nothing does."""
    if not here.leanest:
        yield Rejected(mesh, f"no such micro-batch divides the rows of data={mesh.data}.")
        return
    if not here.fitting:
        yield Rejected(mesh, too_large(min(here.leanest.values(), key=_total), limit))
    plain = mesh.model * mesh.stage == 1 and mesh.data > 1
    for zero, each in sorted(here.leanest.items()):
        if each.memory.total > limit and (fixed.mesh is not None or (plain and zero == 0)):
            yield Rejected(mesh, level_too_large(each, limit), zero)


def _rank(candidate: Candidate) -> tuple[float, int]:
    return candidate.seconds, candidate.memory.total


def _pareto(candidates: list[Candidate]) -> Iterator[Candidate]:
    """Each that needs less memory than every faster one."""
    least: float = float("inf")
    for candidate in sorted(candidates, key=_rank):
        if candidate.memory.total < least:
            least = candidate.memory.total
            yield candidate


def _computes(config: Config, cluster: Cluster, fixed: Fixed) -> tuple[Compute, ...]:
    """Compute dtypes to try, of those the hardware has; 8-bit products only where asked for."""
    peaks = cluster.accelerator.peak_tflops
    asked = fixed.compute or COMPUTE_OF_POLICY.get(config.precision.policy)
    if asked is None:
        return tuple(c for c in ("bfloat16", "float32") if c in peaks)
    if asked not in peaks:
        raise RequestError(
            f"{cluster.accelerator.title} does not compute in {asked}; it does in {listed(peaks)}."
        )
    return (asked,)


def workload_for(config: Config, cluster: Cluster, compute: Compute) -> Workload:
    """What `config` asks for on `cluster`, computed in `compute`."""
    precision = config.precision.model_copy(update={"policy": POLICY_OF_COMPUTE[compute]})
    return Workload.of(config.model_copy(update={"precision": precision}), cluster.accelerator.kind)


def _meshes(cluster: Cluster, fixed: Fixed) -> list[MeshShape]:
    if fixed.mesh is None:
        return fitting_shapes(cluster.devices)
    if fixed.mesh.size != cluster.devices:
        raise RequestError(
            f"mesh {fixed.mesh} is for {fixed.mesh.size} devices, but {cluster.name} has "
            f"{cluster.devices} ({cluster.nodes} nodes of {cluster.per_node})."
        )
    return [fixed.mesh]


def _illegal(config: Config, mesh: MeshShape, fixed: Fixed) -> str | None:
    """Why the trainer refuses this mesh; None if it takes it."""
    if config.batch.global_size % mesh.data:
        return (
            f"data={mesh.data} does not divide the {config.batch.global_size} sequences of a step."
        )
    microbatches = fixed.microbatches or 1
    batch = config.batch.model_copy(update={"microbatches": microbatches})
    try:
        validate_shape(config.model_copy(update={"batch": batch}), mesh)
    except RequestError as error:
        return str(error).splitlines()[0]
    return None


def _misplaced(cluster: Cluster, mesh: MeshShape, fixed: Fixed) -> str | None:
    node = cluster.per_node * cluster.accelerator.devices
    if fixed.mesh is None and cluster.nodes > 1 and mesh.model > node:
        return (
            f"model={mesh.model} is wider than a node of {node}: its collectives, several a layer, "
            "would cross the network between nodes."
        )
    return None


def _executions(
    config: Config, mesh: MeshShape, fixed: Fixed, workloads: dict[Compute, Workload]
) -> Iterator[Execution]:
    rows = config.batch.global_size // mesh.data
    zeros = (0, 1, 2, 3) if mesh.data > 1 else (1,)
    schedules: tuple[ScheduleName, ...] = ("1f1b",)
    remats: tuple[Remat, ...] = ("none", "dots", "full")
    if mesh.stage > 1:
        schedules, remats = (*schedules, "gpipe"), (*remats, "stage")
    if fixed.microbatches is not None:
        sizes = [rows // fixed.microbatches] if rows % fixed.microbatches == 0 else []
    elif fixed.microbatch_size is not None:
        sizes = [fixed.microbatch_size] if rows % fixed.microbatch_size == 0 else []
    else:
        sizes = [size for size in range(1, rows + 1) if rows % size == 0]
    sequence_parallel = sequence_parallel_on(config, mesh)
    for compute, zero, schedule, remat, size in itertools.product(
        workloads,
        zeros if fixed.zero is None else (fixed.zero,),
        schedules if fixed.schedule is None else (fixed.schedule,),
        remats if fixed.remat is None else (fixed.remat,),
        sizes,
    ):
        yield Execution(
            mesh, rows // size, size, config.batch.sequence_length, zero, schedule, 1, remat,
            compute, sequence_parallel, reduce_bytes=workloads[compute].reduce_bytes,
        )  # fmt: skip


def too_large(least: Leanest, limit: int) -> str:
    """That not even this fits, with its largest parts."""
    e, memory = least.execution, least.memory
    return (
        f"needs {gigabytes(memory.total)} per device even with zero={e.zero}, remat={e.remat} and "
        f"micro-batches of {e.microbatch_size}, of which {gigabytes(memory.states)} are states and "
        f"{gigabytes(memory.grads)} gradients; {gigabytes(limit)} there."
    )


def level_too_large(least: Leanest, limit: int) -> str:
    """That a ZeRO level does not fit."""
    e, memory = least.execution, least.memory
    return (
        f"zero={e.zero} needs {gigabytes(memory.states)} of states and "
        f"{gigabytes(memory.total)} in all per device at the least (remat={e.remat}, micro-batches "
        f"of {e.microbatch_size}); {gigabytes(limit)} there."
    )


def gigabytes(count: float) -> str:
    """Bytes for people, decimal: `22.6 GB`, `520 GB`."""
    size = count / 1e9
    return f"{size:,.0f} GB" if size >= 100 else f"{size:.1f} GB"
