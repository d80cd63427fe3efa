"""The moving part of a run's output: a bar on a terminal, plain lines anywhere else.

step  20/150  loss 3.2145  grad_norm 1.23  lr 3.0e-03  12,345 tokens/s  eta 0:01:10
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Any, TextIO

import rich.progress
from rich.console import Console
from rich.table import Column

_FIELDS: tuple[tuple[str, str], ...] = (
    ("loss", "loss {:.4f}"),
    ("grad_norm", "grad_norm {:.3g}"),
    ("lr", "lr {:.1e}"),
    ("tokens_per_second", "{:,.0f} tokens/s"),
    ("mfu", "mfu {:.1%}"),
)
"""Metric and how it is shown, in order; a metric that was not measured is not shown."""

_BESIDE_BAR = frozenset({"loss", "tokens_per_second", "mfu"})
"""What fits beside a bar in 80 columns."""


class Progress:
    """Shows the metrics of each step. Without `enabled` (processes other than 0), shows nothing.

    On no terminal a line is printed for the first step, every `every_steps` and the last.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        every_steps: int = 10,
        enabled: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._every = every_steps
        self._enabled = enabled
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._bar = _bar(self._stream, total_steps) if self._is_terminal() else None

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Show the step `metrics["step"]` as done (steps count from 1)."""
        if not self._enabled:
            return
        step, is_first = int(metrics["step"]), self._first is None
        eta = f"eta {self._eta(step)}"
        if self._bar is not None:
            summary = _spaced(eta, *describe(metrics, _BESIDE_BAR))
            self._bar.update(self._bar.task_ids[0], completed=step, summary=summary)
        elif is_first or step % self._every == 0 or step == self._total:
            width = len(str(self._total))
            done = f"step {step:>{width}}/{self._total}"
            self._print(_spaced(done, *describe(metrics), eta))

    def note(self, text: str) -> None:
        """Print a line of its own, above the bar where there is one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif self._enabled:
            self._print(text)

    def _is_terminal(self) -> bool:
        return self._enabled and self._stream.isatty()

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def _eta(self, step: int) -> str:
        """Time left at the pace since the first step shown, which itself holds the compilation."""
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        first_step, first_time = self._first
        if step <= first_step:
            return "0:00:00" if step >= self._total else "-:--:--"
        seconds = (now - first_time) / (step - first_step) * max(0, self._total - step)
        return str(timedelta(seconds=round(seconds)))

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def describe(metrics: Mapping[str, Any], only: Collection[str] | None = None) -> list[str]:
    """The measured metrics of a step as they are shown, without the step itself."""
    fields = [(name, form) for name, form in _FIELDS if only is None or name in only]
    known = [(form, metrics.get(name)) for name, form in fields]
    shown = [form.format(float(value)) for form, value in known if value is not None]
    return [*shown, "skipped"] if metrics.get("skipped") else shown


def _spaced(*parts: str) -> str:
    return "  ".join(parts)


def _bar(stream: TextIO, total_steps: int) -> rich.progress.Progress:
    """A bar with one task. Markup is off: text in brackets is text (rich would swallow it)."""
    width = len(f"step {total_steps}/{total_steps}")
    bar = rich.progress.Progress(
        rich.progress.TextColumn(
            "step {task.completed:.0f}/{task.total:.0f}", table_column=Column(min_width=width)
        ),
        rich.progress.BarColumn(bar_width=8),
        rich.progress.TextColumn(
            "{task.fields[summary]}", markup=False, table_column=Column(no_wrap=True)
        ),
        console=Console(file=stream, markup=False, highlight=False),
        refresh_per_second=4,
    )
    bar.add_task("train", total=total_steps, summary="")
    return bar
