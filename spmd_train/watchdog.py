"""Ends a run that hangs or has lost a process, and says which process and why.

    process 0   --sign-->  board  <--sign--   process 1       every few seconds, a daemon thread:
         <--all signs--      |   --sign of 0-->               "running step 41", mark 130, 2.3 s
                             v
                          verdict --> every process: one line, exit status 1

Process 0 judges the others and each of the others judges process 0, which holds the board
(`distributed.Board`). Nothing compares the clocks of two machines: a sign is old once the reader
has not seen it change for long. JAX's own remedies come later and name no cause: it aborts all
processes when one sends no heartbeat, and those that are left when process 0 dies.
"""

from __future__ import annotations

import faulthandler
import json
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import jax

from spmd_train.config_groups import WatchdogConfig
from spmd_train.distributed import Board, BoardLostError, on_abort
from spmd_train.errors import RequestError, RunError, end_process, listed
from spmd_train.telemetry.records import RunLog

_SIGNS = "spmd_train/signs/"
_VERDICT = "spmd_train/verdict"

_DONE = "done"

_USUAL = 5
"""No stall is called before so many times the slowest piece of work but one: the first step, which
connects the devices, is no measure."""

_GRACE_SECONDS = 1.5
"""How long a process may have for its own error, which says more than the news of another's."""


@dataclass(frozen=True)
class Sign:
    """What a process tells of itself.

    Attributes:
        doing: as in "running step 41". timed: whether that may count as a stall.
        mark: how often `doing` has changed. It changes alike on all processes, so the process with
            the lowest mark is the one that the others wait for.
        seconds: how long it has been doing that, by its own clock.
    """

    process: int
    host: str
    doing: str
    timed: bool
    mark: int
    seconds: float

    @property
    def name(self) -> str:
        return f"process {self.process} ({self.host})"


@dataclass(frozen=True)
class Seen:
    """The last sign seen of another process, and for how many seconds it has not changed."""

    sign: Sign
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """Why the run ends."""

    kind: Literal["silent", "stalled", "failed", "lost"]
    message: str


def judge(
    own: Sign, others: Iterable[Seen], limits: WatchdogConfig, usual_seconds: float = 0.0
) -> Verdict | None:
    """What is wrong, if anything is.

    Args:
        others: those this process watches; process 0 watches all, the others watch process 0.
        usual_seconds: what a slow piece of work takes when all is well.
    """
    working = [seen for seen in others if seen.sign.doing != _DONE]
    silent = [seen for seen in working if seen.seconds > limits.silent_seconds]
    # While this process gets on with its work, so do the others: a step needs all of them.
    if limits.silent_seconds and silent and own.seconds > limits.silent_seconds / 4:
        return Verdict("silent", _silence(silent))
    judges_all = own.process == 0
    if limits.stalled_seconds and judges_all:
        limit = max(limits.stalled_seconds, _USUAL * usual_seconds)
        signs = [own, *(seen.sign for seen in working)]
        behind = [sign for sign in signs if sign.mark == min(s.mark for s in signs)]
        if all(sign.timed and sign.seconds > limit for sign in behind):
            waiting = [sign for sign in signs if sign not in behind]
            return Verdict("stalled", _stall(behind, waiting, limits.stalled_seconds))
    return None


def _silence(silent: list[Seen]) -> str:
    return "; ".join(
        f"{seen.sign.name} has given no sign of life for {seen.seconds:.0f} s; "
        f"the last one said: {seen.sign.doing}"
        for seen in silent
    )


def _stall(behind: list[Sign], waiting: list[Sign], stalled_seconds: float) -> str:
    have = "have" if len(behind) > 1 else "has"
    seconds = min(sign.seconds for sign in behind)
    says = f"{_names(behind)} {have} been {behind[0].doing} for {seconds:.0f} s"
    for doing, group in groupby(sorted(waiting, key=lambda s: s.doing), key=lambda s: s.doing):
        signs = list(group)
        says += f"; {_names(signs)} {'wait' if len(signs) > 1 else 'waits'}, {doing}"
    return f"{says}; if that is usual here, raise watchdog.stalled_seconds={stalled_seconds:g}"


def _names(signs: list[Sign]) -> str:
    if len(signs) == 1:
        return signs[0].name
    return f"processes {listed(sign.process for sign in signs)}"


