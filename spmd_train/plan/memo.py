"""`plan --memo`: why this configuration, for the one who must decide.

The text is `memo.md.j2`; every number in it comes from the memory and time models, by the functions
of the `memo_*` modules.
"""

from __future__ import annotations

import importlib.resources
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import jax.numpy as jnp
import jinja2

from spmd_train.pipeline.schedule import make_schedule
from spmd_train.plan import memo_growth, memo_memory, memo_timeline, memo_traffic
from spmd_train.plan.memo_growth import Grown, Mitigation
from spmd_train.plan.memory import memory_use
from spmd_train.plan.search import Candidate, Plan, workload_for
from spmd_train.plan.timing import step_time
from spmd_train.plan.workload import Execution, Workload
from spmd_train.precision import Policy

TIME_ERROR_PERCENT = (1.9, 10.7)
"""Smallest and largest mean absolute error of a published source (docs/planner-time.md)."""
CLOSE_TO_LIMIT = 0.03  # of the limit: less is left than the memory model may be wrong by
SMALL_GAIN = 0.02  # of tokens per second: less is not worth a change of configuration
SHOWN_MITIGATIONS = 6


def memo(plan: Plan, candidate: Candidate) -> str:
    """The decision memo for `candidate`, one of `plan`'s, in Markdown."""
    e, cluster = candidate.execution, plan.cluster
    workload = workload_for(plan.config, cluster, e.compute)
    policy = workload.policy
    weak = memo_growth.growth(workload, e, cluster, keep_batch=False)
    far = weak[-1]
    assert far is not None
    part, lost = memo_growth.bottleneck(far.time)
    found = memo_growth.mitigations(workload, plan.config, far, candidate.limit)
    return _template().render(
        plan=plan,
        candidate=candidate,
        e=e,
        mesh=e.mesh,
        cluster=cluster,
        node=cluster.per_node * cluster.accelerator.devices,
        workload=workload,
        parameters=workload.transformer.parameters,
        memory=candidate.memory.itemised(),
        time=candidate.time,
        limit=candidate.limit,
        close=0 <= candidate.limit - candidate.memory.total < CLOSE_TO_LIMIT * candidate.limit,
        settings=settings(e, policy),
        zero_splits=memo_memory.ZERO[e.zero],
        kept=memo_memory.KEPT[e.remat],
        changes=memo_memory.changes(workload, e),
        flows=memo_traffic.flows(workload.transformer, e, cluster),
        growths={
            "the same batch per device (the global batch grows)": weak,
            "the same global batch (each data shard has fewer rows)": memo_growth.growth(
                workload, e, cluster, keep_batch=True
            ),
        },
        split=split(plan, workload, candidate),
        formats=formats(policy, workload.optimizer),
        policy=policy,
        far=far,
        bottleneck=memo_growth.PARTS[part],
        lost=lost,
        mitigations=found[:SHOWN_MITIGATIONS],
        first=first_to_try(found, far),
        time_error=TIME_ERROR_PERCENT,
    )


def settings(e: Execution, policy: Policy) -> list[str]:
    """The configuration's keys that make the trainer run `e`, besides the mesh."""
    return [
        f"batch.global_size={e.global_size}",
        f"batch.microbatches={e.microbatches}",
        f"parallel.zero={e.zero}",
        f"pipeline.schedule={e.schedule}",
        f"pipeline.remat={e.remat}",
        f"precision.policy={policy.name.split('+')[0]}",
    ]


class Split(NamedTuple):
    """Micro-batches against none.

    Attributes:
        naive: the same with one micro-batch, costed. idle, naive_idle: shares of a step that a
            stage waits, by the schedule's table; timeline, naive_timeline: both drawn.
        more: (micro-batches, idle share) of a schedule that would wait at most 5 %, if this waits
            longer.
        pipelined: the fastest candidate of the plan with more than one stage, for stage=1.
    """

    naive: Candidate
    idle: float
    naive_idle: float
    timeline: str
    naive_timeline: str
    more: tuple[int, float] | None
    pipelined: Candidate | None


