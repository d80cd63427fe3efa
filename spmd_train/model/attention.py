"""Causal attention: one function, an implementation by platform.

- `xla`: blockwise, everywhere. XLA would materialise the [T, T] scores; this walks the causal
  pairs of blocks with a running softmax (Milakov & Gimelshein 2018; Dao et al. 2022, algorithm 1)
  and recomputes them in the backward pass (ibid., algorithm 4).
- `cudnn`: NVIDIA's fused kernel, 16-bit only.
- `splash`: the Pallas TPU kernel.

Where a row holds several documents, `segments` [B, T] numbers them and a position sees those of its
own document only. Padding has the number 0 and is a document like any other: every position sees at
least itself, so no softmax is empty.

Axes: B batch, T query position, S key position, N KV heads, G query heads per KV head,
H = N*G heads, E head_dim, R rows (query position, query head of the group).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_train.errors import RequestError
from spmd_train.sharding import Layout

BLOCK = 128  # positions; a [B, H, 128, 128] float32 tile of scores is held at a time
MASKED = -1e30  # finite: an all-masked row stays free of NaN


def resolve_attention(
    choice: str, platform: str, compute: Any, length: int, head_dim: int, packed: bool = False
) -> str:
    """The implementation for `platform`; `auto` takes the fused kernel where it applies.

    cuDNN takes 16-bit heads of up to 128 columns, in eights; splash whole tiles of 128 positions.
    Not cuDNN where rows are `packed`: `jax.nn.dot_product_attention` (JAX 0.10.2 and 0.12) has no
    argument for documents, and makes of a mask a bias [B, 1, T, T] in memory.

    Raises:
        RequestError: the choice cannot keep packed documents apart.
    """
    if choice == "cudnn" and packed:
        raise RequestError(
            "model.attention=cudnn cannot keep the documents of a row apart, as "
            "data.packing=documents needs; use model.attention=auto, or data.packing=padded."
        )
    if choice != "auto":
        return choice
    if platform == "gpu" and jnp.dtype(compute).itemsize == 2 and not packed:
        return "cudnn" if head_dim % 8 == 0 and head_dim <= 128 else "xla"
    return "splash" if platform == "tpu" and length % 128 == 0 else "xla"


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    implementation: str,
    layout: Layout,
    segments: jax.Array | None = None,
) -> jax.Array:
    """Causal attention with grouped KV heads.

    Args:
        q: [B, T, H, E], not scaled. k, v: [B, T, N, E] with H a multiple of N.
        implementation: "xla", "cudnn" or "splash".
        layout: heads may be sharded over `model`; where KV heads are fewer than its shards they
            arrive replicated and are repeated until every shard has its own.
        segments: int32 [B, T], number of the document at every position; None for one document a
            row. A position sees the earlier ones of its own document.

    Returns:
        [B, T, H, E] in q's dtype. Scores and softmax are float32.
    """
    shards = layout.shards("heads")
    if k.shape[2] % shards:
        repeat = math.lcm(k.shape[2], shards) // k.shape[2]
        k, v = (jnp.repeat(a, repeat, axis=2) for a in (k, v))
        k, v = (layout.constrain(a, "batch", None, "heads", None) for a in (k, v))
    if implementation == "xla":
        return blockwise(q, k, v, segments)
    kernel = {"cudnn": _cudnn, "splash": _splash}[implementation]
    # A fused kernel cannot be partitioned automatically.
    axes = ("batch", None, "heads", None)
    return layout.shard_by_shard(kernel, q, k, v, axes=axes, whole=segments)


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
    if segments is not None:
        raise ValueError("cuDNN attention takes no segments; see resolve_attention")
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def _splash(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, heads = q.shape[1], q.shape[2]
    mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
    attention = kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    q, k, v = (jnp.swapaxes(a, 1, 2) for a in (q * q.shape[-1] ** -0.5, k, v))  # [B, H, T, E]
    documents = None if segments is None else kernel.SegmentIds(segments, segments)
    return jnp.swapaxes(jax.vmap(attention)(q, k, v, documents), 1, 2).astype(q.dtype)


def blockwise(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None = None,
    block: int = BLOCK,
) -> jax.Array:
    """Causal attention that never holds more than one [block, block] tile of scores per head.

    Args:
        q: [B, T, H, E]; k, v: [B, T, N, E]; segments: [B, T] or None.
        block: tile size; T is padded up to a multiple of it (causality hides the padding).
    """
    B, T, H, E = q.shape
    N, block = k.shape[2], min(block, T)
    pad = -T % block
    if pad:
        q, k, v = (jnp.pad(a, ((0, 0), (0, pad), (0, 0), (0, 0))) for a in (q, k, v))
        segments = None if segments is None else jnp.pad(segments, ((0, 0), (0, pad)))
    # Batch dimensions first, so that every product is a plain batched matrix product (on CPU up to
    # three times as fast), and the G query heads of a KV head as rows of one matrix.
    rows = q.reshape(B, T + pad, N, H // N, E).transpose(0, 2, 1, 3, 4).reshape(B, N, -1, E)
    out = _flash(rows, k.swapaxes(1, 2), v.swapaxes(1, 2), segments, block)
    out = out.reshape(B, N, T + pad, H // N, E).transpose(0, 2, 1, 3, 4)
    return out.reshape(B, T + pad, H, E)[:, :T]


def _walk(body: Any, carry: Any, blocks: int) -> Any:
    """Fold `body(carry, i, j)` over the causal (query block, key block) pairs, row by row.

    A static trip count; no loop where there is one block.
    """
    if blocks == 1:
        return body(carry, 0, 0)
    pairs = tuple(a.astype(np.int32) for a in np.tril_indices(blocks))
    return lax.scan(lambda c, ij: (body(c, *ij), None), carry, pairs)[0]


def _take(x: jax.Array, i: Any, size: int, axis: int = 2) -> jax.Array:
    """Block i of `x` [B, N, rows, ...]."""
    return x if x.shape[axis] == size else lax.dynamic_slice_in_dim(x, i * size, size, axis)


def _put(x: jax.Array, value: jax.Array, i: Any, size: int) -> jax.Array:
    if x.shape[2] == size:
        return value
    return lax.dynamic_update_slice_in_dim(x, value, i * size, axis=2)


def _scores(q: jax.Array, k: jax.Array, segments: jax.Array | None, i: Any, j: Any) -> jax.Array:
    """Masked float32 scores [B, N, R, S] of query block i against key block j."""
    rows, block = q.shape[2], k.shape[2]
    s = jnp.einsum("bnre,bnse->bnrs", q, k, preferred_element_type=jnp.float32)
    position = i * block + jnp.arange(rows) // (rows // block)
    visible = position[:, None] >= j * block + jnp.arange(block)
    if segments is not None:
        of_rows = jnp.repeat(_take(segments, i, block, axis=1), rows // block, axis=1)
        of_keys = _take(segments, j, block, axis=1)
        visible = visible & (of_rows[:, None, :, None] == of_keys[:, None, None, :])
    return jnp.where(visible, s * q.shape[-1] ** -0.5, MASKED)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _flash(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, block: int
) -> jax.Array:
    """q [B, N, R, E] with R = T*G rows (t, g), k and v [B, N, T, E] -> [B, N, R, E]."""
    return _flash_forward(q, k, v, segments, block)[0]


def _flash_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, block: int
) -> tuple[jax.Array, Any]:
    T = k.shape[2]
    rows = block * (q.shape[2] // T)

    def body(carry: Any, i: Any, j: Any) -> Any:
        out, top, total = carry  # running numerator, maximum and denominator of every row
        s = _scores(_take(q, i, rows), _take(k, j, block), segments, i, j)
        old = _take(top, i, rows)
        new = jnp.maximum(old, s.max(-1))
        p = jnp.exp(s - new[..., None])
        # What a row takes from blocks of which it sees nothing, before the first that it does see,
        # is then shrunk to exactly nothing: exp(MASKED - new) = 0.
        shrink = jnp.exp(old - new)
        added = _dot("bnrs,bnse->bnre", p.astype(v.dtype), _take(v, j, block))
        return (
            _put(out, _take(out, i, rows) * shrink[..., None] + added, i, rows),
            _put(top, new, i, rows),
            _put(total, _take(total, i, rows) * shrink + p.sum(-1), i, rows),
        )

    zero = jnp.zeros(q.shape[:3], jnp.float32)
    start = (jnp.zeros(q.shape, jnp.float32), zero + MASKED, zero)
    out, top, total = _walk(body, start, T // block)
    out = (out / total[..., None]).astype(q.dtype)
    return out, (q, k, v, segments, out, top + jnp.log(total))


def _flash_backward(block: int, saved: Any, d_out: jax.Array) -> tuple[Any, ...]:
    q, k, v, segments, out, lse = saved
    T, E = k.shape[2:]
    rows = block * (q.shape[2] // T)
    # rowsum(dO * O) is what the softmax's backward subtracts from every score's gradient
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), -1)

    def body(carry: Any, i: Any, j: Any) -> Any:
        dq, dk, dv = carry
        qi, kj, vj = _take(q, i, rows), _take(k, j, block), _take(v, j, block)
        di = _take(d_out, i, rows)
        p = jnp.exp(_scores(qi, kj, segments, i, j) - _take(lse, i, rows)[..., None])
        dp = _dot("bnre,bnse->bnrs", di, vj)
        ds = (p * (dp - _take(delta, i, rows)[..., None]) * E**-0.5).astype(q.dtype)
        p = p.astype(q.dtype)
        return (
            _put(dq, _take(dq, i, rows) + _dot("bnrs,bnse->bnre", ds, kj), i, rows),
            _put(dk, _take(dk, j, block) + _dot("bnrs,bnre->bnse", ds, qi), j, block),
            _put(dv, _take(dv, j, block) + _dot("bnrs,bnre->bnse", p, di), j, block),
        )

    start = tuple(jnp.zeros(a.shape, jnp.float32) for a in (q, k, v))
    gradients = _walk(body, start, T // block)
    return *(g.astype(a.dtype) for g, a in zip(gradients, (q, k, v), strict=True)), None


_dot = partial(jnp.einsum, preferred_element_type=jnp.float32)
_flash.defvjp(_flash_forward, _flash_backward)
