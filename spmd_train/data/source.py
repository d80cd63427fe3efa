"""Read a corpus into one array of ids, or say in one sentence why that cannot be trained on.

Everything is checked here, before anything is compiled: a run that starts has enough tokens for
its batches, and a model with a row in its embedding for each of them.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import numpy as np

from spmd_train.data.tokenizer import Tokenizer
from spmd_train.errors import RequestError

_SAMPLE_NAME = "the bundled sample text"


def window_count(token_count: int, sequence_length: int) -> int:
    """How many training windows a corpus holds: each needs one token more than it spans."""
    return max(0, (token_count - 1) // sequence_length)


def load_tokens(
    source: str | None,
    tokenizer: Tokenizer,
    *,
    model_vocab: int,
    sequence_length: int,
    global_size: int,
) -> np.ndarray:
    """The ids of the text file `source` (None: the bundled sample), one dimension."""
    _check_vocabulary(tokenizer, model_vocab)
    name = _SAMPLE_NAME if source is None else f"data.source {source!r}"
    data = _sample() if source is None else _read(Path(source), name)
    tokens = tokenizer.encode(_decoded(data, name))
    _check_length(tokens.size, name, sequence_length, global_size)
    return tokens


def _sample() -> bytes:
    return (resources.files("spmd_train.data") / "sample" / "austen_1mb.txt").read_bytes()


def _read(path: Path, name: str) -> bytes:
    if path.is_dir():
        raise RequestError(f"{name} is a directory: give the path of one UTF-8 text file.")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise RequestError(
            f"{name} does not exist (looked for {path.absolute()}): give the path of a UTF-8 text"
            " file, or leave the key out to train on the bundled sample."
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


def _check_vocabulary(tokenizer: Tokenizer, model_vocab: int) -> None:
    if tokenizer.vocab_size > model_vocab:
        raise RequestError(
            f"model.vocab={model_vocab} is smaller than the tokenizer's vocabulary of"
            f" {tokenizer.vocab_size} ids: set model.vocab={tokenizer.vocab_size} or more."
        )


def _check_length(token_count: int, name: str, sequence_length: int, global_size: int) -> None:
    windows = window_count(token_count, sequence_length)
    if windows >= global_size:
        return
    held = f"{name} has {token_count} tokens, which is {windows} windows of sequence_length"
    needed = f"{held}={sequence_length} where one step needs batch.global_size={global_size}"
    shorter = (token_count - 1) // global_size
    cures = ["give a longer text"]
    if windows:
        cures.append(f"set batch.global_size={windows} or less")
    if shorter:
        cures.append(f"set batch.sequence_length={shorter} or less")
    raise RequestError(f"{needed}: {', or '.join(cures)}.")
