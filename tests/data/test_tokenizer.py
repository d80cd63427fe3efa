"""Text to ids: compared with Python's UTF-8, and with the libraries called directly."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from spmd_train.data.tokenizer import (
    ByteTokenizer,
    JsonTokenizer,
    SentencePieceTokenizer,
    load_saved,
    tokenizer,
    train_bpe,
)
from spmd_train.errors import RequestError

TEXT = "It is a truth universally acknowledged,\n\nthat a single man\nin possession. " * 20

GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
LLAMA3 = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(
            Regex(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            "isolated",
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
NEWLINE_IN_WORDS = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(r"\s?\p{L}+|\s?\p{N}|[^\p{L}\p{N}]"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)


def bpe(pre_tokenizer: Any = GPT2, special: tuple[str, ...] = ("<|endoftext|>",)) -> Tokenizer:
    """A byte-level BPE made by the library itself."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizer
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([TEXT], trainer)
    return library


@pytest.fixture(scope="module")
def library() -> Tokenizer:
    return bpe()


@pytest.fixture(scope="module")
def ours(library: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> JsonTokenizer:
    return saved(library, tmp_path_factory.mktemp("tokenizer"))


def saved(library: Tokenizer, directory: Path, config: Any = None) -> JsonTokenizer:
    library.save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return JsonTokenizer(directory / "tokenizer.json")


# -------------------------------------------------------------------------------------------- bytes


@given(st.text())
def test_every_text_round_trips(text):
    ids = ByteTokenizer().encode(text)
    assert ids.dtype == np.uint8
    assert ids.tolist() == list(text.encode("utf-8"))
    assert ByteTokenizer().decode(ids) == text


def test_bytes_are_taken_as_they_are_and_broken_ones_are_shown():
    assert ByteTokenizer().encode(b"\xff\x00").tolist() == [255, 0]
    assert ByteTokenizer().decode([65, 0xFF, 66]) == "A�B"


def test_chosen_by_name():
    assert isinstance(tokenizer("bytes"), ByteTokenizer)
    with pytest.raises(RequestError, match=r"'bpe' is not known: use bytes, or the path of"):
        tokenizer("bpe")


# ----------------------------------------------------------------------------------- tokenizer.json


@given(st.lists(st.text() | st.sampled_from(["truth\n\na man", " it is", "é<|endoftext|>"])))
def test_ids_are_those_of_the_library(
    ours: JsonTokenizer, library: Tokenizer, texts: list[str]
) -> None:
    expected = [library.encode(text, add_special_tokens=False).ids for text in texts]
    assert [ids.tolist() for ids in ours.encode_batch(texts)] == expected
    assert [ours.encode(text).tolist() for text in texts] == expected
    assert [ours.decode(ids) for ids in expected] == texts


def test_what_it_says_of_itself(ours: JsonTokenizer, library: Tokenizer, tmp_path: Path) -> None:
    assert ours.vocab_size == library.get_vocab_size()
    assert (ours.bos_id, ours.eos_id) == (None, library.token_to_id("<|endoftext|>"))
    name = ours.save(tmp_path)
    assert ours.fingerprint == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    again = load_saved(tmp_path, name)
    assert (again.fingerprint, again.eos_id) == (ours.fingerprint, ours.eos_id)
    assert isinstance(tokenizer(str(tmp_path)), JsonTokenizer)


def test_what_a_file_asks_for_prompts_does_not_change_a_corpus(tmp_path: Path) -> None:
    library = bpe(special=("<s>", "</s>"))
    whole = library.encode(TEXT).ids
    library.enable_truncation(8)
    library.enable_padding(length=16)
    library.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    assert len(library.encode(TEXT).ids) == 16
    ours = saved(library, tmp_path)
    assert ours.encode(TEXT).tolist() == whole
    assert (ours.bos_id, ours.eos_id) == (0, 1)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"bos_token": "<a>", "eos_token": {"content": "<b>", "lstrip": False}}, (0, 1)),
        ({"bos_token": None, "eos_token": "<a>"}, (None, 0)),
        ({"eos_token": "<missing>"}, (None, None)),
        (None, (None, 2)),
    ],
)
def test_bos_and_eos_come_from_the_configuration_beside_it(
    tmp_path: Path, config: Any, expected: tuple[int | None, int | None]
) -> None:
    ours = saved(bpe(special=("<a>", "<b>", "</s>")), tmp_path, config)
    assert (ours.bos_id, ours.eos_id) == expected
    (tmp_path / "copy").mkdir()
    again = load_saved(tmp_path / "copy", ours.save(tmp_path / "copy"))
    assert (again.bos_id, again.eos_id) == expected


