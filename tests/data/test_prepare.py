"""Preparing a corpus: bytes that no worker count, shard size or interruption changes.

What is prepared is compared with the `tokenizers` library called on each whole document, and read
with `struct` and NumPy alone. What kills a run here is `os._exit`, as a machine would.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import io
import json
import os
import struct
import subprocess
import sys
import textwrap
import time
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from spmd_train.cli import main
from spmd_train.data import documents, shards
from spmd_train.data.manifest import Manifest
from spmd_train.data.meter import Meter
from spmd_train.data.prepare import Options, prepare
from spmd_train.data.tokenizer import train_bpe
from spmd_train.differences import first_difference
from spmd_train.errors import RequestError, RunError

ROOT = Path(__file__).parent.parent.parent
NOVEL = (resources.files("spmd_train.data") / "sample" / "austen_1mb.txt").read_text("utf-8")
LONG = NOVEL[:100_000].replace("\n\n", "\n\n\n\n")  # GPT-2 makes two words of such a run
TEXTS = [f"{NOVEL[i : i + 500]} é {i}" for i in range(0, 30_000, 500)]


def read_corpus(directory: Path) -> tuple[np.ndarray, list[int]]:
    """The ids and the lengths of the documents, by the layout of the format."""
    raw = (directory / "tokens.idx").read_bytes()
    code, sequences = struct.unpack_from("<BQ", raw, 17)
    dtype = {1: "u1", 4: "i4", 8: "u2"}[code]
    sizes = np.frombuffer(raw, "<i4", sequences, 34)
    return np.fromfile(directory / "tokens.bin", dtype), sizes.tolist()


def files(directory: Path) -> dict[str, str]:
    """Every file of a directory, by its hash."""
    return {
        str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(directory.rglob("*"))
        if p.is_file()
    }


def lines(texts: list[str]) -> bytes:
    records = ({"id": i, "text": t} for i, t in enumerate(texts))
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records).encode()


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bpe")
    train_bpe([LONG], 512, directory)
    return directory / "tokenizer.json"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of every kind of input."""
    directory = tmp_path_factory.mktemp("corpus")
    (directory / "a.jsonl").write_bytes(lines(TEXTS))
    (directory / "b.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[:5])))
    (directory / "c.txt").write_text(LONG)
    (directory / "more").mkdir()
    pq.write_table(pa.table({"text": TEXTS}), directory / "more" / "d.parquet", row_group_size=7)
    (directory / "more" / "e.txt").write_text("one line")
    return directory


def prepared(inputs: Path | list[Path], out: Path, **options: Any) -> Manifest:
    paths = [inputs] if isinstance(inputs, Path) else inputs
    if "train_bpe" not in options:
        options.setdefault("tokenizer", "bytes")
    options.setdefault("workers", 1)
    return prepare(Options([str(p) for p in paths], out, **options))


def refused(*arguments: Any, **options: Any) -> str:
    with pytest.raises(RequestError) as caught:
        prepared(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


# -------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("shard_bytes", [2**12, 2**15])
def test_the_ids_are_the_librarys(
    corpus: Path, bpe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    """Texts are cut into pieces of 1 kB here, in one shard and across them; it must not show."""
    monkeypatch.setattr(documents, "TEXT_SLICE_BYTES", 2**10)
    manifest = prepared(corpus, tmp_path / "out", tokenizer=str(bpe), shard_bytes=shard_bytes)
    library = Tokenizer.from_file(str(bpe))
    texts = [*TEXTS, *TEXTS[:5], LONG, *TEXTS, "one line"]
    expected = [[*library.encode(text).ids, 0] for text in texts]
    tokens, sizes = read_corpus(tmp_path / "out")
    assert tokens.dtype == np.uint16
    assert sizes == list(map(len, expected))
    assert tokens.tolist() == [i for document in expected for i in document]
    assert (manifest.documents, manifest.tokens) == (len(texts), tokens.size)
    assert not (tmp_path / "out" / "partial").exists()


def test_a_text_is_really_cut(corpus: Path, bpe: Path) -> None:
    source = documents.examine(str(corpus / "c.txt"), "text")
    can_cut = shards.load_saved(bpe.parent, bpe.name).can_cut
    parts = list(documents.slices(source, 2**13, can_cut))
    assert len(parts) > 8
    assert [p.opens for p in parts] == [True] + [False] * (len(parts) - 1)
    assert [p.closes for p in parts] == [False] * (len(parts) - 1) + [True]
    assert sum(p.bytes for p in parts) == source.bytes
    assert len(list(documents.slices(source, 2**13, None))) == 1


def test_a_text_that_must_not_be_cut(
    bpe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The library's Metaspace puts a mark before a text: it would be before every piece."""
    spec = json.loads(bpe.read_text())
    spec["pre_tokenizer"] = {"type": "Metaspace", "replacement": "Ġ", "prepend_scheme": "always"}
    (tmp_path / "meta.json").write_text(json.dumps(spec))
    (tmp_path / "a.txt").write_text(LONG)
    monkeypatch.setattr("spmd_train.data.prepare._LONG_TEXT_BYTES", 2**12)
    monkeypatch.setattr(documents, "TEXT_SLICE_BYTES", 2**12)
    prepared(tmp_path / "a.txt", tmp_path / "out", tokenizer=str(tmp_path / "meta.json"))
    expected = Tokenizer.from_file(str(tmp_path / "meta.json")).encode(LONG).ids
    assert read_corpus(tmp_path / "out")[0].tolist() == [*expected, 0]
    assert "a.txt (100.6 kB) is encoded in one piece" in capsys.readouterr().out


def test_neither_workers_nor_shards_show_in_the_result(corpus: Path, tmp_path: Path) -> None:
    for workers, shard_bytes in ((1, 2**13), (2, 2**13), (3, 2**15), (1, None)):
        out = tmp_path / f"{workers}-{shard_bytes}"
        prepared(corpus, out, train_bpe=300, workers=workers, shard_bytes=shard_bytes)
    first, *others = [files(out) for out in sorted(tmp_path.iterdir())]
    assert set(first) == {
        "manifest.json", "tokenizer.json", "tokenizer_config.json", "tokens.bin", "tokens.idx"
    }  # fmt: skip
    assert others == [first] * 3


@settings(max_examples=30)
@given(st.lists(st.text(), min_size=1, max_size=30), st.integers(1, 200))
def test_any_documents_in_any_shards(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], shard_bytes: int
) -> None:
    directory = tmp_path_factory.mktemp("any")
    (directory / "a.jsonl").write_bytes(lines(texts))
    expected = [len(text.encode()) for text in texts if text]
    if not expected:
        assert "holds no text" in refused(directory, directory / "out")
        return
    manifest = prepared(directory / "a.jsonl", directory / "out", shard_bytes=shard_bytes)
    tokens, sizes = read_corpus(directory / "out")
    assert (tokens.dtype, sizes) == (np.dtype(np.uint8), expected)
    assert bytes(tokens) == "".join(texts).encode()
    assert manifest.empty_documents == texts.count("")


@pytest.mark.parametrize("kind", documents.KINDS[1:])
def test_every_kind_of_file_holds_the_same(tmp_path: Path, kind: str) -> None:
    texts = ["one", "ünö\nlines", " two "]
    data = lines(texts)
    path = tmp_path / f"a{kind}"
    if kind == ".parquet":
        pq.write_table(pa.table({"id": [1, 2, 3], "text": texts}), path, row_group_size=2)
    elif kind == ".jsonl.gz":  # two members, as `cat a.gz b.gz` makes
        path.write_bytes(gzip.compress(data[:9]) + gzip.compress(data[9:]))
    elif kind == ".jsonl.zst":
        buffer = io.BytesIO()
        for part in (data[:9], data[9:]):
            sink = pa.BufferOutputStream()
            with pa.CompressedOutputStream(sink, "zstd") as stream:
                stream.write(part)
            buffer.write(sink.getvalue())
        path.write_bytes(buffer.getvalue())
    else:
        path.write_bytes(data.replace(b"\n", b"\r\n").rstrip() + b"\n\n")
    prepared(path, tmp_path / "out", shard_bytes=1)
    tokens, sizes = read_corpus(tmp_path / "out")
    assert bytes(tokens).decode() == "".join(texts)
    assert sizes == [len(text.encode()) for text in texts]


def test_fields_in_fields(tmp_path: Path) -> None:
    rows = [{"meta": {"body": "one"}}, {"meta": {"body": "two"}}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pq.write_table(pa.Table.from_pylist([*rows, {"meta": None}]), tmp_path / "b.parquet")
    options = {"text_field": "meta.body", "skip_bad": True}
    manifest = prepared([tmp_path / "a.jsonl", tmp_path / "b.parquet"], tmp_path / "o", **options)
    assert bytes(read_corpus(tmp_path / "o")[0]) == b"onetwoonetwo"
    assert [s.place for s in manifest.skipped_records] == ["row 2"]


def test_bos_and_eos(tmp_path: Path, bpe: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "both.json").write_bytes(bpe.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|endoftext|>", "eos_token": "!"})
    )
    one = Tokenizer.from_file(str(bpe)).encode("one").ids
    mark = Tokenizer.from_file(str(bpe)).token_to_id("!")
    for i, (bos, eos, expected) in enumerate(
        [
            (False, None, [*one, mark]),
            (True, None, [0, *one, mark]),
            (True, False, [0, *one]),
            (False, False, one),
        ]
    ):
        out = tmp_path / str(i)
        options = {"tokenizer": str(tmp_path / "both.json"), "bos": bos, "eos": eos}
        manifest = prepared(tmp_path / "a.txt", out, **options)
        assert read_corpus(out)[0].tolist() == expected
        assert (manifest.request.add_bos, manifest.request.add_eos) == (bos, eos is not False)
    for flag in ("bos", "eos"):
        message = refused(tmp_path / "a.txt", tmp_path / "out", **{flag: True})
        assert f"--{flag}: the tokenizer bytes has no {flag.upper()} token" in message


def test_the_manifest_says_what_was_done(corpus: Path, bpe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepared([corpus / "c.txt", corpus / "more"], out, tokenizer=str(bpe))
    said = json.loads((out / "manifest.json").read_text())
    names = ["c.txt", "more/d.parquet", "more/e.txt"]
    assert said["request"]["inputs"] == [
        {
            "path": str(corpus / name),
            "bytes": (corpus / name).stat().st_size,
            "sha256": files(corpus)[name],
        }
        for name in names
    ]
    assert said["files"] == {n: files(out)[n] for n in ("tokens.bin", "tokens.idx")}
    assert said["tokenizer"] == {
        "name": "tokenizer.json",
        "fingerprint": files(out)["tokenizer.json"],
        "vocab_size": 512,
        "bos_id": None,
        "eos_id": 0,
    }
    assert (out / "tokenizer.json").read_bytes() == bpe.read_bytes()


# ------------------------------------------------------------------------------- killed and resumed

PROGRAM = """
import os, sys, threading, time
from pathlib import Path
from spmd_train.data import indexed, manifest, prepare, shards
from spmd_train.data.prepare import Options

def kill_after(module, name, calls):
    real, count = getattr(module, name), 0
    def counted(*args, **kwargs):
        nonlocal count
        count += 1
        if count > calls:
            os._exit(9)
        return real(*args, **kwargs)
    setattr(module, name, counted)

if __name__ == "__main__":
    inputs, out, workers, where = sys.argv[1:]
    if where == "encoding":
        kill_after(shards, "encode", 3)
    elif where == "joining":
        kill_after(prepare.IndexedDataset, "document_offsets", 5)
    elif where == "renaming":  # tokens.bin is there, tokens.idx is not
        real = os.replace
        def replace(source, target):
            real(source, target)
            if Path(target) == Path(out) / "tokens.bin":
                os._exit(9)
        indexed.os.replace = replace
    elif where == "removing":  # the manifest is there, the partial directory too
        kill_after(prepare.shutil, "rmtree", 0)
    elif where == "workers":
        def watch():
            import multiprocessing
            while not list(Path(out).glob("partial/shard-*.json")):
                time.sleep(0.002)
            print(*(p.pid for p in multiprocessing.active_children()), flush=True)
            os._exit(9)
        threading.Thread(target=watch).start()
    prepare.prepare(Options([inputs], Path(out), train_bpe=300, workers=int(workers),
                            shard_bytes=2**13))
"""


def start(program: Path, corpus: Path, out: Path, where: str) -> subprocess.CompletedProcess[str]:
    workers = "2" if where == "workers" else "1"
    return subprocess.run(
        [sys.executable, program, corpus, out, workers, where],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_killed_run_goes_on_to_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    prepared(corpus, tmp_path / "whole", train_bpe=300, shard_bytes=2**13)
    expected = files(tmp_path / "whole")
    for where in ("encoding", "joining", "renaming", "removing"):
        out = tmp_path / where
        killed = start(program, corpus, out, where)
        assert killed.returncode == 9, killed.stderr
        assert (out / "partial").is_dir()
        assert (out / "manifest.json").exists() == (where == "removing")
        counted = len(list(out.glob("partial/shard-*.json")))
        assert counted == 3 if where == "encoding" else counted > 8
        prepared(corpus, out, train_bpe=300, shard_bytes=2**13)
        assert files(out) == expected, where


def test_workers_leave_with_a_killed_parent(corpus: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    killed = start(program, corpus, tmp_path / "out", "workers")
    assert killed.returncode == 9, killed.stderr
    *_, pids = killed.stdout.splitlines()
    waiting = [int(pid) for pid in pids.split()]
    assert waiting
    deadline = time.monotonic() + 30
    while waiting and time.monotonic() < deadline:
        waiting = [pid for pid in waiting if Path(f"/proc/{pid}").exists()]
        time.sleep(0.05)
    assert not waiting
    prepared(corpus, tmp_path / "out", train_bpe=300, shard_bytes=2**13)
    prepared(corpus, tmp_path / "whole", train_bpe=300, shard_bytes=2**13)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_finished_shards_are_not_encoded_again(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    real, seen = shards.encode, []

    def encode(job: shards.Job, shard: shards.Shard) -> shards.Summary:
        if len(seen) == 4:
            raise OSError(28, "No space left on device")
        seen.append(shard.number)
        return real(job, shard)

    monkeypatch.setattr(shards, "encode", encode)
    with pytest.raises(RunError, match="No space left on device; what is finished is kept"):
        prepared(corpus, tmp_path / "out", shard_bytes=2**14)
    seen.append(-1)
    prepared(corpus, tmp_path / "out", shard_bytes=2**14)
    assert seen == [0, 1, 2, 3, -1, *range(4, len(seen) - 1)]
    assert f"going on: 4 of {len(seen) - 1} shards are finished" in capsys.readouterr().out
    monkeypatch.setattr(shards, "encode", None)
    assert prepared(corpus, tmp_path / "out").documents == 127
    assert "already prepared" in capsys.readouterr().out


# ------------------------------------------------------------------------- what is refused at start


def test_another_request_in_the_same_directory(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("one two")
    (tmp_path / "b.txt").write_text("three")
    both, out = [tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "out"
    prepared(both, out)
    before = files(out)
    assert "inputs[1] is '" in refused(both[:1], out)
    assert "b.txt' there and absent here" in refused(both[:1], out)
    assert "text_field is 'text' there and 'body' here" in refused(both, out, text_field="body")
    assert "train_bpe is absent there and 300" in refused(both, out, train_bpe=300)
    both[0].write_text("ONE two")
    assert "inputs[0].sha256 is" in refused(both, out)
    assert files(out) == before
    both[0].write_text("one two")
    prepared(both, out)

    def fail(*_: Any) -> None:
        raise OSError(28, "full")

    monkeypatch.setattr(shards, "finished", lambda job, shard: None)
    monkeypatch.setattr("spmd_train.data.prepare._assemble", fail)
    with pytest.raises(RunError):
        prepared(both, tmp_path / "other")
    message = refused(both[1:], tmp_path / "other")
    assert "was begun for another request: request.inputs[0].path is" in message
    assert f"or remove {tmp_path}/other/partial" in message


def test_directories_that_hold_something_else(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    assert "holds other files" in refused(tmp_path / "a.txt", tmp_path)
    (tmp_path / "out").mkdir()
    prepared(tmp_path / "a.txt", tmp_path / "out")
    (tmp_path / "out" / "manifest.json").write_text('{"version": 7}')
    assert "manifest.json: is damaged, or from another version" in refused(
        tmp_path / "a.txt", tmp_path / "out"
    )


def test_two_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "out" / "partial").mkdir(parents=True)
    with (tmp_path / "out" / "partial" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        message = refused(tmp_path / "a.txt", tmp_path / "out")
    assert "is being prepared by another process" in message
    prepared(tmp_path / "a.txt", tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokenizer": None}, "either --tokenizer or --train-bpe"),
        ({"train_bpe": 300, "tokenizer": "bytes"}, "either --tokenizer or --train-bpe"),
        ({"train_bpe": 9}, "--train-bpe is 9; it must be at least 257"),
        ({"workers": 0}, "--workers is 0; it must be at least 1"),
        ({"tokenizer": "gpt2"}, "tokenizer 'gpt2' is not known"),
    ],
)
def test_requests_that_make_no_sense(tmp_path: Path, options: Any, words: str) -> None:
    (tmp_path / "a.txt").write_text("one")
    assert words in refused(tmp_path / "a.txt", tmp_path / "out", **options)
    assert not (tmp_path / "out" / "partial").exists()


def test_inputs_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("one")
    (tmp_path / "sub").mkdir()
    known = "give files, directories or globs of .txt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet."
    for pattern, words in (
        ("no.txt", f"no.txt: no such file; {known}"),
        ("*.jsonl", f"*.jsonl: no such file; {known}"),
        ("*.csv", f"*.csv: holds no file of a known kind; {known}"),
        ("sub", f"sub: no such file; {known}"),
        ("a.csv", "a.csv: its kind is not known; known are .txt"),
    ):
        assert words in refused(tmp_path / pattern, tmp_path / "out")
    with pytest.raises(RequestError, match="give at least one INPUT"):
        prepare(Options([], tmp_path / "out", tokenizer="bytes"))


def test_globs_directories_and_names_give_each_file_once(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/ignored.md", "[x].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    patterns = ["b.txt", "*.txt", "", "**/c.txt", "[x].txt"]
    found = documents.find([str(tmp_path / p) for p in patterns])
    names = [os.path.relpath(path, tmp_path) for path in found]
    assert names == ["b.txt", "[x].txt", "a.txt", "sub/c.txt"]


# ---------------------------------------------------------------------------------------- bad input

GOOD = '{"text": "good"}\n'


def parquet(**columns: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, row_group_size=2)
    return sink.getvalue()


def broken_parquet() -> bytes:
    """A file whose footer is right and whose first page is not."""
    data = parquet(text=["good", "better"])
    return b"PAR1" + b"\xff" * 40 + data[44:]


BAD = {
    "not-utf8.txt": (b"one\ntwo\ncaf\xe9", "line 3: is not UTF-8 text (byte 0xe9)"),
    "cut.txt": ("é".encode()[:1], "line 1: is not UTF-8 text (byte 0xc3)"),
    "empty.txt": (b"", "empty.txt: is empty"),
    "empty.jsonl": (b"", "empty.jsonl: is empty"),
    "empty.jsonl.gz": (gzip.compress(b""), "empty.jsonl.gz: is empty"),
    "syntax.jsonl": (GOOD + '\n{"text": "a"\n', "line 3: is not JSON (Expecting ',' delimiter at"),
    "bytes.jsonl": (GOOD.encode() + b'{"text": "\xff"}', "line 2: is not UTF-8 text (byte 0xff)"),
    "missing.jsonl": (GOOD + '{"body": "a"}', "line 2: has no field 'text' (it has body); name it"),
    "null.jsonl": (GOOD + '{"text": null}', "line 2: field 'text' is null, not a string"),
    "number.jsonl": (GOOD + '{"text": 3}', "line 2: field 'text' is a number, not a string"),
    "list.jsonl": (GOOD + "[1]", "line 2: is a list where an object with 'text' is expected"),
    "half.jsonl": (GOOD + '{"text": "\\ud800"}', "line 2: field 'text' holds half a surrogate"),
    "deep.jsonl": (GOOD + "[" * 10**5, "line 2: is JSON nested too deeply"),
    "cut.jsonl.gz": (
        gzip.compress(lines(TEXTS))[:-20],
        ": cannot be unpacked from about here on (Trunc",
    ),
    "not.jsonl.zst": (b"hello, this is no zstd", "line 1: cannot be unpacked from about"),
    "not.parquet": (b"hello", "not.parquet: is no Parquet file that can be read"),
    "column.parquet": (parquet(body=["a"]), "has no column 'text' (it has body); name it with"),
    "type.parquet": (parquet(text=[1, 2]), "column 'text' is int64, not string"),
    "rows.parquet": (parquet(text=pa.array([], "string")), "rows.parquet: has no rows"),
    "null.parquet": (parquet(text=["good", "b", None]), "row 2: field 'text' is null"),
    "page.parquet": (broken_parquet(), "row 0: cannot be read from here on"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_can_be_skipped(tmp_path: Path, name: str) -> None:
    content, words = BAD[name]
    data = content.encode() if isinstance(content, str) else content
    (tmp_path / name).write_bytes(data)
    (tmp_path / "z.txt").write_text("the rest")
    inputs, out = [tmp_path / name, tmp_path / "z.txt"], tmp_path / "out"
    message = refused(inputs, out)
    assert message.startswith(str(tmp_path / name))
    assert words in message
    assert message.endswith("; --skip-bad leaves such records out.")
    assert not out.exists() or not list(out.iterdir())
    manifest = prepared(inputs, out, skip_bad=True)
    assert manifest.skipped == 1
    assert words in str(documents.BadRecord(**manifest.skipped_records[0].model_dump()))
    assert bytes(read_corpus(out)[0]).endswith(b"the rest")


def test_lines_are_counted_from_the_start_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD * 99 + "{\n" + GOOD * 9 + "[]\n")
    for shard_bytes in (20, 300, 10**6):
        out = tmp_path / str(shard_bytes)
        message = refused(tmp_path / "a.jsonl", out, shard_bytes=shard_bytes)
        assert "a.jsonl, line 100: is not JSON" in message
        manifest = prepared(tmp_path / "a.jsonl", out, shard_bytes=shard_bytes, skip_bad=True)
        assert [s.place for s in manifest.skipped_records] == ["line 100", "line 110"]


def test_after_a_bad_line_the_finished_part_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD * 99 + "{\n" + GOOD * 9)
    out, options = tmp_path / "out", {"shard_bytes": 100}
    refused(tmp_path / "a.jsonl", out, **options, workers=2)
    assert not (out / "manifest.json").exists()
    assert len(list(out.glob("partial/shard-*.json"))) >= 10
    prepared(tmp_path / "a.jsonl", out, skip_bad=True, **options)
    prepared(tmp_path / "a.jsonl", tmp_path / "whole", skip_bad=True, **options)
    assert files(out) == files(tmp_path / "whole")


def test_a_shard_that_skipped_does_not_serve_a_request_that_skips_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text("{\n" + GOOD)
    with monkeypatch.context() as patch:
        patch.setattr("spmd_train.data.prepare._assemble", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepared(tmp_path / "a.jsonl", tmp_path / "out", skip_bad=True)
    assert "line 1: is not JSON" in refused(tmp_path / "a.jsonl", tmp_path / "out")


# --------------------------------------------------------------------------------- the command line


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD * 3 + "{\n")
    command = ["data", "prepare", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out")]
    assert main([*command, "--tokenizer", "bytes"]) == 2
    assert "a.jsonl, line 4: is not JSON" in capsys.readouterr().err
    assert main([*command, "--tokenizer", "bytes", "--eos"]) == 2
    assert "the tokenizer bytes has no EOS token" in capsys.readouterr().err
    assert main([*command, "--tokenizer", "bytes", "--eos", "--no-eos"]) == 2
    assert "exclude each other" in capsys.readouterr().err
    assert main([*command, "--tokenizer", "bytes", "--skip-bad", "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert "3 documents  12 tokens" in out
    assert f"{tmp_path}/out: 3 documents, 12 tokens in 12 bytes of uint8" in out
    assert f"skipped 1 that could not be used:\n  {tmp_path}/a.jsonl, line 4: is not JSON" in out


def test_preparing_needs_no_jax() -> None:
    code = """
    import sys
    import spmd_train.cli, spmd_train.data.prepare, spmd_train.data.inspect
    sys.exit("jax" in sys.modules)
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert (
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment).returncode
        == 0
    )


def test_progress_as_lines() -> None:
    now = 0.0
    stream = io.StringIO()
    with Meter(1000, stream=stream, clock=lambda: now) as meter:
        meter.advance(500, 50, 5000, new=False)
        now = 9.0
        meter.advance(100, 10, 900)
        now = 10.0
        meter.advance(100, 10, 1100)
        now = 25.0
        meter.advance(300, 30, 3000)
    assert stream.getvalue().splitlines() == [
        " 70%  70 documents  7,000 tokens  200 tokens/s  eta 0:00:15",
        "100%  100 documents  10,000 tokens  200 tokens/s  eta 0:00:00",
        "100 documents  10,000 tokens  200 tokens/s  in 25.0 s",
    ]


def test_the_first_difference() -> None:
    old = {"a": 1, "b": [{"c": 1}, {"c": 2}]}
    assert first_difference(old, old) is None
    assert (
        first_difference(old, {**old, "b": [{"c": 1}, {"c": 3}]}) == "b[1].c is 2 there and 3 here"
    )
    assert (
        first_difference(old, {**old, "b": [{"c": 1}]}) == "b[1] is {'c': 2} there and absent here"
    )
    assert first_difference(old, {**old, "a": None}) == "a is 1 there and absent here"
