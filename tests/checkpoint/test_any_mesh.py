"""Saved on one mesh, restored on another: every bit, and the losses of the run that went on.

Public case P17, with a vocabulary (61) that is padded differently on every mesh, and dropout.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import Run, assert_same_bits, run

from spmd_train.checkpoint.manager import Checkpoints
from spmd_train.start import load_parameters

Place = tuple[str, int]

PLACES: list[Place] = [
    (mesh, zero)
    for mesh in ("1x1x1", "8x1x1", "1x8x1", "1x1x8", "2x2x2", "4x2x1")
    for zero in (1, 3)
]
DEFAULT: list[Place] = [("2x2x2", 3), ("1x1x4", 1)]
BEFORE, AFTER = 3, 5


def on(place: Place) -> Run:
    mesh, zero = place
    return run(mesh, "model.vocab=61", "model.dropout=0.1", f"parallel.zero={zero}")


def losses(where: Run, state: Any, steps: int) -> tuple[Any, list[float]]:
    batch, seen = where.batch(), []
    for _ in range(steps):
        state, metrics = where(state, batch)
        seen.append(float(metrics["loss"]))
    return state, seen


@functools.cache
def uninterrupted(place: Place, directory: Path) -> tuple[Any, list[float]]:
    """Saves after three steps and goes on; the saved arrays, and the losses from there on."""
    where = on(place)
    state, _ = losses(where, where.state(), BEFORE)
    canonical = where.spec.canonical(state)
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(BEFORE, canonical, {})
        kept = jax.device_get(canonical)
        _, after = losses(where, state, AFTER)
    return kept, after


def check(saved_on: Place, restored_on: Place, root: Path) -> None:
    directory = root / f"{saved_on[0]}-{saved_on[1]}"
    kept, want = uninterrupted(saved_on, directory)
    where = on(restored_on)
    with Checkpoints(directory, read_only=True) as checkpoints:
        restored = checkpoints.restore(BEFORE, where.spec.abstract_canonical())
    state = where.spec.from_canonical(restored)
    blocks = jax.tree.leaves(restored["params"]["blocks"])
    assert all(x.is_deleted() for x in blocks), "the state takes the place of what was read"
    placed = jax.tree.map(lambda x, s: x.sharding == s, state, where.spec.shardings())
    assert all(jax.tree.leaves(placed))
    assert_same_bits(jax.device_get(where.spec.canonical(state)), kept)
    _, got = losses(where, state, AFTER)
    if saved_on == restored_on:
        assert got == want
    else:
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_parameters_alone_start_a_run_with_the_same_bits(root: Path) -> None:
    """What `--init-from` takes, where the vocabulary is padded on one mesh and not on the other."""
    saved_on, here = DEFAULT
    directory = root / f"{saved_on[0]}-{saved_on[1]}"
    kept, _ = uninterrupted(saved_on, directory)
    spec = on(here).spec
    with Checkpoints(directory, read_only=True) as checkpoints:
        state = spec.from_parameters(load_parameters(checkpoints, BEFORE, spec))
    canonical = jax.device_get(spec.canonical(state))
    assert canonical["step"] == 0
    assert_same_bits(canonical["params"], kept["params"])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("meshes")


@pytest.mark.parametrize("restored_on", DEFAULT, ids=str)
@pytest.mark.parametrize("saved_on", DEFAULT, ids=str)
def test_a_checkpoint_goes_on_anywhere(saved_on: Place, restored_on: Place, root: Path) -> None:
    check(saved_on, restored_on, root)


@pytest.mark.slow
@pytest.mark.parametrize("saved_on", PLACES, ids=str)
def test_a_checkpoint_of_every_mesh_goes_on_on_every_other(saved_on: Place, root: Path) -> None:
    for restored_on in PLACES:
        check(saved_on, restored_on, root)
