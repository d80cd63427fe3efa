"""Steps on disk: which count, whether they are undamaged, and which may be deleted. No JAX here.

```
checkpoints/
  20/                            a step: MANIFEST.json and all it names
    MANIFEST.json                size and CRC-32 of every file of the step
    meta/metadata                JSON that says in words what the step holds
    state/                       the arrays, as Orbax writes them
  40.saving[.orbax-checkpoint-tmp]   being written, or left by a process that was killed
  30.damaged/                    found damaged and set aside, until step 30 is saved again
```

A step is written under another name, its manifest last, then renamed: the rename is the commit.
What Orbax checks by itself is less: a bit flipped in array data restores as a wrong number
(orbax-checkpoint 0.12.8), an empty directory counts as the newest step.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from spmd_train.disk import write_whole
from spmd_train.errors import listed

MANIFEST = "MANIFEST.json"
META = Path("meta") / "metadata"  # where Orbax's JsonCheckpointHandler puts the item `meta`
_SAVING, _DAMAGED, _DELETING = ".saving", ".damaged", ".deleting"
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class Keep:
    """Which steps stay: the `last` newest (None: all), and each multiple of `every` (0: none)."""

    last: int | None = None
    every: int = 0

    def __call__(self, steps: Sequence[int]) -> set[int]:
        """Those of `steps` (ascending) that stay."""
        if self.last is None:
            return set(steps)
        return {*steps[-self.last :], *(s for s in steps if self.every and s % self.every == 0)}


KEEP_ALL = Keep()
SIZES = slice(0)
"""For `damage`: no file is read, only sizes are compared."""


def step_path(directory: Path, step: int) -> Path:
    return directory / str(step)


def saving_path(directory: Path, step: int) -> Path:
    """Where a step is written before it counts."""
    return directory / f"{step}{_SAVING}"


def steps(directory: Path) -> list[int]:
    """The steps that count, oldest first: those whose writing was finished."""
    return [step for step in numbered(directory) if (directory / str(step) / MANIFEST).is_file()]


def numbered(directory: Path) -> list[int]:
    """Every directory named like a step, also an empty or unfinished one, in ascending order."""
    names = (entry.name for entry in _entries(directory) if entry.is_dir())
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def leftovers(directory: Path) -> list[Path]:
    """What killed processes left behind: it never counts, and the next run removes it."""
    return sorted(e for e in _entries(directory) if _SAVING in e.name or _DELETING in e.name)


def set_aside(directory: Path) -> list[Path]:
    """Damaged steps that `put_aside` renamed."""
    return sorted(e for e in _entries(directory) if e.name.endswith(_DAMAGED))


def commit(directory: Path, step: int) -> None:
    """Make the step written at `saving_path` count. A killed commit leaves no step, or a whole one.

    Raises:
        OSError: the manifest cannot be written, or the disk reports what it could not write before.
    """
    source, target = saving_path(directory, step), step_path(directory, step)
    files = sorted(p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file())
    with ThreadPoolExecutor() as pool:  # CRC-32 and reading release the interpreter's lock
        entries = dict(zip(files, pool.map(lambda f: _entry(source / f), files), strict=True))
    manifest = json.dumps({"files": entries, "crc32": _checksum(entries)}, indent=0)
    write_whole(source / MANIFEST, manifest.encode())
    if target.exists():  # an unfinished or empty directory of that name
        delete(target)
    source.rename(target)
    _sync_directory(directory)
    shutil.rmtree(directory / f"{step}{_DAMAGED}", ignore_errors=True)


def damage(path: Path, contents: slice = slice(None)) -> list[str]:
    """What is wrong with the step at `path`, a sentence a file; empty if it is sound.

    Args:
        contents: of which files, in order of their names, to read the contents too, so that several
            processes can share the reading. Sizes are checked of all of them.
    """
    try:
        entries = read_manifest(path)
    except ValueError as error:
        return [str(error)]
    names = sorted(entries)
    wrong = {name: _wrong_size(path / name, entries[name][0]) for name in names}
    to_read = [name for name in names[contents] if wrong[name] is None]
    with ThreadPoolExecutor() as pool:
        found = pool.map(partial(_wrong_content, path, entries), to_read)
        wrong |= dict(zip(to_read, found, strict=True))
    return [f"{name} {what}" for name, what in wrong.items() if what is not None]


def size_bytes(path: Path) -> int:
    """Bytes of all files below `path`."""
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def read_meta(path: Path) -> dict[str, Any]:
    """The metadata of the step at `path`.

    Raises:
        ValueError: it is missing or no JSON.
    """
    try:
        meta = json.loads((path / META).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{META} is missing ({error.strerror})") from error
    if not isinstance(meta, dict):
        raise ValueError(f"{META} is no JSON object")
    return meta


def put_aside(directory: Path, step: int) -> Path:
    """Rename a damaged step, so that it no longer counts and can be saved again."""
    target = directory / f"{step}{_DAMAGED}"
    shutil.rmtree(target, ignore_errors=True)
    step_path(directory, step).rename(target)
    return target


def prune(directory: Path, keep: Keep) -> list[int]:
    """Delete the steps that `keep` does not name, after a newer one was committed; returns them.

    A step that lost a file does not count as kept. The newest is never deleted.
    """
    whole = [step for step in steps(directory) if not damage(step_path(directory, step), SIZES)]
    gone = [step for step in whole[:-1] if step not in keep(whole)]
    for step in gone:
        delete(step_path(directory, step))
    return gone


def delete(path: Path) -> None:
    """Remove a step; killed in between, it is a leftover and no step that lacks files."""
    doomed = path.with_name(path.name + _DELETING)
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def remove_leftovers(directory: Path) -> list[Path]:
    """Clean up after processes that were killed; only the run that owns the directory may."""
    found = leftovers(directory)
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    return found


def free_bytes(directory: Path) -> int:
    """Bytes that may still be written where `directory` is."""
    return shutil.disk_usage(directory).free


def _entries(directory: Path) -> Iterator[Path]:
    return directory.iterdir() if directory.is_dir() else iter(())


def _entry(path: Path) -> tuple[int, str]:
    """Size and checksum, once the file's bytes are safely on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path.stat().st_size, _crc(path)


