"""Pictures of a plan for the terminal: memory bars, the schedule's timeline, memory against time.

```
32x1x1 zero3 1x8 full    pwwmmmmggaaaaaaaaactttt                        | 38.3 of 80.3 GB
16x2x1 zero3 1x16 full   pwwmmmmggaaaaaaaaaaaaaaaaattt                  | 50.8 of 80.3 GB
```

A part is a letter as well as a colour, so the pictures can be read without colours.
"""

from __future__ import annotations

import math
import textwrap

from rich.console import Group
from rich.text import Text

from spmd_train.pipeline.schedule import IDLE
from spmd_train.plan.search import Candidate, Plan
from spmd_train.plan.view import (
    BRIEF,
    SAME_ON_EVERY_STAGE,
    brief,
    edges,
    gigabytes,
    idle_sentence,
    memory_parts,
    memory_scale,
    occurring,
    pictured,
    schedule_of,
    seconds,
    shown_ticks,
)
from spmd_train.plan.workload import Execution

# Letter and colour of each part: Okabe and Ito's, which colour-blind readers can tell apart.
_MARKS = {
    "params": ("p", "#0072B2"),
    "master": ("w", "#56B4E9"),
    "moments": ("m", "#009E73"),
    "batch": ("b", "#999999"),
    "grads": ("g", "#E69F00"),
    "activations": ("a", "#D55E00"),
    "logits": ("l", "#CC79A7"),
    "communication": ("c", "#F0E442"),
    "temporary": ("t", "#999999"),
}
_POINTS = "123456789abcdefghijklmnopqrstuvwxyz"


def pictures(plan: Plan, top: int, width: int) -> Group:
    """All of them, for a terminal of `width` columns; nothing where no mesh works."""
    if not plan.candidates:
        return Group()
    return Group(
        memory_bars(plan, top, width),
        Text(),
        *(timeline(c.execution, width).append("\n") for c in pictured(plan)),
        pareto(plan, width),
    )


def memory_bars(plan: Plan, top: int, width: int) -> Text:
    """A bar for each of the `top` best, up to the limit, and the parts of the first."""
    shown = plan.candidates[:top]
    labels = [brief(c.execution) for c in shown]
    numbers = [f"{gigabytes(c.memory.total)} of {gigabytes(c.limit)} GB" for c in shown]
    left, right = max(map(len, labels)), max(map(len, numbers))
    columns = max(10, width - left - right - 4)
    per_byte = columns / memory_scale(shown)
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("Memory of a device", style="bold")
    text.append(f" ({BRIEF})\n", style="dim")
    for candidate, label, number in zip(shown, labels, numbers, strict=True):
        text.append(f"{label:{left}}  ")
        text.append_text(_bar(candidate, per_byte, columns))
        text.append(f" {number:>{right}}\n", style="" if candidate.fits else "bold red")
    text.append(f"\nParts of {labels[0]}:\n")
    for part in occurring([memory_parts(c.memory) for c in shown]):
        letter, colour = _MARKS[part.name]
        text.append(f" {letter} ", style=f"black on {colour}")
        text.append(f" {part.title:14}{gigabytes(part.amount):>10} GB\n")
    return text.append(_wrapped(SAME_ON_EVERY_STAGE, width))


def _bar(candidate: Candidate, per_byte: float, columns: int) -> Text:
    """Letters up to what is used, and a mark at the limit."""
    parts = memory_parts(candidate.memory)
    ends = [round(edge) for edge in edges(parts, per_byte)]
    bar = Text()
    for part, start, end in zip(parts, ends, ends[1:], strict=False):
        letter, colour = _MARKS[part.name]
        bar.append(letter * (end - start), style=f"black on {colour}")
    bar.append(" " * (columns - len(bar)) + " ")
    limit = round(candidate.limit * per_byte)
    return bar[:limit] + Text("|", style="bold") + bar[limit + 1 :]


def timeline(execution: Execution, width: int) -> Text:
    """What each stage does in each tick, forward / backward; the middle is left out if too wide."""
    table = schedule_of(execution)
    digits = len(str(table.num_microbatches - 1))
    cell, left = 2 * digits + 3, len(f"stage {table.num_stages - 1}")
    fitting = max(2, (width - left) // cell)
    whole = table.num_ticks <= fitting
    first, last = shown_ticks([1] * table.num_ticks, fitting if whole else fitting - 1)

    def half(microbatch: int) -> str:
        return f"{'.' if microbatch == IDLE else microbatch:>{digits}}"

    def line(name: str, cells: dict[int, str]) -> str:
        parts = [cells[tick].rjust(cell) for tick in first]
        if last:
            parts.append("...".rjust(cell))
        return f"{name:{left}}" + "".join([*parts, *(cells[tick].rjust(cell) for tick in last)])

    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"Schedule of {brief(execution)}\n", style="bold")
    text.append(_wrapped(idle_sentence(execution), width) + "\n")
    if table.num_stages == 1:
        return text
    text.append(line("tick", {tick: str(tick) for tick in (*first, *last)}) + "\n", style="dim")
    for stage in range(table.num_stages):
        cells = {
            tick: f"{half(table.forward[tick, stage])}/{half(table.backward[tick, stage]).strip()}"
            for tick in (*first, *last)
        }
        text.append(line(f"stage {stage}", cells) + "\n")
    return text.append("forward/backward micro-batch; a dot is an idle half", style="dim")


def pareto(plan: Plan, width: int, height: int = 14) -> Text:
    """Memory against step time: numbers are the Pareto's, o the fastest of each mesh."""
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("Memory against time\n", style="bold")
    if not plan.pareto:
        return text.append("Nothing fits.")
    points = plan.pareto[: len(_POINTS)]
    everything = (*points, *plan.candidates)
    most = memory_scale(everything)
    times = [math.log(c.seconds) for c in everything]
    low, spread = min(times), max(times) - min(times)
    left = len(gigabytes(most))
    columns = max(10, min(width, 100) - left - 3)
    grid = [[" "] * columns for _ in range(height)]
    marked = [*zip(plan.candidates, "o" * len(plan.candidates), strict=True)]
    marked += reversed([*zip(points, _POINTS, strict=False)])  # the fastest is drawn last
    for candidate, mark in marked:
        right = (math.log(candidate.seconds) - low) / spread if spread else 0.5
        row = height - 1 - round(candidate.memory.total / most * (height - 1))
        grid[row][round(right * (columns - 1))] = mark
    for row, cells in enumerate(grid):
        scale = most * (height - 1 - row) / (height - 1)
        label = gigabytes(scale) if row in (0, (height - 1) // 2, height - 1) else ""
        label = "0" if row == height - 1 else label
        text.append(f"{label:>{left}} |{''.join(cells)}\n")
    fastest, slowest = (seconds(math.exp(t)) for t in (low, low + spread))
    text.append(f"{'GB':>{left}} +{'-' * columns}\n")
    axis = f"{fastest} s{'step, logarithmic':^{max(0, columns - len(fastest + slowest) - 4)}}"
    text.append(f"{'':{left}}  {axis}{slowest} s\n" if spread else f"{'':{left}}  {axis}\n")
    for candidate, mark in zip(points, _POINTS, strict=False):
        figures = f"{gigabytes(candidate.memory.total):>8} GB{seconds(candidate.seconds):>8} s"
        text.append(f" {mark}{figures}  {brief(candidate.execution)}\n")
    marks = "numbers: nothing is both leaner and faster; o: the fastest of each mesh"
    return text.append(_wrapped(marks, width), "dim")


def _wrapped(sentence: str, width: int) -> str:
    return "\n".join(textwrap.wrap(sentence, max(width, 20)))
