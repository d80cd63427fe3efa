"""Text to ids and back: bytes, a Hugging Face `tokenizer.json`, or a SentencePiece `.model`.

A tokenizer is chosen by one word, `bytes` or a path, so that a configuration or a flag can say it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from spmd_train.disk import write_whole
from spmd_train.errors import RequestError

Ids = Iterable[int] | np.ndarray


class Tokenizer(Protocol):
    """What the package asks of a tokenizer. No method adds BOS or EOS by itself."""

    @property
    def vocab_size(self) -> int:
        """Every id is smaller."""

    @property
    def bos_id(self) -> int | None:
        """The id that begins a document, if there is one."""

    @property
    def eos_id(self) -> int | None:
        """The id that ends a document, if there is one."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the file that decides the ids, in hexadecimal."""

    @property
    def is_local(self) -> bool:
        """Whether there are places at which a text may be cut."""

    def can_cut(self, left: str, right: str) -> bool:
        """Whether a text may be cut between these two pieces of it without changing an id."""

    def encode(self, text: str) -> np.ndarray:
        """The ids of one text. [I]"""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, the same as one by one. Each [I]"""

    def decode(self, ids: Ids) -> str:
        """The text of `ids`, BOS and EOS included."""

    def save(self, directory: Path) -> str:
        """Copy into `directory`; returns the name under which `load_saved` finds it there."""


def tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `--tokenizer` or the configuration key `data.tokenizer` names.

    Raises:
        RequestError: there is no such tokenizer, or its file cannot be used.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name)
    if path.is_dir():
        found = [path / f for f in ("tokenizer.json", "tokenizer.model") if (path / f).is_file()]
        if not found:
            raise RequestError(f"{path}: holds neither tokenizer.json nor tokenizer.model.")
        path = found[0]
    if not path.is_file():
        raise RequestError(
            f"tokenizer {name!r} is not known: use bytes, or the path of a tokenizer.json, of a"
            " SentencePiece .model, or of a directory with one of them."
        )
    if path.suffix == ".json":
        return JsonTokenizer(path)
    if path.suffix == ".model":
        return SentencePieceTokenizer(path)
    raise RequestError(f"tokenizer {name!r} is neither a .json nor a .model file.")


def load_saved(directory: Path, name: str) -> Tokenizer:
    """What `save(directory)` wrote and called `name`."""
    return tokenizer(name if name == "bytes" else str(directory / name))


def load_of_run(directory: Path, fingerprint: str | None) -> Tokenizer:
    """The tokenizer that a run saved in its directory.

    Args:
        fingerprint: what the run's checkpoint says of it.

    Raises:
        RequestError: the run never had one, or its file is missing or another.
    """
    if fingerprint is None:
        raise RequestError(
            f"{directory} was trained on ids of which no tokenizer is known; resume it with "
            "data.tokenizer set, and it has one."
        )
    if fingerprint == ByteTokenizer.fingerprint:
        return ByteTokenizer()
    found = tokenizer(str(directory))
    if found.fingerprint != fingerprint:
        raise RequestError(
            f"the tokenizer in {directory} (SHA-256 {found.fingerprint[:12]}) is not the one "
            f"that the run was trained with ({fingerprint[:12]}); put that one back."
        )
    return found


class ByteTokenizer:
    """One id per UTF-8 byte: no files, no unknown words, and every text round-trips."""

    vocab_size = 256
    bos_id = None
    eos_id = None
    fingerprint = hashlib.sha256(b"bytes").hexdigest()
    is_local = True

    def encode(self, text: str | bytes) -> np.ndarray:
        """The ids of `text`, as a writable uint8 array."""
        data = text.encode("utf-8") if isinstance(text, str) else text
        return np.frombuffer(bytearray(data), dtype=np.uint8)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Ids) -> str:
        """The text of `ids`; bytes that are no UTF-8 (a model may emit any) become U+FFFD."""
        return bytes(int(i) for i in ids).decode("utf-8", errors="replace")

    def can_cut(self, left: str, right: str) -> bool:
        """Anywhere."""
        return True

    def save(self, directory: Path) -> str:
        """Nothing to write."""
        return "bytes"


_END = "<|endoftext|>"

_EOS_NAMES = (_END, "</s>", "<eos>", "<|end_of_text|>", "<｜end▁of▁sentence｜>")
_BOS_NAMES = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<｜begin▁of▁sentence｜>")
"""Names in widespread tokenizers, for a file that comes without its configuration."""


class JsonTokenizer:
    """A Hugging Face `tokenizer.json`. BOS and EOS are those of `tokenizer_config.json` beside it.

    Its truncation, padding and post-processor, which belong to a model's prompts, are not applied.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Library

        self._file = path.read_bytes()
        self.fingerprint = hashlib.sha256(self._file).hexdigest()
        try:
            self._library = Library.from_buffer(self._file)
            spec = json.loads(self._file)
        except Exception as error:  # the library raises nothing more specific
            raise RequestError(
                f"{path}: is no tokenizer.json that can be read ({error})."
            ) from error
        self._library.no_truncation()
        self._library.no_padding()
        config_path = path.with_name("tokenizer_config.json")
        self._config = _read_config(config_path) if config_path.is_file() else {}
        self.bos_id = self._special_id("bos_token", _BOS_NAMES)
        self.eos_id = self._special_id("eos_token", _EOS_NAMES)
        # Not the number of entries: ids may have gaps.
        self.vocab_size = max(self._library.get_vocab(with_added_tokens=True).values()) + 1
        self.is_local = _is_local(spec)

    def _special_id(self, key: str, usual: Sequence[str]) -> int | None:
        if key in self._config:
            named = self._config[key]
            names: Sequence[Any] = [named["content"] if isinstance(named, dict) else named]
        else:
            names = usual
        ids = [self._library.token_to_id(name) for name in names if name is not None]
        return next((i for i in ids if i is not None), None)

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, as int32."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, found by several threads unless TOKENIZERS_PARALLELISM is false."""
        encoded = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, np.int32) for one in encoded]

    def decode(self, ids: Ids) -> str:
        """The text of `ids`."""
        return self._library.decode([int(i) for i in ids], skip_special_tokens=False)

    def can_cut(self, left: str, right: str) -> bool:
        """Whether the two pieces have, together, the same words and ids as apart.

        A word must begin within `left`, lest the last one be longer than what is seen of it.
        """
        if not self.is_local:
            return False
        pieces = [left + right, left, right]
        whole, a, b = self._library.encode_batch(pieces, add_special_tokens=False)
        words = [word for word in a.word_ids if word is not None]
        if len(set(words)) < 2:
            return False
        words += [words[-1] + 1 + word for word in b.word_ids if word is not None]
        return bool(whole.word_ids == words and whole.ids == a.ids + b.ids)

    def save(self, directory: Path) -> str:
        """Write `tokenizer.json` as it was read, and with it what names BOS and EOS."""
        defaults: dict[str, str | None] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        for key, token in (("bos_token", self.bos_id), ("eos_token", self.eos_id)):
            if token is not None:
                defaults[key] = self._library.id_to_token(token)
        write_whole(directory / "tokenizer.json", self._file)
        config = json.dumps(defaults | self._config, indent=2, ensure_ascii=False) + "\n"
        write_whole(directory / "tokenizer_config.json", config.encode())
        return "tokenizer.json"


