"""Megatron's indexed dataset: what we write, read by a reader of the test's own; what others write.

The layout both sides follow is that of `_IndexWriter` in Megatron-LM's indexed_dataset.py, written
down again here with `struct` alone.
"""

from __future__ import annotations

import itertools
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_train.data import indexed
from spmd_train.data.indexed import IndexedDataset, Writer, dtype_for
from spmd_train.errors import RequestError

NUMPY = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}


def independent_read(prefix: Path) -> tuple[str, list[list[int]]]:
    """The type and the documents of PREFIX.bin and PREFIX.idx."""
    raw, data = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    assert raw[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, entries = struct.unpack_from("<QBQQ", raw, 9)
    assert version == 1
    sizes = struct.unpack_from(f"<{sequences}i", raw, 34)
    pointers = struct.unpack_from(f"<{sequences}q", raw, 34 + 4 * sequences)
    starts = struct.unpack_from(f"<{entries}q", raw, 34 + 12 * sequences)
    assert len(raw) == 34 + 12 * sequences + 8 * entries
    dtype = np.dtype(NUMPY[code])
    read = [
        np.frombuffer(data, dtype, size, at).tolist()
        for size, at in zip(sizes, pointers, strict=True)
    ]
    assert len(data) == sum(sizes) * dtype.itemsize
    documents = [[i for s in read[a:b] for i in s] for a, b in itertools.pairwise(starts)]
    return dtype.name, documents


def write_as_megatron(
    prefix: Path, sequences: list[list[int]], starts: list[int], code: int, modes: bytes = b""
) -> None:
    """The bytes of `_IndexWriter.write`, one pack after another."""
    dtype = np.dtype(NUMPY[code])
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(starts))
    index += b"".join(struct.pack("<i", len(s)) for s in sequences)
    at = 0
    for sequence in sequences:
        index += struct.pack("<q", at)
        at += len(sequence) * dtype.itemsize
    index += b"".join(struct.pack("<q", start) for start in starts)
    Path(f"{prefix}.idx").write_bytes(index + modes)
    Path(f"{prefix}.bin").write_bytes(b"".join(np.array(s, dtype).tobytes() for s in sequences))


def written(prefix: Path, documents: list[list[int]], dtype: str = "u2") -> Path:
    with Writer(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add(document)
    return prefix


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    return written(tmp_path / "a.b", [[1, 2, 3], [], [4, 65535]])


@st.composite
def typed_documents(draw: st.DrawFn) -> tuple[str, list[list[int]]]:
    dtype = draw(st.sampled_from(sorted(NUMPY.values())))
    limits = np.iinfo(dtype)
    ids = st.integers(limits.min, limits.max)
    return np.dtype(dtype).name, draw(st.lists(st.lists(ids, max_size=9), max_size=9))


@given(typed_documents())
def test_what_is_written_is_read_by_an_independent_reader_and_by_ours(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[str, list[list[int]]]
) -> None:
    dtype, documents = case
    prefix = written(tmp_path_factory.mktemp("indexed") / "d", documents, dtype)
    assert independent_read(prefix) == case
    ours = IndexedDataset.open(prefix)
    assert [ours.document(i).tolist() for i in range(len(ours))] == documents
    assert ours.tokens.dtype.name == dtype
    offsets = ours.document_offsets()
    assert offsets.tolist() == [sum(map(len, documents[:i])) for i in range(len(documents) + 1)]


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=5), st.booleans()), max_size=8))
def test_a_document_may_be_written_in_parts(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[list[int], bool]]
) -> None:
    prefix = tmp_path_factory.mktemp("indexed") / "d"
    expected: list[list[int]] = []
    with Writer(prefix, np.dtype("u1")) as writer:
        for ids, continues in parts:
            writer.extend(np.array(ids, np.int64), [len(ids)], continues=continues)
            if continues and expected:
                expected[-1] += ids
            else:
                expected.append(list(ids))
    assert independent_read(prefix)[1] == expected


def test_a_file_made_by_megatron(tmp_path: Path) -> None:
    """Two documents of several sequences, with the modes that multimodal files have at the end."""
    write_as_megatron(tmp_path / "m", [[7, 8], [9], [], [70000]], [0, 3, 4], 4, b"\0\1\0\1")
    ours = IndexedDataset.open(tmp_path / "m")
    assert [ours.document(i).tolist() for i in range(2)] == [[7, 8, 9], [70000]]
    assert ours.document_offsets().tolist() == [0, 3, 4]
    assert ours.tokens.tolist() == [7, 8, 9, 70000]


