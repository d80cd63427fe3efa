"""The loss scale against traces of known systems, and the order of unscaling and clipping."""

from __future__ import annotations

import csv
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits

from spmd_train.precision import clip_by_grad_norm, dynamic_loss_scale, guard_of, scale_of
from spmd_train.precision.guard import NOT_FINITE

TRACES = Path(__file__).parents[1] / "golden" / "loss_scaler_vectors.csv"
CLEAN, OVERFLOW = {"w": jnp.zeros(1)}, {"w": jnp.full(1, jnp.inf)}


def traces(rule: str) -> list[tuple[str, list[int]]]:
    lines = (line for line in TRACES.read_text().splitlines() if not line.startswith("#"))
    return [
        (row["sequence"], [int(n) for n in row["log2_scale_after_each_step"].split()])
        for row in csv.DictReader(lines)
        if row["rule"] == rule
    ]


def trace(sequence: str, **rule: float) -> list[float]:
    """log2 of the scale after each step of O(verflow), C(lean), E(mpty)."""
    tx = dynamic_loss_scale(optax.sgd(1.0), **rule)
    params = {"w": jnp.ones(1)}
    state, found = tx.init(params), []
    update = jax.jit(tx.update)
    for what in sequence:
        _, state = update(OVERFLOW if what == "O" else CLEAN, state, params, empty=what == "E")
        found.append(float(np.log2(scale_of(state))))
    return found


@pytest.mark.parametrize(("sequence", "expected"), traces("megatron"))
def test_with_hysteresis_it_is_megatrons(sequence, expected):
    assert trace(sequence, growth_interval=4, hysteresis=2) == expected


@pytest.mark.parametrize(("sequence", "expected"), traces("torch_GradScaler"))
def test_without_it_is_torchs_with_a_floor(sequence, expected):
    assert trace(sequence, growth_interval=4) == [max(n, 0) for n in expected]


def test_overflow_on_every_second_step_does_not_skip_for_ever():
    """Hysteresis that clean steps refill (apex) stays at 2^16 for ever here."""
    assert trace("OC" * 20, growth_interval=4, hysteresis=2)[-1] == 0
    ((_, apex),) = [t for t in traces("apex_hysteresis") if t[0] == "OCOCOCOC"]
    assert set(apex) == {16}


def test_an_empty_step_is_neither_clean_nor_an_overflow():
    assert trace("CECEC", growth_interval=3) == [16, 16, 16, 16, 17]


def test_p04_the_scale_stays_within_its_bounds():
    """google/flax#2547: 200 clean steps that each may grow, then one overflow."""
    scales = trace("C" * 200 + "O", growth_interval=1)
    assert scales[-2:] == [24, 23]
    assert np.isfinite(scales).all()


def test_p04_permanent_overflow_is_counted_and_moves_nothing():
    tx = dynamic_loss_scale(optax.adamw(0.1))
    params = {"w": jnp.ones(1)}
    state = tx.init(params)
    before = state.inner.inner
    for _ in range(60):
        updates, state = tx.update(OVERFLOW, state, params)
        params = optax.apply_updates(params, updates)
    assert params["w"] == 1.0
    assert scale_of(state) == 1.0
    assert guard_of(state).consecutive == guard_of(state).total == 60
    assert_same_bits(state.inner.inner, before)


def test_a_static_scale_stays_and_still_skips():
    tx = dynamic_loss_scale(optax.sgd(1.0), initial=128.0, growth_interval=None)
    params = {"w": jnp.ones(1)}
    state = tx.init(params)
    updates, state = tx.update(OVERFLOW, state, params)
    assert scale_of(state) == 128.0
    assert optax.apply_updates(params, updates)["w"] == 1.0
    updates, state = tx.update({"w": jnp.full(1, 128.0)}, state, params)
    assert updates["w"] == -1.0


class TestP03:
    """Lightning-AI/pytorch-lightning#9599: loss 3a + 4b in fp16, clipped to 1, SGD(1)."""

    @staticmethod
    def step(scale: float, clip) -> tuple[dict, object]:
        tx = dynamic_loss_scale(optax.chain(clip, optax.sgd(1.0)), initial=scale)
        params = {"a": jnp.float16(0), "b": jnp.float16(0)}
        state = tx.init(params)
        grads = jax.grad(lambda p: (3 * p["a"] + 4 * p["b"]) * scale_of(state).astype(jnp.float16))(
            params
        )
        updates, state = tx.update(grads, state, params)
        return updates, state

    @pytest.mark.parametrize("scale", [1.0, 2.0**8, 2.0**10, 2.0**13])
    @pytest.mark.parametrize("clip", [clip_by_grad_norm(1.0), optax.clip_by_global_norm(1.0)])
    def test_unscale_then_clip(self, scale, clip):
        updates, state = self.step(scale, clip)
        np.testing.assert_allclose([updates["a"], updates["b"]], [-0.6, -0.8], rtol=0, atol=1e-6)
        assert guard_of(state).grad_norm == 5.0

    def test_what_overflows_is_skipped_not_clipped(self):
        updates, state = self.step(2.0**14, clip_by_grad_norm(1.0))
        assert guard_of(state).verdict == NOT_FINITE
        assert scale_of(state) == 2.0**13
        assert [float(u) for u in updates.values()] == [0, 0]
