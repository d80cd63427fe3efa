"""A hundred steps at a width where a layer takes milliseconds: the collectives keep one order.

Tiny shapes hide the race that a missing data dependence leaves (docs/design.md, fact 5): a wrong
order shows as a hang, which JAX's CPU backend turns into an abort of the process.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
from spmd_train.build import build_step, put_batch
from spmd_train.config import load
from spmd_train.data.batches import micro_batched, shift
from spmd_train.mesh import MeshShape, build_mesh

sets = ["model.layers=4", "model.width=256", "model.heads=8", "model.kv_heads=8", "model.ffn=688"]
sets += ["batch.sequence_length=64", "batch.global_size=8", "batch.microbatches=4"]
config = load(None, [*sets, *sys.argv[2:]], mesh=sys.argv[1])
mesh, _ = build_mesh(MeshShape.parse(sys.argv[1]))
step, _ = build_step(config, mesh)
state, train_step = step.spec.init(0), step.jitted()
rows = np.random.default_rng(0).integers(0, 256, (8, 65)).astype(np.int32)
batch = put_batch(step, micro_batched(shift(rows), 4))
for _ in range(100):
    state, metrics = train_step(state, batch)
    loss = float(metrics["loss"])
print(loss)
"""


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "none"])
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("mesh", ["2x2x2", "1x2x4"])
def test_a_hundred_steps_never_hang(mesh: str, zero: int, remat: str) -> None:
    arguments = [mesh, f"parallel.zero={zero}", f"pipeline.remat={remat}"]
    seen = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=1200
    )
    assert seen.returncode == 0, seen.stderr[-2000:]
    assert float(seen.stdout) < 1.0  # one batch a hundred times is learned by heart
