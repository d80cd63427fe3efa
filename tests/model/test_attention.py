"""Blockwise attention against a softmax written out in numpy float64, and its plain gradient."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from spmd_train.errors import RequestError
from spmd_train.model.attention import attend, blockwise, resolve_attention
from spmd_train.sharding import Layout


def plain(q: np.ndarray, k: np.ndarray, v: np.ndarray, segments=None) -> np.ndarray:
    """Causal softmax attention in float64; query head h reads KV head h // (H / N)."""
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(a, group, axis=2) for a in (k, v))
    scores = np.einsum("bthe,bshe->bhts", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(visible(segments, q.shape[1]), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhts,bshe->bthe", weights, v)


def visible(segments, length):
    """[B or 1, 1, T, S] bool: an earlier position of the same document."""
    earlier = np.tril(np.ones((1, 1, length, length), bool))
    if segments is None:
        return earlier
    return earlier & (segments[:, None, :, None] == segments[:, None, None, :])


def plain_jax(q: jax.Array, k: jax.Array, v: jax.Array, segments=None) -> jax.Array:
    """The same for `jax.grad`; itself checked against `plain`."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(a, group, axis=2) for a in (k, v))
    scores = jnp.einsum("bthe,bshe->bhts", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(visible(segments, q.shape[1]), scores, -jnp.inf)
    return jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(scores, -1), v)


@functools.cache
def inputs(length: int, kv_heads: int, scale: float = 1.0) -> tuple[np.ndarray, ...]:
    """q, k, v and an output gradient; batch 2, 4 heads of 8."""
    rng = np.random.default_rng(length + kv_heads)
    shapes = [(2, length, heads, 8) for heads in (4, kv_heads, kv_heads, 4)]
    return tuple((scale * rng.standard_normal(shape)).astype(np.float32) for shape in shapes)


@functools.partial(jax.jit, static_argnums=4)
def with_gradients(q, k, v, d_out, block, segments=None):
    def attention(q, k, v):
        return blockwise(q, k, v, segments, block)

    out, pullback = jax.vjp(attention, q, k, v)
    return out, pullback(d_out)


@jax.jit
def plain_gradients(q, k, v, d_out, segments=None):
    return jax.vjp(lambda *qkv: plain_jax(*qkv, segments), q, k, v)[1](d_out)


# block: one tile, several, of one row, with padding (13 = 4 * 4 - 3), longer than the sequence
CASES = [
    *[(16, 4, block) for block in (16, 8, 4, 1)],
    *[(13, 4, 4), (13, 4, 5), (7, 4, 512)],
    *[(16, 2, 8), (16, 1, 4), (13, 2, 4)],
]


@pytest.mark.parametrize(("length", "kv_heads", "block"), CASES)
def test_output_equals_softmax_in_float64(length, kv_heads, block):
    q, k, v, d_out = inputs(length, kv_heads)
    out, _ = with_gradients(q, k, v, d_out, block)
    np.testing.assert_allclose(out, plain(q, k, v), rtol=0, atol=2e-6)
    np.testing.assert_allclose(plain_jax(q, k, v), plain(q, k, v), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("length", "kv_heads", "block"), CASES)
def test_gradients_equal_autodiff_of_plain_softmax(length, kv_heads, block):
    q, k, v, d_out = inputs(length, kv_heads)
    _, got = with_gradients(q, k, v, d_out, block)
    for g, w in zip(got, plain_gradients(q, k, v, d_out), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-5 * np.abs(w).max())


@pytest.mark.parametrize("block", [4, 16])
def test_the_future_is_invisible(block):
    """Changing position 9 changes nothing before it, bit for bit."""
    q, k, v, d_out = inputs(16, 2)
    before, _ = with_gradients(q, k, v, d_out, block)
    changed = [a.copy() for a in (q, k, v)]
    for a in changed:
        a[:, 9] += 3.0
    after, _ = with_gradients(*changed, d_out, block)
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert not np.array_equal(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("block", [4, 5, 16])
@pytest.mark.parametrize("scale", [0.0, 60.0])
def test_never_nan_even_where_a_softmax_saturates(block, scale):
    """Scores of several thousands, or all equal; also in the padded rows of the last block."""
    q, k, v, d_out = inputs(16, 2, scale)
    out, gradients = with_gradients(q, k, v, d_out, block)
    assert all(np.isfinite(a).all() for a in (out, *gradients))
    np.testing.assert_allclose(out, plain(q, k, v), rtol=0, atol=1e-4 * max(scale, 1.0))


@pytest.mark.parametrize("block", [4, 16])
def test_bfloat16_is_close_and_stays_bfloat16(block):
    """Scores and softmax are float32, so the error is that of rounding inputs and weights."""
    rounded = [jnp.asarray(a, jnp.bfloat16) for a in inputs(16, 2)]
    out, gradients = with_gradients(*rounded, block)
    assert {a.dtype for a in (out, *gradients)} == {jnp.dtype(jnp.bfloat16)}
    exact = [np.asarray(a, np.float32) for a in rounded]
    np.testing.assert_allclose(np.asarray(out, np.float32), plain(*exact[:3]), rtol=0, atol=3e-2)
    for g, w in zip(gradients, plain_gradients(*exact), strict=True):
        np.testing.assert_allclose(
            np.asarray(g, np.float32), w, rtol=0, atol=3e-2 * np.abs(w).max()
        )


def shapes_in(jaxpr) -> set[tuple[int, ...]]:
    """The shape of every value in a jaxpr and in all the jaxprs inside it."""
    found = {v.aval.shape for e in jaxpr.eqns for v in e.outvars if hasattr(v.aval, "shape")}
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for inner in value if isinstance(value, (list, tuple)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found |= shapes_in(inner)
    return found


@pytest.mark.parametrize("length", [37, 64])
def test_no_square_of_scores_is_ever_held(length):
    """Forward and backward; the plain implementation, traced alike, does hold it."""
    q, k, v, d_out = inputs(length, 2)

    def square(shapes):
        return [s for s in shapes if sum(n >= length for n in s) >= 2]

    def traced(attention):
        def both(q, k, v, d_out):
            out, pullback = jax.vjp(attention, q, k, v)
            return out, pullback(d_out)

        return shapes_in(jax.make_jaxpr(both)(q, k, v, d_out).jaxpr)

    assert not square(traced(functools.partial(blockwise, block=8)))
    assert square(traced(plain_jax))


def test_replicated_kv_heads_are_repeated_for_every_shard():
    """2 KV heads read by 8 shards of 8 heads: as if each had its own copy, gradients summed."""

    class Eight(Layout):
        def shards(self, name: str) -> int:
            return 8

    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 16, 8, 8)).astype(np.float32)
    k, v = (rng.standard_normal((2, 16, 2, 8)).astype(np.float32) for _ in range(2))

    def gradients(layout):
        def total(q, k, v):
            return jnp.sum(attend(q, k, v, implementation="xla", layout=layout) ** 2)

        return jax.jit(jax.grad(total, (0, 1, 2)))(q, k, v)

    for split, whole in zip(gradients(Eight()), gradients(Layout()), strict=True):
        np.testing.assert_allclose(split, whole, rtol=0, atol=1e-5 * np.abs(whole).max())


@pytest.mark.parametrize(
    ("platform", "compute", "length", "head_dim", "expected"),
    [
        ("cpu", "bfloat16", 2048, 128, "xla"),
        ("gpu", "bfloat16", 2048, 128, "cudnn"),
        ("gpu", "float32", 2048, 128, "xla"),
        ("gpu", "bfloat16", 2048, 132, "xla"),
        ("tpu", "bfloat16", 2048, 128, "splash"),
        ("tpu", "bfloat16", 1000, 128, "xla"),
    ],
)
def test_auto_takes_a_fused_kernel_only_where_it_applies(
    platform, compute, length, head_dim, expected
):
    assert resolve_attention("auto", platform, compute, length, head_dim) == expected
    assert resolve_attention("xla", platform, compute, length, head_dim) == "xla"
    packed = resolve_attention("auto", platform, compute, length, head_dim, packed=True)
    assert packed == ("xla" if expected == "cudnn" else expected)


# ------------------------------------------------------------------ several documents in a row


@st.composite
def packings(draw, length: int) -> np.ndarray:
    """[2, length] int32: documents of any lengths from 1 on, numbered, and padding (0) at the end.

    A row may be one document or nothing but padding.
    """
    rows = []
    for _ in range(2):
        cuts = sorted(draw(st.sets(st.integers(0, length), max_size=6)))
        sizes = np.diff([0, *cuts])
        sizes = sizes[sizes > 0]
        row = np.repeat(np.arange(1, len(sizes) + 1), sizes)
        rows.append(np.pad(row, (0, length - len(row))))
    return np.stack(rows).astype(np.int32)


# Three tiles of the real size, the last one cut; many small ones, all equal or the last one cut.
PACKED = [(300, 128, 12), (16, 4, 25), (13, 4, 25)]


@pytest.mark.parametrize(("length", "block", "examples"), PACKED)
def test_packed_documents_equal_softmax_with_their_mask(length, block, examples):
    q, k, v, d_out = inputs(length, 2)

    @settings(max_examples=examples)
    @given(packings(length))
    def check(segments):
        out, gradients = with_gradients(q, k, v, d_out, block, segments)
        np.testing.assert_allclose(out, plain(q, k, v, segments), rtol=0, atol=2e-6)
        want = plain_gradients(q, k, v, d_out, segments)
        for g, w in zip(gradients, want, strict=True):
            np.testing.assert_allclose(g, w, rtol=0, atol=1e-5 * np.abs(w).max())

    check()


@pytest.mark.parametrize("block", [4, 16])
def test_another_document_is_invisible(block):
    """Bit for bit, output and gradients, in whatever tiles; whatever lies in the first document."""
    segments = np.repeat([[1, 2, 0]], [6, 7, 3], axis=1).repeat(2, axis=0)
    q, k, v, d_out = inputs(16, 2)
    d_out = np.where((segments == 2)[..., None, None], d_out, 0)
    before = with_gradients(q, k, v, d_out, block, segments)
    q, k, v = (np.where((segments != 2)[..., None, None], 30 * a + 9, a) for a in (q, k, v))
    after = with_gradients(q, k, v, d_out, block, segments)
    assert not np.array_equal(before[0][:, :6], after[0][:, :6])
    for b, a in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(b[:, 6:13], a[:, 6:13])
    for gradient in after[1]:
        assert not gradient[:, :6].any(), "what nobody looks at has no gradient"
        assert not gradient[:, 13:].any()


@pytest.mark.parametrize(
    "segments",
    [
        np.repeat([1, 2, 3, 0], [100, 90, 1, 65]),
        pytest.param(None, marks=pytest.mark.slow),
    ],
)
def test_the_tpu_kernel_in_pallas_interpreter(segments):
    """Splash, with and without documents, as `attend` calls it."""
    rng = np.random.default_rng(0)
    q, k, v, d_out = (
        rng.standard_normal((1, 256, heads, 128)).astype(np.float32) for heads in (2, 1, 1, 2)
    )
    segments = None if segments is None else segments[None].astype(np.int32)

    def attention(q, k, v):
        return attend(q, k, v, implementation="splash", layout=Layout(), segments=segments)

    with pltpu.force_tpu_interpret_mode():
        out, pullback = jax.vjp(attention, q, k, v)
        gradients = pullback(d_out)
    np.testing.assert_allclose(out, plain(q, k, v, segments), rtol=0, atol=1e-5)
    for g, w in zip(gradients, plain_gradients(q, k, v, d_out, segments), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-4 * np.abs(w).max())


def test_cudnn_is_refused_where_documents_are_packed():
    with pytest.raises(RequestError, match=r"model\.attention=cudnn cannot keep the documents"):
        resolve_attention("cudnn", "gpu", "bfloat16", 2048, 128, packed=True)
    q, k, v, _ = (jnp.asarray(a, jnp.bfloat16) for a in inputs(16, 2))
    with pytest.raises(ValueError, match="cuDNN attention takes no segments"):
        attend(
            q, k, v, implementation="cudnn", layout=Layout(), segments=jnp.ones((2, 16), jnp.int32)
        )
