"""`plan` as it is typed: what it prints, its one JSON document, its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import run

from spmd_train.config import load, parse
from spmd_train.errors import RequestError
from spmd_train.mesh import MeshShape
from spmd_train.plan.auto import mesh_for, present

SMALL = ("--config", "llama-7b", "--cluster", "8x80gb", "--global-batch", 32)


def document(capsys: pytest.CaptureFixture[str], *request: object) -> dict:
    assert run("plan", *request, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, *SMALL, "--top", 3)
    assert found["model"]["params"] == pytest.approx(6.74e9, rel=1e-3)
    assert found["cluster"]["devices"] == 8
    assert len(found["candidates"]) == 3
    length = load("llama-7b").batch.sequence_length
    for each in found["candidates"]:
        memory, seconds = each["memory_bytes"], each["step_seconds"]
        parts = sum(v for k, v in memory.items() if k not in ("total", "limit"))
        assert parts == memory["total"] <= memory["limit"]
        spent = sum(v for k, v in seconds.items() if k != "total")
        assert spent == pytest.approx(seconds["total"])
        assert each["fits"]
        assert each["tokens_per_second"] == pytest.approx(32 * length / seconds["total"])
        mesh = each["mesh"]
        assert f"--mesh {mesh['data']}x{mesh['model']}x{mesh['stage']} " in each["command"]
        assert each["why"]
    keys = {"params", "grads", "master", "moments", "activations", "logits", "communication"}
    assert keys < set(found["candidates"][0]["memory_bytes"])
    assert all(set(r) >= {"mesh", "reason"} for r in found["rejected"])


def test_everything_fixed_costs_the_one_candidate_fitting_or_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fixed = ("--zero", 0, "--microbatch-size", 1, "--schedule", "1f1b", "--remat", "none",
             "--compute", "bfloat16")  # fmt: skip
    found = document(
        capsys, "--config", "llama-30b", "--cluster", "8x40gb", "--mesh", "8x1x1", *fixed
    )
    (candidate,) = found["candidates"]
    assert not candidate["fits"]
    assert candidate["memory_bytes"]["total"] > candidate["memory_bytes"]["limit"]
    assert candidate["why"].startswith("does not fit: needs")


def test_what_a_person_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", *SMALL, "--top", 2) == 0
    printed = capsys.readouterr().out
    pieces = [
        "6.7 billion parameters", "8 x NVIDIA A100-SXM4-80GB", "MFU", "rejected:", "zero=0 needs",
        "train the first:", "spmd-train train --config llama-7b",
    ]  # fmt: skip
    for piece in pieces:
        assert piece in printed


def test_two_clusters(capsys: pytest.CaptureFixture[str]) -> None:
    both = ("--config", "llama-30b", "--cluster", "cluster-a", "--cluster", "cluster-b")
    found = document(capsys, *both, "--top", 1)
    (best,) = found["configurations"]
    assert [c["fits"] for c in best["on"]] == [True, True]
    assert run("plan", *both, "--top", 1) == 0
    printed = capsys.readouterr().out
    assert "cluster-b: --mesh" in printed
    config = parse(printed.partition("for all of them:\n")[2])
    assert config.batch.microbatches == best["set"]["batch.microbatches"]


def test_nothing_fits_is_a_failure_that_says_what_would(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("plan", "--config", "llama-70b", "--cluster", "8x80gb") == 1
    assert "The smallest cluster of such nodes that would do has 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (("--config", "llama-7b", "--cluster", "8x80g"), "did you mean '8x80gb'"),
        (("--config", "llama-7b"), "plan needs --cluster"),
        ((*SMALL, "--mesh", "2x2x1"), "is for 4 devices, but 8x80gb has 8"),
        ((*SMALL, "--top", 0), "--top is 0; it must be at least 1"),
        ((*SMALL, "--set", "model.blok=x"), "model.blok"),
        ((*SMALL, "--verify", -1), "--verify is -1; it must be at least 0"),
        ((*SMALL, "--cluster", "8x40gb", "--memo", "x"), "--memo: for one cluster, and 2 are"),
        ((*SMALL, "--compute", "float8"), "does not compute in float8"),
    ],
)
def test_a_wrong_request(
    request_: tuple[object, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", *request_) == 2
    assert message in capsys.readouterr().err


class TestAuto:
    """`train --mesh auto`."""

    def test_on_known_devices(self) -> None:
        config = load("llama-7b", ["batch.global_size=128", "batch.microbatches=8"])
        devices = [SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")] * 16
        mesh = mesh_for(config, devices)
        assert mesh.size == 16
        assert present("NVIDIA H100 80GB HBM3", 16).nodes == 2
        assert present("TPU7x", 16).size == 8
        tiny = mesh_for(load("tiny"), [SimpleNamespace(device_kind="TPU v5p")])
        assert tiny == MeshShape(1, 1, 1)

    def test_where_nothing_fits(self) -> None:
        with pytest.raises(RequestError, match="fits the devices here on no mesh"):
            mesh_for(load("llama-70b"), [SimpleNamespace(device_kind="NVIDIA A10G")] * 8)

    def test_on_a_cpu_the_mesh_must_be_given(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("--mesh", "auto") == 2
        assert "has no numbers for 'cpu' devices" in capsys.readouterr().err


def test_the_page_and_the_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, memo = tmp_path / "plan.html", tmp_path / "memo.md"
    written = ("--html", page, "--memo", memo)
    assert run("plan", *SMALL, "--top", 2, *written, "--pictures") == 0
    assert "## 6. What will prevent perfect scaling" in memo.read_text()
    assert "Memory of a device" in capsys.readouterr().out
    assert page.read_text().lower().startswith("<!doctype html>")
    assert run("plan", *SMALL, "--html", tmp_path / "no" / "plan.html") == 1
    assert "cannot write" in capsys.readouterr().err


def test_calibration_is_refused_on_other_devices_than_the_clusters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", "--cluster", "8x80gb", "--calibrate") == 2
    assert "copy" in capsys.readouterr().err, "a bundled file is not written to"
    mine = tmp_path / "mine.yaml"
    mine.write_text("accelerator: h100-80gb\nnodes: 1\nper_node: 8\n")
    assert run("plan", "--cluster", mine, "--calibrate") == 2
    assert "cpu" in capsys.readouterr().err
    assert "measured" not in mine.read_text()
