"""The indexed dataset of Megatron-LM: documents of token ids in two files, mapped into memory.

    PREFIX.bin   the ids of all sequences, one after another, in one integer type
    PREFIX.idx   "MMIDIDX" 00 00 | version 1, uint64 | dtype code, uint8 | N, uint64 | D + 1, uint64
                 sizes            int32 [N]      ids in each sequence
                 pointers         int64 [N]      byte in .bin at which it starts
                 document_starts  int64 [D + 1]  sequence with which each document starts, and N
                 modes            int8  [N]      only in multimodal files; not read here

Little endian throughout. Source: megatron/core/datasets/indexed_dataset.py (`_IndexWriter`). A
document is one sequence here, and several only beyond the 2^31 - 1 ids which a size can say.

Letters: N sequences, D documents, I ids.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spmd_train.errors import RequestError, listed

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_CODES = {np.dtype(name): code for code, name in _DTYPES.items()}

MAX_SEQUENCE = 2**31 - 1
"""Ids in one sequence at most: its size is an int32."""


def dtype_for(vocab_size: int) -> np.dtype:
    """The smallest type of the format that holds every id of a vocabulary; it has no uint32."""
    return np.dtype("u1" if vocab_size <= 2**8 else "<u2" if vocab_size <= 2**16 else "<i4")


@dataclass(frozen=True, eq=False)
class IndexedDataset:
    """An open pair of files; opening reads the header and the ends of the tables only.

    Attributes:
        tokens: every id, in order [I]. sizes: [N]. document_starts: [D + 1]. All memory-mapped.
    """

    prefix: Path
    tokens: np.ndarray
    sizes: np.ndarray
    pointers: np.ndarray
    document_starts: np.ndarray

    @classmethod
    def open(cls, prefix: str | os.PathLike[str]) -> IndexedDataset:
        """Open PREFIX.bin and PREFIX.idx.

        Raises:
            RequestError: a file is missing, cut off, no index at all, or does not fit the other.
        """
        prefix = Path(prefix)
        index, data = _with_suffix(prefix, ".idx"), _with_suffix(prefix, ".bin")
        for path in (index, data):
            if not path.is_file():
                raise RequestError(f"{path}: no such file; a dataset is a .bin and an .idx.")
        dtype, sequences, entries = _read_header(index)
        sizes, pointers, starts = _map_tables(index, sequences, entries)
        data_bytes = data.stat().st_size
        if sequences:
            expected = int(pointers[-1]) + int(sizes[-1]) * dtype.itemsize
            in_order = pointers[0] == 0 and starts[0] == 0 and starts[-1] == sequences
        else:
            expected, in_order = 0, bool((starts[-1:] == 0).all())
        if not in_order:
            raise RequestError(
                f"{index}: its documents do not cover its sequences from first to last."
            )
        if data_bytes != expected:
            raise RequestError(
                f"{data} has {data_bytes} bytes and its index {index.name} describes {expected}: it"
                " was cut off, or belongs to another index; copy or prepare both again."
            )
        tokens = np.memmap(data, dtype, "r") if data_bytes else np.empty(0, dtype)
        return cls(prefix, tokens, sizes, pointers, starts)

    def __len__(self) -> int:
        """Documents."""
        return max(0, len(self.document_starts) - 1)

    def document(self, number: int) -> np.ndarray:
        """The ids of one document, as a view of the file."""
        first, last = self.document_starts[number : number + 2]
        if first == last:
            return self.tokens[:0]
        start = self.pointers[first] // self.tokens.itemsize
        stop = self.pointers[last - 1] // self.tokens.itemsize + self.sizes[last - 1]
        return self.tokens[start:stop]

    def document_offsets(self) -> np.ndarray:
        """Where each document starts in `tokens`, and where the last one ends. int64 [D + 1]

        Raises:
            RequestError: the tables, read in full here, contradict each other.
        """
        ends = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])
        if not (
            np.array_equal(self.pointers, ends[:-1] * self.tokens.itemsize)
            and (self.sizes >= 0).all()
            and (np.diff(self.document_starts) >= 0).all()
        ):
            name = _with_suffix(self.prefix, ".idx")
            raise RequestError(f"{name}: its sizes, pointers and documents contradict each other.")
        return ends[self.document_starts] if len(self.document_starts) else ends


def _read_header(index: Path) -> tuple[np.dtype, int, int]:
    """The type of the ids, the number of sequences and that of `document_starts`."""
    with index.open("rb") as file:
        header = file.read(_HEADER.size)
    if not header.startswith(_MAGIC):
        raise RequestError(f"{index}: is no Megatron index: it does not start with MMIDIDX.")
    if len(header) < _HEADER.size:
        raise RequestError(f"{index}: was cut off in its header; prepare or copy it again.")
    _, version, code, sequences, entries = _HEADER.unpack(header)
    if version != 1:
        raise RequestError(f"{index}: has version {version} of the format; only 1 can be read.")
    if code not in _DTYPES:
        raise RequestError(f"{index}: has dtype code {code}; the format has {listed(_DTYPES)}.")
    dtype = np.dtype(_DTYPES[code])
    if dtype.kind == "f":
        raise RequestError(f"{index}: holds {dtype.name} numbers, which are no token ids.")
    expected = _HEADER.size + 12 * sequences + 8 * entries
    found = index.stat().st_size
    if found not in (expected, expected + sequences):  # with the modes of a multimodal file
        raise RequestError(
            f"{index}: has {found} bytes where {sequences} sequences and {entries} document entries"
            f" take {expected}: it was cut off or is damaged; copy or prepare it again."
        )
    return dtype, sequences, entries


def _map_tables(index: Path, sequences: int, entries: int) -> tuple[np.ndarray, ...]:
    whole = np.memmap(index, np.uint8, "r")
    lengths = (4 * sequences, 8 * sequences, 8 * entries)
    tables, at = [], _HEADER.size
    for length, dtype in zip(lengths, ("<i4", "<i8", "<i8"), strict=True):
        tables.append(whole[at : at + length].view(dtype))
        at += length
    return tuple(tables)


class Writer:
    """Writes a dataset as a stream of documents; only their lengths stay in memory, 8 bytes each.

    Used in a `with` block: the two files appear, complete, when it is left without an exception.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: np.dtype) -> None:
        self._dtype = np.dtype(dtype)
        self._code = _CODES[self._dtype]
        self._prefix = Path(prefix)
        self._lengths: list[np.ndarray] = []
        # One name per process: a worker orphaned by a killed run must not write into ours.
        self._temporary = [
            self._prefix.with_name(f"{self._prefix.name}{suffix}.{os.getpid()}.tmp")
            for suffix in (".bin", ".idx")
        ]
        self._data = self._temporary[0].open("wb")

    def add(self, ids: np.ndarray | Sequence[int]) -> None:
        """Write one document."""
        self.extend(np.asarray(ids, dtype=None if len(ids) else self._dtype), [len(ids)])

    def extend(
        self, tokens: np.ndarray, lengths: np.ndarray | Sequence[int], continues: bool = False
    ) -> None:
        """Write the documents that lie one after another in `tokens` [I], given their lengths.

        With `continues`, the first of them goes on with the document written last, if there is one.

        Raises:
            RequestError: an id does not fit the type of the file. Ids are never truncated.
        """
        lengths = np.array(lengths, np.int64)
        if lengths.sum() != tokens.size:
            raise ValueError(f"lengths add up to {lengths.sum()}, not to {tokens.size} tokens")
        if tokens.dtype != self._dtype and tokens.size:
            limits = np.iinfo(self._dtype)
            for value in (int(tokens.min()), int(tokens.max())):
                if not limits.min <= value <= limits.max:
                    raise RequestError(
                        f"token id {value} does not fit {self._dtype.name}, the type of"
                        f" {self._prefix}.bin: ids from {limits.min} to {limits.max} do."
                    )
        self._data.write(np.ascontiguousarray(tokens, self._dtype).data)
        if continues and self._lengths and lengths.size:
            self._lengths[-1][-1] += lengths[0]
            lengths = lengths[1:]
        if lengths.size:
            self._lengths.append(lengths)

    def _write_index(self) -> None:
        lengths = np.concatenate([np.empty(0, np.int64), *self._lengths])
        parts = np.maximum(1, -(-lengths // MAX_SEQUENCE))  # sequences of each document
        starts = np.concatenate([[0], np.cumsum(parts)]).astype("<i8")
        sizes = np.full(starts[-1], MAX_SEQUENCE, "<i4")
        sizes[starts[1:] - 1] = lengths - (parts - 1) * MAX_SEQUENCE
        ends = np.cumsum(sizes, dtype="<i8") * self._dtype.itemsize
        pointers = np.concatenate([[0], ends[:-1]]).astype("<i8")[: sizes.size]
        with self._temporary[1].open("wb") as file:
            file.write(_HEADER.pack(_MAGIC, 1, self._code, sizes.size, starts.size))
            for table in (sizes, pointers, starts):
                file.write(table.data)
            _to_disk(file.fileno())

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        try:
            if kind is None:
                self._data.flush()
                _to_disk(self._data.fileno())
                self._write_index()
                for temporary, suffix in zip(self._temporary, (".bin", ".idx"), strict=True):
                    os.replace(temporary, _with_suffix(self._prefix, suffix))
        finally:
            self._data.close()
            for temporary in self._temporary:
                temporary.unlink(missing_ok=True)


def _to_disk(descriptor: int) -> None:
    """A rename may outlive a power cut that its contents did not, unless they were synced first."""
    os.fsync(descriptor)


def _with_suffix(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)  # a prefix may itself hold dots
