"""A prepared corpus: a directory whose `manifest.json`, written last, says all about it.

    DIR/tokens.bin tokens.idx    the ids (`indexed`)
    DIR/loss_mask.bin loss_mask.idx   for conversations: 1 for an id to learn, else 0
    DIR/chat_template.jinja      how their messages became texts
    DIR/tokenizer.json           or tokenizer.model; nothing for bytes
    DIR/manifest.json            from what, how, how much, and the hashes of the files

Nothing in a manifest depends on when, where or by how many processes it was made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from spmd_train.data.records import Format
from spmd_train.data.tokenizer import Tokenizer, load_saved
from spmd_train.disk import write_whole
from spmd_train.errors import RequestError

SKIPPED_LISTED = 1000
"""Skipped records a manifest lists; it counts all of them."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class InputFile(_Record):
    """One input, as it was read."""

    path: str
    bytes: int
    sha256: str


class Request(_Record):
    """What decides every byte of a corpus.

    Attributes:
        train_bpe: ids of the tokenizer trained on the input, if one is. tokenizer: the fingerprint
            of one that was given. chat_template: the SHA-256 of it, for the format `messages`.
    """

    inputs: list[InputFile]
    format: Format = "text"
    chat_template: str | None = None
    text_field: str
    train_bpe: int | None
    tokenizer: str | None
    add_bos: bool
    add_eos: bool


class TokenizerRecord(_Record):
    """The tokenizer, as it lies in the directory. `name`: bytes, or the name of its file."""

    name: str
    fingerprint: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None


class Skipped(_Record):
    """A record left out: `place` is its line (from 1), its row (from 0), or empty for a file."""

    file: str
    place: str
    reason: str


class Manifest(_Record):
    """The contents of `manifest.json`.

    Attributes:
        learned_tokens: those that are trained on, None for all; `loss_mask` says which.
        empty_documents: texts without a single id, left out. files: SHA-256 by name.
    """

    version: Literal[1] = 1
    request: Request
    tokenizer: TokenizerRecord
    documents: int
    tokens: int
    learned_tokens: int | None = None
    dtype: str
    empty_documents: int
    skipped: int
    skipped_records: list[Skipped]
    files: dict[str, str]

    def write(self, directory: Path) -> None:
        """Declare the corpus in `directory` complete."""
        write_whole(directory / "manifest.json", (self.model_dump_json(indent=2) + "\n").encode())


def learned_share(manifest: Manifest) -> str:
    """What part of a corpus of conversations is trained on, in words."""
    learned, what = manifest.learned_tokens or 0, "completions"
    if manifest.request.format == "messages":
        what = "what the assistant says"
    return f"{what}, {learned:,} of {manifest.tokens:,} tokens ({learned / manifest.tokens:.1%})"


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a prepared corpus, or None where there is none.

    Raises:
        RequestError: it cannot be read, or was written by another version.
    """
    path = directory / "manifest.json"
    if not path.is_file():
        return None
    return parse_record(Manifest, path)


def parse_record(kind: type[Any], path: Path) -> Any:
    """A JSON file as the record it is supposed to hold."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise RequestError(
            f"{path}: is damaged, or from another version ({where}: {first['msg']}); prepare again."
        ) from error


def load_tokenizer(directory: Path, manifest: Manifest) -> Tokenizer:
    """The tokenizer a corpus was made with.

    Raises:
        RequestError: its file is missing or has changed since.
    """
    record = manifest.tokenizer
    if record.name != "bytes" and not (directory / record.name).is_file():
        raise RequestError(f"{directory / record.name}: is missing; copy the corpus again, whole.")
    found = load_saved(directory, record.name)
    if found.fingerprint != record.fingerprint:
        raise RequestError(
            f"{directory / record.name}: has changed since the corpus was made with it (SHA-256"
            f" {found.fingerprint[:12]}, was {record.fingerprint[:12]}); put the old file back."
        )
    return found
