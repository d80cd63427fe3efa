"""Open what is trained on: a text file, a prepared corpus, or a dataset of Megatron-LM.

Everything is checked here and in `stream`, before anything is compiled: a run that starts has
enough tokens for its batches, and a model with a row in its embedding for each of them.

Letters: D documents, I tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from spmd_train.data.corpus import Corpus, open_corpus
from spmd_train.data.tokenizer import Tokenizer, tokenizer
from spmd_train.disk import sha256
from spmd_train.errors import RequestError

_SAMPLE_NAME = "the bundled sample text"
_PAGES, _PAGE_BYTES = 1024, 4096
_CHUNK = 2**24


@dataclass(frozen=True, eq=False)
class TokenSource:
    """One corpus, as it is trained on.

    Attributes:
        name: in messages. tokens: every id [I]. offsets: where each document starts in them and the
            last one ends, int64 [D + 1].
        content: a hash of all that is read. tokenizer: of the ids, None where nobody says.
        loss_mask: uint8 [I], 1 for what may be a target; None for all of it.
        is_checked: whether every id is known to be of the tokenizer's vocabulary.
    """

    name: str
    tokens: np.ndarray
    offsets: np.ndarray
    content: str
    tokenizer: Tokenizer | None = None
    loss_mask: np.ndarray | None = None
    is_checked: bool = True


def open_source(path: str | None, tokenizer_name: str | None, key: str) -> TokenSource:
    """Open the corpus that the configuration's `key` names; None: the bundled sample.

    Args:
        tokenizer_name: `data.tokenizer`; None: a prepared corpus's own, `bytes` for a text file.

    Raises:
        RequestError: it cannot be read, or was made with another tokenizer.
    """
    if path is not None and holds_ids(Path(path)):
        return _of_corpus(path, tokenizer_name)
    name = _SAMPLE_NAME if path is None else f"{key} {path!r}"
    text = tokenizer(tokenizer_name or "bytes")
    tokens = text.encode(_decoded(_sample() if path is None else _read(Path(path), name), name))
    content = hashlib.sha256(f"{tokens.dtype} ".encode() + tokens.tobytes()).hexdigest()
    return TokenSource(path or _SAMPLE_NAME, tokens, np.array([0, tokens.size]), content, text)


def check_vocabulary(source: TokenSource, model_vocab: int) -> None:
    """Refuse ids that the model has no embedding for.

    The tokenizer bounds the ids of a text or a prepared corpus; those of others are all looked at,
    unless their type says enough.
    """
    known = source.tokenizer
    if known and known.vocab_size > model_vocab:
        raise RequestError(
            f"model.vocab={model_vocab} is smaller than the tokenizer's vocabulary of"
            f" {known.vocab_size} ids: set model.vocab={known.vocab_size} or more."
        )
    limits = np.iinfo(source.tokens.dtype)
    if source.is_checked or (limits.min == 0 and limits.max < model_vocab):
        return
    for start in range(0, source.tokens.size, _CHUNK):
        chunk = source.tokens[start : start + _CHUNK]
        for at in (int(chunk.argmin()), int(chunk.argmax())):
            if not 0 <= chunk[at] < model_vocab:
                cure = "it holds other data than token ids"
                if chunk[at] > 0:
                    cure = f"set model.vocab={chunk.max() + 1} or more"
                raise RequestError(
                    f"{source.name}: token {start + at} is {chunk[at]}, and model.vocab="
                    f"{model_vocab} allows 0 to {model_vocab - 1}: {cure}."
                )


def holds_ids(path: Path) -> bool:
    return path.is_dir() or path.suffix in (".bin", ".idx") or Path(f"{path}.idx").is_file()


def _of_corpus(path: str, tokenizer_name: str | None) -> TokenSource:
    corpus = open_corpus(Path(path))
    text = corpus.tokenizer
    if tokenizer_name is not None:
        asked = tokenizer(tokenizer_name)
        if text and asked.fingerprint != text.fingerprint:
            raise RequestError(
                f"{path} was prepared with another tokenizer (SHA-256 {text.fingerprint[:12]})"
                f" than {tokenizer_name!r} ({asked.fingerprint[:12]}): prepare it with that one,"
                " or leave data.tokenizer out if you set it."
            )
        text = asked
    return TokenSource(
        path,
        np.asarray(corpus.dataset.tokens),  # a plain view: a memmap's own indexing is slower
        corpus.dataset.document_offsets(),
        _content(corpus),
        text,
        None if corpus.loss_mask is None else np.asarray(corpus.loss_mask.tokens),
        is_checked=corpus.manifest is not None,
    )


def _content(corpus: Corpus) -> str:
    """A hash of a corpus: of its manifest's hashes, or without a manifest of its index in full and
    of 1024 pages of its ids, evenly spread. Reading a terabyte at each start would take an hour."""
    if corpus.manifest is not None:
        return hashlib.sha256(repr(sorted(corpus.manifest.files.items())).encode()).hexdigest()
    data, index = (
        corpus.dataset.prefix.with_name(f"{corpus.dataset.prefix.name}{suffix}")
        for suffix in (".bin", ".idx")
    )
    size = data.stat().st_size
    hasher = hashlib.sha256(f"{sha256(index)} {size} ".encode())
    with data.open("rb") as file:
        for page in range(_PAGES):
            file.seek(max(0, size - _PAGE_BYTES) * page // (_PAGES - 1))
            hasher.update(file.read(_PAGE_BYTES))
    return hasher.hexdigest()


def _sample() -> bytes:
    return (resources.files("spmd_train.data") / "sample" / "austen_1mb.txt").read_bytes()


def _read(path: Path, name: str) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise RequestError(
            f"{name} does not exist (looked for {path.absolute()}): give the path of a text file,"
            " of a directory of `data prepare` or of a Megatron .bin, or leave the key out for"
            " the bundled sample."
        ) from None
    except OSError as error:
        raise RequestError(f"{name} cannot be read: {error.strerror or error}.") from error
    if not data:
        raise RequestError(f"{name} is empty: give a file with text in it.")
    return data


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name} is not UTF-8 text (byte 0x{data[error.start]:02x} at offset {error.start}):"
            " convert it to UTF-8 first, for instance with iconv."
        ) from None
