"""The layers of one stage, forward and backward, as loops that add gradients in place.

`jax.vjp` of one layer is taken in the forward loop; what it keeps (its residuals, all but the
weights and other values the backward loop has anyway) goes into a ring over the micro-batches in
flight, and the backward loop rebuilds the vjp from there. So nothing that was saved is recomputed,
and no gradient is held twice: each layer's is added straight into the accumulator.

What is kept per layer and micro-batch, by remat policy: `none` everything, `dots` the results of
matrix products with weights, `full` the layer's input. `stage` keeps only the stage's input and
runs the `full` forward again, just before the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from spmd_train.precision.fp8 import PRODUCT

_policies = jax.checkpoint_policies

REMAT: dict[str, Callable[..., bool] | None] = {
    "none": None,
    "dots": _policies.save_from_both_policies(
        _policies.dots_with_no_batch_dims_saveable,
        _policies.save_only_these_names(PRODUCT),  # fp8 products: a custom_vjp hides their dots
    ),
    "full": _policies.nothing_saveable,
    "stage": _policies.nothing_saveable,
}

Ring = list[jax.Array]  # one array [slots, layers, ...] per residual of a layer


def together(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Leave it to the compiler what a layer is compiled together with."""
    return fn


@dataclass(frozen=True)
class Recipe:
    """How a layer's vjp is put together again.

    Attributes:
        treedef: structure of the vjp function, itself a pytree of its residuals.
        known: for each residual its index among the known values (weights and so on), or None
            where it comes from the ring.
        kept: shapes and dtypes of those that come from the ring.
    """

    treedef: Any
    known: tuple[int | None, ...]
    kept: tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True)
class StageLayers:
    """One stage's layers for one micro-batch shape.

    Attributes:
        block: (params of one layer, x [B, T, D], aux) -> [B, T, D].
        params: layer number on this stage -> its parameters.
        count: number of layers on a stage.
        remat: key in `REMAT`.
        isolate: wraps what one layer computes, forward or backward.
        ring_in_order: read the ring in the memory layout it was written in. Left to itself, XLA
            turns the whole ring around once a tick, for one weight gradient's sake, and holds both:
            on a GPU 12 to 16 % of a pipeline's temporaries. (Not where residuals are sharded
            automatically: there the constraint brings such copies about.)
    """

    block: Callable[[Any, jax.Array, Any], jax.Array]
    params: Callable[[Any], Any]
    count: int
    remat: str
    isolate: Callable[[Callable[..., Any]], Callable[..., Any]]
    ring_in_order: bool = False

    def _differentiable(self) -> Callable[[Any, jax.Array, Any], jax.Array]:
        policy = REMAT[self.remat]
        return self.block if policy is None else jax.checkpoint(self.block, policy=policy)

    def _vjp(self, params: Any, x: jax.Array, aux: Any) -> tuple[jax.Array, Ring, Recipe]:
        layer = self._differentiable()
        y, pullback = jax.vjp(lambda p, x: layer(p, x, aux), params, x)
        residuals, treedef = jax.tree.flatten(pullback)
        # Identity, not equality: a residual that *is* a weight needs no storage of its own.
        position = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((params, aux)))}
        known = tuple(position.get(id(r)) for r in residuals)
        saved = [jnp.asarray(r) for r, k in zip(residuals, known, strict=True) if k is None]
        kept = tuple(jax.ShapeDtypeStruct(r.shape, r.dtype) for r in saved)
        return y, saved, Recipe(treedef, known, kept)

    def recipe(self, x: jax.ShapeDtypeStruct, aux: Any) -> Recipe:
        """The recipe for inputs shaped like `x`, found by tracing one layer."""
        found: list[Recipe] = []

        def probe(params: Any, x: jax.Array, aux: Any) -> Ring:
            _, saved, recipe = self._vjp(params, x, aux)
            found.append(recipe)
            return saved

        jax.eval_shape(probe, self.params(0), x, aux)
        return found[0]

    def ring(self, recipe: Recipe, slots: int) -> Ring:
        """Empty storage for `slots` micro-batches."""
        return [jnp.zeros((slots, self.count, *k.shape), k.dtype) for k in recipe.kept]

    def forward(self, x: jax.Array, aux: Callable[[Any], Any], trips: Any) -> jax.Array:
        """The first `trips` layers, nothing kept; `trips` is 0 for an idle tick."""
        block = self.isolate(self.block)
        return lax.fori_loop(0, trips, lambda i, x: block(self.params(i), x, aux(i)), x)

    def forward_keeping(
        self, x: jax.Array, ring: Ring, slot: Any, aux: Callable[[Any], Any], trips: Any
    ) -> tuple[jax.Array, Ring]:
        """As `forward`, every layer's residuals written to `slot` of the ring."""

        def one(i: Any, carry: tuple[jax.Array, Ring]) -> tuple[jax.Array, Ring]:
            x, ring = carry
            y, saved = self.isolate(lambda *a: self._vjp(*a)[:2])(self.params(i), x, aux(i))
            ring = [
                lax.dynamic_update_slice(r, s[None, None], (slot, i) + (0,) * s.ndim)
                for r, s in zip(ring, saved, strict=True)
            ]
            return y, ring

        return lax.fori_loop(0, trips, one, (x, ring))

    def backward(
        self,
        totals: Any,
        dy: jax.Array,
        ring: Ring,
        slot: Any,
        recipe: Recipe,
        aux: Callable[[Any], Any],
        trips: Any,
        add: Callable[[Any, Any, Any], Any],
    ) -> tuple[Any, jax.Array]:
        """Walk back from the last layer: gradients into `totals`, returns them and dx.

        `add`: (accumulators, layer number, gradients of that layer) -> accumulators.
        """

        def one(k: Any, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            totals, dy = carry
            i = self.count - 1 - k
            known = jax.tree.leaves((self.params(i), aux(i)))
            stored = iter(self._stored(r, slot, i) for r in ring)
            residuals = [next(stored) if j is None else known[j] for j in recipe.known]
            pullback = self.isolate(lambda r, dy: jax.tree.unflatten(recipe.treedef, r)(dy))
            gradients, dx = pullback(residuals, dy)
            return add(totals, i, gradients), dx

        return lax.fori_loop(0, trips, one, (totals, dy))

    def _stored(self, ring: jax.Array, slot: Any, layer: Any) -> jax.Array:
        """One layer's residual of one micro-batch."""
        size = (1, 1, *ring.shape[2:])
        x = lax.dynamic_slice(ring, (slot, layer) + (0,) * (ring.ndim - 2), size)
        if self.ring_in_order:
            x = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
        return x[0, 0]
