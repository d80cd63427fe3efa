"""Skipped steps: a full no-op, never an applied NaN; and the spike rule against numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits

from spmd_train.precision import SpikeRule, skip_bad_steps
from spmd_train.precision.guard import APPLIED, EMPTY, NOT_FINITE, SPIKE

NAN, INF = float("nan"), float("inf")


def run(tx, gradients, start=1.0):
    """The parameter after each step, and the states."""
    params = jnp.float32(start)
    state, values, states = tx.init(params), [], []
    for gradient in gradients:
        updates, state = tx.update(jnp.float32(gradient), state, params)
        params = optax.apply_updates(params, updates)
        values.append(float(params))
        states.append(state)
    return values, states


class TestP05:
    """optax#1746 and flaxchat#6: the numbers of the report; apply_if_finite gives NaN here."""

    def test_adam_does_not_move_and_never_gives_up(self):
        values, states = run(skip_bad_steps(optax.adam(0.1)), [1, NAN, NAN, NAN, 1])
        assert values[:4] == pytest.approx([0.9000007] * 4, abs=1e-7)
        assert [int(s.inner[0].count) for s in states] == [1, 1, 1, 1, 2]
        assert [int(s.consecutive) for s in states] == [0, 1, 2, 3, 0]
        assert int(states[-1].total) == 3
        assert values[4] < 0.9

    def test_adamw_does_not_decay(self):
        values, _ = run(skip_bad_steps(optax.adamw(0.1, weight_decay=0.1)), [1, NAN, INF, -INF])
        assert values == pytest.approx([0.8900006] * 4, abs=1e-6)
        assert len(set(values)) == 1


def test_every_bit_of_the_parameters_stays():
    """-0.0 + 0.0 would be 0.0: one bit of a skipped step's parameters."""
    tx = skip_bad_steps(optax.sgd(1.0))
    params = {"w": jnp.array([-0.0, 0.0, 2e-38, NAN, 3.0], jnp.float32)}
    state = tx.init(params)
    updates, state = jax.jit(tx.update)({"w": jnp.full(5, NAN)}, state, params)
    assert_same_bits(optax.apply_updates(params, updates), params)


def test_infinite_norm_of_finite_gradients_is_bad():
    """Clipping would divide by it, and the update would silently be zero."""
    _, (state,) = run(skip_bad_steps(optax.sgd(1.0)), [1e30])
    assert state.verdict == NOT_FINITE


def test_bad_loss_and_empty_steps():
    tx = skip_bad_steps(optax.sgd(1.0))
    params = jnp.float32(1)
    state = tx.init(params)
    for options, verdict, consecutive in [
        ({"value": NAN}, NOT_FINITE, 1),
        ({"value": 0.0, "empty": True}, EMPTY, 1),  # neither bad nor good: the count stays
        ({"value": INF}, NOT_FINITE, 2),
        ({"value": 1.0}, APPLIED, 0),
    ]:
        updates, state = tx.update(jnp.float32(1), state, params, **options)
        assert (int(state.verdict), int(state.consecutive)) == (verdict, consecutive)
        assert updates == (-1.0 if verdict == APPLIED else 0.0)


def test_half_precision_gradients_are_measured_in_float32():
    """70000 ones in bfloat16 sum up to 264^2; in float16 the sum of squares overflows at 65504."""
    tx = skip_bad_steps(optax.sgd(1.0))
    for dtype in (jnp.bfloat16, jnp.float16):
        params = jnp.ones(70000, dtype)
        _, state = tx.update(params, tx.init(params), params)
        np.testing.assert_allclose(state.grad_norm, 70000**0.5, rtol=1e-6)


class TestSpikes:
    """OLMo-core's rule, step by step in numpy."""

    RULE = SpikeRule(sigma=3.0, window=16)

    @staticmethod
    def expected(losses, norms, rule):
        verdicts = []
        for i, latest in enumerate(zip(losses, norms, strict=True)):
            seen = [np.array(series[max(0, i - rule.window) : i]) for series in (losses, norms)]
            active = i >= max(2, rule.window // 2)
            far = active and any(
                x - s.mean() > rule.sigma * s.std(ddof=1) for x, s in zip(latest, seen, strict=True)
            )
            verdicts.append(SPIKE if far else APPLIED)
        return verdicts

    @pytest.mark.parametrize("seed", range(3))
    def test_it_is_olmos(self, seed):
        rng = np.random.default_rng(seed)
        losses = np.float32(4 + 0.1 * rng.standard_normal(80))
        norms = np.float32(1 + 0.1 * rng.standard_normal(80))
        losses[[3, 20, 60]] += 5  # the first comes before the rule is in force
        norms[[30, 31, 70]] += 9
        losses[25] -= 5  # far below is no spike
        tx = skip_bad_steps(optax.sgd(1.0), spike=self.RULE)
        state, update, verdicts = tx.init(jnp.float32(0)), jax.jit(tx.update), []
        for loss, norm in zip(losses, norms, strict=True):
            _, state = update(jnp.float32(norm), state, jnp.float32(0), value=loss)
            verdicts.append(int(state.verdict))
        assert verdicts == self.expected(losses, norms, self.RULE)
        assert verdicts.count(SPIKE) >= 4
        assert int(state.total) == verdicts.count(SPIKE)

    def test_what_is_not_finite_stays_out_of_the_window(self):
        tx = skip_bad_steps(optax.sgd(1.0), spike=self.RULE)
        state = tx.init(jnp.float32(0))
        for loss in [4.0, NAN, 5.0]:
            _, state = tx.update(jnp.float32(1), state, jnp.float32(0), value=loss)
        assert int(state.window.seen) == 2
        np.testing.assert_array_equal(state.window.losses[:3], [4, 5, 0])

    def test_its_state_can_be_donated(self):
        """Two windows that share one buffer cannot."""
        tx = skip_bad_steps(optax.sgd(1.0), spike=self.RULE)
        update = jax.jit(tx.update, donate_argnums=1)
        _, state = update(jnp.float32(1), tx.init(jnp.float32(0)), jnp.float32(0), value=2.0)
        assert int(state.window.seen) == 1

    def test_a_new_level_is_accepted_in_time(self):
        tx = skip_bad_steps(optax.sgd(1.0), spike=self.RULE)
        state, verdicts = tx.init(jnp.float32(0)), []
        rng = np.random.default_rng(0)
        for loss in [*(1 + 0.01 * rng.standard_normal(16)), *(2 + 0.01 * rng.standard_normal(20))]:
            _, state = tx.update(jnp.float32(1), state, jnp.float32(0), value=loss)
            verdicts.append(int(state.verdict))
        assert verdicts[16] == SPIKE
        assert set(verdicts[20:]) == {APPLIED}
