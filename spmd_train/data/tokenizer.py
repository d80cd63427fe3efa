"""Text to ids and back. A tokenizer is chosen by name, so a run's configuration can say which."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from spmd_train.errors import RequestError, listed


class ByteTokenizer:
    """One id per UTF-8 byte: no files, no unknown words, and every text round-trips."""

    vocab_size = 256

    def encode(self, text: str | bytes) -> np.ndarray:
        """The ids of `text`, as a writable uint8 array."""
        data = text.encode("utf-8") if isinstance(text, str) else text
        return np.frombuffer(bytearray(data), dtype=np.uint8)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """The text of `ids`; bytes that are no UTF-8 (a model may emit any) become U+FFFD."""
        return bytes(int(i) for i in ids).decode("utf-8", errors="replace")


_TOKENIZERS = {"bytes": ByteTokenizer}


def tokenizer(name: str) -> ByteTokenizer:
    """The tokenizer called `name` in the configuration key `data.tokenizer`."""
    if name not in _TOKENIZERS:
        known = listed(sorted(_TOKENIZERS))
        raise RequestError(f"data.tokenizer={name!r} is not known: use one of {known}.")
    return _TOKENIZERS[name]()
