"""The order of the data against lists written here, Grain's own operations, and plain counting."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import grain
import numpy as np
import pytest
from helpers import stream_of
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_train.data.batches import micro_batched
from spmd_train.data.source import TokenSource
from spmd_train.data.stream import Stream, repetition, shares

GOLDEN = [5, 7, 6, 0, 4, 8, 9, 2, 1, 3]  # 10 windows, seed 1, grain 0.2.18: must never change


def one_token_rows(count, *, global_size, seed=0):
    """P20's data: row i holds the token i."""
    return stream_of(np.arange(count + 1, dtype=np.uint8), 1, global_size, seed)


def test_golden_order():
    stream = one_token_rows(10, global_size=5, seed=1)
    assert np.concatenate([stream.sample_ids(s) for s in range(2)]).tolist() == GOLDEN


def test_each_token_is_the_target_of_one_window():
    stream = stream_of(np.arange(41), 8, 5, seed=0)
    targets = stream.batch(stream.sample_ids(0)).targets
    assert sorted(targets.ravel()) == list(range(1, 41))


def test_public_case_p20_each_id_once_per_epoch():
    stream = one_token_rows(64, global_size=8)
    epochs = [
        np.concatenate(
            [stream.rows(stream.sample_ids(step)).tokens[:, 0] for step in range(first, first + 8)]
        )
        for first in (0, 8)
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(64))] * 2
    assert epochs[0].tolist() != epochs[1].tolist() != list(range(64))


def test_public_case_p20_resume_is_the_uninterrupted_run():
    run = one_token_rows(64, global_size=8)
    uninterrupted = [run.rows(run.sample_ids(step)).tokens for step in range(12)]
    resumed = one_token_rows(64, global_size=8)  # a fresh process: nothing but the step number
    for step in (3, 11, 0, 7):
        np.testing.assert_array_equal(
            resumed.rows(resumed.sample_ids(step)).tokens, uninterrupted[step]
        )


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


# ------------------------------------------------------------------------------ several corpora


def source(name: str, sizes: list[int], first: int = 0) -> TokenSource:
    """Documents of these sizes, of the ids from `first` on."""
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    tokens = np.arange(first, first + offsets[-1], dtype=np.uint32)
    return TokenSource(name, tokens, offsets, f"content of {name}")


def mixture(seed: int = 0, size: int = 4, **more) -> Stream:
    sources = (source("a", [9] * 3), source("b", [4, 30, 1], 1000), source("c", [6], 2000))
    return Stream(sources, 3, size, seed, (7, 2, 1), **more)


def ids_of(stream: Stream, first: int, stop: int) -> list[int]:
    return [int(i) for step in range(first, stop) for i in stream.sample_ids(step)]


@given(st.integers(1, 200), st.integers(0, 2**32 - 1))
@settings(max_examples=10)
def test_one_corpus_is_ordered_as_grain_does(rows, seed):
    stream = one_token_rows(rows, global_size=1, seed=seed)
    grains = grain.MapDataset.source(range(rows)).shuffle(seed=seed).repeat()
    assert ids_of(stream, 0, 2 * rows) == [grains[i] for i in range(2 * rows)]


@given(
    st.lists(st.lists(st.integers(2, 99), min_size=1, max_size=5), min_size=1, max_size=3),
    st.sampled_from(["windows", "documents", "padded"]),
    st.integers(0, 2**32 - 1),
    st.data(),
)
@settings(max_examples=15)
def test_properties_of_the_order(corpora, packing, seed, data):
    """The same list of ids for all processes and micro-batches, from any step; epochs are whole."""
    parts = tuple(source(str(i), [100, *s], 1000 * i) for i, s in enumerate(corpora))
    weights = data.draw(st.tuples(*[st.integers(1, 3)] * len(parts)))

    def made(size: int) -> Stream:
        return Stream(parts, 2, size, seed, shares(weights), packing)

    stream, steps = made(4), 8
    uninterrupted = ids_of(stream, 0, steps)
    first = data.draw(st.integers(0, steps))
    assert ids_of(made(4), first, steps) == uninterrupted[4 * first :]
    assert ids_of(made(2), 0, 2 * steps) == uninterrupted
    # A process makes the global batch and places its own slice of it.
    for step in data.draw(st.lists(st.integers(0, steps - 1), max_size=2)):
        slices = [made(4).sample_ids(step)[2 * process :][:2] for process in range(2)]
        assert [int(i) for part in slices for i in part] == uninterrupted[4 * step :][:4]
    batch = stream.batch(stream.sample_ids(3))
    assert micro_batched(batch, 2).inputs.reshape(4, 2).tolist() == batch.inputs.tolist()

    long = ids_of(made(200), 0, 2)
    for corpus, (begin, end) in enumerate(
        zip(stream.samples.firsts[:-1], stream.samples.firsts[1:], strict=True)
    ):
        own = [i for i in long if begin <= i < end]
        rows = int(end - begin)
        for epoch in range(len(own) // rows):
            part = own[epoch * rows : (epoch + 1) * rows]
            assert sorted(part) == list(range(begin, end))
        expected = 400 * weights[corpus] / sum(weights)
        assert abs(len(own) - expected) < len(parts)
        assert made(200).epochs(2)[str(corpus)] == Fraction(len(own), rows)


def test_proportions_are_exact():
    """7 : 2 : 1 in every 10 rows; Grain's own mix would make 700 : 200 : 100 of it, but of 7 : 3
    233 : 100."""
    stream = mixture(size=10)
    firsts = stream.samples.firsts
    for step in (0, 1, 7, 10**6):
        corpus = np.searchsorted(firsts, stream.sample_ids(step), "right") - 1
        assert Counter(corpus.tolist()) == {0: 7, 1: 2, 2: 1}
    two = Stream((source("a", [30000]), source("b", [50000])), 3, 10, 0, shares([0.7, 0.3]))
    counts = Counter(int(i) < len(two.samples.parts[0]) for i in ids_of(two, 0, 1000))
    assert counts == {True: 7000, False: 3000}


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 300))
def test_the_mixture_is_grains_where_grain_is_exact(weights, start):
    """Grain scales weights by 100 / min and truncates: with a 1 among them they stay exact."""
    weights = [*weights, 1]
    parts = tuple(source(str(i), [2]) for i in range(len(weights)))
    stream = Stream(parts, 1, 1, 0, shares(weights))  # one row in each: its number is its corpus
    sets = [grain.MapDataset.source([i]).repeat() for i in range(len(weights))]
    grains = grain.MapDataset.mix(sets, weights)
    positions = range(start, start + 40)
    assert [int(stream.sample_ids(i)[0]) for i in positions] == [grains[i] for i in positions]


