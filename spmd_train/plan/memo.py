"""`plan --memo`: why this configuration, for the one who must decide.

The text is `memo.md.j2`; every number in it comes from the memory and time models, by the functions
of the `memo_*` modules.
"""

from __future__ import annotations

import importlib.resources
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import jinja2

from spmd_train.pipeline.schedule import Schedule, make_schedule
from spmd_train.plan import memo_growth, memo_memory, memo_timeline, memo_traffic
from spmd_train.plan.memory import memory_use
from spmd_train.plan.reasons import command
from spmd_train.plan.search import MODEL_ERROR, Candidate, Plan, workload_for
from spmd_train.plan.timing import step_time
from spmd_train.precision import Policy

TIME_ERROR_PERCENT = (1.9, 10.7)
"""Smallest and largest mean absolute error of a published source (docs/planner-time.md)."""
FEW_IDLE = 0.05  # share of a schedule that its stages may wait, before more micro-batches are shown
SHOWN_MITIGATIONS = 8
PARTS_OF_MEMORY = {
    "params": "weights that the layers read",
    "master": "master weights",
    "moments": "moments of the optimizer",
    "batch": "token ids",
    "grads": "sums of gradients",
    "activations": "activations kept for backward passes",
    "logits": "workspace of look-up and head",
    "communication": "weights and gradients on their way (zero=2 and 3)",
    "temporary": "other workspace at the worst moment",
}


def memo(plan: Plan, candidate: Candidate, train: str | None = None) -> str:
    """The decision memo for `candidate`, one of `plan`'s, in Markdown.

    Args:
        train: the command that trains it; by default with the configuration's own name.
    """
    e, cluster = candidate.execution, plan.cluster
    workload = workload_for(plan.config, cluster, e.compute)
    policy, model = workload.policy, workload.transformer
    same_rows = memo_growth.growth(workload, e, cluster, keep_batch=False)
    same_batch = memo_growth.growth(workload, e, cluster, keep_batch=True)
    far = same_rows[-1]
    assert far is not None
    part, lost = memo_growth.bottleneck(far.time)
    found = memo_growth.mitigations(workload, plan.config, far, candidate.limit)
    first, besides = memo_growth.first_to_try(found, far)
    shown = found[:SHOWN_MITIGATIONS]
    shown += [first] if first is not None and first not in shown else []
    return _template().render(
        plan=plan,
        candidate=candidate,
        e=e,
        mesh=e.mesh,
        cluster=cluster,
        node=cluster.per_node * cluster.accelerator.devices,
        parameters=model.parameters,
        memory=candidate.memory.itemised(),
        parts_of_memory=PARTS_OF_MEMORY,
        time=candidate.time,
        limit=candidate.limit,
        kept_free=MODEL_ERROR,
        train=train or command(plan, candidate, plan.config.name, ()),
        zero_splits=memo_memory.ZERO[e.zero],
        changes=memo_memory.changes(workload, e),
        flows=memo_traffic.flows(model, e, cluster),
        growths={
            "the same rows on each data shard, so a larger global batch": same_rows,
            "the same global batch, so fewer rows on each data shard": same_batch,
        },
        far=far,
        far_same_batch=same_batch[-1],
        whole=in_pieces(plan, candidate, 1),
        split=split(plan, candidate),
        policy=policy,
        formats=formats(policy, workload.optimizer),
        bottleneck=memo_growth.PARTS[part],
        lost=lost,
        mitigations=shown,
        first=first,
        besides=besides,
        small=memo_growth.SMALL,
        time_error=TIME_ERROR_PERCENT,
    )


def in_pieces(plan: Plan, candidate: Candidate, microbatches: int) -> Candidate:
    """The same with a shard's rows in so many micro-batches, costed; more micro-batches of the same
    size, so a larger batch, where they do not divide the rows."""
    e, cluster = candidate.execution, plan.cluster
    workload = workload_for(plan.config, cluster, e.compute)
    size, rest = divmod(e.microbatches * e.microbatch_size, microbatches)
    after = replace(
        e, microbatches=microbatches, microbatch_size=e.microbatch_size if rest else size
    )
    time = step_time(workload.transformer, after, cluster)
    return Candidate(after, memory_use(workload, after), time, candidate.limit)


class Split(NamedTuple):
    """Micro-batches through stages against naive layer splitting.

    Attributes:
        chosen: with its micro-batches. naive: the same rows as one.
        more: with so many that the stages wait little; None where `chosen` has them.
        idle, naive_idle, more_idle: shares of the schedule's table that a stage waits.
        timeline, naive_timeline: the tables drawn.
    """

    chosen: Candidate
    naive: Candidate
    more: Candidate | None
    idle: float
    naive_idle: float
    more_idle: float
    timeline: str
    naive_timeline: str


def split(plan: Plan, candidate: Candidate) -> Split | None:
    """What micro-batches do for the candidate, or, if it has one stage, for the fastest of the plan
    that has more; None without one."""
    staged = (c for c in (candidate, *plan.candidates) if c.execution.mesh.stage > 1)
    subject = next(staged, None)
    if subject is None:
        return None
    e = subject.execution

    def table(microbatches: int) -> Schedule:
        return make_schedule(e.schedule, e.mesh.stage, microbatches)

    chosen, naive, enough = table(e.microbatches), table(1), e.microbatches
    while table(enough).bubble_fraction() > FEW_IDLE:
        enough *= 2
    return Split(
        chosen=subject,
        naive=in_pieces(plan, subject, 1),
        more=in_pieces(plan, subject, enough) if enough > e.microbatches else None,
        idle=chosen.bubble_fraction(),
        naive_idle=naive.bubble_fraction(),
        more_idle=table(enough).bubble_fraction(),
        timeline=memo_timeline.draw(chosen),
        naive_timeline=memo_timeline.draw(naive),
    )


class Format(NamedTuple):
    """A quantity of the step, its number format, and why that one."""

    quantity: str
    dtype: str
    why: str


def formats(policy: Policy, optimizer: str) -> list[Format]:
    """What runs in which precision, by the policy."""

    def row(quantity: str, dtype: Any, wide: str, narrow: str) -> Format:
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


def gigabytes(size_bytes: float) -> str:
    """Decimal: `24.15 GB`, `3.3 MB`, `32.8 kB`, `0`."""
    if size_bytes == 0:
        return "0"
    if abs(size_bytes) >= 1e7:
        return f"{size_bytes / 1e9:,.2f} GB"
    return f"{size_bytes / 1e6:.3g} MB" if abs(size_bytes) >= 1e6 else f"{size_bytes / 1e3:.3g} kB"


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
    return f"{round(100 * share, 1) + 0.0:+.1f} %"  # + 0.0: no minus zero