def _crc(path: Path) -> str:
    """CRC-32 in hexadecimal; 4 GB/s, where SHA-256 makes 1.8 (measured on one core)."""
    value = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    """Size and checksum of each file of the step at `path`.

    Raises:
        ValueError: there is no manifest, or it was altered.
    """
    try:
        tree = json.loads((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        present = listed(sorted(e.name for e in _entries(path))) or "nothing"
        raise ValueError(f"{MANIFEST} is missing: the step holds {present}") from None
    except OSError as error:
        raise ValueError(f"{MANIFEST} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{MANIFEST} is no JSON: truncated or altered") from error
    if not isinstance(tree, dict) or tree.get("crc32") != _checksum(tree.get("files")):
        raise ValueError(f"{MANIFEST} was altered: it does not match its own CRC-32")
    return {name: (size, crc) for name, (size, crc) in tree["files"].items()}


def _checksum(entries: Any) -> str:
    """Of the manifest's own entries."""
    return f"{zlib.crc32(json.dumps(entries).encode()):08x}"


def _wrong_size(path: Path, size: int) -> str | None:
    try:
        found = path.stat().st_size
    except OSError as error:
        return f"is missing ({error.strerror})"
    return None if found == size else f"has {found:,} bytes instead of {size:,}"


def _wrong_content(root: Path, entries: dict[str, tuple[int, str]], name: str) -> str | None:
    try:
        found = _crc(root / name)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    wanted = entries[name][1]
    return None if found == wanted else f"was altered: CRC-32 {found} instead of {wanted}"


def _sync_directory(path: Path) -> None:
    """The rename itself survives a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
