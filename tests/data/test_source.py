"""What a run may be given to read, and one clear sentence for whatever is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmd_train.config import load as load_config
from spmd_train.data.indexed import Writer
from spmd_train.data.prepare import Options, prepare
from spmd_train.data.source import TokenSource, open_source
from spmd_train.data.stream import Stream, open_stream
from spmd_train.errors import RequestError


def load(source: Path | None = None, *sets: str, vocab: int = 256, length: int = 4, size: int = 2):
    """The stream of a configuration."""
    given = [] if source is None else [f"data.source={source}"]
    shape = (f"model.vocab={vocab}", f"batch.sequence_length={length}", f"batch.global_size={size}")
    return open_stream(load_config(None, [*shape, *given, *sets]))


def tokens(stream: Stream) -> bytes:
    return bytes(stream.sources[0].tokens)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("It is a truth universally acknowledged", encoding="utf-8")
    return path


def corpus(directory: Path, texts: list[str], **options: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    if "train_bpe" not in options:
        options["tokenizer"] = "bytes"
    prepare(Options([str(directory / "a.jsonl")], directory / "out", workers=1, **options))
    return directory / "out"


def megatron(prefix: Path, documents: list[list[int]], dtype: str = "<i4") -> Path:
    with Writer(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add(document)
    return prefix


# ------------------------------------------------------------------------------------ what is read


def test_the_bundled_sample_needs_no_file():
    stream = load(length=128, size=64)
    assert len(tokens(stream)) == 2**20
    assert tokens(stream)[:4] == b"EMMA"
    assert stream.epochs(10).keys() == {"the bundled sample text"}


def test_a_file_is_read_byte_for_byte(text: Path):
    assert tokens(load(text)) == text.read_bytes()


def test_a_file_with_a_tokenizer(text: Path, tmp_path: Path):
    made = corpus(tmp_path / "c", ["some words"], train_bpe=260)
    stream = load(text, f"data.tokenizer={made}", vocab=260)
    assert stream.tokenizer.decode(stream.sources[0].tokens) == text.read_text()


def test_a_prepared_corpus(tmp_path: Path):
    texts = ["one text", "another text", "a third"]
    stream = load(corpus(tmp_path / "c", texts))
    (source,) = stream.sources
    assert tokens(stream) == "".join(texts).encode()
    assert source.offsets.tolist() == [0, 8, 20, 27]
    assert stream.tokenizer.vocab_size == 256
    assert not isinstance(source.tokens, np.memmap)
    assert isinstance(source.tokens.base, np.memmap)


@pytest.mark.parametrize("name", ["m", "m.bin", "m.idx", ""])
def test_a_megatron_dataset(tmp_path: Path, name: str):
    megatron(tmp_path / "m", [[1, 2, 3, 4, 5, 6, 7, 8], [9]])
    stream = load(tmp_path / name, size=1)
    assert stream.sources[0].tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert stream.tokenizer is None


def test_a_mixture(tmp_path: Path, text: Path):
    made = corpus(tmp_path / "c", ["one text"] * 9)
    ids = megatron(tmp_path / "m", [[7] * 40])
    mixing = f"data.mixing={{{made}: 0.5, {ids}: 1, {text}: 0.5}}"
    stream = load(None, mixing, "data.packing=documents")
    assert [source.name for source in stream.sources] == [str(made), str(ids), str(text)]
    assert stream.shares == (1, 2, 1)
    assert stream.tokenizer.vocab_size == 256
    assert stream.rows(stream.sample_ids(0)).segments.shape == (2, 5)


# -------------------------------------------------------------------------------------- the content


def test_the_content_of_a_corpus_does_not_depend_on_its_place(tmp_path: Path):
    made = corpus(tmp_path / "c", ["one text", "two"])
    before = load(made).identity
    made.rename(tmp_path / "moved")
    assert load(tmp_path / "moved").identity == before
    other = corpus(tmp_path / "d", ["one text", "twO"])
    assert load(other).identity != before


@pytest.mark.parametrize("at", [0, 4096 * 500, -4])
def test_the_content_of_a_megatron_dataset(tmp_path: Path, at: int):
    """Of 4 MB every page is looked at; of larger ones the ends, and pages between them."""
    documents = [[1] * 500_000, [2] * 547_600]
    megatron(tmp_path / "m", documents)
    before = load(tmp_path / "m").identity
    data = bytearray((tmp_path / "m.bin").read_bytes())
    data[at] ^= 4
    (tmp_path / "m.bin").write_bytes(data)
    assert load(tmp_path / "m").identity != before
    megatron(tmp_path / "m", [documents[0] + documents[1]])  # the same ids, other documents
    assert load(tmp_path / "m").identity != before


# ---------------------------------------------------------------------------------- what is refused


def refused(*arguments: Any, **settings: Any) -> str:
    with pytest.raises(RequestError) as caught:
        load(*arguments, **settings)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def test_missing_file(tmp_path: Path):
    message = refused(tmp_path / "no.txt")
    assert f"data.source '{tmp_path}/no.txt' does not exist" in message
    message = refused(None, f"data.mixing={{{tmp_path}/no.txt: 1}}")
    assert f"data.mixing '{tmp_path}/no.txt' does not exist" in message
    assert f"{tmp_path}/no.idx: no such file" in refused(tmp_path / "no.bin")


def test_directory_of_something_else(tmp_path: Path):
    assert "holds no dataset: neither a manifest.json nor an .idx file" in refused(tmp_path)


def test_unreadable_file(text: Path):
    assert "cannot be read: Not a directory" in refused(text / "below")


def test_empty_file(text: Path):
    text.write_bytes(b"")
    assert "is empty" in refused(text)


def test_not_utf8_names_the_offset(text: Path):
    text.write_bytes(b"caf\xe9 au lait")
    assert "not UTF-8 text (byte 0xe9 at offset 3)" in refused(text)


def test_shorter_than_one_global_batch_names_what_works(text: Path):
    message = refused(text, length=10, size=5)  # 38 tokens: (38 - 1) // 10 = 3
    assert "38 tokens, which is 3 rows of sequence_length=10" in message
    assert "batch.global_size=3 or less" in message
    assert "sequence_length=7 or less" in message
    assert len(load(text, length=10, size=3).samples) == 3
    assert len(load(text, length=7, size=5).samples) == 5


def test_what_is_held_out_is_not_there_to_train_on(text: Path):
    message = refused(text, "data.eval_fraction=0.4", length=10, size=3)
    assert "38 tokens, 23 of them to train on, which is 2 rows" in message


def test_not_even_one_row(text: Path):
    message = refused(text, length=64, size=100)
    assert "0 rows" in message
    assert "set " not in message


def test_each_corpus_of_a_mixture_has_a_row(tmp_path: Path, text: Path):
    short = tmp_path / "short.txt"
    short.write_text("ab")
    message = refused(None, f"data.mixing={{{text}: 1, {short}: 1}}")
    assert f"{short} has 2 tokens, which is 0 rows of sequence_length=4" in message
    assert "where a mixture needs one of each" in message


def test_vocabulary_larger_than_the_model(text: Path):
    assert "set model.vocab=256 or more" in refused(text, vocab=61)


def test_ids_beyond_the_model(tmp_path: Path):
    megatron(tmp_path / "m", [[1, 2, 300, 4], [5] * 9])
    message = refused(tmp_path / "m")
    assert "m: token 2 is 300, and model.vocab=256 allows 0 to 255: set model.vocab=301" in message
    assert load(tmp_path / "m", vocab=301)
    megatron(tmp_path / "m", [[1, 2, -1, 4], [5] * 9])
    assert "token 2 is -1, and model.vocab=256 allows 0 to 255: it holds other" in refused(
        tmp_path / "m"
    )


def test_other_tokenizers(tmp_path: Path):
    a = corpus(tmp_path / "a", ["one text, and more of it"], train_bpe=258)
    b = corpus(tmp_path / "b", ["one text"] * 9)
    message = refused(None, f"data.mixing={{{a}: 1, {b}: 1}}", vocab=300)
    marks = [json.loads((d / "manifest.json").read_text())["tokenizer"]["fingerprint"][:12]
             for d in (a, b)]  # fmt: skip
    assert f"{a} and {b} were made with different tokenizers (SHA-256" in message
    assert f"{marks[0]} and {marks[1]}" in message
    message = refused(a, "data.tokenizer=bytes", vocab=300)
    assert (
        f"{a} was prepared with another tokenizer (SHA-256 {marks[0]}) than 'bytes' ({marks[1]})"
        in message
    )
    assert marks[0] in message
    assert load(a, f"data.tokenizer={a}", vocab=300)
    assert "tokenizer 'gpt2' is not known" in refused(None, "data.tokenizer=gpt2")


def test_source_and_mixing(tmp_path: Path):
    message = refused(tmp_path / "a", f"data.mixing={{{tmp_path}/b: 1}}")
    assert f"data.source={tmp_path}/a and data.mixing are both given; leave one out" in message


def test_the_dataclass_needs_no_tokenizer():
    assert TokenSource("x", np.arange(3), np.array([0, 3]), "content").loss_mask is None
    assert open_source(None, "bytes", "data.source").tokenizer.vocab_size == 256
