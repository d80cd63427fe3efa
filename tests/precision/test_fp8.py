"""fp8: rounding against ml_dtypes, products against numpy, and training against other meshes,
float32 and its own restart.

With `precision.compute=float32` only the operands of the block's products are rounded, so meshes
can be compared as closely as in float32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from helpers import (
    T0,
    assert_same_bits,
    assert_same_gradients,
    configure,
    parameters,
    run,
    token_rows,
    train,
)
from test_hlo import collectives

from spmd_train.build import build_step
from spmd_train.checkpoint.manager import Checkpoints
from spmd_train.errors import RequestError
from spmd_train.mesh import MeshShape, build_mesh
from spmd_train.model import Architecture, build_model
from spmd_train.precision.fp8 import fp8_einsum, product_names, quantize, remember, scales_from
from spmd_train.precision.guard import EMPTY, NOT_FINITE

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
TOP = {E4M3: 448.0, E5M2: 57344.0}

# The products of the decoder: sizes by letter, all different.
SIZES = {"b": 2, "t": 24, "d": 32, "h": 4, "e": 8, "n": 3, "f": 40}
PRODUCTS = ["btd,dhe->bthe", "btd,dne->btne", "bthe,hed->btd", "btd,df->btf", "btf,fd->btd"]
NAMES = ("query", "key", "value", "out", "gate", "up", "down")


def random(letters: str, seed: int) -> np.ndarray:
    shape = [SIZES[c] for c in letters]
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def operands(subscripts: str) -> tuple[str, str, str, np.ndarray, np.ndarray, np.ndarray]:
    """Letters and random values of x, w and g, in sizes as a model has them."""
    inputs, y = subscripts.split("->")
    x, w = inputs.split(",")
    return x, w, y, random(x, 0), 0.02 * random(w, 1), 1e-5 * random(y, 2)


def power_of_two(peak: np.ndarray, dtype: type) -> np.ndarray:
    """The largest power of two that `peak` may be multiplied with; 1 for 0."""
    _, exponent = np.frexp(TOP[dtype] / np.where(peak > 0, peak, 1.0))
    return np.where(peak > 0, np.ldexp(0.5, exponent), 1.0)


def rounded(a: np.ndarray, dtype: type, scale: np.ndarray) -> np.ndarray:
    scaled = np.clip(a.astype(np.float64) * scale, -TOP[dtype], TOP[dtype]).astype(np.float32)
    return scaled.astype(dtype).astype(np.float64) / scale


def rounded_einsum(letters: tuple[str, str, str], a: tuple, b: tuple) -> np.ndarray:
    """float64 einsum of operands (values, fp8 type, scale or None) rounded by row or by scale."""
    values = []
    for labels, (x, dtype, scale) in zip(letters[:2], (a, b), strict=True):
        summed = tuple(i for i, c in enumerate(labels) if c not in letters[2])
        if scale is None:
            scale = power_of_two(np.abs(x).max(axis=summed, keepdims=True), dtype)
        values.append(rounded(x, dtype, scale))
    return np.einsum(f"{letters[0]},{letters[1]}->{letters[2]}", *values)


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(subscripts: str, x, w, g, scales):
    """The product, and (dx, dw, the scales' "gradient")."""
    y, pullback = jax.vjp(functools.partial(fp8_einsum, subscripts), x, w, scales)
    return y, pullback(g)


def cosine(a: jax.Array, b: np.ndarray) -> float:
    a, b = np.asarray(a, np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


# ------------------------------------------------------------------------------------- one product


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_rounding_is_that_of_ml_dtypes(dtype):
    """Rows of sizes from 1e-25 to 1e25: to nearest, ties to even, subnormals kept, bit for bit."""
    a = random("tf", 3) * 10.0 ** np.arange(-25, 23, 2, dtype=np.float32)[:, None]
    a[:, :16] *= 2.0 ** -np.arange(16, dtype=np.float32)  # into e4m3's subnormals
    a[:, -4:] = a[:, 16:17] * np.array([1.0625, 1.125, 1.1875, 1.25], np.float32)  # ties
    values, unit = jax.jit(quantize, static_argnums=(1, 2))(a, jnp.dtype(dtype), (1,))
    scale = power_of_two(np.abs(a).max(1, keepdims=True), dtype)
    np.testing.assert_array_equal(np.asarray(unit, np.float64), 1.0 / scale)
    want = rounded(a, dtype, scale)
    np.testing.assert_array_equal(np.asarray(values).astype(np.float64) / scale, want)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("subscripts", PRODUCTS)
def test_products_are_those_of_the_rounded_operands(subscripts, delayed):
    """y, dx and dw against numpy's float64 products; the scales' "gradient" is what was seen."""
    xs, ws, ys, x, w, g = operands(subscripts)
    scales = np.array([64.0, 4096.0, 2.0**28], np.float32) if delayed else None
    y, (dx, dw, seen) = with_gradients(subscripts, x, w, g, scales)
    sx, sw, sg = (None,) * 3 if scales is None else scales
    want = [
        rounded_einsum((xs, ws, ys), (x, E4M3, sx), (w, E4M3, sw)),
        rounded_einsum((ys, ws, xs), (g, E5M2, sg), (w, E4M3, sw)),
        rounded_einsum((xs, ys, ws), (x, E4M3, sx), (g, E5M2, sg)),
    ]
    for got, right in zip((y, dx, dw), want, strict=True):
        np.testing.assert_allclose(got, right, rtol=0, atol=1e-6 * np.abs(right).max())
    if delayed:
        np.testing.assert_array_equal(seen, [np.abs(a).max() for a in (x, w, g)])


def test_as_exact_as_8_bits_are():
    """Published for rowwise e4m3: some 3.7 % of error in a product of random numbers; gradients
    that point where float32's do."""
    rng = np.random.default_rng(0)
    x, w, g = (
        rng.standard_normal(s).astype(np.float32) for s in ((64, 256), (256, 192), (64, 192))
    )
    y, (dx, dw, _) = with_gradients("td,df->tf", x, w, g, None)
    error = np.linalg.norm(y - x @ w) / np.linalg.norm(x @ w)
    assert 0.036 <= error <= 0.038
    assert cosine(dx, g @ w.T) >= 0.997
    assert cosine(dw, x.T @ g) >= 0.997


@pytest.mark.parametrize("scales", [None, np.ones(3, np.float32)], ids=["current", "delayed"])
def test_zeros_stay_zeros(scales):
    _, _, _, x, w, g = operands("btd,df->btf")
    y, (dx, dw, _) = with_gradients("btd,df->btf", 0 * x, w, 0 * g, scales)
    assert not np.any(y)
    assert not np.any(dx)
    assert not np.any(dw)


@pytest.mark.parametrize("scales", [None, np.ones(3, np.float32)], ids=["current", "delayed"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_not_hidden(bad, scales):
    """Neither by the clip nor by the cast; and the other rows are left alone."""
    _, _, _, x, w, g = operands("btd,df->btf")
    for which in range(3):
        a = [x.copy(), w.copy(), g.copy()]
        a[which][(0,) * a[which].ndim] = bad
        y, (dx, dw, seen) = with_gradients("btd,df->btf", *a, scales)
        finite = [np.isfinite(np.asarray(r)) for r in (y, dx, dw)]
        reached = ([0, 2], [0, 1], [1, 2])[which]  # x makes y and dw, w y and dx, g dx and dw
        for i, result in enumerate(finite):
            assert result.any()
            assert result.all() == (i not in reached)
        if scales is not None:
            assert not np.isfinite(seen[which])


def test_no_einsum_of_two_operands():
    for subscripts in ("...d,df->...f", "btd->bt", "btd,hf->btf", "btd,dd->bt"):
        with pytest.raises(ValueError, match=r"btd,df->btf"):
            fp8_einsum(subscripts, jnp.ones((1, 1, 1)), jnp.ones((1, 1)), None)


# ---------------------------------------------------------------------------------------- training

# A vocabulary that is padded on the mesh, so that saving and restoring go the long way.
BASE = (*T0, "model.vocab=61")
FP8 = ("precision.policy=fp8", "precision.fp8_history=4")
EXACT = (*FP8, "precision.compute=float32")
CURRENT, DELAYED = "precision.fp8_scaling=current", "precision.fp8_scaling=delayed"
MESH = ("2x2x2", "batch.microbatches=4")


def history_after(steps: int, mesh: str, *sets: str) -> dict[str, np.ndarray]:
    compiled = run(mesh, *sets, base=BASE)
    state, batch = compiled.state(), compiled.batch()
    for _ in range(steps):
        state, _ = compiled(state, batch)
    return jax.device_get(state.fp8)


@pytest.mark.parametrize(
    ("scaling", "remat"),
    [
        (CURRENT, "dots"),
        (DELAYED, "none"),
        pytest.param(CURRENT, "stage", marks=pytest.mark.slow),
        pytest.param(DELAYED, "dots", marks=pytest.mark.slow),
        pytest.param(DELAYED, "full", marks=pytest.mark.slow),
    ],
)
def test_a_mesh_trains_like_one_device(scaling, remat):
    """2x2x2 with 4 micro-batches against 1x1x1 with one. Seen: all within 1e-6, as in float32;
    a difference that tips one rounding would be worth 1e-3 in some gradient's entry."""
    got = train(*MESH, *EXACT, scaling, f"pipeline.remat={remat}", base=BASE)
    want = train("1x1x1", *EXACT, scaling, base=BASE)
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5)
    np.testing.assert_allclose(got.grad_norms, want.grad_norms, rtol=1e-4)
    assert_same_gradients(got.gradients, want.gradients, tolerance=1e-3)


@pytest.mark.parametrize(
    ("precision", "scaling"),
    [(EXACT, CURRENT), (EXACT, DELAYED), pytest.param(FP8, CURRENT, marks=pytest.mark.slow)],
)
def test_trains_like_float32(precision, scaling):
    """Seen: losses within 7e-4, gradient norms within 2e-2."""
    got = train("1x1x1", *precision, scaling, base=BASE)
    want = train("1x1x1", base=BASE, steps=10)
    losses, norms = want.losses[:5], want.grad_norms[:5]
    assert (got.losses != losses).all()
    np.testing.assert_allclose(got.losses, losses, rtol=5e-3)
    np.testing.assert_allclose(got.grad_norms, norms, rtol=5e-2)
    if scaling == CURRENT:  # delayed starts without scales
        for name, gradient in want.gradients.items():
            assert cosine(got.gradients[name], gradient) > 0.99, name


def test_the_history_on_a_mesh_is_that_of_one_device():
    """Largest values over all micro-batches and data shards, not of one, and not a sum."""
    got = history_after(3, *MESH, *EXACT, DELAYED, "pipeline.remat=none")
    want = history_after(3, "1x1x1", *EXACT, DELAYED)
    assert tuple(got) == tuple(sorted(NAMES))
    for name in NAMES:
        assert got[name].shape == (4, 4, 3)
        np.testing.assert_allclose(got[name], want[name], rtol=1e-3)


def test_the_history_is_what_numpy_sees():
    """Of the weights in all layers; of the input of the first layer's queries, the embedding
    behind a norm; newest first, and empty where there was no step."""
    config = configure("1x1x1", *EXACT, DELAYED, base=BASE)
    blocks = parameters(config.model)["blocks"]
    first, third = (history_after(n, "1x1x1", *EXACT, DELAYED) for n in (1, 3))
    for name in NAMES:
        part = blocks["attention" if name in ("query", "key", "value", "out") else "mlp"]
        axes = tuple(range(1, part[name].ndim))
        np.testing.assert_array_equal(first[name][0, :, 1], np.abs(part[name]).max(axes))
        assert not first[name][1:].any()
        np.testing.assert_array_equal(third[name][2], first[name][0])
        assert third[name][:3].all()
        assert not third[name][3].any()
    x = parameters(config.model)["embed"]["table"][token_rows(config)[:, :-1]]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.model.norm_eps)
    x = x * blocks["attention_norm"]["scale"][0]
    for name in ("query", "key", "value"):
        np.testing.assert_allclose(first[name][0, 0, 0], np.abs(x).max(), rtol=1e-5)


def test_scales_follow_the_history():
    """The largest value of all remembered steps decides, until it is forgotten."""
    history = {"up": jnp.zeros((2, 1, 3))}
    steps = [(8.0, 0.02, 1e-6), (4.0, 0.03, 1e-5), (2.0, 0.01, 1e-7), (1.0, 0.0, 0.0)]
    np.testing.assert_array_equal(scales_from(history)["up"], [[1.0, 1.0, 1.0]])
    for i, step in enumerate(steps):
        history = remember(history, {"up": jnp.array([step])})
        peaks = np.max(np.array(steps[max(i - 1, 0) : i + 1], np.float32), axis=0)
        want = [power_of_two(p, d) for p, d in zip(peaks, (E4M3, E4M3, E5M2), strict=True)]
        np.testing.assert_array_equal(scales_from(history)["up"], [want])


def test_a_skipped_step_leaves_the_history_alone():
    compiled = run(*MESH, *EXACT, DELAYED, "pipeline.remat=none", base=BASE)
    state, _ = compiled(compiled.state(), compiled.batch())
    before = jax.device_get(state.fp8)
    state, metrics = compiled(state, compiled.batch(lengths=np.zeros(8, np.int32)))
    assert metrics["verdict"] == EMPTY
    assert_same_bits(jax.device_get(state.fp8), before)
    state.params["blocks"]["mlp"]["up"] *= np.nan
    state, metrics = compiled(state, compiled.batch())
    assert metrics["verdict"] == NOT_FINITE
    assert_same_bits(jax.device_get(state.fp8), before)


@pytest.mark.slow
def test_idle_ticks_leave_no_trace_in_the_history():
    """Masked, they run the layers on zeros, in which biases make values."""
    sets = (*EXACT, DELAYED, "model.qkv_bias=true")
    got = history_after(2, *MESH, *sets, "pipeline.idle=masked", "pipeline.remat=stage")
    want = history_after(2, "1x1x1", *sets)
    for name in got:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-3)


@pytest.mark.parametrize("sets", [EXACT, pytest.param(FP8, marks=pytest.mark.slow)])
def test_a_restart_goes_on_as_if_nothing_had_happened(sets, tmp_path):
    """Saved at 5, run to 10 both ways: history and everything else bit for bit; and the history
    is the same on another mesh."""
    compiled = run(*MESH, *sets, DELAYED, "pipeline.remat=none", base=BASE)
    spec, batch = compiled.spec, compiled.batch()
    state = compiled.state()
    with Checkpoints(tmp_path) as checkpoints:
        for _ in range(5):
            state, _ = compiled(state, batch)
        at_5 = jax.device_get(state.fp8)
        checkpoints.save(5, spec.canonical(state), {})
        restored = spec.from_canonical(checkpoints.restore(5, spec.abstract_canonical()))
        other, _ = build_step(configure("1x1x1", *sets, DELAYED, base=BASE), one())
        moved = other.spec.from_canonical(checkpoints.restore(5, other.spec.abstract_canonical()))
    assert all(a[:4].all() for a in at_5.values())
    for arrays in (restored.fp8, moved.fp8):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(arrays), at_5)
    log: tuple[list, list] = ([], [])
    for _ in range(5):
        state, metrics = compiled(state, batch)
        log[0].append(jax.device_get(metrics))
        restored, metrics = compiled(restored, batch)
        log[1].append(jax.device_get(metrics))
    jax.tree.map(np.testing.assert_array_equal, *log)
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((state, restored)))
    losses = np.array([entry["loss"] for entry in log[0]])
    full = train("1x1x1", base=BASE, steps=10)
    np.testing.assert_allclose(losses, full.losses[5:], rtol=1e-2)


