"""Rows of documents against plain slices of Python lists, in all three packings."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_train.data.batches import IGNORE
from spmd_train.data.sequences import Documents, Packing, Samples, Sequences

PACKINGS = ("windows", "documents", "padded")


def corpus(sizes: list[int], gaps: list[int]) -> tuple[np.ndarray, Documents, list[list[int]]]:
    """Documents of distinct ids with other tokens (id 0) between them."""
    tokens: list[int] = []
    starts, documents, ident = [], [], 1
    for size, gap in zip(sizes, gaps, strict=True):
        tokens += [0] * gap
        starts.append(len(tokens))
        documents.append(list(range(ident, ident + size)))
        tokens += documents[-1]
        ident += size
    where = Documents(np.array(starts, np.int64), np.array(sizes, np.int64))
    return np.array(tokens, np.uint16), where, documents


def cut(sizes: list[int], packing: Packing, length: int, **more: bool) -> Sequences:
    tokens, where, _ = corpus(sizes, [0] * len(sizes))
    return Sequences.of(tokens, where, packing, length, **more)


def all_rows(sequences: Sequences) -> np.ndarray:
    return np.arange(len(sequences))


def naive(documents: list[list[int]], packing: str, length: int) -> list[list[tuple[int, int]]]:
    """Rows of (id, segment), built token by token."""
    rows: list[list[tuple[int, int]]] = []
    if packing == "padded":
        for document in documents:
            for begin in range(0, len(document) - 1, length):
                rows.append([(token, 1) for token in document[begin : begin + length + 1]])
    else:
        text = [(token, number) for number, d in enumerate(documents) for token in d]
        for begin in range(0, len(text) - 1, length):
            part = text[begin : begin + length + 1]
            numbers = list(dict.fromkeys(number for _, number in part))
            rows.append([(token, 1 + numbers.index(number)) for token, number in part])
    return [row + [(0, 0)] * (length + 1 - len(row)) for row in rows]


sizes_and_gaps = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), max_size=12)


@given(sizes_and_gaps, st.sampled_from(PACKINGS), st.integers(1, 9), st.randoms())
def test_rows_against_slices(pairs, packing, length, random):
    sizes, gaps = [p[0] for p in pairs], [p[1] for p in pairs]
    tokens, where, documents = corpus(sizes, gaps)
    sequences = Sequences.of(tokens, where, packing, length, keep_tail=True)
    expected = naive(documents, packing, length)
    assert len(sequences) == len(expected)
    order = all_rows(sequences)
    random.shuffle(order)
    if not expected:
        return
    rows = sequences.rows(order)
    assert rows.tokens.dtype == np.int32
    assert rows.tokens.tolist() == [[token for token, _ in expected[i]] for i in order]
    segments = [[segment for _, segment in expected[i]] for i in order]
    if packing != "documents":
        assert rows.segments is None
        padding = [[segment == 0 for segment in row] for row in segments]
        found = np.zeros_like(padding) if rows.supervised is None else ~rows.supervised
        assert found.tolist() == padding
    else:
        assert rows.supervised is None
        assert rows.segments.dtype == np.int32
        assert rows.segments.tolist() == segments


@given(st.lists(st.integers(0, 12), max_size=12), st.sampled_from(PACKINGS), st.integers(1, 9))
def test_each_token_is_the_target_of_one_row(sizes, packing, length):
    _, _, documents = corpus(sizes, [0] * len(sizes))
    sequences = cut(sizes, packing, length)
    trained: Counter[int] = Counter()
    if len(sequences):
        batch = sequences.rows(all_rows(sequences)).batch()
        trained.update(batch.targets[batch.targets != IGNORE].tolist())
        # Each target follows its input in the corpus: ids are numbered.
        follows = batch.targets == batch.inputs + 1
        assert (follows | (batch.targets == IGNORE)).all()
    if packing == "windows":  # all but the first token and the tail
        count = max(0, sum(sizes) - 1) // length * length
        assert trained == Counter(range(2, 2 + count))
    else:
        assert trained == Counter(token for d in documents for token in d[1:])


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=9),
    st.sampled_from(PACKINGS),
    st.integers(1, 9),
    st.integers(0, 2**32 - 1),
)
def test_a_loss_mask_is_honoured(sizes, packing, length, seed):
    tokens, where, documents = corpus(sizes, [0] * len(sizes))
    mask = np.random.default_rng(seed).integers(0, 2, tokens.size).astype(np.uint8)
    sequences = Sequences.of(tokens, where, packing, length, mask, keep_tail=True)
    if not len(sequences):
        return
    targets = sequences.rows(all_rows(sequences)).batch().targets
    learned = {int(token) for token, flag in zip(tokens, mask, strict=True) if flag}
    firsts = {1} if packing == "windows" else {d[0] for d in documents}
    assert sorted(targets[targets != IGNORE]) == sorted(learned - firsts)


def test_public_case_p21_host_part():
    """A = 5 6 7 2 and B = 9 8 7 6 2 in a row with 7 of padding: 3 + 4 supervised tokens."""
    tokens = np.array([5, 6, 7, 2, 9, 8, 7, 6, 2], np.uint8)
    where = Documents(np.array([0, 4]), np.array([4, 5]))
    rows = Sequences.of(tokens, where, "documents", 15).rows(np.array([0]))
    assert rows.tokens.tolist() == [[5, 6, 7, 2, 9, 8, 7, 6, 2] + [0] * 7]
    batch = rows.batch()
    assert int((batch.targets != IGNORE).sum()) == 7
    assert batch.segments.tolist() == [[1] * 4 + [2] * 5 + [0] * 6]


def test_the_documented_picture():
    """The module's own drawing: a of 6 tokens, b of 2, c of 2, T = 4."""
    expected = {
        "windows": ([[1, 2, 3, 4, 5], [5, 6, 7, 8, 9]], None),
        "documents": (
            [[1, 2, 3, 4, 5], [5, 6, 7, 8, 9], [9, 10, 0, 0, 0]],
            [[1] * 5, [1, 1, 2, 2, 3], [1, 1, 0, 0, 0]],
        ),
        "padded": (
            [[1, 2, 3, 4, 5], [5, 6, 0, 0, 0], [7, 8, 0, 0, 0], [9, 10, 0, 0, 0]],
            None,
        ),
    }
    for packing, (tokens, segments) in expected.items():
        sequences = cut([6, 2, 2], packing, 4)
        rows = sequences.rows(all_rows(sequences))
        assert rows.tokens.tolist() == tokens
        assert (None if rows.segments is None else rows.segments.tolist()) == segments
    assert rows.supervised.tolist() == [[True] * 5] + [[True, True, False, False, False]] * 3


@pytest.mark.parametrize("packing", PACKINGS)
def test_rows_of_several_corpora_are_numbered_one_after_another(packing):
    parts = [cut([5, 9], packing, 3), cut([], packing, 3), cut([8], packing, 3)]
    parts[2] = Sequences.of(
        parts[2].tokens, parts[2].documents, packing, 3, np.ones(8, np.uint8) * (np.arange(8) % 2)
    )
    samples = Samples(parts)
    count = len(parts[0])
    assert len(samples) == count + len(parts[2])
    numbers = np.array([count, 0, count + 1, count - 1])
    rows = samples.rows(numbers)
    own = [parts[c].rows(np.array([i])) for c, i in ((2, 0), (0, 0), (2, 1), (0, count - 1))]
    for name in ("tokens", "segments"):
        if getattr(own[0], name) is not None:
            expected = np.concatenate([getattr(row, name) for row in own])
            np.testing.assert_array_equal(getattr(rows, name), expected)
    for found, row in zip(rows.supervised, own, strict=True):
        expected = True if row.supervised is None else row.supervised[0]
        np.testing.assert_array_equal(found, np.broadcast_to(expected, 4))
    assert packing == "padded" or samples.rows(np.array([0, 1])).supervised is None
