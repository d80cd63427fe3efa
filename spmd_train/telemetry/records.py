"""The two append-only files of a run directory: `metrics.jsonl` and `events.jsonl`.

One JSON object a line, flushed line by line, so a killed run loses at most the line being
written; that torn line is dropped when the run is resumed. JSON has no NaN: non-finite numbers
are the strings "nan", "inf" and "-inf", which `float()` reads like any number.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from spmd_train.disk import write_whole
from spmd_train.errors import RunError


class RunLog:
    """Appends to a run's files. `enabled=False` (processes other than 0) writes nothing."""

    def __init__(self, directory: str | os.PathLike[str], enabled: bool = True) -> None:
        self._enabled = enabled
        self._metrics = _Appender(Path(directory) / "metrics.jsonl")
        self._events = _Appender(Path(directory) / "events.jsonl")
        if enabled:
            self._metrics.open()
            self._events.open()

    def metrics(self, record: Mapping[str, Any]) -> None:
        """Append one step's numbers."""
        if self._enabled:
            self._metrics.append(record)

    def event(self, name: str, **fields: Any) -> None:
        """Append what just happened, with the time (ISO 8601, UTC)."""
        if self._enabled:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            self._events.append({"time": now, "event": name, **fields})

    def truncate_after(self, step: int) -> None:
        """Drop metrics past `step`: a resumed run writes those steps again, each only once."""
        if self._enabled:
            self._metrics.keep(lambda record: record.get("step", 0) <= step)

    def close(self) -> None:
        """Close both files; safe to call twice."""
        self._metrics.close()
        self._events.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a file, oldest first; a torn last line (a run alive or killed) is left out.

    A file that is not there has no records. Non-finite numbers stay the strings they are.
    """
    try:
        lines = Path(path).read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    return [_parse(line, path, number) for number, line in enumerate(lines, start=1)]


def _parse(line: bytes, path: str | os.PathLike[str], number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise RunError(
            f"{os.fspath(path)} line {number} is no JSON ({error}): the file was damaged or edited;"
            " delete that line to go on."
        ) from error
    if not isinstance(record, dict):
        raise RunError(f"{os.fspath(path)} line {number} is no JSON object: delete that line.")
    return record


class _Appender:
    """One file of JSON lines, open for appending."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def open(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _drop_torn_line(self._path)
            self._file = self._path.open("a", encoding="utf-8", buffering=1, newline="\n")
        except OSError as error:
            raise self._failure(error) from error

    def append(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            raise RunError(f"{self._path} is closed: nothing can be appended.")
        line = json.dumps(_plain(record), allow_nan=False) + "\n"
        try:
            self._file.write(line)
        except OSError as error:
            with contextlib.suppress(OSError):  # closing tries to write the same line again
                self.close()
            raise self._failure(error) from error

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Rewrite the file with only the wanted records, replacing it in one atomic step."""
        self.close()
        kept = [json.dumps(record) + "\n" for record in read_jsonl(self._path) if wanted(record)]
        try:
            write_whole(self._path, "".join(kept).encode())
        except OSError as error:
            raise self._failure(error) from error
        self.open()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _failure(self, error: OSError) -> RunError:
        reason = error.strerror or str(error)
        return RunError(f"cannot write {self._path}: {reason}; free the space or fix the path.")


def _drop_torn_line(path: Path) -> None:
    """Cut whatever follows the last newline, so the next record starts a line of its own."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            complete = view.rfind(b"\n") + 1
        file.truncate(complete)


def _plain(value: Any) -> Any:
    """The JSON form of Python, NumPy and JAX values."""
    if hasattr(value, "tolist"):  # NumPy and JAX arrays and scalars, bfloat16 among them
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