def one() -> jax.sharding.Mesh:
    return build_mesh(MeshShape.parse("1x1x1"))[0]


# ------------------------------------------------------------------------------- what runs in fp8


def dots(jaxpr: Any) -> tuple[int, int]:
    """(matrix products of two fp8 operands, other ones), inner jaxprs included."""
    fp8 = other = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            eight = [v.aval.dtype.itemsize == 1 for v in equation.invars]
            assert all(eight) or not any(eight)
            fp8, other = fp8 + all(eight), other + (not any(eight))
        for value in jax.tree.leaves(tuple(equation.params.values())):
            inner = getattr(value, "jaxpr", value)  # closed or not
            if hasattr(inner, "eqns"):
                more = dots(inner)
                fp8, other = fp8 + more[0], other + more[1]
    return fp8, other


def test_every_product_of_a_block_and_nothing_else_runs_in_fp8():
    """7 forward, 14 backward, nothing twice; attention, embedding and head as in bfloat16."""

    def counted(*sets: str) -> tuple[int, int]:
        config = configure("1x1x1", "pipeline.remat=none", *sets, base=BASE)
        step, _ = build_step(config, one())
        batch = step.abstract_batch(8, 16)
        return dots(jax.make_jaxpr(step.train_step)(step.spec.abstract(), batch).jaxpr)

    none, all_of_them = counted("precision.policy=bf16")
    assert none == 0
    for scaling in (CURRENT, DELAYED):
        assert counted(*FP8, scaling) == (21, all_of_them - 21)


