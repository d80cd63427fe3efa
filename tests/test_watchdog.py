"""Who is to blame: the judging as a pure function, two watchdogs on a table, real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from commands import events, losses
from processes import (
    SLOW_DATA,
    arguments,
    environment,
    finish,
    start,
    wait_for_steps,
)

from spmd_train import watchdog as module
from spmd_train.cli import main
from spmd_train.config_groups import WatchdogConfig
from spmd_train.distributed import BoardLostError
from spmd_train.errors import RunError
from spmd_train.telemetry.records import read_jsonl
from spmd_train.watchdog import Seen, Sign, Watchdog, judge

LIMITS = WatchdogConfig(silent_seconds=60, stalled_seconds=600)


def sign(process: int, mark: int = 7, doing: str = "running step 2", seconds: float = 0) -> Sign:
    return Sign(process, f"host{process}", doing, timed=True, mark=mark, seconds=seconds)


def fresh(*signs: Sign) -> list[Seen]:
    return [Seen(s, 1.0) for s in signs]


def message(own: Sign, others: list[Seen], **changes: Any) -> str | None:
    verdict = judge(own, others, LIMITS.model_copy(update=changes))
    return None if verdict is None else f"{verdict.kind}: {verdict.message}"


def test_a_silent_process_is_named() -> None:
    waiting = sign(0, seconds=61)
    assert message(waiting, [Seen(sign(1), 59), Seen(sign(2), 59)]) is None
    assert message(waiting, [Seen(sign(1), 2), Seen(sign(2), 61)]) == (
        "silent: process 2 (host2) has given no sign of life for 61 s; "
        "the last one said: running step 2"
    )
    both = message(waiting, [Seen(sign(1), 61), Seen(sign(2), 61)])
    assert both is not None
    assert both.count("no sign of life") == 2
    assert message(waiting, [Seen(sign(2), 61)], silent_seconds=0) is None
    assert message(waiting, [Seen(sign(2, doing="done"), 61)]) is None


def test_nobody_is_silent_while_this_process_gets_on() -> None:
    assert message(sign(0, seconds=3), [Seen(sign(1), 61)]) is None


def test_process_0_is_named_by_the_others() -> None:
    seen = [Seen(sign(0, doing="saving step 40"), 61)]
    said = message(sign(1, seconds=61), seen)
    assert said is not None
    assert "process 0 (host0)" in said
    assert "saving step 40" in said


CURE = "if that is usual here, raise watchdog.stalled_seconds=600"


def test_a_stalled_process_is_the_one_that_is_behind() -> None:
    reading = sign(1, 6, "reading data for step 2", 610)
    others = fresh(reading, sign(2, seconds=609), sign(3, seconds=609))
    assert message(sign(0, seconds=609), others) == (
        "stalled: process 1 (host1) has been reading data for step 2 for 610 s; "
        f"processes 0, 2, 3 wait, running step 2; {CURE}"
    )
    assert message(sign(0, seconds=609), others, stalled_seconds=0) is None
    # Those that wait may wait for longer than the limit, as long as the one behind gets on.
    patient = fresh(replace(reading, seconds=1), sign(2, seconds=609))
    assert message(sign(0, seconds=609), patient) is None


def test_all_may_hang_together() -> None:
    hung = [sign(p, seconds=601) for p in range(2)]
    assert message(hung[0], fresh(hung[1])) == (
        f"stalled: processes 0, 1 have been running step 2 for 601 s; {CURE}"
    )
    assert message(sign(0, doing="reading data for step 2", seconds=601), []) == (
        f"stalled: process 0 (host0) has been reading data for step 2 for 601 s; {CURE}"
    )


def test_untimed_work_and_slow_machines_do_not_stall() -> None:
    compiling = replace(sign(1, 2, "compiling", 5000), timed=False)
    assert message(sign(0, seconds=5000), fresh(compiling)) is None
    slow = sign(0, seconds=900)
    assert judge(slow, [], LIMITS, usual_seconds=200) is None
    assert judge(slow, [], LIMITS, usual_seconds=100) is not None


def test_only_process_0_knows_enough_to_call_a_stall() -> None:
    assert message(sign(1, seconds=900), fresh(sign(0, 8, seconds=900))) is None


# ------------------------------------------------------------------- two watchdogs, no processes


class Table:
    """A board for threads; `post` of a process that was cut off never comes back."""

    address = "nowhere:1"
    processes = 2

    def __init__(self, process: int, texts: dict[str, str], lost: threading.Event) -> None:
        self.process, self.texts, self.lost = process, texts, lost

    def post(self, name: str, text: str) -> None:
        self._check()
        self.texts[name] = text

    def post_first(self, name: str, text: str) -> None:
        self.texts.setdefault(name, text)

    def read_all(self, prefix: str) -> list[str]:
        self._check()
        return [text for name, text in [*self.texts.items()] if name.startswith(prefix)]

    def wait_for(self, name: str, seconds: float) -> str | None:
        time.sleep(seconds)
        self._check()
        return self.texts.get(name)

    def answers(self) -> bool:
        return not self.lost.is_set()

    def _check(self) -> None:
        if self.lost.is_set():
            raise BoardLostError("connection reset")


class Ended:
    """What each watchdog said in place of ending the process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: dict[int, str] = {}
        self._anything = threading.Event()
        monkeypatch.setattr(module, "end_process", self._end)
        monkeypatch.setattr(module, "_GRACE_SECONDS", 0.01)

    def _end(self, message: str, status: int) -> None:
        assert status == 1
        self.said[int(threading.current_thread().name)] = message
        self._anything.set()
        raise SystemExit  # ends the thread only

    def wait(self) -> dict[int, str]:
        assert self._anything.wait(60)
        return self.said


