"""Texts from Parquet files, by row groups. PyArrow is imported when there is such a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spmd_train.errors import listed

_ROWS_AT_A_TIME = 1024


def problem(path: str, field: str) -> str | None:
    """Why a file holds no texts under `field`, or None."""
    import pyarrow

    try:
        with _opened(path) as file:
            kind: Any = file.schema_arrow
            seen: list[str] = []
            for key in field.split("."):
                names = [kind.field(i).name for i in range(_children(kind))]
                if key not in names:
                    where = f" in {'.'.join(seen)!r}" if seen else ""
                    return (
                        f"has no column {key!r}{where} (it has {listed(names) or 'none'});"
                        " name it with --text-field"
                    )
                kind, seen = kind.field(key).type, [*seen, key]
            if file.metadata.num_rows == 0:
                return "has no rows"
    except (OSError, pyarrow.ArrowException) as error:
        return f"is no Parquet file that can be read ({_one_line(error)})"
    types = pyarrow.types
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        return f"column {field!r} is {kind}, not string"
    return None


def group_ranges(path: str, file_bytes: int, slice_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Row groups, about `slice_bytes` at a time: first, last + 1, share of the file's bytes."""
    with _opened(path) as file:
        sizes = [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]
    whole, start, done, held = max(1, sum(sizes)), 0, 0, 0
    for stop, size in enumerate(sizes, start=1):
        held += size
        share = file_bytes * (done + held) // whole - file_bytes * done // whole
        if share >= slice_bytes or stop == len(sizes):
            yield start, stop, share
            start, done, held = stop, done + held, 0


def rows(path: str, start: int, stop: int, field: str) -> Iterator[tuple[str, str, str | None]]:
    """Place, text, and why it is none (or None), of each row in the row groups [start, stop)."""
    import pyarrow

    with _opened(path) as file:
        row = sum(file.metadata.row_group(i).num_rows for i in range(start))
        try:
            groups = list(range(start, stop))
            for batch in file.iter_batches(_ROWS_AT_A_TIME, groups, columns=[field]):
                column = batch.column(0)
                for key in field.split(".")[1:]:
                    # Not `flatten`: a row whose parent is null has no text either.
                    column = pyarrow.compute.struct_field(column, key)
                for text, why in _texts(column, field):
                    yield f"row {row}", text, why
                    row += 1
        except (OSError, pyarrow.ArrowException) as error:
            why = f"cannot be read from here on ({_one_line(error)}); write or copy the file again"
            yield f"row {row}", "", why


def _texts(column: Any, field: str) -> Iterator[tuple[str, str | None]]:
    for value in column:
        try:
            text = value.as_py()
        except UnicodeDecodeError as error:
            yield "", f"field {field!r} is not UTF-8 text (byte 0x{error.object[error.start]:02x})"
            continue
        yield (text, None) if text is not None else ("", f"field {field!r} is null, not a string")


def _opened(path: str) -> Any:
    import pyarrow.compute
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path)


def _children(kind: Any) -> int:
    """Fields of a schema or a type; a string has none."""
    return len(kind.names) if hasattr(kind, "names") else kind.num_fields


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
