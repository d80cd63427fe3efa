"""What the pictures of a plan show, before it is drawn: parts, labels, numbers as text, ticks.

`draw` makes text of it for a terminal, `page` a page of HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from spmd_train.pipeline.schedule import IDLE, Schedule, make_schedule
from spmd_train.plan.memory import MemoryUse
from spmd_train.plan.search import Candidate, Plan
from spmd_train.plan.timing import StepTime
from spmd_train.plan.workload import Execution

SAME_ON_EVERY_STAGE = (
    "Every device runs the same program, with the buffers of the most loaded stage: one bar stands "
    "for all of them."
)
BRIEF = "mesh, zero, micro-batches x rows, remat"  # what `brief` writes

_MEMORY = {
    "params": "parameters",
    "master": "FP32 master",
    "moments": "moments",
    "batch": "token ids",
    "grads": "gradient sums",
    "activations": "activations",
    "logits": "logits",
    "communication": "communication",
    "temporary": "temporary",
}
_TIME = {
    "compute": "compute",
    "bubble": "bubble",
    "data_comm_exposed": "data axis",
    "model_comm_exposed": "model axis",
    "stage_comm_exposed": "stage axis",
    "optimizer": "optimizer",
}


class Part(NamedTuple):
    """One segment of a stacked bar: bytes or seconds."""

    name: str
    title: str
    amount: float


def memory_parts(memory: MemoryUse) -> list[Part]:
    """Bytes of a device; they add up to `memory.total`."""
    amounts = memory.itemised()
    return [Part(name, title, amounts[name]) for name, title in _MEMORY.items()]


def time_parts(time: StepTime) -> list[Part]:
    """Seconds of a step; they add up to `time.total`."""
    amounts = time.itemised()
    return [Part(name, title, amounts[name]) for name, title in _TIME.items()]


def occurring(bars: Sequence[Sequence[Part]]) -> list[Part]:
    """Of the first bar, the parts that this or another bar has: what a legend names."""
    return [parts[0] for parts in zip(*bars, strict=True) if any(part.amount for part in parts)]


def edges(parts: Sequence[Part], per_unit: float) -> list[float]:
    """Where each part of a bar starts, and where the last ends."""
    return [0.0, *(end * per_unit for end in accumulate(part.amount for part in parts))]


def memory_scale(candidates: Sequence[Candidate]) -> float:
    """Bytes of the longest bar: the limit, or what does not fit in it."""
    return max(max(c.limit, c.memory.total) for c in candidates)


def gigabytes(size_bytes: float) -> str:
    """`38.3`; what would read 0.0 in full, `0.0003`."""
    return f"{size_bytes / 1e9:,.1f}" if size_bytes >= 5e7 else f"{size_bytes / 1e9:.1g}"


def seconds(value: float) -> str:
    """Three figures: `6.81`, `0.0123`, `1,250`; nothing is `0`."""
    if not value:
        return "0"
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def percent(share: float) -> str:
    """`49.6`."""
    return f"{100 * share:.1f}"


def headline(plan: Plan) -> str:
    """The plan in one sentence."""
    cluster = plan.cluster
    count = f"{cluster.nodes} {'node' if cluster.nodes == 1 else 'nodes'} of {cluster.per_node}"
    where = f"{plan.config.name} on {count} {cluster.accelerator.title}"
    if not plan.candidates:
        return f"{where}: no mesh fits, for the reasons below."
    best = plan.candidates[0]
    memory = f"{gigabytes(best.memory.total)} of {gigabytes(best.limit)} GB per device"
    if not best.fits:
        return f"{where}: mesh {best.execution.mesh} does not fit; it needs {memory}."
    return (
        f"{where}: mesh {best.execution.mesh} takes {seconds(best.seconds)} s a step, "
        f"{best.time.tokens_per_second:,.0f} tokens/s at {percent(best.time.mfu)} % MFU, "
        f"in {memory}."
    )


def brief(e: Execution) -> str:
    """What tells candidates apart, in few characters; the usual schedule and dtype go unsaid."""
    unusual = [part for part in (e.schedule, e.compute) if part not in ("1f1b", "bfloat16")]
    batches = f"{e.microbatches}x{e.microbatch_size}"
    return " ".join([str(e.mesh), f"zero{e.zero}", batches, e.remat, *unusual])


def pictured(plan: Plan) -> list[Candidate]:
    """Whose schedules to draw: the best, and where it has one stage the best that has more."""
    best, staged = plan.candidates[:1], [c for c in plan.candidates if c.execution.mesh.stage > 1]
    if best and best[0].execution.mesh.stage == 1:
        return [*best, *staged[:1]]
    return [*best]


def schedule_of(e: Execution) -> Schedule:
    """The table that the step runs."""
    return make_schedule(e.schedule, e.mesh.stage, e.microbatches)


def idle_sentence(e: Execution) -> str:
    """The timeline's numbers: S, M, ticks, idle share."""
    table = schedule_of(e)
    many = _many(e.microbatches, "micro-batch")
    if e.mesh.stage == 1:
        return f"One stage, {many}: no stage waits for another."
    return (
        f"{e.schedule} with {e.mesh.stage} stages and {many}: a stage waits "
        f"{percent(table.bubble_fraction())} % of {_many(table.num_ticks, 'tick')}, "
        "a backward counted as two forwards."
    )


def _many(count: int, noun: str) -> str:
    plural = noun if count == 1 else f"{noun}{'es' if noun.endswith('ch') else 's'}"
    return f"{count} {plural}"


def tick_costs(table: Schedule) -> list[int]:
    """How long each tick lasts, in forwards: stages meet at its end, and idle halves are free."""
    forward, backward = (
        (part != IDLE).any(axis=1).astype(int) for part in (table.forward, table.backward)
    )
    return [int(cost) for cost in forward + 2 * backward]


def shown_ticks(costs: Sequence[int], budget: int) -> tuple[list[int], list[int]]:
    """Ticks to draw where all would cost more than `budget`: the first ones and the last ones."""
    if sum(costs) <= budget:
        return list(range(len(costs))), []
    first = sum(end <= budget - budget // 2 for end in accumulate(costs))
    last = sum(end <= budget // 2 for end in accumulate(reversed(costs)))
    first = max(first, 1)
    last = max(min(last, len(costs) - first), 1)
    return list(range(first)), list(range(len(costs) - last, len(costs)))
