"""Files that are either complete or not there, and known by their SHA-256."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file so that it is seen complete or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
