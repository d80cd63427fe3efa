"""The shapes that a step reads, against plain loops; building them ahead."""

import threading
import time

import jax
import numpy as np
import pytest

from spmd_train.data.batches import IGNORE, Batch, micro_batched, prefetch, shift
from spmd_train.errors import RequestError


def test_shift_against_a_loop():
    rows = np.random.default_rng(0).integers(0, 64, (8, 17)).astype(np.uint8)
    lengths = [1, 16, 2, 15, 3, 14, 0, 13]  # P01's masks, and a row of none
    batch = shift(rows, lengths)
    assert batch.inputs.dtype == batch.targets.dtype == np.int32
    for i in range(8):
        for t in range(16):
            assert batch.inputs[i, t] == rows[i, t]
            assert batch.targets[i, t] == (rows[i, t + 1] if t < lengths[i] else IGNORE)


def test_shift_without_lengths_trains_everything_and_leaves_the_rows_alone():
    rows = np.arange(10, dtype=np.int32).reshape(2, 5)
    batch = shift(rows)
    assert batch.targets.tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]]
    batch.targets[:] = 0
    assert rows[0, 1] == 1


def test_no_target_is_another_documents_or_padding():
    """Against a loop; documents of one token, of a whole row, none at all; with `lengths` too."""
    rows = np.arange(4 * 9).reshape(4, 9)
    sizes = [[4, 5], [1, 2, 3], [9], []]
    segments = np.zeros((4, 9), np.int64)
    for i, row in enumerate(sizes):
        numbers = np.repeat(np.arange(1, len(row) + 1), row)
        segments[i, : len(numbers)] = numbers
    lengths = [8, 4, 8, 8]
    for cut in (None, lengths):
        batch = shift(rows, cut, segments)
        assert batch.segments.dtype == batch.targets.dtype == np.int32
        for i in range(4):
            for t in range(8):
                here, then = segments[i, t], segments[i, t + 1]
                kept = here == then != 0 and (cut is None or t < cut[i])
                assert batch.segments[i, t] == here
                assert batch.inputs[i, t] == rows[i, t]
                assert batch.targets[i, t] == (rows[i, t + 1] if kept else IGNORE)
    split = micro_batched(batch, 2, runs=2)
    for mine, whole in ((split.segments, batch.segments), (split.targets, batch.targets)):
        assert mine.tolist() == [[whole[m].tolist(), whole[2 + m].tolist()] for m in range(2)]


def test_shift_keeps_documents_apart():
    """Public case P21: A = 5 6 7 2, B = 9 8 7 6 2 and 7 of padding; 3 + 4 targets."""
    row = np.array([[5, 6, 7, 2, 9, 8, 7, 6, 2] + [0] * 7])
    segments = np.array([[1] * 4 + [2] * 5 + [0] * 7])
    batch = shift(row, segments=segments)
    no = IGNORE
    assert batch.targets.tolist() == [[6, 7, 2, no, 8, 7, 6, 2] + [no] * 7]
    assert batch.segments.tolist() == [[1] * 4 + [2] * 5 + [0] * 6]
    assert batch.segments.dtype == np.int32


def test_shift_trains_only_what_is_supervised():
    supervised = np.array([[True, False, True, True], [False, False, False, True]])
    batch = shift(np.arange(8).reshape(2, 4), supervised=supervised)
    assert batch.targets.tolist() == [[IGNORE, 2, 3], [IGNORE, IGNORE, 7]]
    both = shift(np.arange(8).reshape(2, 4), None, np.ones((2, 4)), supervised)
    assert both.targets.tolist() == batch.targets.tolist()


def test_micro_batches_are_contiguous_rows():
    batch = shift(np.arange(6 * 4).reshape(6, 4))
    split = micro_batched(batch, 3)
    assert split.segments is None
    assert split.inputs.shape == split.targets.shape == (3, 2, 3)
    for row in range(6):
        assert split.inputs[row // 2, row % 2].tolist() == batch.inputs[row].tolist()


def test_micro_batches_must_divide():
    with pytest.raises(RequestError, match="6 rows do not divide into 4 micro-batches"):
        micro_batched(shift(np.zeros((6, 4))), 4)


def test_a_batch_is_a_pytree():
    batch = shift(np.arange(8).reshape(2, 4))
    doubled = jax.jit(lambda b: jax.tree.map(lambda x: 2 * x, b))(batch)
    assert isinstance(doubled, Batch)
    assert doubled.targets.tolist() == (2 * batch.targets).tolist()
    names = [str(path[0]) for path, _ in jax.tree_util.tree_flatten_with_path(batch)[0]]
    assert names == [".inputs", ".targets"]


def test_prefetch_keeps_the_order_and_ends():
    with prefetch(iter(range(50))) as items:
        assert list(items) == list(range(50))
        assert list(items) == []


def test_prefetch_works_ahead_but_no_further_than_depth():
    built = []
    with prefetch((built.append(i) or i for i in range(100)), depth=2) as items:
        deadline = time.monotonic() + 5
        while len(built) < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
        assert built == [0, 1, 2]  # two in the queue, one waiting to enter
        assert next(items) == 0


def test_prefetch_raises_where_the_item_would_have_come():
    def source():
        yield 1
        raise OSError("the disk is gone")

    items = prefetch(source())
    assert next(items) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(items)
    assert list(items) == []


@pytest.mark.parametrize("depth", [1, 2])
def test_prefetch_closes_while_the_source_goes_on(depth):
    ended = threading.Event()

    def endless():
        try:
            while True:
                yield 0
        finally:
            ended.set()

    with prefetch(endless(), depth) as items:
        next(items)
    assert list(items) == []
    assert ended.wait(5)
