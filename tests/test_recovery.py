"""What a run does about bad steps: it skips them whole, goes back, or stops with what it learned.

The model is the decoder with one byte, `#`, whose embedding is NaN; which steps are bad is told by
the data alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import Run, assert_same_bits, learned, stream_of
from jax.experimental.compilation_cache import compilation_cache
from test_replicas import flipped

from spmd_train.checkpoint.manager import Checkpoints
from spmd_train.cli import main
from spmd_train.config import load
from spmd_train.data.stream import open_stream
from spmd_train.recovery import Recovery
from spmd_train.runs import RunDirectory
from spmd_train.state import TrainState
from spmd_train.telemetry.records import read_jsonl

LENGTH, SIZE, WINDOWS = 8, 4, 200
SETS = (
    *("model.block=own_model:poisoned", "model.tied=false", "model.layers=2", "model.width=16"),
    *("model.heads=2", "model.kv_heads=2", "model.ffn=16", f"batch.sequence_length={LENGTH}"),
    *(f"batch.global_size={SIZE}", "batch.microbatches=2", "optim.lr=1e-2", "guard.diagnoses=0"),
)


@pytest.fixture(scope="module", autouse=True)
def one_compilation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """These runs differ in what is done around one and the same compiled step."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("cache")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two bad windows, in steps 5 and 6 of the stream, which start at its position 4 x SIZE."""
    clean = np.random.default_rng(0).integers(97, 123, WINDOWS * LENGTH + 1).astype(np.uint8)
    order = stream_of(clean, LENGTH, SIZE, 0)
    for step in (4, 5):
        clean[order.sample_ids(step)[0] * LENGTH + 3] = ord("#")
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(clean.tobytes())
    return path


def sets(text: Path, *more: str) -> list[str]:
    return [*SETS, f"data.source={text}", *more]


def train(out: Path, text: Path, *more: str, mesh: str = "1x1x1", steps: int = 9) -> int:
    flags = [part for s in sets(text, *more) for part in ("--set", s)]
    return main(["--mesh", mesh, "--steps", str(steps), "--out", str(out), *flags])


def events(out: Path, name: str) -> list[dict]:
    return [e for e in read_jsonl(out / "events.jsonl") if e["event"] == name]


def by_hand(text: Path, steps: list[int], mesh: str = "1x1x1", total: int = 9) -> object:
    """What training on these steps' batches alone learns, with the very step that runs."""
    config = load(None, sets(text), mesh=mesh, steps=total)
    reference = Run(config, {})
    stream = open_stream(config)
    state = reference.spec.init(config.seed)
    for step in steps:
        rows = stream.rows(stream.sample_ids(step)).tokens
        state, _ = reference(state, reference.batch(rows, np.full(SIZE, LENGTH)))
    return learned(state)


def saved(out: Path, mesh: str = "1x1x1") -> object:
    """What the newest checkpoint of a run holds."""
    spec = Run(load(out / "config.yaml", mesh=mesh)).spec
    with Checkpoints(RunDirectory(out).checkpoints, read_only=True) as checkpoints:
        state = checkpoints.restore(checkpoints.steps()[-1], spec.abstract_canonical())
    return learned(spec.from_canonical(state))


@pytest.mark.parametrize("mesh", ["1x1x1", "2x2x2"])
def test_a_bad_step_is_as_if_it_had_never_been(mesh: str, tmp_path: Path, text: Path) -> None:
    out = tmp_path / "run"
    assert train(out, text, mesh=mesh) == 0
    records = read_jsonl(out / "metrics.jsonl")
    assert [r["step"] for r in records if r["skipped"]] == [5, 6]
    assert records[4]["loss"] == "nan"
    skipped = events(out, "skipped")
    assert [(e["step"], e["reason"], e["in_a_row"]) for e in skipped] == [
        (5, "not finite", 1), (6, "not finite", 2),
    ]  # fmt: skip
    # A skipped step does not advance the schedule: P24.
    assert records[4]["lr"] == records[5]["lr"] == records[6]["lr"]
    assert_same_bits(saved(out, mesh), by_hand(text, [0, 1, 2, 3, 6, 7, 8], mesh))