@pytest.mark.parametrize(
    "sets",
    [(*EXACT, CURRENT, "pipeline.remat=dots"), (*EXACT, DELAYED, "pipeline.remat=none")],
    ids=["current", "delayed"],
)
def test_scaling_adds_no_traffic_over_data_and_no_permute(sets):
    """Largest values cross data once, after the loops; in them they only meet over model, by
    all-reduce (a permute would hang: docs/design.md, fact 9)."""
    compiled = run(*MESH, *sets, base=BASE)
    compiled(compiled.state(), compiled.batch())
    found = collectives(compiled._compiled.as_text())
    inside = [c for c in found if c.depth > 0]
    assert not [c for c in inside if "data" in c.axes]
    assert {frozenset(c.axes) for c in inside if c.kind == "collective-permute"} == {
        frozenset(["stage"])
    }


class Multiplies(nnx.Module):
    """x + x w, its product called by each of `names`."""

    def __init__(self, names: tuple[str, ...], width: int) -> None:
        self.w = nnx.Param(jnp.ones((width, width)), axes=("embed", None))
        self.names = names

    def __call__(self, x, context):
        for name in self.names:
            x = x + context.einsum(name, "btd,df->btf", x, self.w[...])
        return x


def own(*names: str):
    model = build_model(configure("1x1x1", base=BASE).model)
    parts = model.architecture
    made = Architecture(parts.embed, lambda rngs: Multiplies(names, 32), parts.head)
    return type(model)(model.config, made)


def test_products_are_found_by_name():
    assert product_names(own("first", "second"), 16, jnp.bfloat16) == ("first", "second")
    decoder = build_model(configure("1x1x1", base=BASE).model)
    assert product_names(decoder, 16, jnp.bfloat16) == NAMES


def test_a_block_without_fp8_products_is_refused():
    """It would train in bfloat16 and say fp8."""
    for scaling in (CURRENT, DELAYED):
        config = configure("1x1x1", *FP8, scaling, "model.block=own_model:bigram", base=BASE)
        with pytest.raises(RequestError, match=r"own_model:bigram .* context.einsum"):
            build_step(config, one())


def test_two_products_of_one_name_are_refused():
    with pytest.raises(RequestError, match="named same"):
        product_names(own("same", "other", "same"), 16, jnp.bfloat16)
