"""Runs in processes of their own: started, watched while they train, and what they leave."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from spmd_train.telemetry.records import read_jsonl

ROOT = Path(__file__).parent.parent

SMALL = (
    "model.layers=1", "model.width=32", "model.heads=4", "model.kv_heads=2", "model.ffn=64",
    "batch.global_size=4", "batch.microbatches=2", "batch.sequence_length=32",
    "optim.warmup_steps=2", "optim.lr=1e-2",
)  # fmt: skip

SLOW_DATA = """
import itertools, time
from spmd_train.data.stream import Stream
batch, steps = Stream.batch, itertools.count()
def slow_rows(stream, ids):
    step = next(steps)  # of those that this process reads
    time.sleep(0.2)
    return batch(stream, ids)
Stream.batch = slow_rows
"""
"""A run slow enough to be met in the middle."""


def arguments(out: Path, mesh: str, steps: int, *sets: str) -> list[str]:
    words = ["train", "--mesh", mesh, "--steps", str(steps), "--out", str(out)]
    return words + [word for item in (*SMALL, *sets) for word in ("--set", item)]


def environment(**more: str) -> dict[str, str]:
    """Ours, with the compilation cache of this session (conftest.py), and the package."""
    ours = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    return ours | {"PYTHONPATH": str(ROOT)} | more


def start(
    words: Sequence[str], processes: int = 1, first: str = "", only_in: int | None = None
) -> list[subprocess.Popen[str]]:
    """The command in each of a run's processes, after the Python code `first` (in one of them)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    started = []
    for index in range(processes):
        place = {
            "JAX_COORDINATOR_ADDRESS": coordinator,
            "JAX_NUM_PROCESSES": str(processes),
            "JAX_PROCESS_ID": str(index),
        }
        code = first if only_in in (None, index) else ""
        command = [sys.executable, "-c", f"{code}\nfrom spmd_train.cli import entry; entry()"]
        process = subprocess.Popen(
            [*command, *words],
            env=environment(**(place if processes > 1 else {})),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
    return started


def wait_for_steps(out: Path, count: int, running: Sequence[subprocess.Popen[str]]) -> None:
    """Until the run has finished `count` steps; fails if it ends before."""
    deadline = time.monotonic() + 300
    while len(read_jsonl(out / "metrics.jsonl")) < count:
        ended = [process.communicate() for process in running if process.poll() is not None]
        assert not ended, ended
        assert time.monotonic() < deadline
        time.sleep(0.05)


def finish(
    running: Sequence[subprocess.Popen[str]], but: int | None = None
) -> tuple[list[int | None], list[str]]:
    """Statuses and error outputs once all have ended, but for one which is killed then."""
    try:
        for index, process in enumerate(running):
            if index != but:
                process.wait(timeout=300)
    finally:
        statuses = [process.poll() for process in running]
        for process in running:
            process.kill()
    return statuses, [process.communicate()[1] for process in running]
