"""A plan as one HTML page that needs nothing else: no script, no font, no picture from elsewhere.

The geometry of its drawings is worked out here; `page.html.j2` lays them out. Lengths are in units
of an SVG `viewBox`, `WIDTH` of them across the page.
"""

from __future__ import annotations

import importlib.resources
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined

from spmd_train.pipeline.schedule import IDLE
from spmd_train.plan.search import Candidate, Plan
from spmd_train.plan.view import (
    BRIEF,
    SAME_ON_EVERY_STAGE,
    Part,
    brief,
    edges,
    gigabytes,
    headline,
    idle_sentence,
    memory_parts,
    memory_scale,
    occurring,
    percent,
    pictured,
    schedule_of,
    seconds,
    shown_ticks,
    tick_costs,
    time_parts,
)
from spmd_train.plan.workload import Execution

WIDTH = 1000.0
GLYPH, RIGHT = 6.8, 80.0  # beside a bar: a character of its label, and its number
BAR, STEP = 18.0, 28.0
ROW = 26.0  # of a stage in the timeline
FORWARDS_ACROSS = 72  # what a timeline shows of a step, in forwards
PLOT_HEIGHT, PLOT_LEFT, PLOT_BOTTOM = 340.0, 60.0, 44.0


class Segment(NamedTuple):
    """A rectangle of a bar or timeline; `kind` is its CSS class."""

    x: float
    width: float
    kind: str
    text: str
    amount: float = 0.0
    half: int = 0


class Bar(NamedTuple):
    """A stacked bar and what stands beside it."""

    y: float
    label: str
    number: str
    segments: list[Segment]
    fits: bool


class Bars(NamedTuple):
    """A chart of them. `limit`: x of the limit's mark, None without one."""

    title: str
    height: float
    bars: list[Bar]
    legend: list[tuple[str, str, str]]
    limit: float | None


class Timeline(NamedTuple):
    """A schedule: rows of segments. `gap`: x of the ticks left out, how many they are."""

    label: str
    sentence: str
    height: float
    rows: list[tuple[str, float, list[Segment]]]
    gap: tuple[float, int] | None


class Mark(NamedTuple):
    """A point of the scatter; `label` is empty where it would cover another."""

    x: float
    y: float
    label: str
    anchor: str
    text: str
    kind: str


class Scatter(NamedTuple):
    """Memory against time. Ticks: (position, text)."""

    marks: list[Mark]
    line: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    limit: float


def page(plan: Plan, top: int) -> str:
    """The page, with tables and bars of the `top` best candidates."""
    source = importlib.resources.files("spmd_train.plan") / "page.html.j2"
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    shown = plan.candidates[:top]
    return environment.from_string(source.read_text(encoding="utf-8")).render(
        name=plan.config.name,
        cluster=plan.cluster,
        headline=headline(plan),
        facts=_facts(plan),
        rows=[_row(rank, c) for rank, c in enumerate(shown, 1)],
        pareto_rows=[_row(rank, c) for rank, c in enumerate(plan.pareto, 1)],
        charts=[_memory_bars(shown), _time_bars(shown)] if shown else [],
        note=SAME_ON_EVERY_STAGE,
        brief=BRIEF,
        timelines=[_timeline(c.execution) for c in pictured(plan)],
        scatter=_scatter(plan) if plan.pareto else None,
        rejected=[(str(r.mesh), r.reason) for r in plan.rejected],
        W=WIDTH, BAR=BAR, ROW=ROW,
        H=PLOT_HEIGHT, PLOT_LEFT=PLOT_LEFT, PLOT_BOTTOM=PLOT_BOTTOM,
    )  # fmt: skip


def _facts(plan: Plan) -> list[tuple[str, str]]:
    c, w = plan.cluster, plan.workload
    network = f"{c.network.gigabytes_per_second:,.0f} GB/s per node" if c.network else "none"
    tokens = w.global_size * w.sequence_length
    return [
        ("Parameters", f"{w.transformer.parameters / 1e9:,.2f} billion"),
        ("Batch", f"{w.global_size:,} x {w.sequence_length:,} = {tokens:,} tokens"),
        ("Optimizer", w.optimizer),
        ("Devices", f"{c.devices:,}"),
        ("In a node", f"{c.link.kind}, {c.link.gigabytes_per_second:,.0f} GB/s one way"),
        ("Between nodes", network),
        ("Ways tried", f"{plan.evaluated:,}"),
    ]