def test_ids_with_gaps_count_up_to_the_largest(tmp_path: Path) -> None:
    library = Tokenizer(models.WordLevel({"a": 0, "b": 9, "[UNK]": 4}, "[UNK]"))
    assert saved(library, tmp_path).vocab_size == 10


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{", "is no tokenizer.json that can be read"),
        ("tokenizer.json", "[]", "is no tokenizer.json that can be read"),
        ("x.txt", "", "is neither a .json nor a .model file"),
        ("x.model", "nonsense", "is no SentencePiece model"),
    ],
)
def test_files_that_are_no_tokenizers(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(RequestError, match=words):
        tokenizer(str(tmp_path / name))


def test_directories_and_configurations_that_are_none(ours: JsonTokenizer, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"holds neither tokenizer\.json nor tokenizer\.model"):
        tokenizer(str(tmp_path))
    ours.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(RequestError, match=r"tokenizer_config\.json: is not JSON"):
        tokenizer(str(tmp_path))


# ----------------------------------------------------------------------------------------- training


def test_training_is_the_librarys_and_repeats_itself(library: Tokenizer, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        trained = train_bpe([TEXT], 320, tmp_path / name)
        assert trained.encode(TEXT).tolist() == library.encode(TEXT).ids
    a, b = (tmp_path / name / "tokenizer.json" for name in ("a", "b"))
    assert a.read_bytes() == b.read_bytes()


def test_a_vocabulary_holds_all_bytes(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--train-bpe is 256; it must be at least 257"):
        train_bpe([TEXT], 256, tmp_path)
    assert train_bpe([TEXT], 257, tmp_path).vocab_size == 257


# ------------------------------------------------------------------------------------ SentencePiece


@pytest.fixture(scope="module")
def piece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = pytest.importorskip("sentencepiece")
    directory = tmp_path_factory.mktemp("pieces")
    (directory / "text.txt").write_text(TEXT)
    library.SentencePieceTrainer.train(
        input=str(directory / "text.txt"),
        model_prefix=str(directory / "small"),
        vocab_size=60,
        pad_id=-1,
        bos_id=-1,
        eos_id=2,
        unk_id=0,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return directory / "small.model"


def test_sentencepiece_ids_are_those_of_the_library(piece_model: Path, tmp_path: Path) -> None:
    import sentencepiece

    library = sentencepiece.SentencePieceProcessor(model_file=str(piece_model))
    ours = tokenizer(str(piece_model))
    assert isinstance(ours, SentencePieceTokenizer)
    texts = ["It is a truth", "", "a single man\nin possession"]
    assert [ids.tolist() for ids in ours.encode_batch(texts)] == library.encode(texts)
    assert ours.decode(ours.encode(texts[0])) == texts[0]
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (None, 2, library.vocab_size())
    assert ours.fingerprint == hashlib.sha256(piece_model.read_bytes()).hexdigest()
    assert load_saved(tmp_path, ours.save(tmp_path)).fingerprint == ours.fingerprint
    assert not ours.can_cut("It is\n", "a truth")


def test_without_sentencepiece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.model").touch()
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(RequestError, match=r"pip install 'spmd-train\[sentencepiece\]'"):
        tokenizer(str(tmp_path / "x.model"))


# --------------------------------------------------------------------------------------------- cuts

LINES = st.lists(
    st.sampled_from(
        ["a truth", "man", " ", "\n", "\n\n", "\t", "\r\n", ".", "'s", "12345", "é", "!"]
    )
).map("".join)


@pytest.mark.parametrize("splitter", [GPT2, LLAMA3, NEWLINE_IN_WORDS])
def test_a_cut_that_is_allowed_changes_no_id(
    tmp_path_factory: pytest.TempPathFactory, splitter: Any
) -> None:
    """Only the characters around a cut are looked at; the whole texts must agree."""
    library = bpe(splitter)
    ours = saved(library, tmp_path_factory.mktemp("cuts"))
    assert ours.is_local
    seen = set()

    @given(LINES, LINES)
    def check(left: str, right: str) -> None:
        left += "\n"
        allowed = bool(right) and ours.can_cut(left[-16:], right[:16])
        seen.add(allowed)
        if allowed:
            halves = library.encode(left).ids + library.encode(right).ids
            assert library.encode(left + right).ids == halves

    check()
    assert True in seen


def test_cuts_between_words_only(tmp_path: Path) -> None:
    gpt2 = saved(bpe(GPT2), tmp_path)
    assert gpt2.can_cut("a truth\n", "man")
    assert gpt2.can_cut("a truth\n", "\nman")
    assert not gpt2.can_cut("a truth\n\n", "man")  # of a run of blanks, the last is left over
    llama3 = saved(bpe(LLAMA3), tmp_path)
    assert llama3.can_cut("truth ---\n", "man")
    assert not llama3.can_cut("---\n", "man")  # the word may be longer
    assert not saved(bpe(NEWLINE_IN_WORDS), tmp_path).can_cut("a truth\n", "a single")


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Prepend", "prepend": "_"}},
    ],
)
def test_what_may_look_far_is_never_cut(tmp_path: Path, change: dict[str, Any]) -> None:
    spec = json.loads(bpe().to_str()) | change
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    ours = JsonTokenizer(tmp_path / "tokenizer.json")
    assert not ours.is_local
    assert not ours.can_cut("a\n", "b")
