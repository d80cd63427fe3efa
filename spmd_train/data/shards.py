"""A corpus as shards: parts of the input that are encoded independently, each into its own files.

    inputs    a.txt | b.jsonl ..............| c.txt d.txt e.txt | ...
    slices    ----- | -------- ------- ---- | ----- ----- ----- |       `documents.slices`
    shards    [  0            ][  1        ][  2               ]        as many as there are
                                                                        workers to encode them

A shard's bytes depend on the input and the job only: neither the number of workers nor an
interruption shows in them. A shard is finished when its `.json` is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from spmd_train.data.chat import Spans
from spmd_train.data.documents import BadRecord, Slice, read
from spmd_train.data.indexed import Writer, dtype_for
from spmd_train.data.manifest import SKIPPED_LISTED, Skipped, parse_record
from spmd_train.data.records import Form, Format, Piece
from spmd_train.data.tokenizer import Tokenizer, load_saved
from spmd_train.disk import write_whole
from spmd_train.errors import RequestError

_BATCH_CHARACTERS = 2**20
_BATCH_PIECES = 4096

MASK = np.dtype("u1")
"""The type of what says whether an id is learned."""


@dataclass(frozen=True)
class Job:
    """What a worker has to know to encode a shard.

    Attributes:
        directory: where shards go and the tokenizer called `tokenizer` lies. field: of the text.
        template: of conversations.
    """

    directory: Path
    tokenizer: str
    format: Format
    field: str
    template: str
    add_bos: bool
    add_eos: bool
    skip_bad: bool


@dataclass(frozen=True)
class Shard:
    """Consecutive slices of the input; `number` is its place in the corpus."""

    number: int
    slices: tuple[Slice, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the input."""
        return sum(part.bytes for part in self.slices)

    @property
    def continues(self) -> bool:
        """Whether its first document began in the shard before."""
        return not self.slices[0].opens

    def prefix(self, directory: Path) -> Path:
        """The path of its files, without their suffixes."""
        return directory / f"shard-{self.number:06d}"

    def mask_prefix(self, directory: Path) -> Path:
        """That of the files which say what is learned."""
        return directory / f"shard-{self.number:06d}.loss_mask"


class Summary(BaseModel):
    """What a finished shard holds and left out."""

    documents: int
    tokens: int
    learned_tokens: int
    empty_documents: int
    skipped: int
    skipped_records: list[Skipped]


def group(slices: Iterable[Slice], shard_bytes: int) -> list[Shard]:
    """Slices in order, as shards of at least `shard_bytes` each (but for the last)."""
    shards: list[Shard] = []
    held: list[Slice] = []
    held_bytes = 0
    for part in slices:
        held.append(part)
        held_bytes += part.bytes
        if held_bytes >= shard_bytes:
            shards.append(Shard(len(shards), tuple(held)))
            held, held_bytes = [], 0
    return [*shards, Shard(len(shards), tuple(held))] if held else shards


def finished(job: Job, shard: Shard) -> Summary | None:
    """The summary of a shard that was encoded before, skipping nothing that the job would not."""
    path = shard.prefix(job.directory).with_suffix(".json")
    summary: Summary | None = parse_record(Summary, path) if path.is_file() else None
    return summary if summary and (job.skip_bad or not summary.skipped) else None


def encode(job: Job, shard: Shard) -> Summary:
    """Encode a shard into its files.

    Raises:
        RequestError: a record cannot be used, and the job does not skip such records.
    """
    text = _tokenizer(job.directory, job.tokenizer)
    dtype = dtype_for(text.vocab_size)
    before, after = _around(text, job)
    bad, documents, tokens, empty, learned = Skipping(job.skip_bad), 0, 0, 0, 0
    form = Form(job.format, job.field, job.template, text)
    with ExitStack() as stack:
        out = stack.enter_context(Writer(shard.prefix(job.directory), dtype))
        mask = None
        if job.format != "text":
            mask = stack.enter_context(Writer(shard.mask_prefix(job.directory), MASK))
        pieces = bad.documents(item for part in shard.slices for item in read(part, form))
        for batch in _batches(pieces):
            parts: list[np.ndarray] = []
            lengths: list[int] = []
            for piece, ids in zip(batch, text.encode_batch([p.text for p in batch]), strict=True):
                if not ids.size and piece.opens and piece.closes:
                    empty += 1
                    continue
                whole = [*before[: piece.opens], ids, *after[: piece.closes]]
                if mask and piece.learned is not None:
                    flags = _flags(piece.learned, len(before), ids.size, len(after))
                    mask.add(flags)
                    learned += int(flags.sum())
                length = sum(part.size for part in whole)
                parts += whole
                documents += piece.opens
                tokens += length
                if piece.opens or not lengths:
                    lengths.append(length)
                else:
                    lengths[-1] += length
            if lengths:
                out.extend(np.concatenate(parts), lengths, continues=not batch[0].opens)
    summary = Summary(
        documents=documents,
        tokens=tokens,
        learned_tokens=learned,
        empty_documents=empty,
        skipped=bad.count,
        skipped_records=bad.listed,
    )
    write_whole(
        shard.prefix(job.directory).with_suffix(".json"), summary.model_dump_json().encode()
    )
    return summary


def _flags(spans: Spans, before: int, size: int, after: int) -> np.ndarray:
    """1 for each token of a document to be learned; its EOS is, if what it ends is."""
    flags = np.zeros(before + size + after, MASK)
    for start, stop in spans:
        flags[before + start : before + stop] = 1
    flags[before + size :] = flags[before + size - 1]
    return flags


@lru_cache(maxsize=1)
def _tokenizer(directory: Path, name: str) -> Tokenizer:
    return load_saved(directory, name)


def _around(text: Tokenizer, job: Job) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What stands before and after the ids of a document: lists of no array, or of one id."""
    ids = (text.bos_id if job.add_bos else None, text.eos_id if job.add_eos else None)
    before, after = ([] if i is None else [np.array([i], np.int32)] for i in ids)
    return before, after


class Skipping:
    """Counts and lists the records that are no documents, or stops at the first of them."""

    def __init__(self, allowed: bool) -> None:
        self._allowed = allowed
        self.count = 0
        self.listed: list[Skipped] = []

    def documents(self, items: Iterable[Piece | BadRecord]) -> Iterator[Piece]:
        """The items that are texts."""
        for item in items:
            if isinstance(item, Piece):
                yield item
            else:
                self.skip(item)

    def skip(self, bad: BadRecord) -> None:
        """Leave one record out.

        Raises:
            RequestError: none may be.
        """
        if not self._allowed:
            raise RequestError(f"{bad}; --skip-bad leaves such records out.")
        self.add(1, [Skipped(file=bad.file, place=bad.place, reason=bad.reason)])

    def add(self, count: int, records: list[Skipped]) -> None:
        """Count `count` records, of which some are listed."""
        self.count += count
        self.listed += records[: SKIPPED_LISTED - len(self.listed)]


def _batches(pieces: Iterable[Piece]) -> Iterator[Sequence[Piece]]:
    """Consecutive pieces, enough for every thread and not too many for memory."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_PIECES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
