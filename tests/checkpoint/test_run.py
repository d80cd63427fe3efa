"""Checkpoints of whole runs, as their user meets them: damage, full disks, other runs' parameters.

Losses are compared with those of the uninterrupted run.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from commands import SMALL, events, records, run, sets
from processes import environment

from spmd_train.checkpoint import files


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps on 2x1x2, saved every two, all kept."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    saving = sets("checkpoint.every_steps=2", "checkpoint.keep_last=9")
    assert run("--mesh", "2x1x2", "--steps", 8, "--out", out, *sets(*SMALL), *saving) == 0
    return out


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "copy")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def largest(directory: Path) -> Path:
    return max(directory.rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)


def test_a_damaged_newest_step_costs_the_steps_since_the_one_before(
    copy: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(largest(copy / "checkpoints" / "8" / "state"))
    (copy / "checkpoints" / "6" / "meta" / "metadata").unlink()
    assert run("--out", copy, "--resume", "--mesh", "2x1x2") == 0
    message = capsys.readouterr().err
    assert "checkpoint of step 8 is damaged: state/" in message
    assert "checkpoint of step 6 is damaged: meta/metadata is missing" in message
    assert "using step 4" in message
    assert [e["step"] for e in events(copy, "damaged")] == [8, 6]
    assert events(copy, "restored")[0]["step"] == 4
    for key in ("step", "loss", "sample_ids"):
        assert [r[key] for r in records(copy)] == [r[key] for r in records(whole)]
    assert run("checkpoint", "verify", copy) == 0


def test_with_every_step_damaged_the_run_fails_and_names_each(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (2, 4, 6, 8):
        flip(copy / "checkpoints" / str(step) / "state" / "_METADATA")
    assert run("--out", copy, "--resume") == 1
    message = capsys.readouterr().err
    assert "no undamaged checkpoint is left" in message
    assert all(f"step {step}: state/_METADATA was altered" in message for step in (2, 4, 6, 8))


@pytest.mark.parametrize(
    ("key", "value"), [("model.width", 64), ("optim.name", "lion"), ("model.vocab", 300)]
)
def test_an_edited_configuration_is_refused_with_both_values(
    key: str, value: object, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is allocated: the state of no run is that of another model."""
    import yaml

    config = yaml.safe_load((copy / "config.yaml").read_text())
    section, name = key.split(".")
    before, config[section][name] = config[section][name], value
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    assert run("--out", copy, "--resume") == 2
    message = capsys.readouterr().err
    assert f"{key} is {value} in {copy}/config.yaml and {before} in its checkpoint" in message


