"""Runs on prepared corpora, through the command line: what they write down, need and refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmd_train.cli import main
from spmd_train.telemetry.records import read_jsonl

SETS = (
    "model.layers=1", "model.width=16", "model.heads=2", "model.kv_heads=1", "model.ffn=32",
    "model.vocab=320", "batch.sequence_length=8", "batch.global_size=4", "batch.microbatches=1",
    "log.sample_ids=true",
)  # fmt: skip
STEPS = 12


def train(out: Path, *sets: str, stop_after: int = STEPS, mesh: str = "1x1x1") -> int:
    flags = [part for s in (*SETS, *sets) for part in ("--set", s)]
    length = ["--steps", str(STEPS), "--stop-after", str(stop_after)]
    return main(["--mesh", mesh, "--out", str(out), *length, *flags])


def prepare(directory: Path, texts: list[str], *flags: str) -> Path:
    directory.mkdir()
    (directory / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    command = ["data", "prepare", str(directory / "a.jsonl"), "--workers", "1", *flags]
    assert main([*command, "--out", str(directory / "corpus")]) == 0
    return directory / "corpus"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run stopped after 3 steps, and its corpus, which has moved since."""
    directory = tmp_path_factory.mktemp("run")
    texts = [f"text number {i}, which says {i * 7919 % 1000}" for i in range(60)]
    corpus = prepare(directory / "made", texts, "--train-bpe", "300")
    assert train(directory / "run", f"data.source={corpus}", stop_after=3) == 0
    (start,) = [e for e in read_jsonl(directory / "run/events.jsonl") if e["event"] == "start"]
    (epochs,) = start["epochs"].values()
    tokens = json.loads((corpus / "manifest.json").read_text())["tokens"]
    assert epochs == round(STEPS * 4 / ((tokens - 1) // 8), 4)
    corpus.rename(directory / "moved")
    return directory / "run", directory / "moved"


def test_a_run_speaks_with_its_own_tokenizer(run: tuple[Path, Path], capsys: Any) -> None:
    out, corpus = run
    assert (out / "tokenizer.json").read_bytes() == (corpus / "tokenizer.json").read_bytes()
    assert main(["generate", "--run", str(out), "--prompt", "text", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out.startswith("text")
    copy = out.with_name("copy")
    shutil.copytree(out, copy)
    (copy / "tokenizer.json").write_text((out / "tokenizer.json").read_text() + " ")
    assert main(["generate", "--run", str(copy), "--prompt", "text"]) == 2
    assert "is not the one that the run was trained with (" in capsys.readouterr().err
    (copy / "tokenizer.json").unlink()
    assert main(["generate", "--run", str(copy), "--prompt", "text"]) == 2
    assert "holds neither tokenizer.json nor tokenizer.model" in capsys.readouterr().err


def test_a_run_goes_on_where_its_corpus_went(run: tuple[Path, Path], capsys: Any) -> None:
    out, corpus = run
    copy = out.with_name("resumed")
    shutil.copytree(out, copy)
    assert main(["--resume", "--out", str(copy)]) == 2
    assert "does not exist" in capsys.readouterr().err
    texts = [f"text number {i}, which says {i}" for i in range(60)]
    other = prepare(out.with_name("other"), texts, "--tokenizer", "bytes")
    capsys.readouterr()
    resume = ["--resume", "--out", str(copy), "--set"]
    assert main([*resume, f"data.source={other}"]) == 2
    message = capsys.readouterr().err
    marks = [
        json.loads((c / "manifest.json").read_text())["tokenizer"]["fingerprint"]
        for c in (corpus, other)
    ]
    assert f"tokenizer is '{marks[0]}' there and '{marks[1]}' here" in message
    same = prepare(out.with_name("same"), texts, "--tokenizer", str(corpus))
    capsys.readouterr()
    assert main([*resume, f"data.source={same}"]) == 2
    assert "corpora[0].content is '" in capsys.readouterr().err
    assert main([*resume, "data.packing=padded"]) == 2
    assert "data.packing is padded in the request and windows in " in capsys.readouterr().err
    assert main([*resume, f"data.source={corpus}"]) == 0
    assert [r["step"] for r in read_jsonl(copy / "metrics.jsonl")] == [*range(1, STEPS + 1)]


def test_a_corpus_read_too_often_is_remarked(tmp_path: Path, capsys: Any) -> None:
    a = prepare(tmp_path / "a", ["many words " * 30], "--tokenizer", "bytes")
    b = prepare(tmp_path / "b", ["few words " * 4], "--tokenizer", "bytes")
    out = tmp_path / "run"
    assert train(out, f"data.mixing={{{a}: 0.5, {b}: 0.5}}") == 0
    assert f"warning: the run reads {b} 6.0 times; from about 4" in capsys.readouterr().err
    (start,) = [e for e in read_jsonl(out / "events.jsonl") if e["event"] == "start"]
    assert start["epochs"] == {str(a): round(24 / 41, 4), str(b): 6.0}
    ids = [i for record in read_jsonl(out / "metrics.jsonl") for i in record["sample_ids"]]
    assert sum(i >= 41 for i in ids) == 24


def test_ids_without_a_tokenizer_cannot_be_spoken(tmp_path: Path, capsys: Any) -> None:
    corpus = prepare(tmp_path / "a", ["many words " * 30], "--tokenizer", "bytes")
    (corpus / "manifest.json").unlink()
    assert train(tmp_path / "run", f"data.source={corpus}/tokens", stop_after=1) == 0
    assert main(["generate", "--run", str(tmp_path / "run"), "--prompt", "a"]) == 2
    assert "was trained on ids of which no tokenizer is known" in capsys.readouterr().err


@pytest.mark.parametrize("packing", ["documents", pytest.param("padded", marks=pytest.mark.slow)])
def test_prepared_documents_train_alike_on_every_mesh(packing: str, tmp_path: Path) -> None:
    """From the corpus to the compiled step: documents of many lengths, some longer than a row."""
    texts = ["word " * (1 + i * 7 % 13) + str(i) for i in range(80)]
    corpus = prepare(tmp_path / "made", texts, "--tokenizer", "bytes")
    sets = ("model.layers=2", f"data.source={corpus}", f"data.packing={packing}")
    losses = []
    for mesh in ("1x1x1", "2x1x2"):
        out = tmp_path / mesh
        assert train(out, *sets, stop_after=4, mesh=mesh) == 0
        losses.append([r["loss"] for r in read_jsonl(out / "metrics.jsonl")])
    np.testing.assert_allclose(*losses, rtol=1e-5)
