"""Every optimizer against optax on one layer's parameter at a time, every mesh against one device.

The trainer's parameters are stacks of all layers, sharded and padded; the reference gives each
layer's own matrix to optax's own alias (`optax.contrib.muon`, `optax.adafactor`, ...).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FAST, T0, T1, Run, configure, named, run

from spmd_train.config_groups import GuardConfig, LossScaleConfig, OptimConfig
from spmd_train.errors import RequestError
from spmd_train.model import build_model
from spmd_train.optim import base_optimizer, learning_rate
from spmd_train.precision import compose
from spmd_train.precision.policy import POLICIES
from spmd_train.sharding import Layout, Leaf, tree_map_leaves
from spmd_train.state import StateSpec

OPTIMIZERS = ("adamw", "adafactor", "lion", "muon")
LR, DECAY = 1e-2, 0.1

# Sizes of 128 and more, so that Adafactor factors: query, key, value and out by (D, E), the rest.
WIDE = configure(
    "1x1x1",
    *("model.layers=2", "model.width=128", "model.heads=2", "model.kv_heads=1"),
    *("model.head_dim=128", "model.ffn=192", "model.vocab=61"),
    *("model.qkv_bias=true", "model.qk_norm=true"),
).model
MATRICES = ("query", "key", "value", "out", "gate", "up", "down")  # of a block
ROWS = {"out": 2 * 128, "down": 192}  # what they contract; the others contract the width


def optim(name: str, **changed: Any) -> OptimConfig:
    defaults = {"lr": LR, "warmup_steps": 2, "weight_decay": DECAY}
    return OptimConfig(name=name, **{**defaults, **changed})


def random_like(leaves: Any, seed: int) -> Any:
    """In size 1 + seed: gradients that grow are what Adafactor clips."""
    rng = np.random.default_rng(seed)
    return tree_map_leaves(
        lambda leaf: (1 + seed) * rng.standard_normal(leaf.logical_shape, np.float32), leaves
    )


def compiled(fn: Any, *args: Any) -> Any:
    return jax.jit(fn).lower(*args).compile(compiler_options=FAST)


def updated(tx: optax.GradientTransformation, params: Any, gradients: list[Any]) -> tuple[Any, Any]:
    """Parameters and state after one update per gradient."""
    state = tx.init(params)

    def update(params: Any, state: Any, gradient: Any) -> tuple[Any, Any]:
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    step = compiled(update, params, state, gradients[0])
    for gradient in gradients:
        params, state = step(params, state, gradient)
    return params, state


class TestAgainstOptaxPerLayer:
    STEPS = 6

    def reference(self, name: str, parameter: str) -> tuple[optax.GradientTransformation, Any]:
        """The optimizer of one parameter of one layer, and the shape in which it takes it."""
        config = optim(name)
        rate = learning_rate(config, self.STEPS)
        group, *_, last = parameter.split("/")
        is_matrix = group == "blocks" and last in MATRICES
        decay = DECAY if is_matrix or parameter == "head/matrix" else 0.0
        b1, b2 = config.betas
        if name == "lion":
            return optax.lion(rate, b1, b2, weight_decay=decay), None
        if name == "adafactor":
            return optax.adafactor(
                rate,
                multiply_by_parameter_scale=False,
                weight_decay_rate=lambda count: decay * rate(count),
                factored=group == "blocks",
            ), None
        if name == "muon" and is_matrix:
            muon = optax.contrib.muon(rate, beta=b1, weight_decay=decay, consistent_rms=0.2)
            return muon, (ROWS.get(last, 128), -1)
        return optax.adamw(rate, b1, b2, weight_decay=decay), None

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_three_updates(self, name):
        leaves = build_model(WIDE).leaves(Layout())
        tx = base_optimizer(optim(name), self.STEPS, leaves, POLICIES["fp32"])
        start, gradients = random_like(leaves, 0), [random_like(leaves, k) for k in (1, 2, 3)]
        alone = {  # by path and layer
            (path, layer): self.reference(name, path)
            for path in named(start)
            for layer in (range(WIDE.layers) if path.startswith("blocks/") else (None,))
        }

        def separated(tree: Any) -> dict[Any, Any]:
            flat = named(tree)
            one = {(p, i): flat[p] if i is None else flat[p][i] for p, i in alone}
            return {k: x if alone[k][1] is None else x.reshape(alone[k][1]) for k, x in one.items()}

        def init(params: Any) -> Any:
            return {k: tx.init(params[k]) for k, (tx, _) in alone.items()}

        def update(updates: Any, state: Any, params: Any) -> Any:
            new = {k: tx.update(updates[k], state[k], params[k]) for k, (tx, _) in alone.items()}
            return tuple({k: pair[i] for k, pair in new.items()} for i in (0, 1))

        separate = optax.GradientTransformation(init, update)
        want = updated(separate, separated(start), [separated(g) for g in gradients])[0]
        got = separated(updated(tx, start, gradients)[0])
        before = separated(start)
        for key, weights in want.items():
            assert np.abs(weights - before[key]).max() > 0.5 * LR, key
            np.testing.assert_allclose(
                got[key], weights, rtol=1e-6, atol=1e-4 * LR, err_msg=str(key)
            )

    def test_adafactor_keeps_only_sums_of_rows_and_columns(self):
        """One layer's gate [D, F] has D + F second moments; the embedding's are whole."""
        leaves = build_model(WIDE).leaves(Layout())
        tx = base_optimizer(optim("adafactor"), self.STEPS, leaves, POLICIES["fp32"])
        state = jax.eval_shape(tx.init, random_like(leaves, 0))
        layers, rest = (
            optax.tree.get_all_with_path(state, name, filtering=lambda path, x: isinstance(x, dict))
            for name in ("v_row", "v_col")
        )
        shapes = {value["blocks"]["mlp"]["gate"].shape for path, value in layers[:1] + rest[:1]}
        assert shapes == {(2, 128), (2, 192)}


class TestOnAMesh:
    """Three updates with given gradients, on padded and sharded parameters."""

    SETS = (
        *("model.layers=2", "model.width=128", "model.vocab=61"),
        *("optim.lr=1e-2", "optim.clip_norm=null"),
    )

    @staticmethod
    @functools.cache
    def on(mesh: str, name: str) -> tuple[Run, Any]:
        """The optimizer of a whole run, and its compiled update; Muon's sees whole matrices."""
        made = run(mesh, f"optim.name={name}", *TestOnAMesh.SETS)
        spec = made.spec

        def update(state: Any, gradients: Any) -> Any:
            updates, opt_state = spec.tx.update(gradients, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            return type(state)(state.step + 1, params, opt_state)

        state, gradients = made.state(), TestOnAMesh.gradients(spec, 0)
        step = jax.jit(update, out_shardings=spec.shardings()).lower(state, gradients)
        return made, step.compile(compiler_options=FAST)

    @staticmethod
    def gradients(spec: StateSpec, seed: int) -> Any:
        """As the pipeline hands them over: padded, on the optimizer's shards."""

        def placed(leaf: Leaf, x: np.ndarray) -> jax.Array:
            padded = np.pad(x, [(0, n - m) for n, m in zip(leaf.shape, x.shape, strict=True)])
            return jax.device_put(padded, spec.layout.named(spec.layout.optimizer_spec(leaf)))

        return tree_map_leaves(placed, spec.leaves, random_like(spec.leaves, seed))

    @staticmethod
    def after(mesh: str, name: str, seeds: tuple[int, ...], state: Any = None) -> Any:
        made, update = TestOnAMesh.on(mesh, name)
        state = made.state() if state is None else state
        for seed in seeds:
            state = update(state, TestOnAMesh.gradients(made.spec, seed))
        return state

    @staticmethod
    def restored(spec: StateSpec, saved: Any) -> Any:
        """From a checkpoint's arrays, placed as a restore places them."""
        shardings = jax.tree.map(lambda x: x.sharding, spec.abstract_canonical())
        return spec.from_canonical(jax.device_put(saved, shardings))

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_same_as_on_one_device(self, name):
        one, many = (self.after(mesh, name, (1, 2, 3)) for mesh in ("1x1x1", "2x2x2"))
        want, got = (
            self.on(mesh, name)[0].weights(state)
            for mesh, state in (("1x1x1", one), ("2x2x2", many))
        )
        for parameter, weights in want.items():
            np.testing.assert_allclose(got[parameter], weights, rtol=0, atol=1e-4 * LR)

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_resumed_in_the_middle(self, name):
        """Through the canonical state: bit for bit on the same mesh, and the same state on another
        one, where the vocabulary has no padding."""
        whole = self.after("2x2x2", name, (1, 2, 3))
        spec = self.on("2x2x2", name)[0].spec
        saved = jax.device_get(spec.canonical(self.after("2x2x2", name, (1, 2))))
        again = self.after("2x2x2", name, (3,), self.restored(spec, saved))
        jax.tree.map(np.testing.assert_array_equal, spec.canonical(again), spec.canonical(whole))
        other = self.on("1x1x1", name)[0].spec
        moved = other.canonical(self.restored(other, saved))
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(moved), saved)

    @pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "adafactor"])
    def test_half_precision_moments_are_saved_in_float32(self, name):
        """And restored without loss; the second moment stays in float32."""
        sets = (*self.SETS, f"optim.name={name}", "precision.moments=bfloat16")
        spec = run("2x2x2", *sets).spec
        rng = np.random.default_rng(0)

        def drawn(x: jax.Array) -> jax.Array:
            return (
                x
                if x.dtype == jnp.int32
                else x + jnp.asarray(rng.standard_normal(x.shape), x.dtype)
            )

        state = run("2x2x2", *sets).state()
        state = type(state)(state.step, state.params, jax.tree.map(drawn, state.opt_state))
        moments = jax.tree_util.tree_flatten_with_path(state.opt_state)[0]
        half = {"mu" in jax.tree_util.keystr(p) for p, x in moments if x.dtype == jnp.bfloat16}
        assert half == {True}
        saved = jax.device_get(spec.canonical(state))
        assert {x.dtype.name for x in jax.tree.leaves(saved)} == {"float32", "int32"}
        restored = self.restored(spec, saved)
        assert [x.dtype for x in jax.tree.leaves(restored)] == [
            x.dtype for x in jax.tree.leaves(state)
        ]
        again = jax.device_get(spec.canonical(restored))
        jax.tree.map(np.testing.assert_array_equal, again, saved)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["adafactor", "lion", "muon"])
    def test_whole_steps(self, name):
        """Three steps with the gradients of the pipeline, which differ by summation order. Where a
        gradient is no more than that, Lion's sign (and Adam's) is chance."""
        weights = {}
        for mesh in ("1x1x1", "2x2x2"):
            made = run(mesh, f"optim.name={name}", "model.layers=2", base=T0)
            state, batch = made.state(), made.batch()
            for _ in range(3):
                state, _ = made(state, batch)
            weights[mesh] = made.weights(state)
        for parameter, want in weights["1x1x1"].items():
            off = np.abs(weights["2x2x2"][parameter] - want) > 1e-2 * 1e-3
            assert off.mean() < 0.01, parameter


