"""How far the preparation of a corpus is: a bar on a terminal, plain lines anywhere else.

42%  1,234 documents  5,678,901 tokens  1,234,567 tokens/s  eta 0:01:10
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TextIO

import rich.progress
from rich.console import Console
from rich.table import Column

_LINE_EVERY_SECONDS = 10.0


class Meter:
    """Shows how much of the input is done, and what became of it; at the end, in how long.

    `advance(..., new=False)` is for what an earlier run did: it counts, but says nothing of speed.
    """

    def __init__(
        self,
        total_bytes: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_bytes
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._started = self._printed = clock()
        self._bytes = self._documents = self._tokens = 0
        self._new_bytes = self._new_tokens = 0
        self._bar = _bar(self._stream, total_bytes) if self._stream.isatty() else None

    def advance(self, input_bytes: int, documents: int, tokens: int, new: bool = True) -> None:
        """Count more input as done, and show it."""
        self._bytes += input_bytes
        self._documents += documents
        self._tokens += tokens
        if not new:
            return
        self._new_bytes += input_bytes
        self._new_tokens += tokens
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._bytes, summary=self._summary())
        elif self._clock() - self._printed >= _LINE_EVERY_SECONDS:
            self._printed = self._clock()
            share = self._bytes / max(self._total, 1)
            print(f"{share:4.0%}  {self._summary()}", file=self._stream, flush=True)

    def _summary(self) -> str:
        left = max(0, self._total - self._bytes) * self._seconds() / max(self._new_bytes, 1)
        return f"{self._counted()}  eta {timedelta(seconds=round(left))}"

    def _counted(self) -> str:
        speed = self._new_tokens / max(self._seconds(), 1e-9)
        return f"{self._documents:,} documents  {self._tokens:,} tokens  {speed:,.0f} tokens/s"

    def _seconds(self) -> float:
        return self._clock() - self._started

    def __enter__(self) -> Meter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if kind is None:
            print(f"{self._counted()}  in {self._seconds():.1f} s", file=self._stream, flush=True)


def _bar(stream: TextIO, total_bytes: int) -> rich.progress.Progress:
    text = rich.progress.TextColumn("{task.fields[summary]}", table_column=Column(no_wrap=True))
    columns = rich.progress.BarColumn(12), text
    bar = rich.progress.Progress(*columns, console=Console(file=stream), transient=True)
    bar.add_task("", total=total_bytes, summary="")
    return bar
