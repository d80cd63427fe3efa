"""The shapes a step receives, made on the host, and made ahead of the step that reads them.

Letters: B batch, T sequence, M micro-batches.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from spmd_train.errors import RequestError, listed, nearest_divisors

Item = TypeVar("Item")

IGNORE = -1
"""The target of a position that is not trained on: no vocabulary has this id."""


@partial(
    jax.tree_util.register_dataclass, data_fields=["inputs", "targets", "segments"], meta_fields=[]
)
@dataclass(frozen=True, eq=False)
class Batch:
    """What a step reads: `targets[..., t]` is the token after `inputs[..., t]`, or IGNORE.

    `segments` is None where attention may look back to the start of the row: windows of a text, or
    one document and padding after it, which nothing before it sees.
    """

    inputs: Any  # int32 [B, T] or [M, B/M, T]; NumPy on the host, jax.Array (or spec) elsewhere
    targets: Any  # as inputs
    segments: Any = None  # as inputs: number of the document in its row, from 1; 0 is padding


def shift(
    rows: np.ndarray,
    lengths: Sequence[int] | np.ndarray | None = None,
    segments: np.ndarray | None = None,
    supervised: np.ndarray | None = None,
) -> Batch:
    """Rows [B, T+1] as inputs and targets [B, T]; row i trains its first `lengths[i]` targets.

    Of documents packed in a row, `segments` [B, T+1] numbers each token's from 1, every document
    one run; 0 is padding. No target is another document's, or padding. With `supervised` [B, T+1],
    a token is a target only where it is true.

    On the host, since slicing a sequence-sharded array on the device makes the partitioner emit
    a collective-permute, which hangs inside loops of unequal length (docs/design.md).
    """
    inputs = np.ascontiguousarray(rows[:, :-1], dtype=np.int32)
    targets = np.array(rows[:, 1:], dtype=np.int32)
    if lengths is not None:
        beyond = np.arange(targets.shape[1]) >= np.asarray(lengths)[:, None]
        targets[beyond] = IGNORE
    if supervised is not None:
        targets[~supervised[:, 1:]] = IGNORE
    if segments is None:
        return Batch(inputs, targets)
    of_inputs = np.ascontiguousarray(segments[:, :-1], dtype=np.int32)
    targets[(segments[:, 1:] != of_inputs) | (of_inputs == 0)] = IGNORE
    return Batch(inputs, targets, of_inputs)


def micro_batched(batch: Batch, num_microbatches: int, runs: int = 1) -> Batch:
    """[B, T] as [M, B/M, T]: row r is row j of micro-batch m, with r = m * (B/M) + j.

    With `runs` = D data shards, each takes one run of rows instead, whatever M:
    row r is row d * (B/MD) + j of micro-batch m, with r = (d * M + m) * (B/MD) + j.
    """
    rows, length = batch.inputs.shape
    if rows % (num_microbatches * runs):
        works = listed(nearest_divisors(rows // runs, num_microbatches))
        raise RequestError(
            f"{rows} rows do not divide into {num_microbatches} micro-batches:"
            f" the nearest numbers that work are {works}."
        )

    def arranged(x: np.ndarray) -> np.ndarray:
        by_run = x.reshape(runs, num_microbatches, -1, length)
        return by_run.swapaxes(0, 1).reshape(num_microbatches, -1, length)

    return jax.tree.map(arranged, batch)


def prefetch(iterator: Iterator[Item], depth: int = 2) -> Prefetch[Item]:
    """Iterate with up to `depth` items built ahead, so the next batch is made during the step."""
    return Prefetch(iterator, depth)


@dataclass(frozen=True)
class _End:
    """The last thing in the queue: why there is nothing more to come."""

    error: BaseException | None


class Prefetch(Iterator[Item], Generic[Item]):
    """An iterator whose items are built on a daemon thread, in order.

    An exception of the source is raised where its item would have come. `close` (or leaving the
    `with` block) stops the thread. One consumer.
    """

    def __init__(self, iterator: Iterator[Item], depth: int) -> None:
        self._ready: queue.Queue[Item | _End] = queue.Queue(maxsize=max(depth, 1))
        self._stop = threading.Event()
        self._finished = False
        self._thread = threading.Thread(
            target=self._fill, args=(iterator,), name="prefetch", daemon=True
        )
        self._thread.start()

    def _fill(self, iterator: Iterator[Item]) -> None:
        try:
            for item in iterator:
                self._ready.put(item)
                if self._stop.is_set():
                    return
            self._ready.put(_End(None))
        except BaseException as error:  # the consumer must see it, whatever it is
            self._ready.put(_End(error))

    def __next__(self) -> Item:
        if self._finished:
            raise StopIteration
        item = self._ready.get()
        if not isinstance(item, _End):
            return item
        self._finished = True
        if item.error is not None:
            raise item.error
        raise StopIteration

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Stop building. A source stuck in a read is left to its daemon thread after the wait."""
        self._finished = True
        self._stop.set()
        while not self._ready.empty():  # frees a put in progress; the thread then sees the stop
            self._ready.get_nowait()
        self._thread.join(timeout_seconds)

    def __enter__(self) -> Prefetch[Item]:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