def split(plan: Plan, workload: Workload, candidate: Candidate) -> Split:
    """What micro-batches do for `candidate`."""
    e = candidate.execution
    S, M = e.mesh.stage, e.microbatches
    alone = replace(e, microbatches=1, microbatch_size=M * e.microbatch_size)
    naive = Candidate(
        alone,
        memory_use(workload, alone),
        step_time(workload.transformer, alone, plan.cluster),
        candidate.limit,
    )
    chosen, one = (make_schedule(e.schedule, S, m) for m in (M, 1))
    more = None
    if chosen.bubble_fraction() > 0.05:
        enough = 19 * (S - 1)  # (S-1)/(M+S-1) = 1/20
        more = enough, make_schedule(e.schedule, S, enough).bubble_fraction()
    return Split(
        naive=naive,
        idle=chosen.bubble_fraction(),
        naive_idle=one.bubble_fraction(),
        timeline=memo_timeline.draw(chosen),
        naive_timeline=memo_timeline.draw(one),
        more=more,
        pipelined=next((c for c in plan.candidates if c.execution.mesh.stage > 1), None),
    )


class Format(NamedTuple):
    """A quantity of the step, its number format, and why that one."""

    quantity: str
    dtype: str
    why: str


def formats(policy: Policy, optimizer: str) -> list[Format]:
    """What runs in which precision, by the policy."""

    def row(quantity: str, dtype: object, wide: str, narrow: str) -> Format:
        kind = jnp.dtype(dtype)
        return Format(quantity, kind.name, wide if jnp.finfo(kind).bits >= 32 else narrow)

    product = f"float8, {policy.fp8} scaling" if policy.fp8 else jnp.dtype(policy.compute).name
    second = jnp.promote_types(policy.master, jnp.float32)
    rows = [
        row("weights that the layers read, activations", policy.compute,
            "no rounding besides the reference's own; products run at the slower float32 rate",
            "half the bytes of float32 and the fast matrix units; an activation's rounding error "
            "is not carried from step to step"),
        Format("matrix products of the layers", product,
               "the matrix units add up in float32, and round the result once"),
        row("sum of gradients over micro-batches", policy.accumulate,
            "in bfloat16 a gradient below 1/256 of the sum so far would be lost",
            "halves the accumulators; small gradients are lost unless compensated"),
        row("gradients between data shards", policy.reduce,
            "the sum over shards is that of one device, to float32 rounding",
            "half the bytes; every shard's gradient is rounded, the sum is float32"),
        row("master weights, which the optimizer updates", policy.master,
            "in bfloat16 an update below 1/256 of a weight rounds away, and training stalls",
            "small updates round away"),
        row(f"first moment of {optimizer}", policy.moments,
            "a step adds a small share of a gradient to it, which 8 bits would round away",
            "half the bytes; sound only where the decay is small enough"),
        row(f"second moment of {optimizer}", second,
            "squares of gradients, averaged over many steps: the same reason, at more range", ""),
        row("logits", policy.logits,
            "in bfloat16 the loss of a token comes in steps of 1/16 near 12",
            "half the bytes; the loss of a token comes in steps"),
        Format("softmax, loss, norms' statistics", "float32",
               "sums of many terms; float32 in every policy"),
    ]  # fmt: skip
    if optimizer in ("lion", "muon"):  # no second moment of (most of) the weights
        rows = [r for r in rows if not r.quantity.startswith("second moment")]
    return rows


def first_to_try(found: list[Mitigation], at: Grown) -> Mitigation | None:
    """The best change that leaves the global batch alone, if it gains; else the best of all."""
    gaining = [m for m in found if m.gain > SMALL_GAIN]
    kept = [m for m in gaining if m.same_batch(at.execution)]
    return next(iter(kept or gaining), None)


@cache
def _template() -> jinja2.Template:
    source = importlib.resources.files("spmd_train.plan") / "memo.md.j2"
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters.update(
        gb=gigabytes, seconds=seconds, percent=percent, gain=gain, counted=memo_memory.counted
    )
    return environment.from_string(source.read_text(encoding="utf-8"))


def gigabytes(size_bytes: float, digits: int = 2) -> str:
    """`24.15 GB`."""
    return f"{size_bytes / 1e9:,.{digits}f} GB"


def seconds(value: float) -> str:
    """`13.48 s`, `71.2 ms`, `0`."""
    if value == 0:
        return "0"
    return f"{value:,.2f} s" if value >= 0.1 else f"{1e3 * value:.3g} ms"


def percent(share: float) -> str:
    """`37.5 %`."""
    return f"{100 * share:.1f} %"


def gain(share: float) -> str:
    """`+3.1 %`."""
    return f"{100 * share:+.1f} %"
