"""scripts/supervise: with a stand-in for the trainer that follows a script, and with the real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest
from commands import losses
from processes import ROOT, SLOW_DATA, arguments, environment, wait_for_steps

from spmd_train.cli import main

STAND_IN = '''
"""Ends as the next line of its script says: a status, a signal, `save` before it, or `wait`."""
import json, os, pathlib, signal, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
place = {k: v for k, v in os.environ.items() if k.startswith("JAX_")}
starts = out.parent / f"starts{place.get('JAX_PROCESS_ID', '0')}"
number = len(starts.read_text().splitlines()) if starts.exists() else 0
with starts.open("a") as file:
    file.write(json.dumps({"argv": sys.argv[1:], "place": place}) + "\\n")
out.mkdir(exist_ok=True)
(out / "config.yaml").touch()
script = out.parent / f"script{place.get('JAX_PROCESS_ID', '')}"
for word in script.read_text().splitlines()[number].split():
    if word == "save":
        step = out / "checkpoints" / str(number)
        step.mkdir(parents=True)
        (step / "MANIFEST.json").touch()
    elif word == "wait":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        time.sleep(1000)
    elif word.startswith("-"):
        os.kill(os.getpid(), -int(word))
    else:
        sys.exit(int(word))
'''


def supervise(folder: Path, script: str, *options: str, **more: str) -> subprocess.Popen[str]:
    """The supervisor of stand-ins for a trainer; `more` are the scripts of several processes."""
    package = folder / "spmd_train"
    package.mkdir()
    (package / "__init__.py").touch()  # without it, the installed package comes first
    (package / "__main__.py").write_text(STAND_IN)
    for name, lines in {"script": script, **more}.items():
        (folder / name).write_text(lines)
    words = ["--backoff-seconds", "0.1", *options, "--", "train", "--out", str(folder / "run")]
    return subprocess.Popen(
        [sys.executable, str(ROOT / "scripts/supervise"), *words],
        env=os.environ | {"PYTHONPATH": str(folder)},
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    )


def starts(folder: Path, process: int = 0) -> list[dict[str, list[str]]]:
    return [json.loads(line) for line in (folder / f"starts{process}").read_text().splitlines()]


def test_failures_are_restarted_with_resume_until_done(tmp_path: Path) -> None:
    running = supervise(tmp_path, "1\n-9\nsave 1\n1\n0", "--max-restarts", "3")
    _, said = running.communicate(timeout=60)
    assert running.returncode == 0, said
    assert ["--resume" in s["argv"] for s in starts(tmp_path)] == [False, True, True, True, True]
    waits = [line.split(" in ")[1] for line in said.splitlines() if "supervise: restart " in line]
    assert waits == ["0.1 s", "0.2 s", "0.1 s", "0.2 s"], "anew after the new checkpoint"
    assert "ended with status 137" in said


def test_a_wrong_request_is_not_tried_again(tmp_path: Path) -> None:
    running = supervise(tmp_path, "2\n0")
    running.communicate(timeout=60)
    assert running.returncode == 2
    assert len(starts(tmp_path)) == 1


def test_it_gives_up_when_nothing_gets_on(tmp_path: Path) -> None:
    running = supervise(tmp_path, "save 1\n1\n-6\n3\n0", "--max-restarts", "2")
    _, said = running.communicate(timeout=60)
    assert running.returncode == 134, said
    assert len(starts(tmp_path)) == 3
    assert "giving up: 3 starts in a row" in said


def test_processes_get_their_places_and_follow_a_failed_one(tmp_path: Path) -> None:
    options = ("--processes", "2", "--leave-seconds", "0.5")
    running = supervise(tmp_path, "", *options, script0="wait\n0", script1="1\n0")
    _, said = running.communicate(timeout=60)
    assert running.returncode == 0, said
    assert "killing 1 that did not leave" in said
    for process in range(2):
        places = [s["place"] for s in starts(tmp_path, process)]
        assert [p["JAX_PROCESS_ID"] for p in places] == [str(process)] * 2
        assert {p["JAX_NUM_PROCESSES"] for p in places} == {"2"}
        addresses = {p["JAX_COORDINATOR_ADDRESS"] for p in places}
        assert len(addresses) == 2, "a port of its own for each start"


def test_a_signal_is_passed_on(tmp_path: Path) -> None:
    running = supervise(tmp_path, "1\nwait")
    while not (tmp_path / "starts0").exists() or len(starts(tmp_path)) < 2:
        assert running.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)  # the stand-in sets its handler
    running.send_signal(signal.SIGTERM)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 0, said
    assert len(starts(tmp_path)) == 2


def test_it_needs_a_directory() -> None:
    for words in (["--", "train"], ["--", "--out"], ["--processes", "0", "--", "--out=x"]):
        command = [sys.executable, str(ROOT / "scripts/supervise"), *words]
        assert subprocess.run(command, capture_output=True).returncode == 2


def test_a_python_without_the_package_is_refused_at_once(tmp_path: Path) -> None:
    """It would be started, and fail, again and again."""
    venv.create(tmp_path / "bare")
    command = [str(tmp_path / "bare/bin/python"), str(ROOT / "scripts/supervise"), "--", "--out=x"]
    bare = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    ended = subprocess.run(command, capture_output=True, text=True, env=bare, cwd=tmp_path)
    assert ended.returncode == 2
    assert "bare/bin/python has no spmd_train" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_killed_twice_ends_as_if_undisturbed(processes: int, tmp_path: Path) -> None:
    """First before its first checkpoint, then between two."""
    steps, out, whole = 24, tmp_path / "run", tmp_path / "whole"
    assert main(arguments(whole, "1x1x1", steps)) == 0
    sets = ("checkpoint.every_steps=5", "watchdog.silent_seconds=4")
    # The only way to slow down processes that are not ours to start.
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nif 'spmd_train' in sys.orig_argv:\n    exec({SLOW_DATA!r})\n"
    )
    options = ["--processes", str(processes), "--backoff-seconds", "0.1"]
    command = [sys.executable, str(ROOT / "scripts/supervise"), *options, "--"]
    running = subprocess.Popen(
        [*command, *arguments(out, f"{processes}x1x1", steps, *sets)],
        env=environment(PYTHONPATH=f"{tmp_path}:{ROOT}"),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    for after in (2, 8):
        wait_for_steps(out, after, [running])
        victim = children(running.pid)[-1]
        os.kill(victim, signal.SIGKILL)
        while victim in children(running.pid):
            time.sleep(0.05)
        assert len(losses(out)) < steps
    shown, said = running.communicate(timeout=400)
    assert running.returncode == 0, said
    assert said.count("supervise: restart ") == 2
    assert "no complete checkpoint" in shown
    assert len(losses(out)) == steps
    assert losses(out) == pytest.approx(losses(whole), rel=0 if processes == 1 else 1e-5)


def children(pid: int) -> list[int]:
    words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(word) for word in words]
