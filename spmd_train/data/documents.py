"""The texts of the input files, in parts that can be read independently of each other.

    .txt                         one file is one document
    .jsonl .jsonl.gz .jsonl.zst  one line is one document: an object with the text in a field
    .parquet                     one row is one document: a column is the text

A slice is such a part: bytes of a `.txt` or `.jsonl`, row groups of a `.parquet`, a compressed file
as a whole (its middle cannot be reached without its beginning). How files are sliced depends on the
files and the tokenizer only, never on who reads the slices. Memory is bounded by the longest
document, or for texts that may be cut by a slice of 1 MiB.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from spmd_train.data import parquet
from spmd_train.data.chat import read_template
from spmd_train.data.records import Form, Format, Piece, format_of, not_utf8
from spmd_train.errors import RequestError, listed

KINDS = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")

LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")

TEXT_SLICE_BYTES = 2**20
"""A text is encoded in pieces of about this size: an encoding takes some 150 times its memory."""

_CONTEXT_BYTES = 512
_CUTS_TRIED = 256


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be used: its file, the place in it ("line 3" or ""), and why not."""

    file: str
    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}{', ' if self.place else ''}{self.place}: {self.reason}"


@dataclass(frozen=True)
class Source:
    """One input file, read once from end to end."""

    path: str
    bytes: int
    sha256: str
    problem: BadRecord | None

    @property
    def kind(self) -> str:
        """One of KINDS."""
        return kind_of(self.path) or ""


@dataclass(frozen=True)
class Slice:
    """A part of one input: bytes [start, stop), or row groups of a `.parquet`.

    Attributes:
        bytes: its share of the file's size. opens, closes: whether its first document begins in it,
            and its last one ends.
    """

    path: str
    start: int
    stop: int
    bytes: int
    opens: bool = True
    closes: bool = True


CanCut = Callable[[str, str], bool]
"""Whether a text may be cut between two neighbouring pieces of it."""


def kind_of(path: str) -> str | None:
    """Which of KINDS a file is, by its name."""
    return next((kind for kind in KINDS if path.lower().endswith(kind)), None)


def find(patterns: Sequence[str]) -> list[str]:
    """The files that paths, directories and globs name, each once; those of one are sorted.

    Raises:
        RequestError: one of them names no file that can be read.
    """
    found: dict[str, str] = {}
    for pattern in patterns:
        if os.path.isdir(pattern):
            paths = glob.glob(os.path.join(glob.escape(pattern), "**", "*"), recursive=True)
        elif os.path.exists(pattern):
            paths = [pattern]
            if kind_of(pattern) is None:
                raise RequestError(f"{pattern}: its kind is not known; known are {listed(KINDS)}.")
        else:
            paths = glob.glob(pattern, recursive=True)
        usable = sorted(path for path in paths if kind_of(path) and os.path.isfile(path))
        if not usable:
            what = "holds no file of a known kind" if paths else "no such file"
            raise RequestError(
                f"{pattern}: {what}; give files, directories or globs of {listed(KINDS)}."
            )
        for path in usable:
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def examine(path: str, field: str) -> Source:
    """Read a file once: its size, its hash, and whether it is unusable as a whole."""
    hasher, size = hashlib.sha256(), 0
    check = _Utf8() if kind_of(path) == ".txt" else None
    try:
        with open(path, "rb") as file:
            while block := file.read(2**20):
                hasher.update(block)
                size += len(block)
                if check:
                    check.feed(block)
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror}).") from error
    reason = check.end() if check else None
    if size == 0:
        reason = ("", "is empty")
    elif kind_of(path) == ".parquet" and (why := parquet.problem(path, field)):
        reason = ("", why)
    problem = BadRecord(path, *reason) if reason else None
    return Source(path, size, hasher.hexdigest(), problem)


def form_for(
    sources: Sequence[Source], asked: Format | Literal["auto"], field: str, template: Path | None
) -> Form:
    """How records are documents; "auto" is what the first line of the first file with lines is.

    Raises:
        RequestError: a file cannot have such records, or the template is none, or for no such.
    """
    found: Format = "text" if asked == "auto" else asked
    lines = [source.path for source in sources if source.kind in LINES]
    if asked == "auto" and lines and field == "text":
        found = format_of(_first_line(lines[0]))
    others = [source.path for source in sources if source.kind not in LINES]
    if found != "text" and others:
        raise RequestError(
            f"{others[0]}: records of the format {found} are read from {listed(LINES)} only;"
            " prepare other files on their own."
        )
    if template is None:
        return Form(found, field)
    if found != "messages":
        raise RequestError(
            f"--chat-template is for records of the format messages, and these are {found}."
        )
    return Form(found, field, read_template(template))


def slices(source: Source, slice_bytes: int, can_cut: CanCut | None) -> Iterator[Slice]:
    """The slices of a file, of about `slice_bytes`; a text is one slice without `can_cut`."""
    if source.kind == ".txt":
        yield from _text_slices(source, min(slice_bytes, TEXT_SLICE_BYTES), can_cut)
    elif source.kind == ".jsonl":
        yield from _line_slices(source, slice_bytes)
    elif source.kind == ".parquet":
        for start, stop, share in parquet.group_ranges(source.path, source.bytes, slice_bytes):
            yield Slice(source.path, start, stop, share)
    else:
        yield Slice(source.path, 0, source.bytes, source.bytes)


