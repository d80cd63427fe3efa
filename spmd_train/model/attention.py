"""Causal attention: one function, an implementation by platform.

- `xla`: blockwise, everywhere. XLA would materialise the [T, T] scores; this walks the causal
  pairs of blocks with a running softmax (Milakov & Gimelshein 2018; Dao et al. 2022, algorithm 1)
  and recomputes them in the backward pass (ibid., algorithm 4).
- `cudnn`: NVIDIA's fused kernel, 16-bit only.
- `splash`: the Pallas TPU kernel.

Axes: B batch, T query position, S key position, N KV heads, G query heads per KV head,
H = N*G heads, E head_dim.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_train.sharding import Layout

BLOCK = 512  # positions; a [B, H, 512, 512] float32 tile of scores is held at a time
MASKED = -1e30  # finite: an all-masked row stays free of NaN


def resolve_attention(choice: str, platform: str, compute: Any) -> str:
    """The implementation for `platform`; `auto` takes the fused kernel where one applies."""
    if choice != "auto":
        return choice
    if platform == "gpu" and jnp.dtype(compute).itemsize == 2:
        return "cudnn"
    return "splash" if platform == "tpu" else "xla"


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, *, implementation: str, layout: Layout
) -> jax.Array:
    """Causal attention with grouped KV heads.

    Args:
        q: [B, T, H, E], not scaled. k, v: [B, T, N, E] with H a multiple of N.
        implementation: "xla", "cudnn" or "splash".
        layout: heads may be sharded over `model`; where KV heads are fewer than its shards they
            arrive replicated and are repeated until every shard has its own.

    Returns:
        [B, T, H, E] in q's dtype. Scores and softmax are float32.
    """
    shards = layout.shards("heads")
    if k.shape[2] % shards:
        repeat = math.lcm(k.shape[2], shards) // k.shape[2]
        k, v = (jnp.repeat(a, repeat, axis=2) for a in (k, v))
        k, v = (layout.constrain(a, "batch", None, "heads", None) for a in (k, v))
    if implementation == "xla":
        return blockwise(q, k, v)
    kernel = {"cudnn": _cudnn, "splash": _splash}[implementation]
    # A fused kernel cannot be partitioned automatically.
    return layout.shard_by_shard(kernel, q, k, v, axes=("batch", None, "heads", None))


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def _splash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, heads = q.shape[1], q.shape[2]
    mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
    attention = kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    q, k, v = (jnp.swapaxes(a, 1, 2) for a in (q * q.shape[-1] ** -0.5, k, v))  # [B, H, T, E]
    return jnp.swapaxes(jax.vmap(attention)(q, k, v), 1, 2).astype(q.dtype)


def blockwise(q: jax.Array, k: jax.Array, v: jax.Array, block: int = BLOCK) -> jax.Array:
    """Causal attention that never holds more than one [block, block] tile of scores per head.

    Args:
        q: [B, T, H, E]; k, v: [B, T, N, E].
        block: tile size; T is padded up to a multiple of it (causality hides the padding).
    """
    B, T, H, E = q.shape
    N = k.shape[2]
    block = min(block, T)
    pad = -T % block
    if pad:
        q, k, v = (jnp.pad(a, ((0, 0), (0, pad), (0, 0), (0, 0))) for a in (q, k, v))
    out = _flash(q.reshape(B, T + pad, N, H // N, E), k, v, block)
    return out.reshape(B, T + pad, H, E)[:, :T]


def _pairs(blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """The causal (query block, key block) pairs, row by row: a static trip count."""
    rows, columns = np.tril_indices(blocks)
    return rows.astype(np.int32), columns.astype(np.int32)


def _walk(body: Any, carry: Any, blocks: int) -> Any:
    """Fold `body(carry, i, j)` over the causal pairs of blocks; no loop where there is one."""
    if blocks == 1:
        return body(carry, 0, 0)
    return lax.scan(lambda c, ij: (body(c, *ij), None), carry, _pairs(blocks))[0]


def _take(x: jax.Array, i: Any, block: int) -> jax.Array:
    """Block i of `x` along axis 1."""
    if x.shape[1] == block:
        return x
    return lax.dynamic_slice_in_dim(x, i * block, block, axis=1)


def _put(x: jax.Array, value: jax.Array, i: Any, block: int) -> jax.Array:
    if x.shape[1] == block:
        return value
    return lax.dynamic_update_slice_in_dim(x, value, i * block, axis=1)


def _scores(q: jax.Array, k: jax.Array, i: Any, j: Any, block: int) -> jax.Array:
    """Masked float32 scores [B, N, G, T, S] of query block i against key block j."""
    s = jnp.einsum("btnge,bsne->bngts", q, k, preferred_element_type=jnp.float32)
    s = s * q.shape[-1] ** -0.5
    position = jnp.arange(block)
    visible = i * block + position[:, None] >= j * block + position[None, :]
    return jnp.where(visible, s, MASKED)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _flash(q: jax.Array, k: jax.Array, v: jax.Array, block: int) -> jax.Array:
    return _flash_forward(q, k, v, block)[0]


def _flash_forward(q: jax.Array, k: jax.Array, v: jax.Array, block: int) -> tuple[jax.Array, Any]:
    """q [B, T, N, G, E] -> output, and the row-wise log-sum-exp [B, T, N, G]."""
    B, T, N, G, E = q.shape

    def body(carry: Any, i: Any, j: Any) -> Any:
        out, top, total = carry  # running numerator, maximum and denominator of every row
        s = _scores(_take(q, i, block), _take(k, j, block), i, j, block)
        old = _take(top, i, block)
        new = jnp.maximum(old, jnp.moveaxis(s.max(-1), 3, 1))
        p = jnp.exp(s - jnp.moveaxis(new, 1, 3)[..., None])
        shrink = jnp.exp(old - new)
        added = jnp.einsum(
            "bngts,bsne->btnge",
            p.astype(v.dtype),
            _take(v, j, block),
            preferred_element_type=jnp.float32,
        )
        return (
            _put(out, _take(out, i, block) * shrink[..., None] + added, i, block),
            _put(top, new, i, block),
            _put(total, _take(total, i, block) * shrink + jnp.moveaxis(p.sum(-1), 3, 1), i, block),
        )

    rows = jnp.zeros((B, T, N, G), jnp.float32)
    start = (jnp.zeros(q.shape, jnp.float32), rows + MASKED, rows)
    out, top, total = _walk(body, start, T // block)
    out = (out / total[..., None]).astype(q.dtype)
    return out, (q, k, v, out, top + jnp.log(total))


def _flash_backward(block: int, saved: Any, d_out: jax.Array) -> tuple[jax.Array, ...]:
    q, k, v, out, lse = saved
    T, E = q.shape[1], q.shape[-1]
    # rowsum(dO * O) is what the softmax's backward subtracts from every score's gradient
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), -1)

    def body(carry: Any, i: Any, j: Any) -> Any:
        dq, dk, dv = carry
        qi, kj, vj = _take(q, i, block), _take(k, j, block), _take(v, j, block)
        di = _take(d_out, i, block)
        row = partial(jnp.moveaxis, source=1, destination=3)
        s = _scores(qi, kj, i, j, block)
        p = jnp.exp(s - row(_take(lse, i, block))[..., None])
        dp = jnp.einsum("btnge,bsne->bngts", di, vj, preferred_element_type=jnp.float32)
        ds = (p * (dp - row(_take(delta, i, block))[..., None]) * E**-0.5).astype(q.dtype)
        p = p.astype(q.dtype)
        dot = partial(jnp.einsum, preferred_element_type=jnp.float32)
        return (
            _put(dq, _take(dq, i, block) + dot("bngts,bsne->btnge", ds, kj), i, block),
            _put(dk, _take(dk, j, block) + dot("bngts,btnge->bsne", ds, qi), j, block),
            _put(dv, _take(dv, j, block) + dot("bngts,btnge->bsne", p, di), j, block),
        )

    start = tuple(jnp.zeros(a.shape, jnp.float32) for a in (q, k, v))
    gradients = _walk(body, start, T // block)
    return tuple(g.astype(a.dtype) for g, a in zip(gradients, (q, k, v), strict=True))


_flash.defvjp(_flash_forward, _flash_backward)