class TestZeroGradient:
    """Case P07 (google-deepmind/optax#1754): no gradient, no update, in every number format."""

    @pytest.mark.parametrize("policy", ["fp16", pytest.param("fp32", marks=pytest.mark.slow)])
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_nothing_moves(self, name, policy):
        """All gradients zero but the first 32 rows of the embedding's."""
        policy = POLICIES[policy]
        leaves = build_model(WIDE).leaves(Layout())
        config = optim(name, weight_decay=0.0, warmup_steps=0)
        rule = base_optimizer(config, 6, leaves, policy)
        scale = LossScaleConfig(initial=1.0)
        tx = compose(rule, policy, scale, GuardConfig(), config.clip_norm)
        start = jax.tree.map(lambda a: jnp.asarray(a, policy.compute), random_like(leaves, 0))
        gradient = jax.tree.map(lambda a: np.zeros(a.shape, np.float32), start)
        gradient["embed"]["table"][:32] = random_like(leaves, 1)["embed"]["table"][:32]
        end, state = updated(tx, start, [gradient] * 3)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
        rows = np.asarray(end["embed"]["table"] != start["embed"]["table"])
        assert rows[:32].mean() > 0.9
        assert not rows[32:].any()
        for group in ("blocks", "head"):
            jax.tree.map(np.testing.assert_array_equal, end[group], start[group])