class SentencePieceTokenizer:
    """A SentencePiece `.model`."""

    is_local = False  # it prefixes a space, and Unigram weighs a whole text

    def __init__(self, path: Path) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise RequestError(
                f"tokenizer {str(path)!r} needs the package sentencepiece:"
                " pip install 'spmd-train[sentencepiece]'."
            ) from None
        self._file = path.read_bytes()
        self.fingerprint = hashlib.sha256(self._file).hexdigest()
        try:
            self._library = SentencePieceProcessor(model_proto=self._file)
        except Exception as error:  # RuntimeError or an error of the bindings
            raise RequestError(f"{path}: is no SentencePiece model that can be read.") from error
        self.vocab_size: int = self._library.vocab_size()
        self.bos_id = _or_none(self._library.bos_id())
        self.eos_id = _or_none(self._library.eos_id())

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, as int32."""
        return np.array(self._library.encode(text), np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Ids) -> str:
        """The text of `ids`; BOS and EOS, which SentencePiece leaves out, are not shown."""
        return self._library.decode([int(i) for i in ids])

    def can_cut(self, left: str, right: str) -> bool:
        """Nowhere."""
        return False

    def save(self, directory: Path) -> str:
        """Write `tokenizer.model` as it was read."""
        write_whole(directory / "tokenizer.model", self._file)
        return "tokenizer.model"


def train_bpe(texts: Iterable[str], vocab_size: int, directory: Path) -> JsonTokenizer:
    """Train a byte-level BPE (GPT-2's, with `<|endoftext|>` as EOS) and save it in `directory`.

    Counts of distinct words, not texts, stay in memory. The same texts give the same file.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    smallest = 256 + 1
    if vocab_size < smallest:
        raise RequestError(
            f"--train-bpe is {vocab_size}; it must be at least {smallest}: all bytes and {_END}."
        )
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    path = directory / "tokenizer.json"
    write_whole(path, library.to_str(pretty=True).encode())
    return JsonTokenizer(path)


def _is_local(spec: dict[str, Any]) -> bool:
    """Whether each id depends on its own word only, and words on nothing far away.

    True of BPE over words found by a regular expression that does not look behind, as those of
    GPT-2, GPT-4, Llama 3 and Qwen: matching goes on from the end of a word as from a text's start.
    """
    splitter = spec.get("pre_tokenizer") or {}
    steps = splitter.get("pretokenizers", [splitter])
    splits = [step for step in steps if step.get("type") == "Split"]
    by_words = splits or any(s.get("type") == "ByteLevel" and s.get("use_regex") for s in steps)
    return bool(
        spec["model"].get("type") == "BPE"
        and (spec.get("normalizer") or {"type": "NFC"})["type"] == "NFC"
        and by_words
        and all(step.get("type") in ("Split", "ByteLevel", "Digits") for step in steps)
        and all(s["behavior"] == "Isolated" and "(?<" not in str(s["pattern"]) for s in splits)
        and not any(
            token["lstrip"] or token["rstrip"] or "\n" in token["content"]
            for token in spec.get("added_tokens", [])
        )
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RequestError(f"{path}: is not JSON ({error}).") from error
    return config if isinstance(config, dict) else {}


def _or_none(token: int) -> int | None:
    return None if token < 0 else token
