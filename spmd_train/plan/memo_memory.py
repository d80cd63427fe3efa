"""From plain data parallelism to the chosen configuration, a change at a time: what each saves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from spmd_train.plan.memory import MemoryUse, memory_use
from spmd_train.plan.workload import Execution, Workload


@dataclass(frozen=True)
class Change:
    """One row of the table.

    Attributes:
        what: the one thing that differs from the row before.
        execution, memory: with it.
        saved: bytes per device that it saves; negative where it costs.
    """

    what: str
    execution: Execution
    memory: MemoryUse
    saved: int


def plain(e: Execution) -> Execution:
    """Data parallelism alone, of the same batch: all states on every device, nothing recomputed.

    One micro-batch a step where the rows divide so; at least a row each, even if the batch has
    fewer rows than there are devices.
    """
    most = max(1, e.global_size // e.devices)
    rows = e.global_size // e.mesh.data
    size = max(size for size in range(1, most + 1) if rows % size == 0)
    alone = replace(e, zero=0, schedule="1f1b", remat="none", microbatch_size=size)
    return _on(alone, e.global_size, data=e.devices, model=1, stage=1)


def changes(workload: Workload, chosen: Execution) -> list[Change]:
    """Rows from `plain` to `chosen`; the savings add up to the difference of the two.

    What a row saves depends on the rows before: what they have divided cannot be saved again.
    """
    e = plain(chosen)
    memory = memory_use(workload, e)
    rows = [Change(f"plain data parallelism: {_described(e)}", e, memory, 0)]
    for what, after in _steps(e, chosen):
        used = memory_use(workload, after)
        rows.append(Change(what, after, used, memory.total - used.total))
        memory = used
    return rows


def _steps(e: Execution, chosen: Execution) -> Iterator[tuple[str, Execution]]:
    """Each change, and the execution after it. At data=1 no ZeRO level splits anything."""
    mesh, batch = chosen.mesh, chosen.global_size
    if mesh.model > 1:
        e = replace(e, sequence_parallel=chosen.sequence_parallel)
        e = _on(e, batch, data=e.devices // mesh.model, model=mesh.model)
        yield f"model={mesh.model}: every layer split {mesh.model} ways (data={e.mesh.data})", e
    if mesh.stage > 1:
        e = _on(e, batch, data=mesh.data, stage=mesh.stage)
        layers = f"layers split over {mesh.stage} stages (data={mesh.data})"
        yield f"stage={mesh.stage}: {layers}", e
    if e.schedule != chosen.schedule:
        e = replace(e, schedule=chosen.schedule)
        yield f"schedule {chosen.schedule} instead of 1f1b", e
    if mesh.data > 1 and chosen.zero:
        e = replace(e, zero=chosen.zero)
        yield f"zero={chosen.zero}: {ZERO[chosen.zero]} split over data", e
    if e.microbatch_size != chosen.microbatch_size:
        rows = f"micro-batches of {counted(chosen.microbatch_size, 'row')}"
        rows += f" instead of {e.microbatch_size}"
        e = replace(e, microbatches=chosen.microbatches, microbatch_size=chosen.microbatch_size)
        yield rows, e
    if e.remat != chosen.remat:
        e = replace(e, remat=chosen.remat)
        yield f"remat={chosen.remat}: {KEPT[chosen.remat]}", e


ZERO = {
    0: "nothing",
    1: "optimizer state",
    2: "optimizer state and gradients",
    3: "optimizer state, gradients and weights",
}
KEPT = {
    "none": "everything the backward pass reads is kept",
    "dots": "the results of matrix products are kept, the rest is computed again",
    "full": "only the input of each layer is kept, the layer is computed again",
    "stage": "only the input of the stage is kept, its layers are computed again",
}


def _on(e: Execution, batch: int, **sizes: int) -> Execution:
    """The same on another mesh, with as many micro-batches as the batch then has."""
    e = e.with_mesh(**sizes)
    return replace(e, microbatches=max(1, batch // (e.mesh.data * e.microbatch_size)))


def _described(e: Execution) -> str:
    batches = counted(e.microbatches, "micro-batch")
    size = counted(e.microbatch_size, "row")
    return f"data={e.mesh.data}, zero=0, remat=none, {batches} of {size}"


def counted(n: int, noun: str) -> str:
    """`1 row`, `2 rows`, `2 micro-batches`."""
    ending = "" if n == 1 else "es" if noun.endswith(("ch", "sh")) else "s"
    return f"{n:,} {noun}{ending}"