def read(part: Slice, form: Form) -> Iterator[Piece | BadRecord]:
    """The documents of a slice and, in their places, the records that are none."""
    kind = kind_of(part.path)
    if kind == ".txt":
        with open(part.path, "rb") as file:
            file.seek(part.start)
            text = file.read(part.stop - part.start).decode("utf-8")
        yield Piece(text, part.opens, part.closes)
    elif kind == ".jsonl":
        with open(part.path, "rb") as file:
            file.seek(part.start)
            yield from _documents(part.path, _lines_until(file, part.stop), form, part.start)
    elif kind == ".parquet":
        for row, text, why in parquet.rows(part.path, part.start, part.stop, form.field):
            yield Piece(text) if why is None else BadRecord(part.path, row, why)
    else:
        yield from _compressed(part.path, form)


# --------------------------------------------------------------------------------------------- .txt


class _Utf8:
    """Finds the first line of a stream of bytes that is not UTF-8."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._line = 1
        self._problem: tuple[str, str] | None = None

    def feed(self, block: bytes, final: bool = False) -> None:
        if self._problem:
            return
        try:
            self._line += self._decoder.decode(block, final).count("\n")
        except UnicodeDecodeError as error:
            line = self._line + error.object[: error.start].count(b"\n")
            self._problem = (f"line {line}", not_utf8(error))

    def end(self) -> tuple[str, str] | None:
        """The place and the reason, or None."""
        self.feed(b"", final=True)
        return self._problem


def _text_slices(source: Source, slice_bytes: int, can_cut: CanCut | None) -> Iterator[Slice]:
    with open(source.path, "rb") as file:
        start = 0
        while start < source.bytes:
            stop = source.bytes
            if can_cut:
                stop = _next_cut(file, start, slice_bytes, source.bytes, can_cut)
            ends = (start == 0, stop == source.bytes)
            yield Slice(source.path, start, stop, stop - start, *ends)
            start = stop


def _next_cut(
    file: BinaryIO, start: int, slice_bytes: int, file_bytes: int, can_cut: CanCut
) -> int:
    """The first line start at which the text may be cut, at least `slice_bytes` after `start`.

    After some hundred lines in vain the search goes on a slice later, or it would cost more than
    the encoding.
    """
    for target in range(start + slice_bytes, file_bytes, slice_bytes):
        before = min(_CONTEXT_BYTES, target)
        file.seek(target - before)
        window = file.read(before + 2**16)
        cut = before
        for _ in range(_CUTS_TRIED):
            cut = window.find(b"\n", cut) + 1
            if cut == 0:
                break
            left = window[max(0, cut - _CONTEXT_BYTES) : cut].decode("utf-8", "ignore")
            right = window[cut : cut + _CONTEXT_BYTES].decode("utf-8", "ignore")
            if right and can_cut(left, right):
                return target - before + cut
    return file_bytes


# ------------------------------------------------------------------------------------------- .jsonl


def _line_slices(source: Source, slice_bytes: int) -> Iterator[Slice]:
    with open(source.path, "rb") as file:
        start = 0
        while start < source.bytes:
            file.seek(min(start + slice_bytes, source.bytes))
            file.readline()
            yield Slice(source.path, start, file.tell(), file.tell() - start)
            start = file.tell()


def _lines_until(file: BinaryIO, stop: int) -> Iterator[bytes]:
    while file.tell() < stop:
        yield file.readline()


def _compressed(path: str, form: Form) -> Iterator[Piece | BadRecord]:
    count = 0

    def counted(lines: Iterable[bytes]) -> Iterator[bytes]:
        nonlocal count
        for line in lines:
            count += 1
            yield line

    try:
        yield from _documents(path, counted(_unpacked(path)), form)
        if count == 0:
            yield BadRecord(path, "", "is empty")
    except OSError as error:
        reason = f"cannot be unpacked from about here on ({error}); pack or copy the file again"
        yield BadRecord(path, f"line {count + 1}", reason)


def _unpacked(path: str) -> BinaryIO:
    import pyarrow

    codec = "gzip" if path.lower().endswith(".gz") else "zstd"
    stream = pyarrow.CompressedInputStream(pyarrow.OSFile(path), codec)
    # A small buffer: what is in it when the stream turns out to be damaged is lost.
    return io.BufferedReader(stream, 2**14)


def _first_line(path: str) -> bytes:
    """The first line of a `.jsonl`, compressed or not, that is not blank; none of a damaged one."""
    try:
        with open(path, "rb") if kind_of(path) == ".jsonl" else _unpacked(path) as lines:
            return next((line for line in lines if not line.isspace()), b"")
    except OSError:
        return b""


def _documents(
    path: str, lines: Iterable[bytes], form: Form, start: int = 0
) -> Iterator[Piece | BadRecord]:
    """The documents in `lines`, the first of which starts at byte `start` of the file."""
    before: int | None = None
    for number, line in enumerate(lines, start=1):
        if line.isspace():
            continue
        try:
            yield form.piece(line)
        except ValueError as error:
            # Counting lines reads all that comes before, which only a bad line is worth.
            before = _lines_before(path, start) if before is None else before
            yield BadRecord(path, f"line {before + number}", str(error))


def _lines_before(path: str, offset: int) -> int:
    """How many lines end before `offset`."""
    count = 0
    with open(path, "rb") as file:
        while offset and (block := file.read(min(offset, 2**20))):
            count += block.count(b"\n")
            offset -= len(block)
    return count
