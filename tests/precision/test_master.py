"""The FP32 master: the numbers of public case P06, the image bit for bit, and a bf16 run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import T0, run, train

from spmd_train.precision import master_of, with_fp32_master

BF16 = jnp.bfloat16


@pytest.mark.parametrize("direction", [1.0, -1.0])
def test_small_updates_are_not_rounded_away(direction):
    """P06: 100 updates of -1e-3 from 1.0 give 0.9; a bf16-only weight stays exactly 1.0."""
    tx = with_fp32_master(optax.sgd(1e-3))
    plain = optax.sgd(1e-3)
    params, alone = jnp.ones((1,), BF16), jnp.ones((1,), BF16)
    state, plain_state = tx.init(params), plain.init(alone)
    gradient = jnp.full((1,), direction, BF16)
    for _ in range(100):
        _, state = tx.update(gradient, state, params)
        params = master_of(state).astype(BF16)
        updates, plain_state = plain.update(gradient, plain_state, alone)
        alone = optax.apply_updates(alone, updates)
    # Between 1 and 2 float32 is twice as coarse, and rounds each of these steps the same way.
    atol = 2e-6 if direction > 0 else 5e-6
    np.testing.assert_allclose(master_of(state), 1.0 - 0.1 * direction, rtol=0, atol=atol)
    assert float(params[0]) == (0.8984375 if direction > 0 else 1.1015625)
    assert float(alone[0]) == 1.0


@pytest.mark.parametrize("dtype", [BF16, jnp.float16], ids=["bfloat16", "float16"])
def test_updates_lead_to_the_masters_image(dtype):
    """50 random AdamW steps: `params + updates` is `master.astype(dtype)`, bit for bit; and the
    master is what AdamW alone makes of FP32 parameters."""
    rng = np.random.default_rng(0)
    inner = optax.adamw(1e-2, weight_decay=0.1)
    tx = with_fp32_master(inner)
    start = {"w": rng.standard_normal((16, 8)).astype(np.float32), "b": np.zeros(8, np.float32)}
    params = jax.tree.map(lambda a: jnp.asarray(a, dtype), start)
    alone = jax.tree.map(lambda a: a.astype(jnp.float32), params)
    state, alone_state = tx.init(params), inner.init(alone)
    update, update_alone = jax.jit(tx.update), jax.jit(inner.update)
    for _ in range(50):
        gradients = jax.tree.map(
            lambda a: jnp.asarray(rng.standard_normal(a.shape), jnp.float32), start
        )
        updates, state = update(gradients, state, params)
        assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype(jnp.float32)}
        stepped = optax.apply_updates(params, updates)
        params = jax.tree.map(lambda m: m.astype(dtype), master_of(state))
        jax.tree.map(np.testing.assert_array_equal, stepped, params)
        steps, alone_state = update_alone(gradients, alone_state, alone)
        alone = optax.apply_updates(alone, steps)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), master_of(state), alone
    )


def test_without_parameters_it_says_so():
    tx = with_fp32_master(optax.sgd(1.0))
    state = tx.init(jnp.ones((1,), BF16))
    with pytest.raises(ValueError, match="parameters"):
        tx.update(jnp.ones((1,)), state)


SETS = ("precision.policy=bf16", "batch.microbatches=2")


def test_bfloat16_on_a_mesh_trains_like_float32():
    """2x2x2 on CPU: first loss within 2e-2 (public cases), and five steps follow FP32's."""
    half, full = train("2x2x2", *SETS, base=T0), train("1x1x1", base=T0)
    np.testing.assert_allclose(half.losses[0], full.losses[0], rtol=0, atol=2e-2)
    np.testing.assert_allclose(half.losses, full.losses, rtol=0, atol=5e-2)
    np.testing.assert_allclose(half.grad_norms, full.grad_norms, rtol=5e-2)


def test_state_holds_float32_and_the_params_are_its_image():
    """P06's scan: no half-precision leaf in the optimizer state; the image is bit for bit."""
    compiled = run("2x2x2", *SETS, base=T0)
    state, batch = compiled.state(), compiled.batch()
    assert master_of(state.opt_state) is not None
    for _ in range(3):
        state, _ = compiled(state, batch)
        floats = [x.dtype for x in jax.tree.leaves(state.opt_state) if x.dtype != jnp.int32]
        assert set(floats) == {jnp.dtype(jnp.float32)}
        assert {p.dtype for p in jax.tree.leaves(state.params)} == {jnp.dtype(BF16)}
        for p, m in zip(
            jax.tree.leaves(state.params), jax.tree.leaves(master_of(state.opt_state)), strict=True
        ):
            np.testing.assert_array_equal(p, m.astype(BF16))
    canonical = compiled.spec.canonical(state)
    assert {x.dtype.name for x in jax.tree.leaves(canonical)} == {"float32", "int32"}
