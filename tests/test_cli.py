"""The command line as its user sees it: exit status, messages, files, a run and its continuation.

A resumed run is compared with the uninterrupted one; two processes with one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from commands import SMALL, events, losses, records, run, sets
from processes import start

from spmd_train.checkpoint import files
from spmd_train.telemetry.records import read_jsonl


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six uninterrupted steps on 2x2x2."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert run("--mesh", "2x2x2", "--steps", 6, "--out", out, *sets(*SMALL)) == 0
    return out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mesh", "3x0x2"], ["3x0x2", "at least 1"]),
        (["--mesh", "4x2"], ["4x2", "three sizes"]),
        (["--mesh", "data=4,modle=2"], ["modle", "did you mean 'model'"]),
        (["--mesh", "1x1x4", *sets("model.layers=6")], ["6 layers", "1, 2, 3, 6"]),
        (["--mesh", "1x3x1", *sets("model.heads=8")], ["8 heads", "1, 2, 4, 8"]),
        (["--mesh", "4x1x1", *sets("batch.global_size=6", "batch.microbatches=1")], ["6", "4, 8"]),
        (["--mesh", "1x1x1", *sets("batch.microbatches=5")], ["microbatches=5", "4, 8"]),
        (sets("optim.learning_rte=1"), ["optim.learning_rte", "optim.lr"]),
        (sets("optim.lr=-1"), ["optim.lr", "> 0"]),
        (["--config", "NOT_YAML"], ["NOT_YAML", "line"]),
        (sets("data.source=EMPTY"), ["EMPTY", "empty"]),
        (sets("data.packing=packed"), ["one of windows, documents, padded"]),
        (["--platform", "gpu"], ["gpu", "platforms present"]),
        (["--resume"], ["--out"]),
        (["--stop-after", "0"], ["at least 1"]),
        (sets("model.block=no.such:thing"), ["model.block", "no"]),
    ],
)
def test_a_wrong_request_exits_2_and_says_what_works(
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "NOT_YAML").write_text("a: [1\nb: }")
    (tmp_path / "EMPTY").write_text("")
    assert run(*arguments) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message
    assert not (tmp_path / "runs").exists(), "nothing is started"


def test_a_run_directory_holds_what_it_promises(whole_run: Path) -> None:
    config = yaml.safe_load((whole_run / "config.yaml").read_text())
    assert config["mesh"] == "2x2x2"
    records = read_jsonl(whole_run / "metrics.jsonl")
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert set(records[0]) == {
        "step", "loss", "tokens", "grad_norm", "lr", "loss_scale", "skipped", "step_seconds",
        "tokens_per_second", "data_wait_seconds", "sample_ids",
    }  # fmt: skip
    assert records[0]["tokens"] == 8 * 32
    assert records[0]["loss"] == pytest.approx(np.log(256), rel=0.05)  # an untrained model guesses
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[0]["lr"] == pytest.approx(0.5e-2)  # lr * k / warmup, k = 1
    events = {e["event"]: e for e in read_jsonl(whole_run / "events.jsonl")}
    assert set(events) == {"start", "compile", "checkpoint", "stop"}
    assert events["start"]["resolved"]["schedule"] == "1f1b"
    assert events["compile"]["bytes_per_device"]["temporaries"] >= 0
    for line in (whole_run / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"bare {name}"))


@pytest.mark.parametrize("mesh", ["2x2x2", "1x1x1"])
def test_a_stopped_run_resumes_as_if_uninterrupted(
    mesh: str, whole_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "stopped"
    common = ["--out", out]
    assert run(*common, "--mesh", "2x2x2", "--steps", 6, "--stop-after", 3, *sets(*SMALL)) == 0
    assert len(losses(out)) == 3
    assert run(*common, "--mesh", mesh, "--resume") == 0
    tolerance = 0 if mesh == "2x2x2" else 1e-5
    np.testing.assert_allclose(losses(out), losses(whole_run), rtol=tolerance)


def test_resume_refuses_what_would_change_the_run(
    whole_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--out", whole_run, "--resume", "--set", "optim.lr=1e-4") == 2
    message = capsys.readouterr().err
    assert "optim.lr is 0.0001" in message
    assert "0.01" in message
    assert run("--out", tmp_path / "nothing", "--resume") == 2
    assert "no run directory" in capsys.readouterr().err
    assert run("--out", whole_run, "--steps", 6) == 2
    assert "--resume" in capsys.readouterr().err


def test_a_run_resumed_at_its_end_is_already_done(whole_run: Path) -> None:
    before = losses(whole_run)
    assert run("--out", whole_run, "--resume") == 0
    assert run("--out", whole_run, "--resume", "--steps", 5) == 2  # fewer than it has taken
    assert losses(whole_run) == before


def test_generate_continues_the_prompt(whole_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = ["generate", "--run", whole_run, "--prompt", "It was", "--max-tokens", 20]
    assert run(*request) == 0
    first = capsys.readouterr().out
    assert first.startswith("It was")
    assert len(first.encode()) > 20
    assert run(*request) == 0
    assert capsys.readouterr().out == first, "the same seed gives the same text"
    assert run(*request[:-2], "--max-tokens", 0) == 2
    assert run("generate", "--run", whole_run.parent, "--prompt", "x") == 2
    assert run("generate", "--run", whole_run, "--prompt", "") == 2


@pytest.mark.slow
def test_a_run_that_diverges_stops_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "diverges"
    wild = sets(*SMALL, "optim.lr=1e30", "optim.warmup_steps=0")
    wild += sets("guard.max_consecutive_skips=3", "guard.diagnoses=1")
    assert run("--mesh", "1x1x1", "--steps", 8, "--out", out, *wild) == 1
    message = capsys.readouterr().err
    assert "step 4: the last 3 steps were all skipped (not finite)" in message
    assert "float32 itself overflows" in message
    skipped = [e for e in read_jsonl(out / "events.jsonl") if e["event"] == "skipped"]
    assert [e["in_a_row"] for e in skipped] == [1, 2, 3]
    assert [e["finding"]["cause"] for e in skipped if "finding" in e] == ["diverged"]


@pytest.mark.slow
def test_a_float64_master_trains_and_is_diagnosed(whole_run: Path, tmp_path: Path) -> None:
    """In processes of their own, since JAX's 64 bits are one switch for all."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    wide = ["--mesh", "1x1x1", "--steps", 6, *sets(*SMALL, "precision.master=float64")]
    wild = sets("optim.lr=1e30", "guard.max_consecutive_skips=1")
    asked = [*wide, "--out", good], [*wide, "--out", bad, *wild]
    first, second = (start(["train", *map(str, words)])[0] for words in asked)
    assert first.wait() == 0, first.stderr
    np.testing.assert_allclose(losses(good), losses(whole_run), rtol=1e-5)
    assert second.wait() == 1
    assert second.stderr is not None
    assert "float32 itself overflows" in second.stderr.read()


