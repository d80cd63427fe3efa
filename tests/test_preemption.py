"""Signals: a run that was asked to leave and is resumed equals the one that was left alone."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from commands import events, losses, records
from processes import SLOW_DATA, arguments, finish, start, wait_for_steps

from spmd_train.cli import main

STEPS = 24


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All steps, undisturbed, on one device."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert main(arguments(out, "1x1x1", STEPS)) == 0
    return out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_was_told_to_leave_goes_on_as_if_it_had_not(
    number: signal.Signals, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    running = start(arguments(out, "1x1x1", STEPS), first=SLOW_DATA)
    wait_for_steps(out, 3, running)
    running[0].send_signal(number)
    running[0].wait(timeout=300)
    assert running[0].stdout is not None
    assert "--resume" in running[0].stdout.read()
    statuses, errors = finish(running)
    assert statuses == [0], errors
    assert f"{number.name}: saving and leaving" in errors[0]
    step = len(losses(out))
    assert 3 <= step < STEPS
    assert (out / "checkpoints" / str(step)).is_dir()
    (preemption,) = events(out, "preemption")
    assert (preemption["step"], preemption["signal"], preemption["processes"]) == (
        step,
        number.name,
        [0],
    )
    assert events(out, "stop")[-1]["reason"] == "signal"
    assert main(["--resume", "--out", str(out)]) == 0
    assert losses(out) == losses(whole)


def test_one_process_told_stops_all_at_one_step(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    running = start(arguments(out, "2x1x1", STEPS), processes=2, first=SLOW_DATA)
    wait_for_steps(out, 3, running)
    running[1].send_signal(signal.SIGTERM)
    statuses, errors = finish(running)
    assert statuses == [0, 0], errors
    step = len(losses(out))
    assert 3 <= step < STEPS
    (preemption,) = events(out, "preemption")
    assert (preemption["step"], preemption["processes"]) == (step, [1])
    # Orbax commits a step only once both have written it.
    assert (out / "checkpoints" / str(step) / "commit_success.txt").exists()
    assert main(["--resume", "--out", str(out), "--mesh", "1x1x1"]) == 0
    np.testing.assert_allclose(losses(out), losses(whole), rtol=1e-5)


SLOW_EVALUATION = """
import time
from spmd_train.data.heldout import Heldout
rows = Heldout.rows
def slow_rows(heldout, numbers):
    time.sleep(0.3)
    return rows(heldout, numbers)
Heldout.rows = slow_rows
"""


@pytest.mark.slow
def test_an_evaluation_in_two_processes_does_not_delay_leaving(tmp_path: Path) -> None:
    """The one in which a signal came is left out, the others are those of one process."""
    sets = ("data.eval_fraction=0.05", "eval.every_steps=3", "eval.batches=20")
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert main(arguments(whole, "1x1x1", STEPS, *sets)) == 0
    running = start(arguments(out, "2x1x1", STEPS, *sets), processes=2, first=SLOW_EVALUATION)
    wait_for_steps(out, 5, running)
    time.sleep(1)  # of the six seconds that the next takes
    running[1].send_signal(signal.SIGTERM)
    statuses, errors = finish(running)
    assert statuses == [0, 0], errors
    assert [e["step"] for e in events(out, "preemption")] == [6]
    lines = records(out)
    assert [line["step"] for line in lines if "eval_loss" in line] == [3]
    want = records(whole)
    assert lines[2]["eval_loss"] == pytest.approx(want[2]["eval_loss"], rel=1e-5)
    assert lines[2]["eval_tokens"] == want[2]["eval_tokens"] == 20 * 4 * 32
    assert main(["--resume", "--out", str(out), "--mesh", "1x1x1"]) == 0
    assert records(out)[-1]["eval_loss"] == pytest.approx(want[-1]["eval_loss"], rel=1e-5)


def test_a_run_without_a_checkpoint_is_resumed_at_its_start(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out, ignore=shutil.ignore_patterns("checkpoints"))
    assert main(["--resume", "--out", str(out)]) == 0
    assert "no complete checkpoint" in capsys.readouterr().out
    assert len(events(out, "no_checkpoint")) == 1
    assert losses(out) == losses(whole)


@pytest.mark.slow
def test_a_resumed_run_told_before_its_first_step_stops_too(tmp_path: Path) -> None:
    """JAX takes a process that has not yet counted a step to be at step 0, which is past."""
    out = tmp_path / "run"
    words = arguments(out, "2x1x1", STEPS)
    stopped, errors = finish(start([*words, "--stop-after", "5"], processes=2))
    assert stopped == [0, 0], errors
    early = """
import os, signal
import spmd_train.loop as loop
restore = loop._start
def told(*args):
    os.kill(os.getpid(), signal.SIGTERM)
    return restore(*args)
loop._start = told
"""
    running = start([*words, "--resume"], processes=2, first=SLOW_DATA + early)
    statuses, errors = finish(running)
    assert statuses == [0, 0], errors
    assert 5 <= len(losses(out)) < STEPS
    assert events(out, "preemption")[-1]["processes"] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_second_signal_ends_a_run_that_hangs(processes: int, tmp_path: Path) -> None:
    """The main thread is in a read that never ends: no handler of Python's own would run."""
    out = tmp_path / "run"
    hangs = SLOW_DATA.replace("0.2", "0.2 if step < 3 else 10_000")
    running = start(arguments(out, f"{processes}x1x1", STEPS), processes, first=hangs)
    wait_for_steps(out, 3, running)
    for process in running:
        process.send_signal(signal.SIGTERM)
    time.sleep(2)
    assert all(process.poll() is None for process in running)
    for process in running:
        process.send_signal(signal.SIGTERM)
    statuses, errors = finish(running)
    assert 128 + signal.SIGTERM in statuses
    assert 0 not in statuses
    assert "leaving without saving" in "".join(errors)
    assert not events(out, "checkpoint")
