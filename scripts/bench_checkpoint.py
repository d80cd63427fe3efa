"""Save and restore against a plain copy of the same bytes on one disk, and what the loop waits.

    python scripts/bench_checkpoint.py --config small --mesh 2x1x2 --directory /data/tmp

The state is that of a run of the configuration, the step the one that trains. Files are read from
the page cache, as after a restart on the same host.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="small")
    parser.add_argument("--mesh", default="2x1x2")
    parser.add_argument("--set", action="append", default=[], dest="sets")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="steps timed; 0 times none")
    parser.add_argument("--directory", default=None, help="on the disk to measure")
    given = parser.parse_args()

    from spmd_train.mesh import MeshShape, build_mesh, prepare_devices

    prepare_devices(MeshShape.parse(given.mesh), None)
    import jax

    from spmd_train.build import build_step, put_batch
    from spmd_train.checkpoint import files
    from spmd_train.checkpoint.files import Keep
    from spmd_train.checkpoint.manager import Checkpoints
    from spmd_train.config import load
    from spmd_train.data.batches import shift

    config = load(given.config, given.sets, mesh=given.mesh)
    mesh, _ = build_mesh(MeshShape.parse(given.mesh), None)
    step, _ = build_step(config, mesh)
    spec = step.spec
    state = spec.init(0)
    directory = Path(tempfile.mkdtemp(prefix="bench_checkpoint_", dir=given.directory))
    canonical = spec.canonical(state)
    size = sum(x.nbytes for x in jax.tree.leaves(canonical))
    print(f"{config.name} on {given.mesh}: {size / 1e6:,.0f} MB of state")

    def best(measured: Callable[[int], tuple[float, ...]]) -> list[float]:
        runs = [measured(i) for i in range(given.repeat)]
        return [statistics.median(column) for column in zip(*runs, strict=True)]

    block = os.urandom(1 << 24)
    source = directory / "source"
    with source.open("wb") as file:
        for start in range(0, size, len(block)):
            file.write(block[: size - start])

    def copy(_: int) -> tuple[float, ...]:
        clock = time.perf_counter()
        shutil.copyfile(source, directory / "copy")
        with (directory / "copy").open("rb") as file:
            os.fsync(file.fileno())
        took = time.perf_counter() - clock
        (directory / "copy").unlink()
        return (took,)

    def read(_: int) -> tuple[float, ...]:
        clock = time.perf_counter()
        source.read_bytes()
        return (time.perf_counter() - clock,)

    with Checkpoints(directory / "checkpoints", Keep(1)) as checkpoints:

        def save(i: int) -> tuple[float, ...]:
            clock = time.perf_counter()
            checkpoints.save(i + 1, spec.canonical(state), {})
            blocked = time.perf_counter() - clock
            checkpoints.wait()
            return blocked, time.perf_counter() - clock

        def restore(_: int) -> tuple[float, ...]:
            clock = time.perf_counter()
            found = checkpoints.newest_sound()
            assert found.step is not None
            verified = time.perf_counter() - clock
            saved = checkpoints.restore(found.step, spec.abstract_canonical())
            jax.block_until_ready(saved)
            return verified, time.perf_counter() - clock

        (copied,), (loaded,) = best(copy), best(read)
        save(-1)  # Orbax loads what it needs
        blocked, saved_in = best(save)
        verified, restored_in = best(restore)
        on_disk = files.size_bytes(directory / "checkpoints" / str(given.repeat))

    def line(what: str, seconds: float, share_of: float | None = None) -> None:
        share = "" if share_of is None else f"  {share_of / seconds:.0%} of the plain copy's speed"
        print(f"{what:<34} {seconds:7.2f} s  {size / seconds / 1e6:7,.0f} MB/s{share}")

    line("plain copy, with fsync", copied)
    line("save, until it counts", saved_in, copied)
    line("plain read", loaded)
    line("restore, checksums verified", restored_in, copied)
    line("  of it verifying", verified)
    print(f"on disk {on_disk / 1e6:,.0f} MB; the loop waits {blocked:.3f} s for a save")
    shutil.rmtree(directory)
    if not given.steps:
        return
    rows = step.micro_batched(shift(_rows(config)))
    batch = put_batch(step, rows)
    compiled = step.jitted().lower(state, batch).compile()
    state, _ = jax.block_until_ready(compiled(state, batch))
    clock = time.perf_counter()
    for _ in range(given.steps):
        state, metrics = compiled(state, batch)
        jax.block_until_ready(metrics)
    seconds = (time.perf_counter() - clock) / given.steps
    print(f"a step takes {seconds:.2f} s: a save stalls the loop for {blocked / seconds:.1%} of it")


def _rows(config):  # type: ignore[no-untyped-def]
    import numpy as np

    shape = (config.batch.global_size, config.batch.sequence_length + 1)
    return np.random.default_rng(0).integers(0, config.model.vocab, shape).astype(np.int32)


if __name__ == "__main__":
    main()
