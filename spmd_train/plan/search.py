"""Every legal way to run a workload on a cluster, costed; the best first, and why not the others.

A mesh is legal if the trainer takes it (`shape_rules`), and placed well if `model`, whose
collectives come several times a layer, stays inside a node. The global batch is kept: the size of a
micro-batch decides how many there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from spmd_train.config import Config
from spmd_train.errors import RequestError, listed
from spmd_train.mesh import MeshShape, fitting_shapes
from spmd_train.plan.cluster import Cluster
from spmd_train.plan.memory import MemoryUse, memory_use
from spmd_train.plan.timing import StepTime, step_time
from spmd_train.plan.workload import Compute, Execution, Remat, ScheduleName, Workload
from spmd_train.shape_rules import sequence_parallel_on, validate_shape

USABLE = {"gpu": 0.94, "tpu": 1.0}
"""Share of an accelerator's memory that a step may take: on a GPU the CUDA context and NCCL's
buffers need some, and XLA takes only 75 % unless told (XLA_PYTHON_CLIENT_MEM_FRACTION)."""

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
    """A mesh on which nothing works, and the reason with its numbers."""

    mesh: MeshShape
    reason: str


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
    """

    config: Config
    workload: Workload
    cluster: Cluster
    candidates: tuple[Candidate, ...]
    pareto: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    evaluated: int


def usable_bytes(cluster: Cluster) -> int:
    """Bytes a step may take on one JAX device."""
    accelerator = cluster.accelerator
    return int(USABLE[accelerator.kind] * accelerator.memory_bytes / accelerator.devices)


def search(config: Config, cluster: Cluster, fixed: Fixed = Fixed()) -> Plan:
    """Cost every legal candidate.

    Raises:
        RequestError: the planner has no model of what the configuration asks for, or a fixed choice
            is impossible.
    """
    _check_modelled(config)
    workloads = {
        compute: workload_for(config, cluster, compute)
        for compute in _computes(config, cluster, fixed)
    }
    limit = usable_bytes(cluster)
    everything_fixed = None not in (
        fixed.mesh, fixed.zero, fixed.schedule, fixed.remat, fixed.compute,
        fixed.microbatches or fixed.microbatch_size,
    )  # fmt: skip
    best: list[Candidate] = []
    fitting: list[Candidate] = []
    rejected: list[Rejected] = []
    evaluated = 0
    for mesh in _meshes(cluster, fixed):
        reason = _illegal(config, mesh, fixed) or _misplaced(cluster, mesh, fixed)
        if reason:
            if fixed.mesh is not None:
                raise RequestError(reason)
            rejected.append(Rejected(mesh, reason))
            continue
        here: list[Candidate] = []
        leanest: tuple[MemoryUse, Execution] | None = None
        for e in _executions(config, mesh, fixed, tuple(workloads)):
            evaluated += 1
            workload = workloads[e.compute]
            memory = memory_use(workload, e)
            if leanest is None or memory.total < leanest[0].total:
                leanest = memory, e
            if memory.total <= limit or everything_fixed:
                here.append(
                    Candidate(e, memory, step_time(workload.transformer, e, cluster), limit)
                )
        if here:
            best.append(min(here, key=_rank))
            fitting.extend(c for c in here if c.fits)
        elif leanest is not None:
            rejected.append(Rejected(mesh, too_large(leanest[0], leanest[1], limit)))
        else:
            rejected.append(
                Rejected(mesh, f"no micro-batch of the size asked for on data={mesh.data}.")
            )
    return Plan(
        config=config,
        workload=next(iter(workloads.values())),
        cluster=cluster,
        candidates=tuple(sorted(best, key=_rank)),
        pareto=tuple(_pareto(fitting)),
        rejected=tuple(rejected),
        evaluated=evaluated,
    )


def _rank(candidate: Candidate) -> tuple[float, int]:
    return candidate.seconds, candidate.memory.total


def _pareto(candidates: list[Candidate]) -> Iterator[Candidate]:
    """Each that needs less memory than every faster one."""
    least: float = float("inf")
    for candidate in sorted(candidates, key=_rank):
        if candidate.memory.total < least:
            least = candidate.memory.total
            yield candidate


def _check_modelled(config: Config) -> None:
    """Refuse what memory and time have no model of."""
    for key, value, known in (
        ("model.block", config.model.block, "decoder"),
        ("precision.reproducible", config.precision.reproducible, False),
        ("pipeline.idle", config.pipeline.idle, "skip"),
    ):
        if value != known:
            shown = str(value).lower() if isinstance(value, bool) else value
            raise RequestError(
                f"{key}={shown} is not modelled by the planner, whose figures are for "
                f"{key}={str(known).lower()}; `compile --target` measures it without a model."
            )


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
    config: Config, mesh: MeshShape, fixed: Fixed, computes: tuple[Compute, ...]
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
        computes,
        zeros if fixed.zero is None else (fixed.zero,),
        schedules if fixed.schedule is None else (fixed.schedule,),
        remats if fixed.remat is None else (fixed.remat,),
        sizes,
    ):
        yield Execution(
            mesh, rows // size, size, config.batch.sequence_length, zero, schedule, 1, remat,
            compute, sequence_parallel,
        )  # fmt: skip


def too_large(memory: MemoryUse, execution: Execution, limit: int) -> str:
    """That not even this fits, with its largest parts."""
    e = execution
    return (
        f"{e.mesh}: needs {memory.total / 1e9:,.0f} GB per device even with zero={e.zero}, "
        f"remat={e.remat} and micro-batches of {e.microbatch_size}, of which "
        f"{memory.states / 1e9:,.0f} GB are states and {memory.grads / 1e9:,.0f} GB gradients; "
        f"{limit / 1e9:,.0f} GB there."
    )
