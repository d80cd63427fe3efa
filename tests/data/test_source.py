"""Reading a corpus: the file's own bytes, and one clear sentence for whatever is wrong with it."""

import pytest

from spmd_train.data.source import load_tokens
from spmd_train.data.tokenizer import ByteTokenizer
from spmd_train.errors import RequestError


def load(source, *, model_vocab=256, sequence_length=4, global_size=2):
    return load_tokens(
        None if source is None else str(source),
        ByteTokenizer(),
        model_vocab=model_vocab,
        sequence_length=sequence_length,
        global_size=global_size,
    )


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("It is a truth universally acknowledged", encoding="utf-8")
    return path


def test_the_bundled_sample_needs_no_file():
    tokens = load(None, sequence_length=128, global_size=64)
    assert tokens.ndim == 1
    assert tokens.size == 2**20
    assert bytes(tokens[:4]) == b"EMMA"


def test_a_file_is_read_byte_for_byte(text):
    assert bytes(load(text)) == text.read_bytes()


def refused(source, **settings):
    with pytest.raises(RequestError) as caught:
        load(source, **settings)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def test_missing_file(tmp_path):
    message = refused(tmp_path / "no.txt")
    assert f"{tmp_path}/no.txt" in message
    assert "does not exist" in message


def test_directory(tmp_path):
    assert "is a directory: give the path of one" in refused(tmp_path)


def test_unreadable_file(text):
    assert "cannot be read: Not a directory" in refused(text / "below")


def test_empty_file(text):
    text.write_bytes(b"")
    assert "is empty" in refused(text)


def test_not_utf8_names_the_offset(text):
    text.write_bytes(b"caf\xe9 au lait")
    assert "not UTF-8 text (byte 0xe9 at offset 3)" in refused(text)


def test_shorter_than_one_global_batch_names_what_works(text):
    message = refused(text, sequence_length=10, global_size=5)  # 38 tokens: (38 - 1) // 10 = 3
    assert "38 tokens, which is 3 windows of sequence_length=10" in message
    assert "batch.global_size=3 or less" in message
    assert "sequence_length=7 or less" in message
    assert load(text, sequence_length=10, global_size=3).size == 38
    assert load(text, sequence_length=7, global_size=5).size == 38


def test_not_even_one_window(text):
    message = refused(text, sequence_length=64, global_size=100)
    assert "0 windows" in message
    assert "set " not in message


def test_vocabulary_larger_than_the_model(text):
    assert "set model.vocab=256 or more" in refused(text, model_vocab=61)
