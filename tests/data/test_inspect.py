"""What `data inspect` says of a corpus, against counts made with Python's own containers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_train.cli import main
from spmd_train.data.corpus import open_corpus
from spmd_train.data.indexed import Writer
from spmd_train.data.inspect import PREFIX_TOKENS, inspect
from spmd_train.data.prepare import Options, prepare
from spmd_train.errors import RequestError

ROW = "abcdefgh" * (PREFIX_TOKENS // 8)
TEXTS = ["one", "two", "one", f"{ROW} a", f"{ROW} b", ROW[:-1], "one", "[bold]é[/]", "x" * 1000]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Bytes, so that every number can be counted by hand."""
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in TEXTS))
    prepare(Options([str(tmp_path / "a.jsonl")], tmp_path / "out", "bytes", workers=1))
    return tmp_path / "out"


def refused(path: Path, samples: int = 3) -> str:
    with pytest.raises(RequestError) as caught:
        inspect(path, samples)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def test_counts(corpus: Path) -> None:
    report = inspect(corpus, samples=0)
    data = [text.encode() for text in TEXTS]
    counts = Counter(b"".join(data))
    assert (report.documents, report.tokens) == (len(TEXTS), counts.total())
    assert report.distinct_tokens == len(counts)
    assert {t.id: t.count for t in report.top_tokens} == dict(counts.most_common(20))
    assert report.top_tokens[0].text == "x"
    assert report.duplicates.exact == 2
    assert (report.duplicates.same_beginning, report.duplicates.long_enough) == (1, 3)
    assert not report.samples


@given(st.lists(st.integers(0, 70), min_size=1, max_size=20))
def test_lengths(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    prefix = tmp_path_factory.mktemp("lengths") / "d"
    with Writer(prefix, np.dtype("u2")) as writer:
        for size in sizes:
            writer.add([7] * size)
    lengths = inspect(prefix, samples=0).lengths
    assert (lengths.smallest, lengths.largest) == (min(sizes), max(sizes))
    assert (lengths.median, lengths.mean) == (np.median(sizes), np.mean(sizes))
    for row in lengths.histogram:
        inside = [size for size in sizes if row["from"] <= size < row["to"]]
        assert len(inside) == row["documents"] > 0
    assert sum(row["documents"] for row in lengths.histogram) == len(sizes)


def test_samples_are_spread_and_shortened(corpus: Path) -> None:
    shown = inspect(corpus, samples=3).samples
    assert [(s.document, s.head) for s in shown[:2]] == [(1, "two"), (4, f"{ROW} b")]
    assert [s.document for s in inspect(corpus, samples=99).samples] == list(range(len(TEXTS)))
    (last,) = [s for s in inspect(corpus, samples=99).samples if s.tokens == 1000]
    assert (len(last.head), len(last.tail)) == (192, 48)


def test_a_megatron_file_is_shown_as_ids(tmp_path: Path, capsys: Any) -> None:
    with Writer(tmp_path / "m", np.dtype("i4")) as writer:
        writer.add([70000, 5])
    for path in (tmp_path / "m", tmp_path / "m.idx", tmp_path / "m.bin", tmp_path):
        report = inspect(path, samples=1)
        assert (report.samples[0].head, report.top_tokens[0].text) == ("70000 5", None)
    assert main(["data", "inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "no manifest" in out
    assert "70000 5\n" in out


def test_for_a_person_and_for_a_program(corpus: Path, capsys: Any) -> None:
    assert main(["data", "inspect", str(corpus), "--samples", "9"]) == 0
    out = capsys.readouterr().out
    for words in (
        f"{corpus}: 9 documents, ",
        "from 1 file, ",
        "tokenizer bytes: 256 ids",
        "repeated documents: 2 of 9 (22.2%)",
        "repeated beginnings of 64 tokens: 1 of 3 (33.3%)",
        "document 7 of 9, 11 tokens ─",
        "\n[bold]é[/]\n",  # text is never taken for rich's markup
        "[... 760 tokens ...]",
    ):
        assert words in out
    assert main(["data", "inspect", str(corpus), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["documents"] == said["manifest"]["documents"] == 9
    assert said["duplicates"] == {"exact": 2, "same_beginning": 1, "long_enough": 3}


def test_ids_beyond_the_vocabulary(corpus: Path, tmp_path: Path) -> None:
    manifest = json.loads((corpus / "manifest.json").read_text())
    with Writer(corpus / "tokens", np.dtype("u2")) as writer:
        for text in TEXTS:
            writer.add([*text.encode()])
    manifest["dtype"] = "uint16"
    (corpus / "manifest.json").write_text(json.dumps(manifest))
    assert inspect(corpus, 0).documents == 9
    with (corpus / "tokens.bin").open("r+b") as file:
        file.seek(2 * 4)
        file.write(b"\x00\x01")
    message = refused(corpus)
    assert "tokens.bin: token 4 is 256, which is beyond the vocabulary of its tokenizer" in message
    with Writer(tmp_path / "m", np.dtype("i4")) as writer:
        writer.add([3, -1])
    assert "token 1 is -1, which is beyond the vocabulary of any tokenizer" in refused(
        tmp_path / "m"
    )


def test_a_corpus_that_is_damaged_or_no_corpus(corpus: Path, tmp_path: Path) -> None:
    assert "m.idx: no such file" in refused(tmp_path / "m")
    assert "holds no dataset" in refused(tmp_path)
    (tmp_path / "new" / "partial").mkdir(parents=True)
    assert "is not finished: repeat the `data prepare`" in refused(tmp_path / "new")
    for name in ("m", "n"):
        with Writer(tmp_path / name, np.dtype("u1")):
            pass
    assert "holds several datasets: name one of" in refused(tmp_path)
    assert "holds no document" in refused(tmp_path / "m")
    assert "--samples is -1" in refused(corpus, -1)
    with Writer(corpus / "tokens", np.dtype("u1")) as writer:
        writer.add([1])
    message = refused(corpus)
    assert "tokens.bin has 1 documents, 1 tokens of uint8, and its manifest says 9, " in message


def test_a_tokenizer_that_was_changed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three")
    prepare(Options([str(tmp_path / "a.txt")], tmp_path / "out", train_bpe=260, workers=1))
    found = open_corpus(tmp_path / "out")
    assert found.tokenizer is not None
    assert found.tokenizer.decode(found.dataset.document(0)) == "one two three<|endoftext|>"
    path = tmp_path / "out" / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    assert "tokenizer.json: has changed since the corpus was made" in refused(tmp_path / "out")
    path.unlink()
    assert "tokenizer.json: is missing" in refused(tmp_path / "out")
