"""Documents cut into rows of T + 1 tokens, every row reachable by its number.

    corpus      |a0 a1 a2 a3 a4 a5|b0 b1|c0 c1|                           T = 4

    windows     [a0 a1 a2 a3 a4] [a4 a5 b0 b1 c0]                         one text; its tail
                                                                          (c1) is not used
    documents   [a0 a1 a2 a3 a4] [a4 a5 b0 b1 c0] [c0 c1 .. .. ..]        segments 11111
                                                                          11223 11000
    padded      [a0 a1 a2 a3 a4] [a4 a5 .. .. ..] [b0 b1 .. .. ..] ...    supervised 11111
                                                                          11000 11000 ...

A row begins with the token that the row before it ended with, so that each token but the first (of
the corpus in `windows`, of its document in the others) is the target of exactly one row.

Letters: B rows, T sequence, D documents, I tokens, P pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from spmd_train.data.batches import Batch, shift

Packing = Literal["windows", "documents", "padded"]


@dataclass(frozen=True, eq=False)
class Rows:
    """Attributes:
    tokens: int32 [B, T+1]; 0 in padding.
    segments: of packed documents, int32 [B, T+1]: the number of each in its row, from 1, and 0 in
        padding. None for the others: causal attention alone keeps padding out of a document.
    supervised: bool [B, T+1], whether a token may be a target; None: all that are no padding.
    """

    tokens: np.ndarray
    segments: np.ndarray | None = None
    supervised: np.ndarray | None = None

    def batch(self) -> Batch:
        """The rows as inputs and targets. [B, T]"""
        return shift(self.tokens, segments=self.segments, supervised=self.supervised)


class Documents(NamedTuple):
    """Where documents lie in an array of tokens. Each int64 [D]"""

    starts: np.ndarray
    sizes: np.ndarray


class Pieces(NamedTuple):
    """The parts of documents that rows are made of: `length` tokens from `start` on. Each [P]"""

    row: np.ndarray
    column: np.ndarray
    start: np.ndarray
    length: np.ndarray
    segment: np.ndarray
    document: np.ndarray


@dataclass(frozen=True, eq=False)
class Sequences:
    """The rows that documents of one corpus make.

    Attributes:
        tokens: of the corpus [I]. loss_mask: uint8 [I], 1 for what may be a target, or None.
        documents: those that are cut, none of them empty (in `padded`: none without a target).
        edges: int64 [D+1], tokens (in `padded`: rows) before each of them.
        keep_tail: whether `windows` ends with a row that is not full.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray | None
    documents: Documents
    edges: np.ndarray
    packing: Packing
    length: int
    keep_tail: bool

    @classmethod
    def of(
        cls,
        tokens: np.ndarray,
        documents: Documents,
        packing: Packing,
        length: int,
        loss_mask: np.ndarray | None = None,
        keep_tail: bool = False,
    ) -> Sequences:
        """Rows of `length` + 1 tokens."""
        used = documents.sizes > (1 if packing == "padded" else 0)
        kept = Documents(documents.starts[used], documents.sizes[used])
        counted = -(-(kept.sizes - 1) // length) if packing == "padded" else kept.sizes
        edges = np.concatenate([[0], np.cumsum(counted, dtype=np.int64)])
        return cls(tokens, loss_mask, kept, edges, packing, length, keep_tail)

    @cached_property
    def token_count(self) -> int:
        """Tokens of its documents."""
        return int(self.documents.sizes.sum())

    def __len__(self) -> int:
        """Rows."""
        if self.packing == "padded":
            return int(self.edges[-1])
        targets = max(0, self.token_count - 1)
        whole = self.packing == "windows" and not self.keep_tail
        return targets // self.length if whole else -(-targets // self.length)

    def rows(self, numbers: np.ndarray) -> Rows:
        """These rows, in the order of `numbers` [B]."""
        row, column, start, length, segment, _ = self.pieces(numbers)
        width = self.length + 1
        before = np.cumsum(length) - length
        nth = np.arange(length.sum())
        source = np.repeat(start - before, length) + nth
        is_full = source.size == numbers.size * width
        place = nth if is_full else np.repeat(row * width + column - before, length) + nth

        def placed(values: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
            if is_full:
                return values.astype(dtype).reshape(-1, width)
            out = np.zeros((numbers.size, width), dtype)
            out.reshape(-1)[place] = values
            return out

        segments = supervised = None
        if self.packing == "documents":
            segments = placed(np.repeat(segment, length), np.int32)
        if self.loss_mask is not None:
            supervised = placed(self.loss_mask[source] != 0, np.bool_)
        elif segments is None and not is_full:
            supervised = placed(np.ones(source.size), np.bool_)
        return Rows(placed(self.tokens[source], np.int32), segments, supervised)

    def pieces(self, numbers: np.ndarray) -> Pieces:
        """What these rows [B] are made of, in the order of rows and columns."""
        rows, (starts, sizes) = np.arange(numbers.size), self.documents
        if self.packing == "padded":
            document = np.searchsorted(self.edges, numbers, "right") - 1
            begin = (numbers - self.edges[document]) * self.length
            lengths = np.minimum(self.length + 1, sizes[document] - begin)
            one = np.ones_like(rows)
            return Pieces(rows, 0 * one, starts[document] + begin, lengths, one, document)
        begin = numbers * self.length
        end = np.minimum(begin + self.length + 1, self.edges[-1])
        first = np.searchsorted(self.edges, begin, "right") - 1
        count = np.searchsorted(self.edges, end, "left") - first
        row = np.repeat(rows, count)
        nth = np.arange(row.size) - np.repeat(np.cumsum(count) - count, count)
        document = first[row] + nth
        start = np.maximum(self.edges[document], begin[row])
        length = np.minimum(self.edges[document + 1], end[row]) - start
        offset = starts[document] - self.edges[document]
        return Pieces(row, start - begin[row], start + offset, length, nth + 1, document)


@dataclass(frozen=True, eq=False)
class Samples:
    """The rows of several corpora, numbered one corpus after another."""

    parts: Sequence[Sequences]

    @cached_property
    def firsts(self) -> np.ndarray:
        """The number of each corpus's first row, and of all rows. int64 [corpora + 1]"""
        return np.concatenate([[0], np.cumsum([len(part) for part in self.parts])]).astype(np.int64)

    def __len__(self) -> int:
        """Rows."""
        return int(self.firsts[-1])

    def of_each(self, numbers: np.ndarray) -> list[tuple[Sequences, np.ndarray, np.ndarray]]:
        """Each corpus with rows among `numbers` [B]: it, their places in B, their numbers in it."""
        corpus = np.searchsorted(self.firsts, numbers, "right") - 1
        return [
            (self.parts[c], places, numbers[places] - self.firsts[c])
            for c in np.unique(corpus)
            for (places,) in [np.nonzero(corpus == c)]
        ]

    def rows(self, numbers: np.ndarray) -> Rows:
        """These rows, in the order of `numbers` [B]."""
        each = self.of_each(numbers)
        back = np.argsort(np.concatenate([places for _, places, _ in each]))
        rows = [part.rows(own) for part, _, own in each]
        masks = [r.supervised for r in rows]
        if any(mask is not None for mask in masks):  # a corpus without one trains on everything
            masks = [
                np.ones(r.tokens.shape, np.bool_) if mask is None else mask
                for r, mask in zip(rows, masks, strict=True)
            ]
        joined = [
            _joined(arrays, back)
            for arrays in ([r.tokens for r in rows], [r.segments for r in rows], masks)
        ]
        return Rows(*joined)


def _joined(arrays: Sequence[np.ndarray | None], back: np.ndarray) -> Any:
    """Arrays as one whose rows are in the order `back`; None where they are None."""
    present = [array for array in arrays if array is not None]
    return np.concatenate(present)[back] if present else None