def test_too_many_in_a_row_end_the_run_with_what_it_had_learned(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert train(out, text, "guard.max_consecutive_skips=2", "guard.diagnoses=1") == 1
    message = capsys.readouterr().err
    assert "step 6: the last 2 steps were all skipped (not finite)" in message
    assert "saved as step 6" in message
    first, second = events(out, "skipped")
    assert "finding" not in second, "as many as were asked for"
    finding = first["finding"]
    assert finding["says"] in message
    assert (finding["cause"], finding["float32_finite"]) == ("data", False)
    assert finding["first"]["tensor"] == "embedding"
    assert finding["first"]["rows"] == [0]
    assert_same_bits(saved(out), by_hand(text, [0, 1, 2, 3]))
    assert main(["--out", str(out), "--resume"]) == 0, "the data goes on behind what was bad"
    assert_same_bits(saved(out), by_hand(text, [0, 1, 2, 3, 6, 7, 8]))


def test_replicas_that_differ_end_the_run(
    tmp_path: Path,
    text: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bit of one replica flipped after the second step: named before the third."""
    out, compare = tmp_path / "run", Recovery.compare_replicas

    def flip_then_compare(recovery: Recovery, state: TrainState) -> None:
        if int(state.step) == 2:
            state = flipped(state, "params/blocks/mlp/gate", device=1, bit=0)
        compare(recovery, state)

    monkeypatch.setattr(Recovery, "compare_replicas", flip_then_compare)
    assert train(out, text, "guard.replicas_every=1", "batch.microbatches=1", mesh="4x1x1") == 1
    message = capsys.readouterr().err
    assert "step 2: params/blocks/mlp/gate on device 1" in message
    (event,) = events(out, "replicas")
    assert event["findings"][0]["device"] == 1
    assert not list((out / "checkpoints").glob("[0-9]*"))


def test_rollback_goes_on_behind_the_bad_data(tmp_path: Path, text: Path) -> None:
    """PaLM's practice: an earlier checkpoint, and the data in between left out."""
    out = tmp_path / "run"
    assert train(out, text, "guard.rollback_after=2", "checkpoint.every_steps=3") == 0
    (rollback,) = events(out, "rollback")
    assert (rollback["step"], rollback["to"], rollback["data_left_out"]) == (6, 3, [4, 6])
    assert [r["step"] for r in read_jsonl(out / "metrics.jsonl")] == list(range(1, 10))
    assert_same_bits(saved(out), by_hand(text, [0, 1, 2, 6, 7, 8]))


def test_rollback_that_does_not_help_ends_the_run(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "a", text, "guard.rollback_after=1") == 1
    assert "no checkpoint to go back to" in capsys.readouterr().err
    more = ("guard.rollback_after=1", "checkpoint.every_steps=2")
    assert train(tmp_path / "b", text, *more) == 1
    assert "again after going back to 4" in capsys.readouterr().err


def test_weights_that_are_not_finite_are_never_saved(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint damaged outside: every step is bad, and the run ends without another save."""
    out = tmp_path / "run"
    assert train(out, text, "guard.max_consecutive_skips=2", steps=3) == 0
    config = load(out / "config.yaml")
    spec = Run(config).spec
    with Checkpoints(RunDirectory(out).checkpoints) as checkpoints:
        state = checkpoints.restore(3, spec.abstract_canonical())
        table = state["params"]["embed"]["table"]
        state["params"]["embed"]["table"] = jax.device_put(
            table.at[100].set(np.nan), table.sharding
        )
        checkpoints.save(4, state, checkpoints.meta(3))
    assert main(["--out", str(out), "--resume", "--steps", "9"]) == 1
    assert "nothing was saved, since the weights themselves" in capsys.readouterr().err
    assert sorted(int(p.name) for p in (out / "checkpoints").iterdir()) == [3, 4]


@pytest.mark.slow
def test_spikes_are_skipped_when_asked(tmp_path: Path, text: Path) -> None:
    """A window's worth of steps, then a learning rate that shakes the loss: some are spikes."""
    clean = tmp_path / "clean.txt"
    clean.write_bytes(text.read_bytes().replace(b"#", b"a"))
    out = tmp_path / "run"
    guard = ("guard.spike_sigma=1.0", "guard.spike_window=8")
    assert train(out, clean, *guard, steps=30) == 0
    records = read_jsonl(out / "metrics.jsonl")
    expected = []
    for i, record in enumerate(records):
        series = [[r[k] for r in records[max(0, i - 8) : i]] for k in ("loss", "grad_norm")]
        expected.append(
            i >= 4
            and any(
                record[k] - np.mean(s) > np.std(s, ddof=1)
                for k, s in zip(("loss", "grad_norm"), series, strict=True)
            )
        )
    assert [r["skipped"] for r in records] == expected
    assert 0 < sum(expected) < 20
    assert {e["reason"] for e in events(out, "skipped")} == {"spike"}