class TestWeightDecay:
    DECAYS = {*(f"blocks/attention/{m}" for m in MATRICES[:4]), "head/matrix"} | {
        f"blocks/mlp/{m}" for m in MATRICES[4:]
    }

    @pytest.mark.parametrize(
        ("name", "exclude"),
        [*((name, ("norms", "biases", "embeddings")) for name in OPTIMIZERS), ("muon", ("norms",))],
    )
    def test_what_decays(self, name, exclude):
        """Without gradients a weight loses lr * decay of itself; a stacked bias is no weight."""
        leaves = build_model(WIDE).leaves(Layout())
        config = optim(name, warmup_steps=0, schedule="constant", decay_exclude=exclude)
        tx = base_optimizer(config, 6, leaves, POLICIES["fp32"])
        start = random_like(leaves, 0)
        end = named(updated(tx, start, [jax.tree.map(np.zeros_like, start)])[0])
        for parameter, before in named(start).items():
            biased = parameter.endswith("_bias") or parameter == "embed/table"
            decays = parameter in self.DECAYS or (biased and "biases" not in exclude)
            factor = np.float32(1 - LR * DECAY) if decays else 1.0
            np.testing.assert_allclose(end[parameter], before * factor, rtol=1e-6, atol=1e-8)
            assert decays == bool((end[parameter] != before).any()), parameter


