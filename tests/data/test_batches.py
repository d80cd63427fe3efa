"""The order of the data against lists written here, and the shapes against plain loops."""

import threading
import time

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_train.data.batches import IGNORE, Batch, Stream, micro_batched, prefetch, shift
from spmd_train.errors import RequestError

GOLDEN = [5, 7, 6, 0, 4, 8, 9, 2, 1, 3]  # 10 windows, seed 1, grain 0.2.18: must never change


def one_token_rows(count, *, global_size, seed=0):
    """P20's data: row i holds the token i."""
    return Stream(np.arange(count + 1, dtype=np.uint8), 1, global_size, seed)


def test_golden_order():
    stream = one_token_rows(10, global_size=5, seed=1)
    assert np.concatenate([stream.sample_ids(s) for s in range(2)]).tolist() == GOLDEN


@given(
    length=st.integers(1, 9),
    extra=st.integers(0, 100),
    size=st.integers(1, 12),
    step=st.integers(0, 10**9),
)
def test_rows_are_the_windows_of_the_ids(length, extra, size, step):
    tokens = (np.arange(length + 1 + extra) * 37 % 251).astype(np.uint8)
    stream = Stream(tokens, length, size, seed=3)
    rows = stream.rows(stream.sample_ids(step))
    assert rows.dtype == np.int32
    assert rows.shape == (size, length + 1)
    for row, window in zip(rows, stream.sample_ids(step), strict=True):
        start = int(window) * length
        assert row.tolist() == tokens[start : start + length + 1].tolist()


def test_each_token_is_the_target_of_one_window():
    stream = Stream(np.arange(41), 8, 5, seed=0)
    targets = shift(stream.rows(stream.sample_ids(0))).targets
    assert sorted(targets.ravel()) == list(range(1, 41))


def test_public_case_p20_each_id_once_per_epoch():
    stream = one_token_rows(64, global_size=8)
    epochs = [
        np.concatenate(
            [stream.rows(stream.sample_ids(step))[:, 0] for step in range(first, first + 8)]
        )
        for first in (0, 8)
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(64))] * 2
    assert epochs[0].tolist() != epochs[1].tolist() != list(range(64))


def test_public_case_p20_resume_is_the_uninterrupted_run():
    run = one_token_rows(64, global_size=8)
    uninterrupted = [run.rows(run.sample_ids(step)) for step in range(12)]
    resumed = one_token_rows(64, global_size=8)  # a fresh process: nothing but the step number
    for step in (3, 11, 0, 7):
        np.testing.assert_array_equal(resumed.rows(resumed.sample_ids(step)), uninterrupted[step])


def test_the_global_batch_size_only_cuts_the_same_order():
    by_eight, by_four = (one_token_rows(64, global_size=size) for size in (8, 4))
    halves = np.concatenate([by_four.sample_ids(6), by_four.sample_ids(7)])
    assert halves.tolist() == by_eight.sample_ids(3).tolist()


def test_batches_cross_the_end_of_an_epoch_without_loss():
    stream = one_token_rows(10, global_size=4)
    ids = np.concatenate([stream.sample_ids(step) for step in range(5)])
    assert sorted(ids[:10]) == sorted(ids[10:]) == list(range(10))


def test_seeds_differ():
    orders = {tuple(one_token_rows(64, global_size=64, seed=s).sample_ids(0)) for s in range(5)}
    assert len(orders) == 5


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


def test_micro_batches_are_contiguous_rows():
    batch = shift(np.arange(6 * 4).reshape(6, 4))
    split = micro_batched(batch, 3)
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
