"""The numerics clauses of the public bug cases, in the trainer itself, in half precision.

Numbers: the P cases of other trainers' reports. The wrappers alone are in tests/precision.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    T0,
    T0_LENGTHS,
    Run,
    assert_same_bits,
    learned,
    parameters,
    run,
    token_rows,
    train,
)

from spmd_train.pipeline import vocabulary
from spmd_train.precision import LossScaleState, guard_of, scale_of
from spmd_train.precision.guard import APPLIED, EMPTY, NOT_FINITE

FP16 = "precision.policy=fp16"


def half(mesh: str, *sets: str) -> Run:
    return run(mesh, FP16, "batch.microbatches=2", *sets, base=T0)


MESHES = ["1x1x1", "2x2x2"]


@pytest.mark.parametrize("mesh", MESHES)
class TestFP16:
    """fp16 with dynamic scaling against fp32, and what it does at its limits."""

    def test_it_trains_like_fp32(self, mesh):
        """Scaled by 2^16 or not at all, the first loss is the same; the losses follow FP32's."""
        got = half(mesh).train(5)
        want = train("1x1x1", base=T0)
        np.testing.assert_allclose(got.losses, want.losses, atol=2e-2)
        np.testing.assert_allclose(got.grad_norms[0], want.grad_norms[0], rtol=2e-2)
        assert (np.diff(got.losses) < 0).all()

    def test_p02_empty_parts_and_an_empty_step(self, mesh):
        """A data shard or micro-batch without a token is absent; a whole step without is no-op."""
        step = half(mesh)
        rows = token_rows(step.config)
        lengths = np.array([n if i % 2 else 0 for i, n in enumerate(T0_LENGTHS)])
        state, metrics = step(step.state(), step.batch(rows, lengths))
        assert metrics["verdict"] == APPLIED
        assert metrics["tokens"] == lengths.sum()
        assert np.isfinite(metrics["loss"])
        before, scale = learned(state), jax.device_get(state.opt_state[:3])
        state, metrics = step(state, step.batch(rows, np.zeros(8, int)))
        assert metrics["verdict"] == EMPTY
        assert [float(metrics[k]) for k in ("tokens", "loss", "grad_norm")] == [0, 0, 0]
        assert_same_bits(learned(state), before)
        assert_same_bits(jax.device_get(state.opt_state[:3]), scale)

    def test_p05_an_overflow_changes_nothing_and_halves_the_scale(self, mesh):
        """A scale that overflows every gradient: each step is skipped until one is not."""
        step = half(mesh)
        state = step.state()
        high = jax.device_put(jnp.float32(2.0**40), state.opt_state.scale.sharding)
        state = replace(state, opt_state=state.opt_state._replace(scale=high))
        before = learned(state)
        verdicts, scales = [], []
        while not verdicts or (verdicts[-1] == NOT_FINITE and len(verdicts) < 40):
            state, metrics = step(state, step.batch())
            verdicts.append(int(metrics["verdict"]))
            scales.append(float(metrics["loss_scale"]))
            if verdicts[-1] == NOT_FINITE:
                assert_same_bits(learned(state), before)
                assert metrics["consecutive_skips"] == len(verdicts)
        assert verdicts[-1] == APPLIED
        assert len(verdicts) > 5
        assert scales == [2.0 ** (40 - i) for i in range(len(scales))]
        assert guard_of(state.opt_state).consecutive == 0

    def test_p06_no_state_is_half(self, mesh):
        """Only the image that the forward pass reads is; checkpoints hold none at all."""
        step = half(mesh)
        state = step.state()
        kinds = {jnp.dtype(x.dtype).name for x in jax.tree.leaves(state.opt_state)}
        assert kinds <= {"float32", "int32", "bool"}
        assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float16)}
        saved = jax.tree.leaves(step.spec.abstract_canonical())
        assert {jnp.dtype(x.dtype).name for x in saved} <= {"float32", "int32"}

    def test_p07_rows_that_are_never_seen_do_not_move(self, mesh):
        """optax#1754: eps is 0 in fp16, and a zero gradient 0/0. Here 20 steps on ids below 32."""
        step = half(mesh, "optim.weight_decay=0")
        rows = token_rows(step.config) % 32
        state, batch = step.state(), step.batch(rows)
        before = step.weights(state)["embed/table"]
        for _ in range(20):
            state, metrics = step(state, batch)
        after = step.weights(state)["embed/table"]
        assert metrics["verdict"] == APPLIED
        assert_same_bits(after[32:], before[32:])
        assert np.isfinite(after).all()
        seen = np.unique(rows[:, :-1])
        assert (after[seen] != before[seen]).any(axis=1).mean() > 0.9

    def test_row_17_scale_and_counters_are_resumed(self, mesh):
        """Saved at 5, run to 10 both ways: equal scale, counters and weights, to the bit."""
        sets = ("precision.loss_scale.growth_interval=3", "precision.loss_scale.hysteresis=2")
        step = half(mesh, *sets)
        state = step.state()
        for _ in range(5):
            state, _ = step(state, step.batch())
        resumed = step.spec.from_canonical(jax.tree.map(jnp.copy, step.spec.canonical(state)))
        assert_same_bits(jax.device_get(resumed), jax.device_get(state))
        for _ in range(5):
            state, _ = step(state, step.batch())
            resumed, _ = step(resumed, step.batch())
        assert_same_bits(jax.device_get(resumed), jax.device_get(state))
        assert scale_of(state.opt_state) == 2.0**19
        assert state.opt_state.clean == 1