def test_ls_verify_and_show(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("checkpoint", "ls", copy, "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(s["step"], s["state"], s["mesh"]) for s in listed["steps"]] == [
        (step, "complete", "2x1x2") for step in (2, 4, 6, 8)
    ]
    assert run("checkpoint", "verify", copy, "--step", 6) == 0
    assert "sound" in capsys.readouterr().out
    flip(largest(copy / "checkpoints" / "6" / "state"))
    assert run("checkpoint", "verify", copy, "--step", 8) == 0
    capsys.readouterr()
    assert run("checkpoint", "verify", copy) == 1
    output, error = capsys.readouterr()
    assert "step 6: state/" in output
    assert "was altered: CRC-32" in output
    assert "damaged: step 6" in error
    assert run("checkpoint", "ls", copy, "--step", 5) == 2
    assert "it has 2, 4, 6, 8" in capsys.readouterr().err
    assert run("checkpoint", "show", copy, "--step", 5) == 2
    assert run("checkpoint", "ls", copy.parent) == 2
    capsys.readouterr()
    assert run("checkpoint", "show", copy, "--json") == 0
    meta = json.loads(capsys.readouterr().out)
    assert meta["step"] == 8
    assert meta["next_sample"] == 8 * 8
    assert meta["arrays"]["params.embed.table"] == "float32[256, 32] (vocab, embed)"
    assert run("checkpoint", "show", copy) == 0
    shown = capsys.readouterr().out
    assert "params.blocks.mlp.gate" in shown
    assert "float32[2, 32, 64] (layers, embed, mlp)" in shown


def test_the_description_is_that_of_the_arrays(whole: Path) -> None:
    """Every array that plain Orbax reads is described, with its dtype and shape, and no other."""
    path = (whole / "checkpoints" / "8").absolute()
    state = ocp.StandardCheckpointer().restore(path / "state")
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    arrays = {
        jax.tree_util.keystr(path, simple=True, separator="."): f"{x.dtype}{list(x.shape)}"
        for path, x in flat
    }
    described = files.read_meta(path)
    assert arrays == {name: text.split(" (")[0] for name, text in described["arrays"].items()}
    assert set(described["contents"]) == set(state)
    assert ocp.CheckpointManager(path.parent).latest_step() == 8


def test_the_documented_way_to_read_it_without_this_package_works(whole: Path) -> None:
    """In a process with one device, where the run had four."""
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    code = code.replace("/absolute/path/runs/a/checkpoints/80", str(whole / "checkpoints" / "8"))
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert ran.stdout == "(256, 32)\n", ran.stderr


def test_a_run_starts_from_another_runs_parameters(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tuned"
    fresh = sets("optim.name=lion", "optim.lr=1e-9", "seed=3")
    assert run("--init-from", whole, "--mesh", "1x1x1", "--steps", 2, "--out", out, *fresh) == 0
    start = events(out, "start")[0]
    assert (start["step"], start["parameters_from"]) == (0, f"{whole} step 8")
    losses = [r["loss"] for r in records(out)]
    learned = records(whole)[-1]["loss"]
    assert abs(losses[0] - learned) < 0.2 < records(whole)[0]["loss"] - learned
    state = ocp.StandardCheckpointer().restore((out / "checkpoints" / "2" / "state").absolute())
    source = ocp.StandardCheckpointer().restore((whole / "checkpoints" / "8" / "state").absolute())
    for got, want in zip(
        jax.tree.leaves(state["params"]), jax.tree.leaves(source["params"]), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-8)  # two steps of lr 1e-9
    capsys.readouterr()
    assert run("--init-from", whole, "--out", tmp_path / "x", *sets("model.ffn=96")) == 2
    assert "model.ffn is 64 there and 96 here" in capsys.readouterr().err
    assert run("--init-from", whole, "--out", out, "--resume") == 2
    assert run("--init-from", tmp_path, "--out", tmp_path / "x") == 2


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path])
    if made.returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.parametrize(
    "trouble",
    [pytest.param("full", marks=pytest.mark.slow), "filled by another", "read-only"],
)
def test_a_disk_that_takes_no_more_ends_the_run_with_the_old_steps_sound(
    trouble: str,
    disk: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Public case P19. The disk gets full, or read-only, while the run goes on."""
    out = disk / "run"
    saving = sets("checkpoint.every_steps=1", "checkpoint.keep_last=99")
    request = ["--mesh", "1x1x1", "--out", out, "--steps", 90]
    stop = ["--stop-after", 2] if trouble == "read-only" else []
    if trouble == "filled by another":  # between the look at the free space and the writing
        monkeypatch.setattr(files, "free_bytes", lambda _: 1 << 40)
    status = run(*request, *stop, *sets(*SMALL), *saving)
    if trouble == "read-only":
        assert status == 0
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        status = run("--out", out, "--resume")
    assert status == 1
    message = capsys.readouterr().err
    assert {
        "full": "no room for the checkpoint of step",
        "filled by another": "No space left on device",
        "read-only": "Read-only file system",
    }[trouble] in message
    assert str(out) in message
    assert files.steps(out / "checkpoints")[:2] == [1, 2]
    assert run("checkpoint", "verify", out) == 0, "what was saved before is sound"
