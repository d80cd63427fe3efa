"""Kill a run at random moments, resume it on another mesh, and compare with the run never killed.

    python scripts/kill_test.py --kills 30 --seed 0

Each life of the run has one or two processes of four devices in all and a mesh drawn at random.
After a random time, which may fall into starting, compiling, training or saving, one of the
processes (or both) gets SIGKILL. Then every step that counts must be sound. A run that reaches its
end must hold each step once, with the samples of the run that was never killed, and its parameters:
to the last bit with `--reproducible`, with losses within 1e-4 otherwise. Exit status 1 if not.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spmd_train.checkpoint import files
from spmd_train.telemetry.records import read_jsonl

DEVICES = 4
MESHES = ["4x1x1", "2x1x2", "1x1x4", "1x2x2", "2x2x1", "1x4x1"]
REPRODUCIBLE_MESHES = ["4x1x1", "2x1x2", "1x1x4"]  # on one size of the model axis the same bits
SETS = [
    "model.layers=4", "model.width=32", "model.heads=4", "model.kv_heads=4", "model.ffn=64",
    "batch.global_size=16", "batch.microbatches=2", "batch.sequence_length=32",
    "optim.warmup_steps=2", "checkpoint.every_steps=2", "log.sample_ids=true",
    "watchdog.silent_seconds=8",
]  # fmt: skip
REPRODUCIBLE = ["precision.reproducible=true", "precision.logical_shards=4"]
LEAVE_SECONDS = 40
"""How long a process whose peer was killed may take to leave by itself, once they have joined.

One that still waits for the other to join is killed then, as a launcher would.
"""


@dataclass(frozen=True)
class Options:
    kills: int
    steps: int
    seed: int
    reproducible: bool
    directory: Path

    @property
    def meshes(self) -> list[str]:
        return REPRODUCIBLE_MESHES if self.reproducible else MESHES


class Life:
    """One start of a run, in one or two processes."""

    def __init__(self, options: Options, out: Path, mesh: str, processes: int) -> None:
        sets = SETS + (REPRODUCIBLE if options.reproducible else [])
        command = [sys.executable, "-m", "spmd_train", "train", "--out", str(out), "--mesh", mesh]
        if (out / "config.yaml").exists():
            command += ["--resume"]
        else:
            command += ["--steps", str(options.steps)]
            command += [word for item in sets for word in ("--set", item)]
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        # Compiling is the longest part of a life and not what is tested.
        environment["JAX_COMPILATION_CACHE_DIR"] = str(options.directory / "cache")
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.5"
        port = _free_port()
        self.started = time.monotonic()
        self.log = (out.parent / f"{out.name}.log").open("a", encoding="utf-8")
        self.processes = []
        for index in range(processes):
            joined = {
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": str(processes),
                "JAX_PROCESS_ID": str(index),
            }
            extra = joined if processes > 1 else {}
            self.processes.append(
                subprocess.Popen(command, env=environment | extra, stdout=self.log, stderr=self.log)
            )

    def wait_until(self, moment: float) -> bool:
        """Whether the run was still alive `moment` seconds after its start."""
        while time.monotonic() - self.started < moment:
            if all(p.poll() is not None for p in self.processes):
                return False
            time.sleep(0.01)
        return any(p.poll() is None for p in self.processes)

    def kill(self, draw: random.Random) -> str:
        """SIGKILL to one process or to all; the others must leave by themselves."""
        victims = self.processes if draw.random() < 0.5 else [draw.choice(self.processes)]
        for victim in victims:
            victim.send_signal(signal.SIGKILL)
        survivors = [p for p in self.processes if p not in victims]
        for process in survivors:
            try:
                status = process.wait(LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            else:
                assert status != 0, "a process whose peer was killed ended with status 0"
        for process in self.processes:
            process.wait()
        return f"{len(victims)} of {len(self.processes)}"

    def finish(self) -> list[int]:
        return [p.wait() for p in self.processes]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def check_steps(out: Path) -> list[int]:
    """The steps that count; each must be sound."""
    directory = out / "checkpoints"
    steps = files.steps(directory)
    for step in steps:
        problems = files.damage(files.step_path(directory, step))
        assert not problems, f"step {step} counts and is damaged: {problems}"
    return steps


def arrays(out: Path, step: int) -> dict[str, np.ndarray]:
    """What a checkpoint holds, read with plain Orbax."""
    import jax
    import orbax.checkpoint as ocp

    path = (out / "checkpoints" / str(step) / "state").absolute()
    reader = ocp.PyTreeCheckpointer()
    saved = reader.metadata(path).item_metadata.tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
    state = reader.restore(path, restore_args=as_numpy)
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path): x for path, x in flat}


def compare(out: Path, reference: Path, options: Options) -> None:
    """The ended run against the one that was never killed."""
    got, want = read_jsonl(out / "metrics.jsonl"), read_jsonl(reference / "metrics.jsonl")
    for key in ("step", "sample_ids"):
        assert [r[key] for r in got] == [r[key] for r in want], f"{key} lost or repeated"
    losses = [np.array([r["loss"] for r in records]) for records in (got, want)]
    np.testing.assert_allclose(*losses, rtol=0 if options.reproducible else 1e-4)
    if options.reproducible:
        ours, theirs = arrays(out, options.steps), arrays(reference, options.steps)
        assert ours.keys() == theirs.keys()
        different = [n for n in ours if ours[n].tobytes() != theirs[n].tobytes()]
        assert not different, f"not the same bits: {different}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reproducible", action="store_true")
    parser.add_argument("--keep", help="directory for the runs; default: temporary, removed")
    given = parser.parse_args()
    directory = Path(given.keep or tempfile.mkdtemp(prefix="kill_test_"))
    directory.mkdir(parents=True, exist_ok=True)
    options = Options(given.kills, given.steps, given.seed, given.reproducible, directory)
    draw = random.Random(options.seed)
    reference = directory / "reference"
    first = Life(options, reference, options.meshes[0], 1)
    assert first.finish() == [0], (directory / "reference.log").read_text()
    usual = time.monotonic() - first.started
    print(f"never killed: {usual:.1f} s", flush=True)

    kills, runs = 0, 0
    out = directory / "run0"
    while kills < options.kills:
        mesh, processes = draw.choice(options.meshes), draw.choice([1, 2])
        life = Life(options, out, mesh, processes)
        if life.wait_until(draw.uniform(0.1, 1.0) * usual):
            victims = life.kill(draw)
            kills += 1
            steps = check_steps(out)
            newest = steps[-1] if steps else "none"
            print(f"kill {kills}: {mesh}, {victims} processes; steps kept {newest}", flush=True)
            continue
        if set(life.finish()) != {0}:
            raise AssertionError((directory / f"{out.name}.log").read_text()[-4000:])
        runs += 1
        compare(out, reference, options)
        print(f"run {runs} ended as if never killed", flush=True)
        out = directory / f"run{runs}"
    assert Life(options, out, draw.choice(options.meshes), 1).finish() == [0]
    compare(out, reference, options)
    print(f"{kills} kills in {runs + 1} runs: nothing lost, nothing repeated, no bad step accepted")
    if given.keep is None:
        shutil.rmtree(directory)


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        sys.exit(f"failed: {error}")
