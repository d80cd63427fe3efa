"""The decoder's parts against numpy, against published numbers, and what a layer keeps."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import T0, parameters

from spmd_train.config import load
from spmd_train.model import BlockContext, build_model
from spmd_train.model.decoder import Attention, Head, RMSNorm, rope_table, rotate
from spmd_train.model.protocol import VocabRows
from spmd_train.pipeline.layers import REMAT, StageLayers
from spmd_train.sharding import Layout


class TestRotaryPositions:
    """Public cases P09 (precision of far positions) and P23 (order of the lanes)."""

    @pytest.mark.parametrize(
        ("position", "cosine"), [(257, 0.819306), (4095, -0.065976)], ids=["257", "4095"]
    )
    def test_cosine_of_a_far_position(self, position, cosine):
        cos, _ = rope_table(jnp.array([position]), head_dim=64, theta=1e4)
        np.testing.assert_allclose(cos[0, 0], cosine, atol=2e-4)

    @pytest.mark.parametrize(
        ("positions", "tolerance"),
        [((0, 255, 256, 257, 4095), 2e-4), ((4097, 32767), 5e-4), ((131071,), 2e-3)],
    )
    def test_error_against_float64(self, positions, tolerance):
        positions = np.array(positions)
        cos, sin = rope_table(jnp.asarray(positions), head_dim=64, theta=1e4)
        angles = positions[:, None] * 1e4 ** -(np.arange(0, 64, 2) / 64)
        assert np.abs(cos - np.cos(angles)).max() <= tolerance
        assert np.abs(sin - np.sin(angles)).max() <= tolerance

    def test_the_first_8192_rows_are_distinct(self):
        cos, sin = rope_table(jnp.arange(8192), head_dim=64, theta=1e4)
        assert cos.dtype == sin.dtype == jnp.float32
        assert len(np.unique(np.concatenate([cos, sin], axis=1), axis=0)) == 8192

    @pytest.mark.parametrize(("position", "score"), [(0, 120.0), (1, 72.68403), (5, 111.26755)])
    def test_halves_are_paired_not_neighbours(self, position, score):
        """rot(q, p) . rot(k, 0); interleaved lanes would give 120, 101.12416, 103.36162."""
        q, k = np.arange(1.0, 9.0, dtype=np.float32), np.arange(8.0, 0.0, -1.0, dtype=np.float32)
        table = rope_table(jnp.array([position, 0]), head_dim=8, theta=1e4)
        turned = rotate(jnp.stack([q, k])[None, :, None, :], table)[0, :, 0]
        np.testing.assert_allclose(turned[0] @ turned[1], score, rtol=1e-6)

    def test_low_precision_is_cast_only_after_the_rotation(self):
        x = jnp.ones((1, 1, 1, 64), jnp.bfloat16)
        table = rope_table(jnp.array([257]), head_dim=64, theta=1e4)
        exact = rotate(x.astype(jnp.float32), table)
        turned = rotate(x, table)
        assert turned.dtype == jnp.bfloat16
        np.testing.assert_array_equal(turned, exact.astype(jnp.bfloat16))


def config_of(*sets: str):
    return load(None, [*T0, *sets]).model


def test_rms_norm_is_the_formula():
    rng = np.random.default_rng(0)
    x, scale = rng.standard_normal((3, 5, 32)), rng.standard_normal(32)
    norm = RMSNorm(32, 1e-5)
    norm.scale = nnx.Param(jnp.asarray(scale, jnp.float32))
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32)), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("cap", [None, 0.5])
def test_head_is_norm_matrix_and_soft_cap(cap):
    config = config_of(f"model.logit_softcap={'null' if cap is None else cap}")
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((2, 3, 32)), 0.02 * rng.standard_normal((32, 64))
    head = Head(config, rngs=nnx.Rngs(0))
    head.matrix = nnx.Param(jnp.asarray(w, jnp.float32))
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) @ w
    if cap is not None:
        want = cap * np.tanh(want / cap)
        assert np.abs(want).max() < cap
    got = head(jnp.asarray(x, jnp.float32), VocabRows(0, 64, 64), None)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_attention_is_the_textbook_in_numpy(qk_norm):
    """Projections, biases, QK-norm before RoPE, GQA, output projection, all in float64."""
    config = config_of(f"model.qk_norm={str(qk_norm).lower()}", "model.qkv_bias=true")
    rng = np.random.default_rng(2)
    graph, state = nnx.split(nnx.eval_shape(lambda: Attention(config, rngs=nnx.Rngs(0))))
    drawn = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), jnp.float32), state)
    module = nnx.merge(graph, drawn)
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), nnx.to_pure_dict(drawn))
    x = rng.standard_normal((2, 6, 32))

    def projected(name: str) -> np.ndarray:
        return np.einsum("btd,dhe->bthe", x, p[name]) + p[f"{name}_bias"]

    def normed(a: np.ndarray, name: str) -> np.ndarray:
        rms = np.sqrt((a**2).mean(-1, keepdims=True) + config.norm_eps)
        return a / rms * p[name]["scale"] if qk_norm else a

    def turned(a: np.ndarray) -> np.ndarray:
        angle = np.arange(6)[:, None, None] * 1e4 ** -(np.arange(0, 8, 2) / 8)
        low, high = a[..., :4], a[..., 4:]
        return np.concatenate(
            [
                low * np.cos(angle) - high * np.sin(angle),
                high * np.cos(angle) + low * np.sin(angle),
            ],
            axis=-1,
        )

    q = turned(normed(projected("query"), "query_norm"))
    k = turned(normed(projected("key"), "key_norm"))
    v = projected("value")
    k, v = np.repeat(k, 2, axis=2), np.repeat(v, 2, axis=2)
    scores = np.einsum("bthe,bshe->bhts", q, k) / np.sqrt(8)
    scores = np.where(np.tril(np.ones((6, 6), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    want = np.einsum("bhts,bshe,hed->btd", weights, v, p["out"])
    context = BlockContext(rope_table(jnp.arange(6), 8, 1e4), 0, None, Layout(), "xla")
    got = jax.jit(lambda x: module(x, context))(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


@functools.cache
def kept_sizes(remat: str, rows: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of what one layer of T0 keeps for its backward pass."""
    config = config_of("model.qkv_bias=true", "model.qk_norm=true")
    model = build_model(config)
    layer = jax.tree.map(lambda a: jnp.asarray(a[0]), parameters(config)["blocks"])

    def block(params, x, shared):
        return model.block(params, x, BlockContext(shared, 0, None, Layout(), "xla"))

    stage = StageLayers(block, lambda i: layer, 1, remat, lambda totals, i, g: totals)
    x = jax.ShapeDtypeStruct((rows, 16, 32), jnp.float32)
    return tuple(k.shape for k in stage.recipe(x, model.shared(16)).kept)


@pytest.mark.parametrize("remat", REMAT)
def test_what_a_layer_keeps_grows_with_the_rows(remat):
    """No weight is kept once per micro-batch.

    `none` keeps what JAX broadcast from a norm's scale or a rotary table: all smaller than the
    smallest matrix. The others keep nothing that micro-batches share.
    """
    two, four = kept_sizes(remat, 2), kept_sizes(remat, 4)
    assert len(two) == len(four) > 0
    shared = [a for a, b in zip(two, four, strict=True) if np.prod(b) != 2 * np.prod(a)]
    smallest_matrix = 32 * 2 * 8
    assert sum(map(np.prod, shared)) < (2 * smallest_matrix if remat == "none" else 1), shared


def test_remat_policies_keep_less_and_less():
    total = {remat: sum(map(np.prod, kept_sizes(remat, 2))) for remat in REMAT}
    assert total["full"] == total["stage"] == 2 * 16 * 32  # the layer's input, nothing else
    assert total["none"] > total["dots"] > total["full"]