ends_a_thread = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Ended:
    return Ended(monkeypatch)


def pair(tmp_path: Path, lost: threading.Event, **limits: float) -> list[Watchdog]:
    texts: dict[str, str] = {}
    both = []
    for process in range(2):
        table: Any = Table(process, texts, lost)
        both.append(Watchdog(WatchdogConfig(**limits), tmp_path, table))
        both[-1]._threads[0].name = str(process)
    return both


@ends_a_thread
def test_a_failure_is_told_with_its_reason(tmp_path: Path, ended: Ended) -> None:
    first, second = pair(tmp_path, threading.Event())
    with first:
        with pytest.raises(RunError), second:
            raise RunError("step 4: nothing works")
        said = ended.wait()
    assert set(said) == {0}, "the one that failed prints its error itself"
    assert said[0].startswith("failed: process 1 (")
    assert said[0].endswith("failed: step 4: nothing works")
    (event,) = read_jsonl(tmp_path / "events.jsonl")
    assert (event["event"], event["reason"], event["kind"]) == ("stop", "watchdog", "failed")


@ends_a_thread
def test_a_process_that_lost_contact_waits_for_the_name_of_the_dead(
    tmp_path: Path, ended: Ended
) -> None:
    """Process 1 never gives a sign; process 0 sees it as a broken collective only."""
    first, _ = pair(tmp_path, threading.Event(), silent_seconds=1)
    first._seen[1] = (sign(1, doing="running step 9"), 0.0)

    def work() -> None:
        with first:
            raise jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: connection reset")

    threading.Thread(target=work, daemon=True).start()
    ended.wait()
    assert "process 1 (host1) has given no sign of life" in ended.said[0]
    assert ended.said[0].endswith("running step 9")


@ends_a_thread
def test_the_loss_of_process_0_is_told_at_once(tmp_path: Path, ended: Ended) -> None:
    lost = threading.Event()
    _, second = pair(tmp_path, lost)
    with second:
        lost.set()
        said = ended.wait()
    assert said == {
        1: "failed: process 0 (host unknown) is gone: nothing answers at nowhere:1; "
        "the last it said: starting"
    }


def test_nothing_is_said_of_processes_that_have_finished(tmp_path: Path, ended: Ended) -> None:
    first, second = pair(tmp_path, threading.Event(), silent_seconds=1, stalled_seconds=0)
    with first:
        with second:
            second.mark("running step 1")
        time.sleep(3)
    assert first._seen[1][0].doing == "done"
    assert not ended.said


