"""Where micro-batches' gradients add up on one device, until they cross `data`.

An accumulator is made by `zeros`, takes one micro-batch's gradient at a time with `add`, and ends
as the whole step's gradient with `total`. `Accumulation` adds in place; `CompensatedAccumulation`
keeps what that rounds away, `TreeAccumulation` the partial sums of a fixed binary tree
(reproducible.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd_train.mesh import DATA, MODEL
from spmd_train.pipeline.collectives import (
    DataSum,
    exchanged_sum,
    reduce,
    scatter_over_data,
    total_gradient,
)
from spmd_train.pipeline.reproducible import push, stack_depth
from spmd_train.precision.policy import Policy
from spmd_train.sharding import Layout, Leaf, as_tuple, only, tree_map_leaves


@dataclass(frozen=True)
class Accumulation:
    """One sum in place.

    Attributes:
        layout, policy: placement and dtypes.
    """

    layout: Layout
    policy: Policy

    @property
    def over_data(self) -> DataSum:
        return DataSum(self.policy.reduce)

    def zeros(self, leaf: Leaf) -> Any:
        """An empty accumulator of a parameter's gradient."""
        spec = self.layout.accumulator_spec(leaf)
        zeros = jnp.zeros(_local_shape(leaf.shape, spec, self.layout), self.policy.accumulate)
        return self.start(lax.with_sharding_constraint(zeros, only(spec, {MODEL})))

    def add(self, total: Any, part: jax.Array, leaf: Leaf, arrival: Any, layer: Any = None) -> Any:
        """`total` plus one micro-batch's gradient, in place.

        At ZeRO 2 and 3 the accumulator is sharded over data and the part is scattered into it.

        Args:
            arrival: number of gradients of this parameter that came before.
            layer: of a stacked accumulator, the layer that `part` is of.
        """
        if self.layout.zero >= 2:
            part = scatter_over_data(part, leaf, self.over_data, one_layer=layer is not None)
        return self.plus(total, part, arrival, layer)

    def total(self, total: Any, leaf: Leaf) -> jax.Array:
        """The gradient of the whole step, placed for the optimizer."""
        return total_gradient(self.here(total), leaf, self.layout, self.over_data)

    def losses(self, total: Any) -> jax.Array:
        """A small sum, such as that of the losses, over data as well."""
        return reduce(self.here(total), DATA)

    # How a sum is held; another kind of accumulation differs in these alone.
    def start(self, zeros: jax.Array) -> Any:
        return zeros

    def plus(self, total: Any, part: jax.Array, arrival: Any, layer: Any = None) -> Any:
        part = part.astype(total.dtype)
        return total + part if layer is None else total.at[layer].add(part)

    def here(self, total: Any) -> jax.Array:
        """The sum on this device."""
        return total


@dataclass(frozen=True)
class CompensatedAccumulation(Accumulation):
    """A sum and what its last additions have rounded away (Kahan 1965), in the same dtype.

    bfloat16 twice is as large as float32: this is for hardware or memory layouts that want 16 bits.
    """

    def start(self, zeros: jax.Array) -> tuple[jax.Array, jax.Array]:
        return zeros, zeros

    def plus(self, total: Any, part: jax.Array, arrival: Any, layer: Any = None) -> Any:
        whole, lost = total
        dtype = jnp.finfo(whole.dtype)
        at = (lambda x: x) if layer is None else (lambda x: x[layer])
        old = at(whole).astype(jnp.float32)
        wanted = part.astype(jnp.float32) + at(lost).astype(jnp.float32)
        # Rounded in so many words: XLA may leave out the rounding of a cast there and back.
        new = lax.reduce_precision(old + wanted, dtype.nexp, dtype.nmant)
        pair = new.astype(whole.dtype), (wanted - (new - old)).astype(lost.dtype)
        if layer is None:
            return pair
        return whole.at[layer].set(pair[0]), lost.at[layer].set(pair[1])

    def here(self, total: Any) -> jax.Array:
        whole, lost = total
        return whole.astype(jnp.float32) + lost.astype(jnp.float32)


@dataclass(frozen=True)
class TreeAccumulation(Accumulation):
    """The partial sums of a binary tree over logical shards.

    Attributes:
        microbatches: of one logical shard.
    """

    microbatches: int

    @property
    def over_data(self) -> DataSum:
        return DataSum(ordered=True)

    @property
    def slots(self) -> int:
        """Accumulators held for one parameter: 1 + log2(logical shards / data)."""
        return stack_depth(self.layout.logical_shards // self.layout.size(DATA))

    def start(self, zeros: jax.Array) -> jax.Array:
        return jnp.broadcast_to(zeros, (self.slots, *zeros.shape))

    def plus(self, total: jax.Array, part: jax.Array, arrival: Any, layer: Any = None) -> jax.Array:
        return push(total, part, arrival, self.microbatches, layer)

    def here(self, total: jax.Array) -> jax.Array:
        return total[0]

    def losses(self, total: jax.Array) -> jax.Array:
        return exchanged_sum(self.here(total), DATA)


def accumulation(layout: Layout, policy: Policy, microbatches: int) -> Accumulation:
    """The kind that a run asks for; `microbatches` are those of one data shard."""
    if policy.compensated:
        return CompensatedAccumulation(layout, policy)
    if not layout.reproducible:
        return Accumulation(layout, policy)
    per_shard = layout.logical_shards // layout.size(DATA)
    return TreeAccumulation(layout, policy, microbatches // per_shard)


def partial_sum_bytes(leaves: Any, layout: Layout, policy: Policy, tied: bool) -> int:
    """What reproducible sums hold on each device besides one accumulator for every parameter."""
    if not layout.reproducible:
        return 0
    slots = TreeAccumulation(layout, policy, 1).slots

    def size(leaf: Leaf) -> int:
        elements = math.prod(leaf.shape) // layout.size(
            *(a for e in leaf.spec for a in as_tuple(e))
        )
        return elements * jnp.dtype(policy.accumulate).itemsize

    def total(part: Any) -> int:
        return sum(jax.tree.leaves(tree_map_leaves(size, part)))

    of_tied_head = slots * total(leaves["embed"]) if tied else 0
    return (slots - 1) * total(leaves) + of_tied_head


def _local_shape(shape: tuple[int, ...], spec: Any, layout: Layout) -> tuple[int, ...]:
    """Shape inside the manual region: data and stage shards cut, model still whole."""

    def shards(entry: Any) -> int:
        return layout.size(*(a for a in as_tuple(entry) if a != MODEL))

    entries = [*spec, *[None] * (len(shape) - len(spec))]
    return tuple(n // shards(e) for n, e in zip(shape, entries, strict=True))
