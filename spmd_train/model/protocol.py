"""What a model is: an embedding, one block repeated, and a head.

Bring your own with `model.block: mypackage.mymodel:architecture`, a function of the model
configuration that returns an `Architecture`. Its three parts are Flax NNX modules whose parameters
carry logical axes, `nnx.Param(value, axes=("embed", "mlp"))`, and which the trainer calls so:

```
embed(tokens, rows)          [B, T] int32 -> [B, T, D]   this shard's share; shares are summed
block(x, context)            [B, T, D] -> [B, T, D]      identical for every layer
head(x, rows, embed)         [B, T, D] -> [B, T, V_local] float32 logits of these rows only
```

What the head and the embedding receive. The vocabulary is sharded over (stage, model), so that no
stage idles on it: every stage calls the *same* embed and head on its own `rows` of the vocabulary.
- `embed` returns the contribution of its rows, and zeros for tokens that live elsewhere. Whatever
  is not per-token (a learned position, say) is added by one shard only: multiply by `rows.first`.
- `head` receives the last block's output, the same on every stage, and returns logits of its rows.
  It must not communicate: softmax, loss, z-loss and the masking of padded rows are the trainer's,
  and its gradient is taken shard by shard and summed over stages by the trainer. Parameters that
  are not sharded by vocabulary (a final norm) get their gradients summed over stages too.
- With `tied=True` the head may read the parameters of `embed`; else `embed` is None.
- Parameters arrive in the compute dtype; keep norms, softmax and logits in float32 inside.

Modules hold parameters only: no RNG state, no caches. Randomness comes from `BlockContext.dropout`.

Where documents are packed, several in a row, a block that mixes positions must keep them apart by
`context.segments`, and whatever depends on the position must come from `shared`, whose positions
restart with each document. `Architecture.packed` says that both hold; without it such data are
refused, since nobody would notice the leak.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from spmd_train.sharding import Layout


@dataclass(frozen=True)
class VocabRows:
    """The rows of the padded vocabulary that one shard holds.

    Attributes:
        start: global index of the first row; traced inside the step.
        size: number of rows here.
        vocab: number of real rows; rows at or beyond it are padding.
        first: 1.0 on the shard that holds row 0, else 0.0; for what must be added once.
    """

    start: jax.Array | int
    size: int
    vocab: int

    @property
    def first(self) -> jax.Array:
        return jnp.asarray(self.start == 0, jnp.float32)

    def local(self, tokens: jax.Array) -> jax.Array:
        """Row numbers within this shard; `size` (out of range) for tokens of other shards."""
        ids = tokens - self.start
        return jnp.where((ids >= 0) & (ids < self.size), ids, self.size)

    def hot(self, targets: jax.Array) -> jax.Array:
        """[..., V_local] bool, true at the target's row."""
        return jnp.arange(self.size) == self.local(targets)[..., None]

    @property
    def padding(self) -> jax.Array:
        """[V_local] bool, true where the row is padding."""
        return self.start + jnp.arange(self.size) >= self.vocab


Product = Callable[[str, str, jax.Array, jax.Array], jax.Array]


def plain_product(name: str, subscripts: str, x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, x, w)


def no_tap(name: str, x: jax.Array) -> jax.Array:
    return x


@dataclass(frozen=True)
class BlockContext:
    """What a block may know besides its input.

    Attributes:
        shared: what `Architecture.shared` computed once for all layers, for instance RoPE tables.
        layer: index of this layer in the whole model.
        row_keys: [B] RNG keys, functions of (seed, step, global row); None without dropout.
        layout: placement, for annotating activations by logical axes.
        attention: implementation to use, resolved for the platform.
        product: (name, subscripts, x, w) -> einsum of the two, in the policy's number format.
        tap: (name, x) -> x, called on every tensor worth looking at when a step went wrong; it does
            nothing in a training step. Called in the block itself, not inside a `scan` of its own.
        segments: int32 [B, T], number of the document at each position, from 1; 0 is padding. None
            where a row is one document.
    """

    shared: Any
    layer: jax.Array | int
    row_keys: jax.Array | None
    layout: Layout
    attention: str
    product: Product = plain_product
    tap: Callable[[str, jax.Array], jax.Array] = no_tap
    segments: jax.Array | None = None

    def einsum(self, name: str, subscripts: str, x: jax.Array, w: jax.Array) -> jax.Array:
        """A matrix product of activations `x` with the weights `w`, in the run's number format.

        `name` is unique within a block. Write a block's products with weights this way and they run
        in fp8 where the policy says so; what else a block multiplies stays in the compute dtype.
        """
        return self.product(name, subscripts, x, w)

    def dropout(self, x: jax.Array, rate: float, site: int) -> jax.Array:
        """Dropout of `x` [B, T, D]; `site` numbers the uses within one block.

        The mask is a function of (seed, step, layer, site, global row, position, feature), so it is
        the same on every mesh and with every number of micro-batches.
        """
        return dropout(x, rate, self.row_keys, jnp.asarray(self.layer) * 16 + site)


def dropout(x: jax.Array, rate: float, row_keys: jax.Array | None, salt: Any) -> jax.Array:
    """Zero a share `rate` of `x` [B, T, D] and scale the rest; one RNG key a row."""
    if row_keys is None or rate == 0.0:
        return x

    def keep(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(key, salt), 1.0 - rate, x.shape[1:])

    kept = jax.vmap(keep)(row_keys)
    return jnp.where(kept, x / (1.0 - rate), jnp.zeros_like(x)).astype(x.dtype)


def no_shared(positions: jax.Array) -> tuple[()]:
    return ()


@dataclass(frozen=True)
class Architecture:
    """The parts of a model, as constructors.

    Attributes:
        embed, block, head: `(rngs: nnx.Rngs) -> nnx.Module`.
        tied: the head reads the embedding's parameters.
        shared: int32 positions, [T] or (of packed rows) [B, T], -> arrays every block gets in
            `BlockContext.shared`.
        embed_dropout: rate after the embedding.
        packed: documents packed in a row are kept apart, see above.
    """

    embed: Callable[[nnx.Rngs], nnx.Module]
    block: Callable[[nnx.Rngs], nnx.Module]
    head: Callable[[nnx.Rngs], nnx.Module]
    tied: bool = False
    shared: Callable[[jax.Array], Any] = no_shared
    embed_dropout: float = 0.0
    packed: bool = False