def test_time_in_which_a_process_was_stopped_does_not_count(
    tmp_path: Path, ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-Z for an hour, then fg: the clock jumps, but nothing hung."""
    with Watchdog(WatchdogConfig(stalled_seconds=600), tmp_path) as watchdog:
        now = time.monotonic
        monkeypatch.setattr(module.time, "monotonic", lambda: now() + 3600)
        until = now() + 3
        while now() < until:
            time.sleep(0.1)
    assert watchdog._sign().seconds < 600
    assert not ended.said


def test_what_may_be_the_fault_of_another_process() -> None:
    runtime = jax.errors.JaxRuntimeError
    wrapped = RunError("saving failed")
    wrapped.__cause__ = runtime("DEADLINE_EXCEEDED: Barrier timed out")
    assert module._perhaps_by_another(runtime("UNKNOWN: Gloo all-reduce failed"))
    assert module._perhaps_by_another(wrapped)
    assert not module._perhaps_by_another(runtime("RESOURCE_EXHAUSTED: out of memory"))
    assert not module._perhaps_by_another(RunError("step 4: the last 3 steps were all skipped"))


# --------------------------------------------------------------------------------- real processes

HANGS = SLOW_DATA.replace("0.2", "10_000 if step == 9 else 0.2")
FAILS = SLOW_DATA.replace("time.sleep(0.2)", "{}['the shard'] if step == 9 else time.sleep(0.2)")
QUICK = ("watchdog.silent_seconds=4", "watchdog.stalled_seconds=8")


def test_a_killed_process_is_named_and_the_run_goes_on_with_another(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = arguments(out, "2x1x1", 12, *QUICK, "checkpoint.every_steps=4")
    running = start(words, processes=2, first=SLOW_DATA)
    wait_for_steps(out, 6, running)
    running[1].kill()
    statuses, errors = finish(running)
    assert statuses == [1, -signal.SIGKILL], errors
    last_line = errors[0].splitlines()[-1]
    assert last_line.startswith("failed: process 1 (")
    assert "has given no sign of life" in last_line
    assert "the last one said: " in last_line
    (stop,) = events(out, "stop")
    assert (stop["reason"], stop["kind"]) == ("watchdog", "silent")
    assert f"failed: {stop['message']}" == last_line
    other = ["--mesh", "1x1x1", "--set", "watchdog.silent_seconds=60"]
    assert main(["--resume", "--out", str(out), *other]) == 0
    assert len(losses(out)) == 12


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_frozen_process_is_named(victim: int, tmp_path: Path) -> None:
    out = tmp_path / "run"
    running = start(arguments(out, "2x1x1", 100, *QUICK), processes=2, first=SLOW_DATA)
    wait_for_steps(out, 6, running)
    running[victim].send_signal(signal.SIGSTOP)
    statuses, errors = finish(running, but=victim)
    assert statuses[1 - victim] == 1
    last_line = errors[1 - victim].splitlines()[-1]
    assert last_line.startswith(f"failed: process {victim} (")
    assert "has given no sign of life" in last_line


@pytest.mark.slow
def test_the_end_of_process_0_is_named_before_jax_aborts(tmp_path: Path) -> None:
    out = tmp_path / "run"
    running = start(arguments(out, "2x1x1", 100, *QUICK), processes=2, first=SLOW_DATA)
    wait_for_steps(out, 6, running)
    running[0].kill()
    statuses, errors = finish(running)
    assert statuses == [-signal.SIGKILL, 1], errors
    assert "failed: process 0 (" in errors[1]
    assert "is gone: nothing answers at 127.0.0.1:" in errors[1]


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "victim"), [(2, 0), (2, 1), (1, 0)])
def test_a_hanging_read_is_named_with_its_stack(
    processes: int, victim: int, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    words = arguments(out, f"{processes}x1x1", 100, *QUICK)
    statuses, errors = finish(start(words, processes, first=HANGS, only_in=victim))
    assert statuses == [1] * processes, errors
    for error in errors:
        last_line = error.splitlines()[-1]
        assert last_line.startswith(f"failed: process {victim} (")
        assert "has been reading data for step 10 for" in last_line
    assert "in slow_rows" in errors[victim]
    assert len(losses(out)) == 9
    assert [e["kind"] for e in events(out, "stop")] == ["stalled"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_an_exception_in_one_process_is_the_reason_of_all(victim: int, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = arguments(out, "2x1x1", 100, *QUICK)
    statuses, errors = finish(start(words, 2, first=FAILS, only_in=victim))
    assert statuses == [1, 1], errors
    assert errors[victim].splitlines()[-1] == "KeyError: 'the shard'"
    last_line = errors[1 - victim].splitlines()[-1]
    assert last_line.startswith(f"failed: process {victim} (")
    assert last_line.endswith("failed: KeyError('the shard')")


@pytest.mark.slow
def test_processes_that_wait_for_one_that_is_not_started_say_so() -> None:
    code = "import spmd_train.distributed as d; d._JOIN_SECONDS = 3; d.join_processes(60)"
    address = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:38999", "JAX_NUM_PROCESSES": "2"}
    alone = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(JAX_PROCESS_ID="0", JAX_PLATFORMS="cpu", **address),
        capture_output=True,
        text=True,
    )
    assert alone.returncode == 1, alone.stderr
    assert "not all of the 2 processes have joined at 127.0.0.1:38999 in 3 s" in alone.stderr
