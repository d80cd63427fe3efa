"""Architectures of a user, for the tests of the protocol (`model.block: own_model:bigram`).

`bigram`: learned positions, a LayerNorm + MLP block without attention, a head with a bias and a
final LayerNorm. `scalar`, `two_layers` and `mask` are toys whose gradients can be told by hand.
`column`: logits told by hand, of any vocabulary. `poisoned`: the decoder with one token that no
step survives. `faulty`: the decoder, with a block that fails as one of its parameters says.
`placed`: the decoder, told absolute positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from spmd_train.model import Architecture, BlockContext, VocabRows, decoder

if TYPE_CHECKING:
    from spmd_train.config_groups import ModelConfig

POSITIONS = 32


def normal(rngs: nnx.Rngs, axes: tuple[str, ...], *shape: int) -> nnx.Param:
    return nnx.Param(0.05 * jax.random.normal(rngs.params(), shape), axes=axes)


class LayerNorm(nnx.Module):
    def __init__(self, size: int) -> None:
        self.scale = nnx.Param(jnp.ones((size,)), axes=("norm",))
        self.shift = nnx.Param(jnp.zeros((size,)), axes=("norm",))

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        centred = x32 - x32.mean(-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5)
        return (normed * self.scale[...] + self.shift[...]).astype(x.dtype)


class PositionedEmbedding(nnx.Module):
    """Token and learned position; the position is added by the shard that holds row 0 only."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.table = normal(rngs, ("vocab", "embed"), config.vocab, config.width)
        self.positions = nnx.Param(
            0.05 * jax.random.normal(rngs.params(), (POSITIONS, config.width)),
            axes=(None, "embed"),
        )

    def __call__(self, tokens: jax.Array, rows: VocabRows) -> jax.Array:
        token = jnp.take(self.table[...], rows.local(tokens), axis=0, mode="fill", fill_value=0)
        return token + rows.first * self.positions[: tokens.shape[1]]


