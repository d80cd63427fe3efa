"""A model as pure functions over nested dictionaries of parameters.

```
params = {"embed": {...}, "blocks": {... each [layers, ...]}, "head": {...}}
```

The block's parameters are one set of stacked arrays that loops index, so that the program, and the
time to compile it, does not grow with depth.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from spmd_train.errors import RequestError
from spmd_train.model import decoder
from spmd_train.model.protocol import Architecture, BlockContext, VocabRows, dropout
from spmd_train.sharding import Layout, Leaf, tree_map_leaves

if TYPE_CHECKING:
    from spmd_train.config_groups import ModelConfig

Params = Any
EMBED_SALT = 2**30  # a dropout site no layer uses


def _parameters(module: nnx.Module) -> Params:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


@dataclass(frozen=True)
class Model:
    """An architecture with its configuration; everything here is pure.

    Attributes:
        config: shapes and options.
        architecture: the parts.
        attention: implementation of attention, resolved for the platform.
    """

    config: ModelConfig
    architecture: Architecture
    attention: str = "xla"

    @cached_property
    def _parts(self) -> dict[str, tuple[Any, Any]]:
        """Each part's graph (structure without values) and abstract parameters with metadata."""
        makers = {
            "embed": self.architecture.embed,
            "blocks": self.architecture.block,
            "head": self.architecture.head,
        }
        parts = {}
        for name, make in makers.items():
            abstract = nnx.eval_shape(lambda make=make: make(nnx.Rngs(0)))
            parts[name] = nnx.split(abstract)
        return parts

    def leaves(self, layout: Layout) -> Any:
        """The placement of every parameter: a tree of `Leaf` shaped like the parameters."""

        def place(name: str, axes: Any, shape: tuple[int, ...]) -> Leaf:
            if axes is None:
                raise RequestError(
                    f"model.block={self.config.block}: a parameter of {name} with shape {shape} "
                    'has no logical axes; declare it as nnx.Param(value, axes=("embed", "mlp"))'
                )
            if name == "blocks":
                axes, shape = ("layers", *axes), (self.config.layers, *shape)
            return layout.leaf(tuple(axes), shape)

        tree = {}
        for name, (_, state) in self._parts.items():
            pairs = nnx.to_pure_dict(
                state, extract_fn=lambda v: _Declared(getattr(v, "axes", None), v.get_value().shape)
            )
            tree[name] = jax.tree.map(
                lambda d, name=name: place(name, d.axes, d.shape),
                pairs,
                is_leaf=lambda x: isinstance(x, _Declared),
            )
        return tree

    def init(self, key: jax.Array, leaves: Any) -> Params:
        """Float32 parameters, drawn at the model's own shapes and then padded.

        Values depend on the key alone, never on the mesh.
        """
        embed, blocks, head = jax.random.split(key, 3)
        make = self.architecture
        layers = jax.random.split(blocks, self.config.layers)
        params = {
            "embed": _parameters(make.embed(nnx.Rngs(embed))),
            "blocks": jax.vmap(lambda k: _parameters(make.block(nnx.Rngs(k))))(layers),
            "head": _parameters(make.head(nnx.Rngs(head))),
        }
        return tree_map_leaves(pad, leaves, params)

    # The three parts, as the executor and the plain forward pass call them.
    def embed(self, params: Params, tokens: jax.Array, rows: VocabRows) -> jax.Array:
        """This shard's share of the embedding [B, T, D]; see protocol.py."""
        return nnx.merge(self._parts["embed"][0], params["embed"])(tokens, rows)

    def block(self, params: Params, x: jax.Array, context: BlockContext) -> jax.Array:
        """One layer; `params` without the layers axis."""
        return nnx.merge(self._parts["blocks"][0], params)(x, context)

    def head(self, params: Params, x: jax.Array, rows: VocabRows) -> jax.Array:
        """Float32 logits [B, T, V_local] of `rows`, padding not yet masked."""
        embed = (
            nnx.merge(self._parts["embed"][0], params["embed"]) if self.architecture.tied else None
        )
        return nnx.merge(self._parts["head"][0], params["head"])(x, rows, embed)

    @property
    def head_reads(self) -> tuple[str, ...]:
        """Names of the parameter groups the head differentiates."""
        return ("embed", "head") if self.architecture.tied else ("head",)

    def embed_dropout(self, x: jax.Array, row_keys: jax.Array | None) -> jax.Array:
        return dropout(x, self.architecture.embed_dropout, row_keys, EMBED_SALT)

    def shared(self, length: int, segments: jax.Array | None = None) -> Any:
        """What all layers of rows of this length share; of packed rows [B, T], row by row."""
        positions = jnp.arange(length) if segments is None else positions_of(segments)
        return self.architecture.shared(positions)

    @property
    def uses_dropout(self) -> bool:
        return self.config.dropout > 0

    def logits(
        self, params: Params, tokens: jax.Array, segments: jax.Array | None = None
    ) -> jax.Array:
        """Plain forward pass [B, T] -> [B, T, V] float32: one device, whole vocabulary."""
        rows = VocabRows(0, self.config.vocab, self.config.vocab)
        shared, layout = self.shared(tokens.shape[1], segments), Layout()

        def body(x: jax.Array, layer: tuple[jax.Array, Params]) -> tuple[jax.Array, None]:
            index, block_params = layer
            context = BlockContext(shared, index, None, layout, self.attention, segments=segments)
            return self.block(block_params, x, context), None

        x = self.embed(params, tokens, rows)
        x, _ = jax.lax.scan(body, x, (jnp.arange(self.config.layers), params["blocks"]))
        return self.head(params, x, rows)


def positions_of(segments: jax.Array) -> jax.Array:
    """Position of each token within its document, [..., T] int32: its index less the first one's.

    A document is a run of equal numbers; so is the padding.
    """
    index = jnp.arange(segments.shape[-1], dtype=jnp.int32)
    starts = segments != jnp.roll(segments, 1, -1)
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=segments.ndim - 1)


@dataclass(frozen=True)
class _Declared:
    axes: Any
    shape: tuple[int, ...]


def pad(leaf: Leaf, x: jax.Array) -> jax.Array:
    """Zero rows up to the run-time shape."""
    if x.shape == leaf.shape:
        return x
    return jnp.pad(x, [(0, n - m) for n, m in zip(leaf.shape, x.shape, strict=True)])


def unpad(leaf: Leaf, x: jax.Array) -> jax.Array:
    """The model's own shape, without padding."""
    if x.shape == leaf.logical_shape:
        return x
    return x[tuple(slice(n) for n in leaf.logical_shape)]


def parameter_count(leaves: Any) -> int:
    """Number of the model's own parameters; padding not counted."""
    import math

    sizes = tree_map_leaves(lambda leaf: math.prod(leaf.logical_shape), leaves)
    return sum(jax.tree.leaves(sizes))


def build_model(config: ModelConfig, attention: str = "xla") -> Model:
    """The model `model.block` names.

    Raises:
        RequestError: the named function cannot be imported or returns no `Architecture`.
    """
    if config.block == "decoder":
        return Model(config, decoder.architecture(config), attention)
    module, _, name = config.block.partition(":")
    try:
        make: Callable[[ModelConfig], Architecture] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise RequestError(
            f"model.block={config.block!r}: {error}; allowed: 'decoder', or "
            "'package.module:function' returning a spmd_train.model.Architecture"
        ) from None
    made = make(config)
    if not isinstance(made, Architecture):
        raise RequestError(
            f"model.block={config.block!r} returned {type(made).__name__}, not an Architecture"
        )
    return Model(config, made, attention)