class Watchdog:
    """Watches one process's work and the other processes, within a `with` block.

    The work calls `mark` whenever it turns to something else. An exception that leaves the block
    is told to the other processes. A verdict is written to the events in `run_path`.
    """

    def __init__(self, limits: WatchdogConfig, run_path: Path, board: Board | None = None) -> None:
        self._limits = limits
        self._run_path = run_path
        self._board = board
        self._process = 0 if board is None else board.process
        self._host = socket.gethostname()
        shortest = min(filter(None, (limits.silent_seconds, limits.stalled_seconds)), default=60)
        self._beat_seconds = min(max(shortest / 12, 0.2), 5.0)
        self._judge_seconds = min(self._beat_seconds, 1.0)
        self._awake_seconds = 0.0
        self._work = ("starting", True, 0, 0.0)  # doing, timed, mark, since
        self._two_slowest_seconds = [0.0, 0.0]
        self._seen = {} if board is None else _unseen(board)
        self._known: Verdict | None = None
        self._closing = threading.Event()
        self._until_closed = ExitStack()
        self._last_word = threading.Lock()
        self._threads = [threading.Thread(target=self._watch, name="watchdog", daemon=True)]
        if board is not None:
            tell = threading.Thread(target=self._tell, args=(board,), name="signs", daemon=True)
            self._threads.append(tell)

    def mark(self, doing: str, *, timed: bool = True) -> None:
        """Say what is done from now on, alike on all processes; untimed may take for ever."""
        _, was_timed, number, since = self._work
        if was_timed:
            took = self._awake_seconds - since
            self._two_slowest_seconds = sorted((*self._two_slowest_seconds, took))[1:]
        self._work = (doing, timed, number + 1, self._awake_seconds)

    def __enter__(self) -> Watchdog:
        if self._process != 0:
            self._until_closed.enter_context(on_abort(self._explain_abort))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._board is not None and error is not None:
            self._tell_failure(self._board, error)
        self._closing.set()
        for thread in self._threads:
            thread.join(2 * self._beat_seconds)
        if self._board is not None and error is None:
            self.mark(_DONE)
            with suppress(BoardLostError):
                self._post_sign(self._board)
            self._until_closed.close()

    # ------------------------------------------------------------------------------- two threads

    def _tell(self, board: Board) -> None:
        """Post own signs and read those of others. Blocks for as long as process 0 is frozen."""
        watched = _SIGNS if self._process == 0 else f"{_SIGNS}0/"
        while not self._closing.is_set():
            try:
                self._post_sign(board)
                signs = [Sign(**json.loads(text)) for text in board.read_all(watched)]
            except BoardLostError:
                return  # the other thread says so
            for sign in signs:
                if sign.process != self._process and sign != self._seen[sign.process][0]:
                    self._seen[sign.process] = (sign, self._awake_seconds)
            self._closing.wait(self._beat_seconds)

    def _watch(self) -> None:
        """Judge, and take note of the verdict of others. Never blocks for long."""
        before = time.monotonic()
        while not self._closing.is_set():
            verdict = self._verdict()
            if verdict is not None and not self._closing.is_set():
                self._leave(verdict)
            # Time in which this process was stopped or starved itself is nobody's silence.
            now = time.monotonic()
            self._awake_seconds += min(now - before, 2 * self._judge_seconds)
            before = now

    def _verdict(self) -> Verdict | None:
        if self._board is None:
            self._closing.wait(self._judge_seconds)
        else:
            try:
                text = self._board.wait_for(_VERDICT, self._judge_seconds)
            except BoardLostError:
                return self._loss(self._board)
            if text is not None:
                return Verdict(**json.loads(text))
        others = [Seen(sign, self._awake_seconds - since) for sign, since in self._seen.values()]
        return judge(self._sign(), others, self._limits, self._two_slowest_seconds[0])

    def _leave(self, verdict: Verdict) -> None:
        """End this process; process 0, with which the board ends, as the last."""
        self._known = verdict
        main = self._process == 0
        if main and self._board is not None:
            self._board.post_first(_VERDICT, json.dumps(asdict(verdict)))
        if verdict.kind != "lost":
            time.sleep(_GRACE_SECONDS)
        self._last_word.acquire()
        if verdict.kind == "stalled":
            faulthandler.dump_traceback(all_threads=True)
        if main:
            with suppress(RunError), RunLog(self._run_path) as log:
                log.event("stop", reason="watchdog", **asdict(verdict))
            self._let_others_leave()
        end_process(f"failed: {verdict.message}", 1)

    def _explain_abort(self) -> None:
        """Where JAX aborts because process 0 is gone, be first. Anything else may abort."""
        assert self._board is not None
        if not self._board.answers():
            verdict = self._known or self._loss(self._board)
            self._last_word.acquire()
            end_process(f"failed: {verdict.message}", 1)

    def _loss(self, board: Board) -> Verdict:
        sign, _ = self._seen[0]
        return Verdict(
            "lost",
            f"{sign.name} is gone: nothing answers at {board.address}; "
            f"the last it said: {sign.doing}",
        )

    # ------------------------------------------------------------------------- the thread at work

    def _tell_failure(self, board: Board, error: BaseException) -> None:
        """Tell the others why this process ends, unless it does so because of one of them."""
        if self._limits.silent_seconds and _perhaps_by_another(error):
            # Twice what it needs: a verdict about another ends this process while it waits here.
            self._threads[0].join(2 * (self._limits.silent_seconds + 4 * self._beat_seconds))
        self._last_word.acquire()  # and keep it: the command line prints the error
        says = str(error) if isinstance(error, (RequestError, RunError)) else repr(error)
        verdict = Verdict("failed", f"{self._sign().name} failed: {says}")
        board.post_first(_VERDICT, json.dumps(asdict(verdict)))
        self._let_others_leave()

    def _let_others_leave(self) -> None:
        if self._process == 0 and self._board is not None:
            time.sleep(2 * _GRACE_SECONDS)

    def _post_sign(self, board: Board) -> None:
        board.post(f"{_SIGNS}{self._process}/sign", json.dumps(asdict(self._sign())))

    def _sign(self) -> Sign:
        doing, timed, mark, since = self._work
        seconds = self._awake_seconds - since
        return Sign(self._process, self._host, doing, timed, mark, seconds)


def _unseen(board: Board) -> dict[int, tuple[Sign, float]]:
    """The processes that `board.process` watches, before their first sign."""
    watched = range(1, board.processes) if board.process == 0 else [0]
    return {p: (Sign(p, "host unknown", "starting", True, 0, 0.0), 0.0) for p in watched}


def _perhaps_by_another(error: BaseException | None) -> bool:
    """Whether a collective or a barrier failed: the process that raises is not the one to blame."""
    while error is not None:
        if isinstance(error, (jax.errors.JaxRuntimeError, TimeoutError)):
            return "RESOURCE_EXHAUSTED" not in str(error)  # out of memory is one's own
        error = error.__cause__ or error.__context__
    return False
