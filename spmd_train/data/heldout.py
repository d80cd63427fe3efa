"""Documents that are never trained on, and the bytes of text in what a model predicts of them.

A document is held out by a hash of (seed, its number), so the choice depends on nothing else. A
corpus of one single document, such as a text file, holds out the last part of its tokens.

Letters: B rows, T sequence, D documents, I tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spmd_train.data.batches import IGNORE
from spmd_train.data.sequences import Documents, Rows, Samples, Sequences
from spmd_train.data.tokenizer import Tokenizer

_CONTEXT = 32
"""Tokens before a place in a document that decide how the text goes on there: a character of four
bytes may be four tokens."""


def split(offsets: np.ndarray, fraction: float, seed: int) -> tuple[Documents, Documents]:
    """The documents to train on, and those held out: `fraction` of them, and at least one.

    Args:
        offsets: where each document starts and the last one ends, int64 [D + 1].
        fraction: below 0.5; 0 holds out none.
    """
    starts, sizes = offsets[:-1], np.diff(offsets)
    held = np.zeros(starts.size, np.bool_)
    if fraction and starts.size == 1:
        cut = sizes - np.maximum(1, np.round(sizes * fraction).astype(np.int64))
        return Documents(starts, cut), Documents(starts + cut, sizes - cut)
    if fraction and starts.size:
        count = max(1, round(fraction * starts.size))
        held[np.argpartition(_hash(starts.size, seed), count - 1)[:count]] = True
    return Documents(starts[~held], sizes[~held]), Documents(starts[held], sizes[held])


def _hash(count: int, seed: int) -> np.ndarray:
    """A hash of (seed, n) for each n, uint64 [count]: no two are equal.

    The n-th output of SplitMix64 (Steele et al. 2014, figure 14) started at a seed that is far
    from those of neighbouring seeds.
    """
    start = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    z = start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True, eq=False)
class Heldout:
    """The rows of held-out documents, in order: to be read as numbers 0 to len - 1, each once.

    They are cut as the training rows are, but none of their tokens is left out.
    """

    samples: Samples
    tokenizer: Tokenizer | None

    def __len__(self) -> int:
        """Rows."""
        return len(self.samples)

    def rows(self, numbers: np.ndarray) -> Rows:
        """These rows. [B, T+1]"""
        return self.samples.rows(numbers)

    def text_bytes(self, numbers: np.ndarray) -> np.ndarray | None:
        """UTF-8 bytes of the text of each row's targets, int64 [B]; None without a tokenizer.

        BOS and EOS are no text. The bytes of a document's targets and those of its first token add
        up to those of its whole text as decoded; a character that two rows share counts in one.
        """
        if self.tokenizer is None:
            return None
        found = np.zeros(numbers.size, np.int64)
        for part, places, own in self.samples.of_each(numbers):
            found[places] = _text_bytes(part, own, self.tokenizer)
        return found


def _text_bytes(part: Sequences, numbers: np.ndarray, text: Tokenizer) -> np.ndarray:
    marks = [i for i in (text.bos_id, text.eos_id) if i is not None]

    def decoded(ids: np.ndarray) -> int:
        return len(text.decode(ids[~np.isin(ids, marks)]).encode())

    is_target = np.pad(part.rows(numbers).batch().targets != IGNORE, ((0, 0), (1, 0)))
    found = np.zeros(numbers.size, np.int64)
    for row, column, start, length, _, document in zip(*part.pieces(numbers), strict=True):
        beginning = part.documents.starts[document]
        changes = np.diff(is_target[row, column : column + length].astype(np.int8), prepend=0)
        firsts = start + np.flatnonzero(changes == 1)
        lasts = start + np.append(np.flatnonzero(changes == -1), length)
        for first, last in zip(firsts, lasts, strict=False):
            before = max(beginning, first - _CONTEXT)
            found[row] += decoded(part.tokens[before:last]) - decoded(part.tokens[before:first])
    return found