class MLPBlock(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.norm = LayerNorm(config.width)
        self.up = normal(rngs, ("embed", "mlp"), config.width, config.ffn)
        self.up_bias = normal(rngs, ("mlp",), config.ffn)
        self.down = normal(rngs, ("mlp", "embed"), config.ffn, config.width)

    def __call__(self, x: jax.Array, context: BlockContext) -> jax.Array:
        h = context.layout.constrain(self.norm(x), "batch", None, "embed")
        h = jax.nn.gelu(h @ self.up[...] + self.up_bias[...]) @ self.down[...]
        # What a token sees of its past, so that positions and not only tokens matter.
        past = jnp.cumsum(h, axis=1) / (1.0 + jnp.arange(h.shape[1], dtype=h.dtype))[:, None]
        return x + context.layout.constrain(past, "batch", "sequence", "embed")


class BiasedHead(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.norm = LayerNorm(config.width)
        self.matrix = normal(rngs, ("embed", "vocab"), config.width, config.vocab)
        self.bias = normal(rngs, ("vocab",), config.vocab)

    def __call__(self, x: jax.Array, rows: VocabRows, embed: nnx.Module | None) -> jax.Array:
        assert embed is None
        return (self.norm(x) @ self.matrix[...] + self.bias[...]).astype(jnp.float32)


def bigram(config: ModelConfig) -> Architecture:
    return Architecture(
        embed=lambda rngs: PositionedEmbedding(config, rngs),
        block=lambda rngs: MLPBlock(config, rngs),
        head=lambda rngs: BiasedHead(config, rngs),
    )


# -------------------------------------------------------------------------- toys, told by hand


class Table(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.table = normal(rngs, ("vocab", "embed"), config.vocab, config.width)

    def __call__(self, tokens: jax.Array, rows: VocabRows) -> jax.Array:
        return jnp.take(self.table[...], rows.local(tokens), axis=0, mode="fill", fill_value=0)


class NoLayer(nnx.Module):
    def __call__(self, x: jax.Array, context: BlockContext) -> jax.Array:
        return x


def _first_logit(value: jax.Array, rows: VocabRows) -> jax.Array:
    """`value` [B, T] as the logit of row 0, zero for all the others."""
    first = rows.start + jnp.arange(rows.size) == 0
    return jnp.where(first, value[..., None], 0.0)


class ScalarHead(nnx.Module):
    """Logits (w * x, 0): the loss of target 0 at w = 0 has the slope -x/2 in w."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros((1,)), axes=("embed",))

    def __call__(self, x: jax.Array, rows: VocabRows, embed: nnx.Module | None) -> jax.Array:
        return _first_logit((x * self.w[...])[..., 0], rows)


def scalar(config: ModelConfig) -> Architecture:
    return Architecture(
        embed=lambda rngs: Table(config, rngs),
        block=lambda rngs: NoLayer(),
        head=lambda rngs: ScalarHead(),
    )


class Nothing(nnx.Module):
    """An embedding of zeros, whose table has no gradient."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.table = normal(rngs, ("vocab", "embed"), config.vocab, config.width)

    def __call__(self, tokens: jax.Array, rows: VocabRows) -> jax.Array:
        return jnp.zeros((*tokens.shape, self.table.shape[1])) * self.table[0]


class Weighed(nnx.Module):
    """x + p * (6, 0) in layer 0 and x + p * (0, 8) in layer 1."""

    def __init__(self) -> None:
        self.p = nnx.Param(jnp.zeros((2,)), axes=("embed",))

    def __call__(self, x: jax.Array, context: BlockContext) -> jax.Array:
        return x + self.p[...] * jnp.array([[6.0, 0.0], [0.0, 8.0]])[context.layer]


class SumHead(nnx.Module):
    """Logits (sum of x, 0): the loss of target 1 at x = 0 has the slope 1/2 in every feature."""

    def __call__(self, x: jax.Array, rows: VocabRows, embed: nnx.Module | None) -> jax.Array:
        return _first_logit(x.sum(-1), rows)


def two_layers(config: ModelConfig) -> Architecture:
    return Architecture(
        embed=lambda rngs: Nothing(config, rngs),
        block=lambda rngs: Weighed(),
        head=lambda rngs: SumHead(),
    )


class Dropped(nnx.Module):
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, x: jax.Array, context: BlockContext) -> jax.Array:
        return context.dropout(x, self.rate, site=0)


def mask(config: ModelConfig) -> Architecture:
    """Where every token is used once, its row of the embedding's gradient shows its masks."""
    return Architecture(
        embed=lambda rngs: Table(config, rngs),
        block=lambda rngs: Dropped(config.dropout),
        head=lambda rngs: SumHead(),
    )


# ------------------------------------------------------------------------- a model that fails


MARK = 1e3  # a row with a larger number in it is marked


class FaultyBlock(decoder.Block):
    """A decoder block after a tensor "probe", which is its input where `fault` [3] is zero.

    `fault` is (NaN in every row, NaN in marked rows, growth g of the probe by (1 + g)^2).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        self.fault = nnx.Param(jnp.zeros((3,)), axes=("norm",))

    def __call__(self, x: jax.Array, context: BlockContext) -> jax.Array:
        every, marked, growth = self.fault[...]
        is_marked = jnp.abs(x.astype(jnp.float32)).max((1, 2), keepdims=True) > MARK
        broken = (every > 0) | ((marked > 0) & is_marked)
        grown = x * (1 + growth) * (1 + growth)
        probe = context.tap("probe", jnp.where(broken, jnp.nan, grown).astype(x.dtype))
        return super().__call__(probe / (1 + growth) / (1 + growth), context)


def faulty(config: ModelConfig) -> Architecture:
    return replace(decoder.architecture(config), block=lambda rngs: FaultyBlock(config, rngs=rngs))


class PlacedBlock(decoder.Block):
    """A decoder block that knows where it is: rotary tables would not show a shifted document."""

    def __call__(self, x: jax.Array, context: BlockContext) -> jax.Array:
        rope, waves = context.shared
        return super().__call__(x + waves.astype(x.dtype), replace(context, shared=rope))


def placed(config: ModelConfig) -> Architecture:
    sound = decoder.architecture(config)

    def shared(positions: jax.Array) -> tuple[Any, jax.Array]:
        waves = jnp.sin(positions[..., None] / jnp.arange(1.0, 1.0 + config.width))
        return sound.shared(positions), 0.1 * waves

    return replace(
        sound, block=lambda rngs: PlacedBlock(config, rngs=rngs), shared=shared, packed=True
    )


def not_an_architecture(config: ModelConfig) -> str:
    return "not an architecture"


class Poisoned(nnx.Module):
    """An embedding in which one token is NaN: data that no step survives."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.table = normal(rngs, ("vocab", "embed"), config.vocab, config.width)

    def __call__(self, tokens: jax.Array, rows: VocabRows) -> jax.Array:
        x = jnp.take(self.table[...], rows.local(tokens), axis=0, mode="fill", fill_value=0)
        return jnp.where((tokens == POISON)[..., None], jnp.nan, x)


POISON = ord("#")


def poisoned(config: ModelConfig) -> Architecture:
    sound = decoder.architecture(config)
    return replace(sound, embed=lambda rngs: Poisoned(config, rngs), tied=False)


class ColumnHead(nnx.Module):
    """A head of one column: where the embedding is 1, its weights are the logits."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.matrix = normal(rngs, ("embed", "vocab"), 1, config.vocab)

    def __call__(self, x: jax.Array, rows: VocabRows, embed: nnx.Module | None) -> jax.Array:
        return decoder.project(x, self.matrix[...])


def column(config: ModelConfig) -> Architecture:
    return Architecture(
        embed=lambda rngs: Table(config, rngs),
        block=lambda rngs: NoLayer(),
        head=lambda rngs: ColumnHead(config, rngs),
    )