def test_we_write_the_bytes_that_megatron_writes(tmp_path: Path) -> None:
    write_as_megatron(tmp_path / "m", [[7, 8], [9]], [0, 1, 2], 8)
    written(tmp_path / "o", [[7, 8], [9]])
    for suffix in (".bin", ".idx"):
        theirs, ours = tmp_path / f"m{suffix}", tmp_path / f"o{suffix}"
        assert ours.read_bytes() == theirs.read_bytes()


def test_documents_beyond_the_size_of_a_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, "MAX_SEQUENCE", 3)
    documents = [[1, 2, 3, 4, 5, 6, 7], [], [8, 9, 1], [2]]
    written(tmp_path / "d", documents)
    assert independent_read(tmp_path / "d")[1] == documents
    ours = IndexedDataset.open(tmp_path / "d")
    assert ours.sizes.tolist() == [3, 3, 1, 0, 3, 1]
    assert [ours.document(i).tolist() for i in range(4)] == documents


def test_opening_reads_the_ends_only(tmp_path: Path) -> None:
    """Ten million sequences, all but the first and the last left as a hole in the file."""
    count = 10_000_000
    with (tmp_path / "d.idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, 2))
        file.seek(34 + 4 * count + 8 * (count - 1))
        file.write(struct.pack("<qqq", 2 * 10**9, 0, count))
    with (tmp_path / "d.bin").open("wb") as file:
        file.truncate(2 * 10**9)
    ours = IndexedDataset.open(tmp_path / "d")  # a scan would have met the contradiction
    with pytest.raises(RequestError, match="contradict each other"):
        ours.document_offsets()


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "int32"), (10**6, "int32")],
)
def test_the_smallest_type_that_holds_a_vocabulary(vocab_size: int, dtype: str) -> None:
    assert dtype_for(vocab_size).name == dtype
    assert np.iinfo(dtype_for(vocab_size)).max >= vocab_size - 1


@pytest.mark.parametrize(("dtype", "bad"), [("u1", 256), ("u2", 65536), ("u2", -1), ("i4", 2**31)])
def test_ids_are_never_truncated(tmp_path: Path, dtype: str, bad: int) -> None:
    with pytest.raises(RequestError, match=f"token id {bad} does not fit"):
        written(tmp_path / "d", [[1], [2, bad]], dtype)
    assert not list(tmp_path.iterdir())


def test_a_failed_writer_leaves_what_was_there(pair: Path) -> None:
    before = independent_read(pair)
    with pytest.raises(RequestError):
        written(pair, [[9], [70000]])
    assert independent_read(pair) == before
    assert sorted(p.name for p in pair.parent.iterdir()) == ["a.b.bin", "a.b.idx"]


def cut(suffix: str, length: int) -> object:
    return lambda pair: os.truncate(f"{pair}{suffix}", length)


def patch(at: int, data: bytes) -> object:
    def apply(pair: Path) -> None:
        with open(f"{pair}.idx", "r+b") as file:
            file.seek(at)
            file.write(data)

    return apply


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda pair: os.remove(f"{pair}.bin"), "a.b.bin: no such file"),
        (lambda pair: os.remove(f"{pair}.idx"), "a.b.idx: no such file"),
        (cut(".bin", 8), "a.b.bin has 8 bytes and its index a.b.idx describes 10"),
        (cut(".bin", 12), "a.b.bin has 12 bytes"),
        (cut(".idx", 20), "cut off in its header"),
        (cut(".idx", 4), "is no Megatron index"),
        (cut(".idx", 90), "has 90 bytes where 3 sequences and 4 document entries take 102"),
        (patch(0, b"PARQUET!"), "is no Megatron index"),
        (patch(9, b"\x02"), "version 2 of the format; only 1"),
        (patch(17, b"\x09"), "dtype code 9; the format has 1, 2, 3, 4, 5, 6, 7, 8"),
        (patch(17, b"\x07"), "holds float32 numbers"),
        (patch(34 + 36 + 24, b"\x02"), "do not cover its sequences"),
        (patch(34 + 36, b"\x01"), "do not cover its sequences"),
    ],
)
def test_damaged_or_foreign_files_are_refused(pair: Path, damage: object, words: str) -> None:
    damage(pair)  # type: ignore[operator]
    with pytest.raises(RequestError) as caught:
        IndexedDataset.open(pair)
    assert words in str(caught.value)
    assert str(caught.value).startswith(str(pair))
    assert "\n" not in str(caught.value)
