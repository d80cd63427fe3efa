"""The chosen configuration on larger clusters, what limits it there, and what to change first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from spmd_train.config import Config
from spmd_train.errors import RequestError
from spmd_train.plan.cluster import Cluster, torus
from spmd_train.plan.memo_memory import counted
from spmd_train.plan.memory import MemoryUse, memory_use
from spmd_train.plan.timing import StepTime, step_time
from spmd_train.plan.workload import Execution, Workload
from spmd_train.shape_rules import sequence_parallel_on, validate_shape

SMALL = 0.005  # a gain, or a relief, that is not worth a change of configuration

PARTS = {
    "bubble": "stages that wait for one another",
    "data_comm_exposed": "gradients and weights over data",
    "model_comm_exposed": "activations over model",
    "stage_comm_exposed": "activations and sums over stage",
    "optimizer": "the optimizer's update",
}
"""Parts of a step that are not compute, by their names in `StepTime.itemised`."""


@dataclass(frozen=True)
class Grown:
    """The step on a cluster `times` as large.

    Attributes:
        efficiency: tokens per second and device, relative to the cluster planned for.
    """

    times: int
    cluster: Cluster
    execution: Execution
    time: StepTime
    efficiency: float


def larger(cluster: Cluster, times: int) -> Cluster:
    """More nodes; of a single torus, a larger slice."""
    if cluster.topology is None or cluster.nodes > 1:
        return cluster.resized(cluster.nodes * times)
    size = cluster.per_node * times
    topology = torus(size, cluster.link.dimensions)
    return cluster.model_copy(update={"per_node": size, "topology": topology})


def same_per_device(e: Execution, times: int) -> Execution:
    """More data shards, each with the rows it had."""
    return e.with_mesh(data=e.mesh.data * times)


def same_batch(e: Execution, times: int) -> Execution | None:
    """More data shards, each with fewer micro-batches, or, where these do not divide, fewer rows in
    each; None where neither does."""
    e = same_per_device(e, times)
    if e.microbatches % times == 0:
        return replace(e, microbatches=e.microbatches // times)
    rows = e.microbatches * e.microbatch_size
    if rows % times:
        return None
    rows //= times
    size = max(s for s in range(1, e.microbatch_size + 1) if rows % s == 0)
    return replace(e, microbatches=rows // size, microbatch_size=size)


def growth(
    workload: Workload, e: Execution, cluster: Cluster, *, keep_batch: bool
) -> list[Grown | None]:
    """The step on the cluster itself and on 2 and 4 times as many devices; None where the batch
    cannot be divided so far."""
    base = step_time(workload.transformer, e, cluster).tokens_per_second
    found: list[Grown | None] = []
    for times in (1, 2, 4):
        after = same_batch(e, times) if keep_batch else same_per_device(e, times)
        if after is None:
            found.append(None)
            continue
        bigger = larger(cluster, times) if times > 1 else cluster
        time = step_time(workload.transformer, after, bigger)
        found.append(Grown(times, bigger, after, time, time.tokens_per_second / times / base))
    return found


def bottleneck(time: StepTime) -> tuple[str, float]:
    """The largest part of a step that is not compute, and its seconds."""
    parts = time.itemised()
    name = max(PARTS, key=lambda part: parts[part])
    return name, parts[name]


@dataclass(frozen=True)
class Mitigation:
    """One change to a configuration, costed.

    Attributes:
        gain: tokens per second, relative to without it, minus 1.
        relief: share of the bottleneck's seconds per token that it takes away.
    """

    what: str
    execution: Execution
    memory: MemoryUse
    time: StepTime
    gain: float
    relief: float

    def same_batch(self, other: Execution) -> bool:
        return self.execution.global_size == other.global_size


def mitigations(workload: Workload, config: Config, at: Grown, limit: int) -> list[Mitigation]:
    """Every single change that fits the memory and that the trainer runs, best first."""
    part, before = bottleneck(at.time)
    found = []
    for what, after in _alternatives(at.execution):
        after = replace(after, sequence_parallel=sequence_parallel_on(config, after.mesh))
        if not _legal(config, after, at.cluster):
            continue
        memory = memory_use(workload, after)
        if memory.total > limit:
            continue
        time = step_time(workload.transformer, after, at.cluster)
        gain = time.tokens_per_second / at.time.tokens_per_second - 1
        each = time.itemised()[part] / time.tokens
        relief = 1 - each * at.time.tokens / before if before else 0.0
        found.append(Mitigation(what, after, memory, time, gain, relief))
    return sorted(found, key=lambda m: -m.gain)


def first_to_try(found: list[Mitigation], at: Grown) -> tuple[Mitigation | None, Mitigation | None]:
    """(against the bottleneck, against anything else), of the changes that gain.

    Against the bottleneck one that leaves the global batch alone comes before one that does not.
    The other leaves it alone too; None where it is the same.
    """
    gaining = [m for m in found if m.gain > SMALL]
    relieving = [m for m in gaining if m.relief > SMALL]
    kept = [m for m in relieving if m.same_batch(at.execution)]
    first = next(iter(kept or relieving), None)
    best = next((m for m in gaining if m.same_batch(at.execution)), None)
    return first, best if best is not first else None


def _alternatives(e: Execution) -> Iterator[tuple[str, Execution]]:
    mesh, M, rows = e.mesh, e.microbatches, e.microbatch_size
    if mesh.data > 1:
        for zero in {0, 1, 2, 3} - {e.zero}:
            yield f"zero={zero} instead of {e.zero}", replace(e, zero=zero)
    for remat in ("none", "dots", "full", *(("stage",) if mesh.stage > 1 else ())):
        if remat != e.remat:
            yield f"remat={remat} instead of {e.remat}", replace(e, remat=remat)
    if rows % 2 == 0:
        yield (
            f"{2 * M} micro-batches of {counted(rows // 2, 'row')}",
            replace(e, microbatches=2 * M, microbatch_size=rows // 2),
        )
    if M % 2 == 0:
        yield (
            f"{counted(M // 2, 'micro-batch')} of {2 * rows} rows",
            replace(e, microbatches=M // 2, microbatch_size=2 * rows),
        )
    yield (
        f"twice the global batch: {2 * M} micro-batches of {counted(rows, 'row')}",
        replace(e, microbatches=2 * M),
    )
    yield (
        f"twice the global batch: {counted(M, 'micro-batch')} of {2 * rows} rows",
        replace(e, microbatch_size=2 * rows),
    )
    for axis in ("model", "stage"):
        size = getattr(mesh, axis)
        if mesh.data % 2 == 0:  # a shard has twice the rows
            after = replace(e, microbatches=2 * M)
            yield _moved(after.with_mesh(**{axis: 2 * size, "data": mesh.data // 2}), axis)
        if size % 2 == 0 and M % 2 == 0:
            after = replace(e, microbatches=M // 2)
            yield _moved(after.with_mesh(**{axis: size // 2, "data": 2 * mesh.data}), axis)
        elif size % 2 == 0 and rows % 2 == 0:
            after = replace(e, microbatch_size=rows // 2)
            yield _moved(after.with_mesh(**{axis: size // 2, "data": 2 * mesh.data}), axis)


def _moved(e: Execution, axis: str) -> tuple[str, Execution]:
    if e.mesh.stage == 1:
        e = replace(e, schedule="1f1b", remat="full" if e.remat == "stage" else e.remat)
    batches = f"{counted(e.microbatches, 'micro-batch')} of {counted(e.microbatch_size, 'row')}"
    return f"{axis}={getattr(e.mesh, axis)}, data={e.mesh.data}, {batches}", e


def _legal(config: Config, e: Execution, cluster: Cluster) -> bool:
    """Whether the trainer runs it, with `model` inside a node (as the search places it)."""
    if cluster.nodes > 1 and e.mesh.model > cluster.per_node * cluster.accelerator.devices:
        return False
    sizes = {"global_size": e.global_size, "microbatches": e.microbatches}
    batch = config.batch.model_copy(update=sizes)
    try:
        validate_shape(config.model_copy(update={"batch": batch}), e.mesh)
    except RequestError:
        return False
    return True