def test_shares_are_the_weights_as_written():
    assert shares([0.7, 0.3]) == (7, 3)
    assert shares([0.1, 0.2, 1]) == (1, 2, 10)
    assert shares([1e-3, 2.5]) == (1, 2500)
    assert shares([5]) == (1,)
    assert shares([1 / 3, 1]) == (3333333333333333, 10**16)


def test_corpora_are_shuffled_differently_and_rows_are_their_own():
    a, b = source("a", [61]), source("b", [61], 1000)
    stream = Stream((a, b), 3, 20, 0, (1, 1))
    ids = np.array(ids_of(stream, 0, 2))
    assert (ids[ids < 20]).tolist() != (ids[ids >= 20] - 20).tolist()
    for row, number in zip(stream.rows(ids).tokens, ids, strict=True):
        start = 3 * number if number < 20 else 1000 + 3 * (number - 20)
        assert row.tolist() == list(range(start, start + 4))


def test_a_mixture_of_one_is_the_corpus_alone():
    one = Stream((source("a", [61]),), 3, 4, 5, shares([0.25]))
    assert ids_of(one, 0, 9) == ids_of(Stream((source("a", [61]),), 3, 4, 5), 0, 9)


# ----------------------------------------------------------------------------- epochs and identity


def test_epochs_and_the_line_about_too_many():
    stream = Stream((source("a", [31]), source("b", [7])), 3, 8, 0, (3, 1))  # 10 rows and 2
    assert stream.epochs(5) == {"a": Fraction(30, 10), "b": Fraction(10, 2)}
    (line,) = repetition(stream.epochs(5))
    assert line.startswith("warning: the run reads b 5.0 times; from about 4 times on")
    assert "arXiv:2305.16264" in line
    assert not repetition(stream.epochs(4))


def test_whatever_changes_samples_changes_the_identity():
    def plain(**changes) -> Stream:
        made = {"sequence_length": 3, "global_size": 4, "seed": 0, "shares": (1, 2)} | changes
        return Stream((source("a", [40]), source("b", [40])), **made)

    others = [
        plain(sequence_length=4), plain(global_size=2), plain(seed=1), plain(shares=(2, 1)),
        plain(packing="padded"), plain(eval_fraction=0.1),
        Stream((source("b", [40]), source("a", [40])), 3, 4, 0, (1, 2)),
    ]  # fmt: skip
    assert plain().identity == plain().identity
    assert all(other.identity != plain().identity for other in others)
    moved = Stream((source("a", [40]), source("b", [40])), 3, 4, 0, (1, 2))
    assert moved.identity == plain().identity


@pytest.mark.parametrize("packing", ["windows", "documents", "padded"])
def test_documents_held_out_are_in_no_row(packing):
    stream = mixture(packing=packing, eval_fraction=0.3)
    trained = stream.rows(np.arange(len(stream.samples))).tokens
    heldout = stream.heldout.rows(np.arange(len(stream.heldout))).tokens
    shared = {*trained.ravel().tolist()} & {*heldout.ravel().tolist()}
    assert shared <= {0}  # padding, and the first token of all
    assert 3 <= len(stream.heldout) < len(stream.samples)
    assert len(mixture().heldout) == 0
