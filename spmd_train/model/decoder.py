"""The default architecture: a pre-norm decoder (LLaMA, Qwen) with grouped-query attention.

Axes: B batch, T sequence, D width (`embed`), H heads, N KV heads, E head_dim, F ffn (`mlp`),
V vocabulary. Matrices are stored [in, out]. RMSNorm: Zhang & Sennrich 2019; RoPE in the half-split
convention: Su et al. 2021; SwiGLU: Shazeer 2020; QK-norm: Henry et al. 2020.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spmd_train.model.attention import attend
from spmd_train.model.protocol import Architecture, BlockContext, VocabRows

if TYPE_CHECKING:
    from spmd_train.config_groups import ModelConfig

INIT_STD = 0.02


def rope_table(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [..., T, E/2] in float32 for integer `positions` [..., T].

    Frequencies are theta^(-2i/E) (Su et al. 2021, eq. 15). Positions and angles never leave
    float32: bfloat16 cannot count past 256.
    """
    frequencies = (theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)).astype(
        np.float32
    )
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate x [B, T, H, E] by position, halves (i, i + E/2) paired; cast back only afterwards."""
    cos, sin = (a[..., None, :] for a in table)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return turned.astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dimension, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones((size,)), axes=("norm",))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + self.eps)
        return (normed * self.scale[...].astype(jnp.float32)).astype(x.dtype)


def matrix(rngs: nnx.Rngs, axes: tuple[str, ...], shape: tuple[int, ...], std: float) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), shape, jnp.float32) * std, axes=axes)


class Attention(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        D, H, N, E = config.width, config.heads, config.kv_heads, config.head_dim
        residual_std = INIT_STD / (2 * config.layers) ** 0.5  # Radford et al. 2019, section 2.3
        self.query = matrix(rngs, ("embed", "heads", "head_dim"), (D, H, E), INIT_STD)
        self.key = matrix(rngs, ("embed", "kv_heads", "head_dim"), (D, N, E), INIT_STD)
        self.value = matrix(rngs, ("embed", "kv_heads", "head_dim"), (D, N, E), INIT_STD)
        self.out = matrix(rngs, ("heads", "head_dim", "embed"), (H, E, D), residual_std)
        if config.qkv_bias:
            self.query_bias = nnx.Param(jnp.zeros((H, E)), axes=("heads", "head_dim"))
            self.key_bias = nnx.Param(jnp.zeros((N, E)), axes=("kv_heads", "head_dim"))
            self.value_bias = nnx.Param(jnp.zeros((N, E)), axes=("kv_heads", "head_dim"))
        if config.qk_norm:
            self.query_norm = RMSNorm(E, config.norm_eps)
            self.key_norm = RMSNorm(E, config.norm_eps)
        self.config = config

    def __call__(self, x: jax.Array, context: BlockContext) -> jax.Array:
        q = context.einsum("query", "btd,dhe->bthe", x, self.query[...])
        k = context.einsum("key", "btd,dne->btne", x, self.key[...])
        v = context.einsum("value", "btd,dne->btne", x, self.value[...])
        if self.config.qkv_bias:
            q, k = q + self.query_bias[...], k + self.key_bias[...]
            v = v + self.value_bias[...]
        if self.config.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = rotate(q, context.shared), rotate(k, context.shared)
        constrain = context.layout.constrain
        q = constrain(q, "batch", None, "heads", None)
        q, k, v = context.tap("query", q), context.tap("key", k), context.tap("value", v)
        a = attend(
            *(q, k, v),
            implementation=context.attention,
            layout=context.layout,
            segments=context.segments,
        )
        a = context.tap("attention", a)
        return context.einsum("out", "bthe,hed->btd", a, self.out[...])


class SwiGLU(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        D, F = config.width, config.ffn
        residual_std = INIT_STD / (2 * config.layers) ** 0.5
        self.gate = matrix(rngs, ("embed", "mlp"), (D, F), INIT_STD)
        self.up = matrix(rngs, ("embed", "mlp"), (D, F), INIT_STD)
        self.down = matrix(rngs, ("mlp", "embed"), (F, D), residual_std)

    def __call__(self, x: jax.Array, context: BlockContext) -> jax.Array:
        gate = context.einsum("gate", "btd,df->btf", x, self.gate[...])
        up = context.einsum("up", "btd,df->btf", x, self.up[...])
        hidden = context.tap("hidden", jax.nn.silu(gate) * up)
        return context.einsum("down", "btf,fd->btd", hidden, self.down[...])


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Between blocks x is [batch, sequence, embed] and, under sequence parallelism, sharded over its
    sequence; inside attention and MLP the whole sequence meets a shard of heads or ffn.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = SwiGLU(config, rngs=rngs)
        self.rate = config.dropout

    def __call__(self, x: jax.Array, context: BlockContext) -> jax.Array:
        constrain = context.layout.constrain

        def residual(x: jax.Array, branch: jax.Array, site: int) -> jax.Array:
            branch = constrain(branch, "batch", "sequence", "embed")
            return x + context.dropout(branch, self.rate, site)

        tap = context.tap
        h = constrain(tap("attention_norm", self.attention_norm(x)), "batch", None, "embed")
        x = residual(x, tap("out", self.attention(h, context)), 0)
        h = constrain(tap("mlp_norm", self.mlp_norm(x)), "batch", None, "embed")
        return residual(x, tap("down", self.mlp(h, context)), 1)


class Embedding(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        shape = (config.vocab, config.width)
        self.table = matrix(rngs, ("vocab", "embed"), shape, INIT_STD)

    def __call__(self, tokens: jax.Array, rows: VocabRows) -> jax.Array:
        return jnp.take(self.table[...], rows.local(tokens), axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def project(x: jax.Array, w: jax.Array) -> jax.Array:
    """Float32 logits [B, T, V] of x [B, T, D] and w [D, V], matrix products in x's dtype.

    The gradient is cast down before its products too: autodiff would multiply float32 logit
    gradients at float32 speed.
    """
    return jnp.einsum("btd,dv->btv", x, w, preferred_element_type=jnp.float32)


def _project_forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return project(x, w), (x, w)


def _project_backward(
    saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    g = g.astype(x.dtype)
    return jnp.einsum("btv,dv->btd", g, w), jnp.einsum("btd,btv->dv", x, g)


project.defvjp(_project_forward, _project_backward)


class Head(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.norm = RMSNorm(config.width, config.norm_eps)
        if not config.tied:
            self.matrix = matrix(rngs, ("embed", "vocab"), (config.width, config.vocab), INIT_STD)
        self.config = config

    def __call__(self, x: jax.Array, rows: VocabRows, embed: Embedding | None) -> jax.Array:
        w = self.matrix[...] if embed is None else embed.table[...].T
        logits = project(self.norm(x), w)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def architecture(config: ModelConfig) -> Architecture:
    """The decoder as `model.block: decoder` selects it."""
    return Architecture(
        embed=lambda rngs: Embedding(config, rngs=rngs),
        block=lambda rngs: Block(config, rngs=rngs),
        head=lambda rngs: Head(config, rngs=rngs),
        tied=config.tied,
        shared=lambda positions: rope_table(positions, config.head_dim, config.rope_theta),
        embed_dropout=config.dropout,
        packed=True,
    )