def _row(rank: int, c: Candidate) -> dict[str, str]:
    """A candidate's line of the table, every number as text."""
    e = c.execution
    return {
        "rank": str(rank),
        "mesh": str(e.mesh),
        "zero": str(e.zero),
        "micro-batches": f"{e.microbatches:,} x {e.microbatch_size:,}",
        "schedule": e.schedule,
        "remat": e.remat,
        "dtype": e.compute,
        "memory": gigabytes(c.memory.total),
        "limit": gigabytes(c.limit),
        "step": seconds(c.seconds),
        "tokens/s": f"{c.time.tokens_per_second:,.0f}",
        "MFU": percent(c.time.mfu),
        "bubble": percent(c.time.bubble_fraction),
        "fits": "yes" if c.fits else "",
    }


# ---------------------------------------------------------------------------------- stacked bars


def _memory_bars(shown: Sequence[Candidate]) -> Bars:
    parts = [memory_parts(c.memory) for c in shown]
    return _bars("Memory of a device", shown, parts, memory_scale(shown), gigabytes, "GB")


def _time_bars(shown: Sequence[Candidate]) -> Bars:
    parts, longest = [time_parts(c.time) for c in shown], max(c.seconds for c in shown)
    chart = _bars("Seconds of a step", shown, parts, longest, seconds, "s")
    return chart._replace(limit=None)


def _bars(
    title: str,
    shown: Sequence[Candidate],
    parts: Sequence[Sequence[Part]],
    whole: float,
    text: Callable[[float], str],
    unit: str,
) -> Bars:
    """A bar of parts for each candidate; `whole` is what fills the width."""
    left = 16 + GLYPH * max(len(brief(c.execution)) for c in shown)
    per_unit = (WIDTH - left - RIGHT) / whole
    bars = []
    for index, (candidate, of) in enumerate(zip(shown, parts, strict=True)):
        starts = edges(of, per_unit)
        segments = [
            Segment(left + start, end - start, part.name, _said(part, text, unit), part.amount)
            for part, start, end in zip(of, starts, starts[1:], strict=False)
            if part.amount
        ]
        number = f"{text(sum(part.amount for part in of))} {unit}"
        label = brief(candidate.execution)
        bars.append(Bar(index * STEP, label, number, segments, candidate.fits))
    legend = [
        (part.name, part.title, f"{text(part.amount)} {unit}") for part in occurring(parts)
    ]  # fmt: skip
    return Bars(title, len(shown) * STEP, bars, legend, left + shown[0].limit * per_unit)


def _said(part: Part, text: Callable[[float], str], unit: str) -> str:
    return f"{part.title}: {text(part.amount)} {unit}"


# -------------------------------------------------------------------------------------- timeline


def _timeline(e: Execution) -> Timeline:
    """Every tick as long as it lasts; the middle is left out of a long step."""
    table, left = schedule_of(e), 70.0
    costs = tick_costs(table)
    first, last = shown_ticks(costs, FORWARDS_ACROSS)
    gap = 6 if last else 0  # in forwards
    forward = min(40.0, (WIDTH - left) / (sum(costs[t] for t in (*first, *last)) + gap))
    starts: dict[int, float] = {}
    x = left
    for tick in (*first, *last):
        if last and tick == last[0]:
            x += gap * forward
        starts[tick] = x
        x += costs[tick] * forward
    rows = []
    for stage in range(table.num_stages):
        segments = []
        for tick, start in starts.items():
            ahead = bool((table.forward[tick] != IDLE).any())
            for kind, name, offset, length in (
                (table.forward, "forward", 0, 1),
                (table.backward, "backward", ahead, 2),
            ):
                if not (kind[tick] != IDLE).any():
                    continue
                m = int(kind[tick, stage])
                name, what = ("idle", "idle") if m == IDLE else (name, f"{name} of {m}")
                label = "" if m == IDLE else str(m)
                segments.append(
                    Segment(start + offset * forward, length * forward, name,
                            f"stage {stage}, tick {tick}: {what}",
                            half=_fitting(label, length * forward))
                )  # fmt: skip
        rows.append((f"stage {stage}", stage * ROW, segments))
    left_out = len(costs) - len(starts)
    between = (starts[last[0]] - gap * forward / 2, left_out) if left_out else None
    return Timeline(brief(e), idle_sentence(e), table.num_stages * ROW, rows, between)