def test_another_policy_on_resume_is_an_event(whole_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "policies"
    shutil.copytree(whole_run, out)
    assert run("--out", out, "--resume", "--steps", 8, "--set", "precision.policy=fp16") == 0
    events = {e["event"]: e for e in read_jsonl(out / "events.jsonl")}
    assert (events["policy"]["before"], events["policy"]["after"]) == ("fp32", "fp16")
    assert events["restored"]["precision"]["compute"] == "float16"
    last = read_jsonl(out / "metrics.jsonl")[-1]
    assert (last["step"], last["loss_scale"], last["skipped"]) == (8, 65536.0, False)
    assert last["loss"] < losses(whole_run)[0]


def test_two_processes_go_on_where_one_stopped_and_the_other_way(
    whole_run: Path, tmp_path: Path
) -> None:
    """Public case P20 among them: the samples are the same whatever the number of processes.

    The newest step is damaged, which only the process that reads that file can see.
    """
    out = tmp_path / "two"
    saving = sets(*SMALL, "checkpoint.every_steps=1", "checkpoint.keep_last=9")
    assert run("--mesh", "1x1x1", "--steps", 6, "--stop-after", 3, "--out", out, *saving) == 0
    second_file = sorted(files.read_manifest(out / "checkpoints" / "3"))[1]
    (out / "checkpoints" / "3" / second_file).write_bytes(b"x" * 64)
    by_time = sets("checkpoint.every_steps=0", "checkpoint.every_seconds=0.001")
    request = ["--mesh", "2x2x2", "--resume", "--stop-after", 4, "--out", out, *by_time]
    pair = start(list(map(str, request)), processes=2)
    outputs = [p.communicate(timeout=300) for p in pair]
    assert [p.returncode for p in pair] == [0, 0], outputs
    assert "in 2 processes" in outputs[0][0]
    assert "loss" not in outputs[1][0], "one process speaks"
    assert "using step 2" in outputs[0][1]
    assert second_file in events(out, "damaged")[0]["problems"][0]
    assert [e["step"] for e in events(out, "checkpoint")] == [1, 2, 3, 3, 4]
    assert files.steps(out / "checkpoints") == [1, 2, 3, 4]
    assert run("--mesh", "1x1x1", "--resume", "--out", out) == 0
    np.testing.assert_allclose(losses(out), losses(whole_run), rtol=1e-5)
    ids = [[r["sample_ids"] for r in records(d)] for d in (out, whole_run)]
    assert ids[0] == ids[1]
