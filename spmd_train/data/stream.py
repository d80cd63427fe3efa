"""What a run reads at each step, as a pure function of (seed, step).

    corpora   0: rows 0 1 2 3     1: rows 4 5 6 7 8 9           numbered one after another
    orders    2 0 3 1 | 1 3 ...   7 4 9 5 8 6 | 5 ...           one shuffle per epoch, never ending
    mixed     2 7 4 0 9 5 3 8 6 1 5 ...                         1 : 2, exactly, at every length
    steps     ^^^^^^^ ^^^^^^^                                   B = global_size entries each

No iterator state exists: the step number is the whole position in the data. Mesh, process count
and micro-batches do not appear in the order, so a run resumed on other hardware reads on exactly
where it left off (public case P20).

Letters: B batch, T sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from grain.experimental import index_shuffle

from spmd_train.data.batches import Batch
from spmd_train.data.heldout import Heldout, split
from spmd_train.data.sequences import Packing, Rows, Samples, Sequences
from spmd_train.data.source import TokenSource, check_vocabulary, open_source
from spmd_train.data.tokenizer import Tokenizer
from spmd_train.errors import RequestError

if TYPE_CHECKING:
    from spmd_train.config import Config

REPEATED = 4
"""Epochs up to which repeated data is nearly as good as new (abstract of Muennighoff et al. 2023,
"Scaling Data-Constrained Language Models")."""


@dataclass(frozen=True, eq=False)
class Stream:
    """The endless shuffled rows of one or several corpora, addressed by step (from 0).

    Attributes:
        shares: how many rows of each corpus there are in `sum(shares)` of the stream.
    """

    sources: tuple[TokenSource, ...]
    sequence_length: int
    global_size: int
    seed: int
    shares: tuple[int, ...] = (1,)
    packing: Packing = "windows"
    eval_fraction: float = 0.0

    @property
    def tokenizer(self) -> Tokenizer | None:
        """That of every corpus, as far as it is known."""
        return next((s.tokenizer for s in self.sources if s.tokenizer), None)

    @property
    def identity(self) -> dict[str, Any]:
        """Plain values that change with anything that changes the samples or their order."""
        return {
            "tokenizer": self.tokenizer.fingerprint if self.tokenizer else None,
            "corpora": [
                {"content": source.content, "share": share}
                for source, share in zip(self.sources, self.shares, strict=True)
            ],
            "sequence_length": self.sequence_length,
            "global_size": self.global_size,
            "seed": self.seed,
            "packing": self.packing,
            "eval_fraction": self.eval_fraction,
        }

    @cached_property
    def _splits(self) -> tuple[Samples, Samples]:
        """What is trained on, and what is held out."""
        both: tuple[list[Sequences], list[Sequences]] = ([], [])
        for source in self.sources:
            parts = split(source.offsets, self.eval_fraction, self.seed)
            for out, documents, keep_tail in zip(both, parts, (False, True), strict=True):
                out.append(
                    Sequences.of(
                        source.tokens,
                        documents,
                        self.packing,
                        self.sequence_length,
                        source.loss_mask,
                        keep_tail,
                    )
                )
        return Samples(both[0]), Samples(both[1])

    @property
    def samples(self) -> Samples:
        """The rows of one epoch."""
        return self._splits[0]

    @property
    def heldout(self) -> Heldout:
        """The rows that are never trained on; none, unless `eval_fraction` is above 0."""
        return Heldout(self._splits[1], self.tokenizer)

    @cached_property
    def _seeds(self) -> list[int]:
        """Of each corpus's shuffles; epoch e uses seed + e, so those of several are far apart."""
        if len(self.sources) == 1:
            return [self.seed]
        drawn = (np.random.SeedSequence((self.seed, i)) for i in range(len(self.sources)))
        return [int(sequence.generate_state(1)[0]) for sequence in drawn]

    def sample_ids(self, step: int) -> np.ndarray:
        """The rows of global batch `step`, in its order. int64 [B]"""
        first = step * self.global_size
        return np.array([self._row(first + i) for i in range(self.global_size)], np.int64)

    def _row(self, position: int) -> int:
        """An entry of the stream, as `MapDataset.source(rows).shuffle(seed).repeat()` of Grain has
        it, at a tenth of the cost: an index is hashed, and no permutation stored."""
        corpus, nth = _drawn(position, self.shares)
        first, stop = map(int, self.samples.firsts[corpus : corpus + 2])
        epoch, index = divmod(nth, stop - first)
        seed = (self._seeds[corpus] + epoch) % 2**32
        return first + index_shuffle(index, max_index=stop - first - 1, seed=seed, rounds=4)

    def rows(self, sample_ids: np.ndarray) -> Rows:
        """The tokens of these rows. [B, T+1]"""
        return self.samples.rows(sample_ids)

    def batch(self, sample_ids: np.ndarray) -> Batch:
        """These rows as inputs and targets. [B, T]"""
        return self.rows(sample_ids).batch()

    def epochs(self, steps: int) -> dict[str, Fraction]:
        """How many times steps [0, steps) read each corpus, by its name."""
        read = _counts(steps * self.global_size, self.shares)
        return {
            source.name: Fraction(count, len(part))
            for source, count, part in zip(self.sources, read, self.samples.parts, strict=True)
        }


