"""Several processes as one run: JAX's own environment variables, or nothing."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all, sync_global_devices

from spmd_train.errors import RequestError, end_process

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")

_JOIN_SECONDS = 300
"""How long processes wait for each other at the start (JAX's own default)."""


class BoardLostError(Exception):
    """Process 0, which holds the board, does not answer any more."""


@dataclass(frozen=True)
class Board:
    """Small texts by name, seen by every process of the run: JAX's coordination service.

    It lives in process 0 and ends with it. JAX has no public name for its client (0.10 to 0.12),
    so this class is the only place that touches it.
    """

    client: Any
    process: int
    processes: int
    address: str

    def post(self, name: str, text: str) -> None:
        """Write, or write anew. Blocks for as long as process 0 is frozen."""
        with _losing_the_board():
            self.client.key_value_set(name, text, allow_overwrite=True)

    def post_first(self, name: str, text: str) -> None:
        """Write unless something is there."""
        with contextlib.suppress(BoardLostError), _losing_the_board():
            self.client.key_value_set(name, text)

    def read_all(self, prefix: str) -> list[str]:
        """The texts of all names that start with `prefix`, which ends with a slash."""
        with _losing_the_board():
            return [text for _, text in self.client.key_value_dir_get(prefix)]

    def wait_for(self, name: str, seconds: float) -> str | None:
        """The text, as soon as somebody posts it; None after `seconds`, even by a frozen board."""
        try:
            with _losing_the_board():
                text: str = self.client.blocking_key_value_get(name, round(seconds * 1000))
                return text
        except BoardLostError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    def answers(self) -> bool:
        """Whether anything listens where process 0 should; asks the network, not JAX."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
        except OSError:
            return False
        return True


@contextlib.contextmanager
def on_abort(handle: Callable[[], None]) -> Iterator[None]:
    """Within, call `handle` when this process aborts, in the thread that aborts; then it dies.

    JAX (0.10 to 0.12) aborts what is left of a run 0.2 s after process 0 died, from a thread of its
    own, and cannot call Python then (its `missed_heartbeat_callback`: std::bad_cast). Nor can
    Python's own handlers, which wait for the main thread; hence one of the C library.
    """
    signal_of_c = ctypes.CDLL(None).signal
    signal_of_c.restype, signal_of_c.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: handle())
    before = signal_of_c(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        signal_of_c(signal.SIGABRT, before)


@contextlib.contextmanager
def _losing_the_board() -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise BoardLostError(str(error)) from error


def join_processes(silent_seconds: float) -> Board | None:
    """Join the other processes of this run, if the environment names any: then they share a board.

    Each process is started with the same command and JAX_COORDINATOR_ADDRESS=host:port,
    JAX_NUM_PROCESSES and its own JAX_PROCESS_ID.

    Args:
        silent_seconds: when the watchdog ends a run with a silent process; JAX, whose abort is
            pages long and without status 1, follows at three times that, and 100 at least.

    Raises:
        RequestError: some of the variables are missing or impossible.
    """
    given = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    if not given or given.get("JAX_NUM_PROCESSES") == "1":
        return None
    missing = [name for name in VARIABLES if name not in given]
    if missing:
        raise RequestError(
            f"{', '.join(given)} set, but not {', '.join(missing)}; a run of several processes "
            "needs all three, a run of one process needs none."
        )
    address, count, index = (given[name] for name in VARIABLES)
    if not (count.isdigit() and index.isdigit() and int(index) < int(count)):
        raise RequestError(
            f"JAX_PROCESS_ID={index} with JAX_NUM_PROCESSES={count}; the id must be an integer "
            "from 0 to the number of processes - 1."
        )
    from jax._src.distributed import global_state

    # JAX gives up in the same way: it aborts, with a stack trace and no word about what is missing.
    gone = f"not all of the {count} processes have joined at {address} in {_JOIN_SECONDS} s"
    says = f"failed: {gone}; process {index} gives up. Is each of them started, and all anew?"
    giving_up = threading.Timer(_JOIN_SECONDS, end_process, (says, 1))
    giving_up.daemon = True
    giving_up.start()
    jax.distributed.initialize(
        address,
        int(count),
        int(index),
        initialization_timeout=2 * _JOIN_SECONDS,
        heartbeat_timeout_seconds=math.ceil(max(100, 3 * silent_seconds)),
    )
    giving_up.cancel()
    return Board(global_state.client, int(index), int(count), address)


def meet(where: str) -> None:
    """Wait for the other processes, however late they come.

    Once before anything else and again before a step runs for the first time: on CPU each new group
    of devices has to begin its first collective within 30 s, and processes that compile side by
    side need not end so close together.
    """
    if jax.process_count() > 1:
        sync_global_devices(where)


def agreed(value: Callable[[], Any]) -> Any:
    """What `value` (plain JSON) is on the first process, on all of them; every process calls it.

    Only the first process evaluates it: what it sees of the disk or the clock holds for the run.
    """
    if jax.process_count() == 1:
        return value()
    text = json.dumps(value()).encode() if jax.process_index() == 0 else b""
    size = int(broadcast_one_to_all(np.int32(len(text))))
    letters = np.zeros(size, np.uint8)
    letters[: len(text)] = np.frombuffer(text, np.uint8)
    return json.loads(bytes(broadcast_one_to_all(letters).astype(np.uint8)))
