"""Leaving when asked: SIGTERM or Ctrl-C ends a run after a whole step, the same on all processes.

    signal in any process --> wake-up pipe --> a thread --> notice on the board of the run
    every process, after every step: reached()?      <-- JAX's preemption protocol <--'

JAX's protocol takes the highest step that any process has reported and stops all of them at the
next one (`multihost_utils.reached_preemption_sync_point`). Its steps are here the times that a
process has asked, since a long evaluation asks too. JAX also begins it on a SIGTERM of its
own handler; ours replaces that one, since it knows neither Ctrl-C nor a second signal.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from jax.experimental import multihost_utils

from spmd_train.distributed import Board, BoardLostError
from spmd_train.errors import end_process

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_SAME_SECONDS = 1.0
"""A signal this soon after the first is the same one by another way (launcher and terminal)."""

_NOTICE = "RECEIVED_PREEMPTION_NOTICE"
"""Where JAX's protocol looks for the time of death, RFC 3339 (xla, preemption_sync_manager.cc)."""

_RECEIVED = "spmd_train/signals/"


class Preemption:
    """Whether this run was asked to leave. Signals are caught within the `with` block.

    The first one is answered at the next step that all processes can agree on, a second one by
    leaving at once with status 128 + its number. Outside the main thread nothing is caught.
    """

    def __init__(self, board: Board | None = None) -> None:
        self._board = board
        self._received: signal.Signals | None = None
        self._asked = 0
        self._leaving = False
        self._counting = threading.Event()

    def reached(self) -> bool:
        """Whether to save and leave now; once it is, it stays so.

        All processes ask at the same points of the run, and get the same answer.
        """
        if self._board is None:
            return self._received is not None
        if not self._leaving:
            self._asked += 1
            self._leaving = multihost_utils.reached_preemption_sync_point(self._asked)
            self._counting.set()
        return self._leaving

    def described(self) -> dict[str, Any]:
        """Which signal, and which processes got it; both empty where JAX itself gave notice."""
        if self._board is None:
            got = {0: self._received.name} if self._received else {}
        else:
            pairs = (text.split() for text in self._board.read_all(_RECEIVED))
            got = {int(process): name for process, name in pairs}
        return {"signal": next(iter(got.values()), None), "processes": sorted(got)}

    def __enter__(self) -> Preemption:
        self._previous: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            # A handler would run only once the main thread is back in Python, which is never in a
            # collective that hangs. The interpreter writes to the pipe whatever that thread does.
            self._read_end, write_end = os.pipe()
            os.set_blocking(write_end, False)
            self._pipe_before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
            self._previous = {s: signal.signal(s, lambda *_: None) for s in _SIGNALS}
            self._write_end = write_end
            threading.Thread(target=self._listen, name="signals", daemon=True).start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._previous:
            for number, handler in self._previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._pipe_before)
            os.close(self._write_end)  # ends the thread

    def _listen(self) -> None:
        first_at = 0.0
        while number := os.read(self._read_end, 1):
            received = signal.Signals(number[0])
            if received not in _SIGNALS:
                continue
            if self._received is None:
                self._received, first_at = received, time.monotonic()
                says = f"{received.name}: saving and leaving after this step; again: at once"
                os.write(2, f"{says}\n".encode())
                threading.Thread(target=self._give_notice, args=(received,), daemon=True).start()
            elif time.monotonic() - first_at > _SAME_SECONDS:
                end_process(f"{received.name} again: leaving without saving", 128 + received)
        os.close(self._read_end)

    def _give_notice(self, received: signal.Signals) -> None:
        """Begin the protocol, but not before this process counts its steps.

        A process that has not yet reported one counts as being at step 0 (JAX 0.10 and 0.12): where
        another has begun to ask, all would agree on a step that it has passed.
        """
        if self._board is None:
            return
        self._counting.wait()
        with suppress(BoardLostError):  # the watchdog says so
            self._board.post(
                f"{_RECEIVED}{self._board.process}", f"{self._board.process} {received.name}"
            )
            self._board.post(_NOTICE, datetime.now(UTC).isoformat())