def test_p06_half_precision_masters_stall():
    """What is refused: norm scales of 1 never move, since a step is below 1/256 of them."""
    unsafe = ("precision.policy=bf16", "precision.master=bfloat16", "precision.allow_unsafe=true")
    sets = ("optim.lr=1e-3", "optim.weight_decay=0", "batch.microbatches=2")
    ones = jax.tree.map(np.copy, parameters(run("1x1x1", base=T0).config.model))
    ones["blocks"]["mlp_norm"]["scale"][:] = 1.0
    moved = {}
    for name, more in (("kept in FP32", ("precision.policy=bf16",)), ("bfloat16 only", unsafe)):
        step = run("1x1x1", *sets, *more, base=T0)
        state = step.state(ones)
        for _ in range(8):
            state, metrics = step(state, step.batch())
        assert metrics["verdict"] == APPLIED
        moved[name] = np.abs(step.weights(state)["blocks/mlp_norm/scale"] - 1.0).max()
        saved = jax.tree.leaves(step.spec.abstract_canonical())
        assert {jnp.dtype(x.dtype).name for x in saved} <= {"float32", "int32"}
    assert moved["kept in FP32"] > 5e-3
    assert moved["bfloat16 only"] == 0


def test_another_policy_starts_its_own_scale():
    """fp32 -> fp16 begins at the initial scale; fp16 -> fp32 drops it; the rest is kept."""
    half_step, full_step = half("1x1x1"), run("1x1x1", "batch.microbatches=2", base=T0)
    state, _ = full_step(full_step.state(), full_step.batch())
    there = half_step.spec.from_canonical(jax.tree.map(jnp.copy, full_step.spec.canonical(state)))
    assert isinstance(there.opt_state, LossScaleState)
    assert scale_of(there.opt_state) == 2.0**16
    assert there.opt_state.hysteresis == 1
    back = full_step.spec.from_canonical(jax.tree.map(jnp.copy, half_step.spec.canonical(there)))
    assert_same_bits(jax.device_get(back), jax.device_get(state))


class TestP08LossPrecision:
    """optax#1020: one token, V = 131072, logits from bf16; a bf16 log-sum-exp gives 11.8125, ..."""

    V = 131072

    @pytest.mark.parametrize("mesh", ["1x1x1", "1x2x1", "1x4x1", "2x2x2"])
    def test_the_reports_numbers(self, mesh, monkeypatch):
        """On every model axis; and cut into four chunks of the sequence."""
        rows_ = int(mesh[0])
        toy = Run(
            run(
                mesh,
                *("model.block=own_model:column", "model.layers=2", "model.width=1"),
                *("model.heads=4", "model.kv_heads=4", "model.head_dim=2", f"model.vocab={self.V}"),
                *("batch.sequence_length=4", f"batch.global_size={rows_}"),
                *("precision.policy=bf16", "optim.clip_norm=null"),
                base=T0,
            ).config
        )
        monkeypatch.setattr(vocabulary, "LOGITS_BYTES", 4 * self.V // int(mesh[2]) // int(mesh[4]))
        peak, report = (
            77,
            [
                (0, 11.783502, 1e-5),
                (12, 0.590742, 1e-5),
                (20, 2.7012e-4, 2e-6),
            ],
        )
        for height, loss, atol in report:
            matrix = np.zeros((1, self.V), np.float32)
            matrix[0, peak] = height
            params = {
                "embed": {"table": np.ones((self.V, 1), np.float32)},
                "blocks": {},
                "head": {"matrix": matrix},
            }
            state, metrics = toy(
                toy.state(params), toy.batch(np.full((rows_, 5), peak), np.full(rows_, 4))
            )
            np.testing.assert_allclose(metrics["loss"], loss, rtol=0, atol=atol)
            gradient = toy.unpadded(toy.gradients(state, metrics))["head/matrix"]
            assert abs(gradient.sum(dtype=np.float64)) < 1e-5
            assert gradient[0, peak] < 0


class TestP24Schedule:
    """gpt-neox#1373: the first update is no no-op, and the logged rate is the applied one.

    Lion moves a weight by the learning rate exactly, whatever its gradient.
    """

    EXPECTED = (2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3)

    @pytest.mark.parametrize("microbatches", [1, 4])
    def test_logged_is_applied(self, microbatches):
        step = run(
            "1x1x1",
            *("optim.name=lion", "optim.warmup_steps=4", "optim.weight_decay=0"),
            *("model.layers=1", f"batch.microbatches={microbatches}"),
            base=T0,
        )
        params = parameters(step.config.model)  # the head from zero, where float32 is fine enough
        head = {**params["head"], "matrix": np.zeros_like(params["head"]["matrix"])}
        state = step.state({**params, "head": head})
        before = step.weights(state)
        for k, lr in enumerate(self.EXPECTED):
            if k == 2:  # a resumed run goes on where it was
                saved = jax.tree.map(jnp.copy, step.spec.canonical(state))
                state = step.spec.from_canonical(saved)
            if k == 3:  # a step without tokens does not advance it
                state, _ = step(state, step.batch(lengths=np.zeros(8, int)))
            state, metrics = step(state, step.batch())
            after = step.weights(state)
            moved = np.abs(after["head/matrix"] - before["head/matrix"])
            moved = moved[moved > 0]
            assert moved.size > 100
            np.testing.assert_allclose(metrics["lr"], lr, rtol=1e-6)
            np.testing.assert_allclose(moved, metrics["lr"], rtol=0, atol=1e-9)
            before = after
