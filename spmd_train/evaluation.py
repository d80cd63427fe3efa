"""How well a model predicts text it was not trained on: each row once, each token alike.

    loss            = nats of all tokens / tokens                 never a mean of batches' means
    bits per byte   = nats of all tokens / ln 2 / bytes of their text

So neither depends on batch size, padding or mesh (public case P22), and bits per byte not on the
tokenizer either, as far as it makes the same text of the same documents.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from spmd_train.build import put_batch
from spmd_train.config import Config
from spmd_train.data.batches import IGNORE, Batch, prefetch
from spmd_train.data.heldout import Heldout
from spmd_train.errors import RequestError, RunError
from spmd_train.step import Step


@dataclass(frozen=True)
class Evaluated:
    """Attributes:
    loss: nats per token. tokens, rows: how many were predicted, and in how many rows.
    bits_per_byte: None where no tokenizer tells what text the ids are.
    """

    loss: float
    bits_per_byte: float | None
    tokens: int
    rows: int
    seconds: float

    def __str__(self) -> str:
        per_byte = "" if self.bits_per_byte is None else f"{self.bits_per_byte:.4f} bits per byte, "
        return f"loss {self.loss:.4f}, {per_byte}{self.tokens:,} tokens in {self.rows:,} rows"


class Evaluation:
    """Evaluates parameters on the same rows, in batches of the shape that `step` trains on.

    Args:
        batches: most of them that are read, their rows evenly spread; None reads all rows.
        where: what the rows are, for messages.

    Raises:
        RequestError: there is no row.
    """

    def __init__(
        self, step: Step, config: Config, heldout: Heldout, batches: int | None, where: str
    ) -> None:
        if not len(heldout):
            raise RequestError(
                f"{where} holds no row to evaluate on: no document has two tokens there; hold out "
                "more (data.eval_fraction), or give other data."
            )
        self._step = step
        self._batch = config.batch
        self._heldout = heldout
        self._where = where
        most = len(heldout) if batches is None else min(len(heldout), batches * self._rows)
        self.numbers = np.arange(most, dtype=np.int64) * len(heldout) // most
        self._text_bytes: int | None = None
        self._compiled: Callable[..., dict[str, jax.Array]] | None = None

    def __str__(self) -> str:
        count, of_all = self.numbers.size, ""
        if count < len(self._heldout):
            of_all = f" of {len(self._heldout):,}"
        return f"{count:,}{of_all} rows of {self._batch.sequence_length} tokens from {self._where}"

    @property
    def _rows(self) -> int:
        return self._batch.global_size

    def compile(self) -> None:
        """Compile it, before it is called."""
        state = self._step.spec.abstract()
        batch = self._step.abstract_batch(self._rows, self._batch.sequence_length)
        lowered = self._step.jitted_eval().lower(state.params, state.fp8, batch)
        self._compiled = lowered.compile()

    def __call__(
        self, params: Any, history: Any, goes_on: Callable[[int, int], bool] = lambda i, n: True
    ) -> Evaluated | None:
        """Evaluate the parameters of a train state; every process calls it.

        Args:
            goes_on: asked before batch i of n, alike on all processes; None is returned where not.

        Raises:
            RunError: not one of the tokens is supervised.
        """
        assert self._compiled is not None
        clock, nats, tokens, text_bytes = time.perf_counter(), 0.0, 0, 0
        n = -(-self.numbers.size // self._rows)
        with prefetch(self._batches()) as batches:
            for i in range(n):
                if not goes_on(i + 1, n):
                    return None
                rows, size = next(batches)
                found = self._compiled(params, history, put_batch(self._step, rows))
                nats += float(found["loss"])  # sums of batches add up in float64
                tokens += int(found["tokens"])
                text_bytes += size
        if not tokens:
            raise RunError(
                f"{self._where} has no token to predict in {self.numbers.size} rows: the loss mask "
                "leaves none."
            )
        if self._text_bytes is None:
            self._text_bytes = text_bytes
        per_byte = nats / math.log(2) / self._text_bytes if self._text_bytes else None
        seconds = time.perf_counter() - clock
        return Evaluated(nats / tokens, per_byte, tokens, self.numbers.size, seconds)

    def _batches(self) -> Iterator[tuple[Batch, int]]:
        """Host batches [M, B/M, T] and, the first time, the bytes of their text."""
        for first in range(0, self.numbers.size, self._rows):
            numbers = self.numbers[first : first + self._rows]
            found = self._heldout.text_bytes(numbers) if self._text_bytes is None else None
            size = 0 if found is None else int(found.sum())
            batch = filled(self._heldout.rows(numbers).batch(), self._rows)
            yield self._step.micro_batched(batch), size


def filled(batch: Batch, rows: int) -> Batch:
    """A batch [B, T] of fewer rows as one of `rows`; those that are added supervise nothing."""

    def fill(x: np.ndarray | None, value: int) -> Any:
        if x is None:
            return None
        return np.pad(x, ((0, rows - len(x)), (0, 0)), constant_values=value)

    return Batch(fill(batch.inputs, 0), fill(batch.targets, IGNORE), fill(batch.segments, 0))