def open_stream(config: Config) -> Stream:
    """What a configuration trains on.

    Raises:
        RequestError: a corpus cannot be read, does not fit the model or the others, or is too
            short; nothing was compiled.
    """
    data, batch = config.data, config.batch
    weights: Mapping[Any, float] = data.mixing or {data.source: 1.0}
    key = "data.mixing" if data.mixing else "data.source"
    sources = tuple(open_source(path, data.tokenizer, key) for path in weights)
    _check_alike(sources)
    for source in sources:
        check_vocabulary(source, config.model.vocab)
    stream = Stream(
        sources,
        batch.sequence_length,
        batch.global_size,
        config.seed,
        shares(list(weights.values())),
        data.packing,
        data.eval_fraction,
    )
    _check_length(stream)
    return stream


def repetition(epochs: Mapping[str, Fraction]) -> list[str]:
    """A line for each corpus that a run reads more often than is of much use."""
    return [
        f"warning: the run reads {name} {float(count):.1f} times; from about {REPEATED} times on,"
        " repeated data is worth ever less (Muennighoff et al. 2023, arXiv:2305.16264)."
        for name, count in epochs.items()
        if count > REPEATED
    ]


def shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights as the smallest integers in the same proportions, each weight being as written."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    integers = [int(weight * scale) for weight in exact]
    common = math.gcd(*integers)
    return tuple(integer // common for integer in integers)


def _counts(length: int, shares: Sequence[int]) -> list[int]:
    """How many of the first `length` entries of a stream are of each corpus.

    The interleaving of `grain.MapDataset.mix` (0.2.18), which itself rounds its proportions: 7 to 3
    become 233 to 100.
    """
    counts, left = [], sum(shares)
    for share in shares:
        others = length * (left - share) // left
        counts.append(length - others)
        length, left = others, left - share
    return counts


def _drawn(position: int, shares: Sequence[int]) -> tuple[int, int]:
    """The corpus of an entry of the stream, and how many entries before it are of the same."""
    before, after = _counts(position, shares), _counts(position + 1, shares)
    corpus = next(i for i, count in enumerate(before) if count < after[i])
    return corpus, before[corpus]


def _check_alike(sources: Sequence[TokenSource]) -> None:
    known = [source for source in sources if source.tokenizer]
    for source in known[1:]:
        first, other = known[0].tokenizer, source.tokenizer
        if first and other and first.fingerprint != other.fingerprint:
            raise RequestError(
                f"{known[0].name} and {source.name} were made with different tokenizers (SHA-256"
                f" {first.fingerprint[:12]} and {other.fingerprint[:12]}); prepare both with one."
            )


def _check_length(stream: Stream) -> None:
    """Refuse what holds less than one batch, or a corpus without a single row."""
    for source, part in zip(stream.sources, stream.samples.parts, strict=True):
        rows = len(part)
        if rows and (rows >= stream.global_size or len(stream.sources) > 1):
            continue
        held = f", {part.token_count} of them to train on" if stream.eval_fraction else ""
        shorter = (part.token_count - 1) // stream.global_size
        cures = ["give a longer text"]
        if rows:
            cures.append(f"set batch.global_size={rows} or less")
        if shorter > 0:
            cures.append(f"set batch.sequence_length={shorter} or less")
        needed = f"one step needs batch.global_size={stream.global_size}"
        if len(stream.sources) > 1:
            needed = "a mixture needs one of each"
        raise RequestError(
            f"{source.name} has {source.tokens.size} tokens{held}, which is {rows} rows of"
            f" sequence_length={stream.sequence_length} where {needed}: {', or '.join(cures)}."
        )