def _fitting(label: str, width: float) -> int:
    """The micro-batch where its digits fit, else -1."""
    return int(label) if label and len(label) * 5.8 <= width else IDLE


# --------------------------------------------------------------------------------------- scatter


def _scatter(plan: Plan) -> Scatter:
    """The Pareto, and the fastest of each mesh; time on a logarithmic axis."""
    everything = (*plan.pareto, *plan.candidates)
    low, high = (f(c.seconds for c in everything) for f in (min, max))
    low, high = low / 1.08, high * 1.15
    most = memory_scale(everything) * 1.04

    def x(value: float) -> float:
        share = math.log(value / low) / math.log(high / low)
        return PLOT_LEFT + share * (WIDTH - PLOT_LEFT)

    def y(size_bytes: float) -> float:
        return (PLOT_HEIGHT - PLOT_BOTTOM) * (1 - size_bytes / most)

    on_line = {id(c) for c in plan.pareto}
    rest = [c for c in plan.candidates if id(c) not in on_line]
    marks: list[Mark] = []
    taken: list[tuple[float, float, float]] = []
    placed = [(c, "pareto") for c in plan.pareto] + [(c, "other") for c in rest]
    points = [(x(c.seconds), y(c.memory.total)) for c, _ in placed]
    for (c, kind), (px, py) in zip(placed, points, strict=True):
        label, anchor = _free(str(c.execution.mesh), px, py, points, taken)
        text = f"{brief(c.execution)}: {gigabytes(c.memory.total)} GB, {seconds(c.seconds)} s"
        marks.append(Mark(px, py, label, anchor, text, kind))
    line = " ".join(
        f"{'L' if i else 'M'}{m.x:.1f} {m.y:.1f}"
        for i, m in enumerate(marks[: len(plan.pareto)])
    )  # fmt: skip
    return Scatter(
        marks,
        line,
        [(x(v), seconds_tick(v)) for v in _one_two_five(low, high)],
        [(y(v * 1e9), f"{v:,.0f}") for v in _round_steps(most / 1e9)],
        y(plan.pareto[0].limit),
    )


def _free(
    label: str,
    x: float,
    y: float,
    points: Sequence[tuple[float, float]],
    taken: list[tuple[float, float, float]],
) -> tuple[str, str]:
    """The label right or left of its point if nothing is there; else none."""
    width = 7.0 * len(label) + 10
    for start, anchor in ((x + 6, "start"), (x - 6 - width, "end")):
        clear = all(
            start + width < other or other + wide < start or abs(y - level) > 13
            for other, level, wide in taken
        ) and not any(start - 4 < px < start + width and abs(y - py) < 9 for px, py in points)
        if clear and start > PLOT_LEFT and start + width < WIDTH:
            taken.append((start, y, width))
            return label, anchor
    return "", "start"


def _one_two_five(low: float, high: float) -> list[float]:
    """1, 2, 5, 10 ... between two values; the ends where there are none."""
    first = math.floor(math.log10(low))
    found = [
        factor * 10.0**power
        for power in range(first, math.ceil(math.log10(high)) + 1)
        for factor in (1, 2, 5)
    ]
    return [v for v in found if low <= v <= high] or [math.sqrt(low * high)]


def seconds_tick(value: float) -> str:
    """`20 s`, `0.5 s`."""
    return f"{value:.3g} s"


def _round_steps(high: float) -> list[float]:
    """Four to ten round steps from 0 up to `high`."""
    step = next(s for s in _one_two_five(high / 12, high) if high / s <= 10)
    return [i * step for i in range(int(high / step) + 1)]