class TestSchedules:
    WARMUP = (2.5e-4, 5e-4, 7.5e-4, 1e-3)

    @pytest.mark.parametrize(
        ("schedule", "next_two"),
        [
            ("cosine", (9.78e-4, 9.14e-4)),  # 1e-4 + 9e-4 (1 + cos(pi k / 10)) / 2, k = 1, 2
            ("linear", (9.1e-4, 8.2e-4)),
            ("constant", (1e-3, 1e-3)),
            ("wsd", (1e-3, 1e-3)),
        ],
    )
    def test_applied_is_logged(self, schedule, next_two):
        """Case P24: a warm-up of 4 to 1e-3. Lion moves a weight by exactly the learning rate."""
        config = OptimConfig(
            name="lion", lr=1e-3, warmup_steps=4, schedule=schedule, weight_decay=0.0
        )
        leaves = {"w": Layout().leaf(("embed",), (1,))}
        tx = base_optimizer(config, 14, leaves, POLICIES["fp32"])
        params = {"w": jnp.zeros(1)}
        state, applied = tx.init(params), []
        for _ in range(6):
            updates, state = tx.update({"w": jnp.ones(1)}, state, params)
            applied.append(-float(updates["w"][0]))
        logged = [float(learning_rate(config, 14)(count)) for count in range(6)]
        np.testing.assert_allclose(applied, logged, rtol=1e-6)
        np.testing.assert_allclose(applied, (*self.WARMUP, *next_two), rtol=1e-3)
        np.testing.assert_allclose(applied[:4], self.WARMUP, rtol=1e-6)

    @pytest.mark.parametrize(
        ("warmup", "fraction", "want"),
        [
            # Updates 1 ... 10. The last four fall by 0.9 / 4 of the rate each, to a tenth of it.
            (2, 0.4, (0.5, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325, 0.1)),
            (0, 0.2, (1, 1, 1, 1, 1, 1, 1, 1, 0.55, 0.1)),
            (0, 0.01, (1, 1, 1, 1, 1, 1, 1, 1, 1, 0.1)),  # one step at least
            (5, 1.0, (0.2, 0.4, 0.6, 0.8, 1, 0.82, 0.64, 0.46, 0.28, 0.1)),  # at once
        ],
    )
    def test_wsd(self, warmup, fraction, want):
        config = OptimConfig(lr=2.0, warmup_steps=warmup, schedule="wsd", decay_fraction=fraction)
        rates = [float(learning_rate(config, 10)(count)) for count in range(11)]
        np.testing.assert_allclose(rates, 2.0 * np.array([*want, 0.1]), rtol=1e-6)


def test_lions_moment_decays_with_the_second_rate():
    """So it is the second rate that a bfloat16 moment must not be too slow for."""
    slow = ("optim.betas=[0.9, 0.999]", "precision.moments=bfloat16")
    assert run("1x1x1", *slow, base=T1).resolved.policy.endswith("moments=bfloat16")
    with pytest.raises(RequestError, match=r"decay of 0\.999 "):
        run("1x1x1", *slow, "optim.name=lion", base=T1)
