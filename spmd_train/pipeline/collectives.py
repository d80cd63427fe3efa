"""Every collective of the step, in one place, with the rules that keep them correct.

1. Sums are done in FP32 and cast back (`reduce`); a 16-bit `psum` in a partly manual region also
   aborts XLA's CPU compiler (JAX 0.10.2 and 0.12: "Invalid binary instruction opcode copy"). Where
   gradients cross `data` in 16 bits, or the order of a sum matters, slices are exchanged and each
   shard adds its own up (`DataSum`).
2. What crosses `data` or sums whole gradients runs with `model` made manual (`over_model`), or XLA
   gathers the array over `model` first (seen in the HLO compiled for 32 H100).
3. Collectives come in one order on every device (`ordered`). Where stages run different numbers of
   layers, two devices that meet the same two collectives in different orders wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd_train.mesh import DATA, MODEL, STAGE
from spmd_train.pipeline.reproducible import tree_sum
from spmd_train.sharding import Layout, Leaf, only


def reduce(x: jax.Array, *axes: str) -> jax.Array:
    """Sum `x` over manual mesh axes in float32, returned in its own dtype."""
    axes = tuple(a for a in axes if lax.axis_size(a) > 1)
    if not axes:
        return x
    if jnp.issubdtype(x.dtype, jnp.integer):
        return lax.psum(x, axes)
    return lax.psum(x.astype(jnp.float32), axes).astype(x.dtype)


def maximum(x: jax.Array, axis: str) -> jax.Array:
    """Largest value over a manual mesh axis."""
    return lax.pmax(x, axis) if lax.axis_size(axis) > 1 else x


def from_stage(x: jax.Array, stage: Any) -> jax.Array:
    """The value `x` has on one stage, on every stage: exact, since all the others add -0.

    (A sum with +0 would turn -0 into +0, and the sign of a zero would depend on the mesh.)
    """
    if lax.axis_size(STAGE) == 1:
        return x
    return reduce(jnp.where(lax.axis_index(STAGE) == stage, x, jnp.full_like(x, -0.0)), STAGE)


def shift(x: jax.Array, by: int) -> jax.Array:
    """Send `x` to the stage `by` further on (+1 forward, -1 backward), around the ring."""
    n = lax.axis_size(STAGE)
    return lax.ppermute(x, STAGE, [(i, (i + by) % n) for i in range(n)])


def ordered(x: jax.Array, after: jax.Array, tick: jax.Array) -> jax.Array:
    """`x`, available only once `after` (which broadcasts to it) is: a true data dependence.

    `tick < 0` never holds, but the compiler cannot know. `lax.optimization_barrier` does not do
    this: XLA drops it before it schedules (seen to deadlock on CPU in 3 runs of 3).
    """
    return jnp.where(tick < 0, after.astype(x.dtype), x)


def over_model(fn: Callable[[jax.Array], jax.Array], x: jax.Array, spec: P) -> jax.Array:
    """Apply `fn` to each model shard of `x`, `model` made manual around it; `spec` is x's."""
    local = only(spec, {MODEL})
    return jax.shard_map(
        fn, in_specs=(local,), out_specs=local, axis_names={MODEL}, check_vma=False
    )(x)


def _without_layers(spec: P, dim: int | None, drop: bool) -> tuple[P, int | None]:
    if not drop:
        return spec, dim
    return P(*spec[1:]), None if dim is None else dim - 1


@dataclass(frozen=True)
class DataSum:
    """How gradients are summed over data shards; always in float32.

    Attributes:
        wire: dtype in which they cross.
        ordered: by one binary tree over the shards. The order of the library's sums depends on how
            many shards there are and how they are connected.
    """

    wire: Any = jnp.float32
    ordered: bool = False

    @property
    def by_library(self) -> bool:
        return not self.ordered and jnp.dtype(self.wire) == jnp.float32


def scatter_over_data(
    x: jax.Array, leaf: Leaf, how: DataSum, *, one_layer: bool = False
) -> jax.Array:
    """Sum a gradient over data, each data shard keeping its part: one reduce-scatter.

    A leaf that no dimension of divides by data is summed whole. `one_layer`: `x` lacks the layers
    axis of its leaf.
    """
    spec, dim = _without_layers(leaf.spec, leaf.data_dim, one_layer)
    if dim is None:
        return all_reduce(x, spec, DATA, how=how)

    def local(x: jax.Array) -> jax.Array:
        if how.by_library:
            total = lax.psum_scatter(x.astype(jnp.float32), DATA, scatter_dimension=dim, tiled=True)
        else:
            total = _exchange_and_sum(x, DATA, dim, how.wire)
        return total.astype(x.dtype)

    return over_model(local, x, spec)


def _exchange_and_sum(x: jax.Array, axes: Any, dim: int, wire: Any) -> jax.Array:
    """This shard's slice of the sum over `axes`, float32: slices exchanged, then `tree_sum`.

    The bytes of a reduce-scatter, in the dtype `wire`, and an order that is known.
    """
    n = lax.axis_size(axes)
    slices = lax.all_to_all(x.astype(wire), axes, dim, dim, tiled=True).astype(jnp.float32)
    shape = (*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])
    return tree_sum(slices.reshape(shape), dim)


def exchanged_sum(x: jax.Array, axes: Any, wire: Any = jnp.float32) -> jax.Array:
    """The whole sum over manual axes, in the order of `tree_sum`, on every shard.

    `x` goes as one vector, so that its shape need not divide: the bytes of an all-reduce.
    """
    n = lax.axis_size(axes)
    if n == 1:
        return x
    flat = jnp.pad(x.reshape(-1), (0, -x.size % n))
    total = lax.all_gather(_exchange_and_sum(flat, axes, 0, wire), axes, tiled=True)
    return total[: x.size].reshape(x.shape).astype(x.dtype)


def gather_over_data(x: jax.Array, leaf: Leaf, *, one_layer: bool = False) -> jax.Array:
    """The whole of a parameter whose `data_dim` is sharded over data: one all-gather."""
    spec, dim = _without_layers(leaf.spec, leaf.data_dim, one_layer)
    if dim is None:
        return x

    def local(x: jax.Array) -> jax.Array:
        return lax.all_gather(x, DATA, axis=dim, tiled=True)

    return over_model(local, x, spec)


def all_reduce(x: jax.Array, spec: P, axis: str, *, how: DataSum = DataSum()) -> jax.Array:
    """Sum a gradient over a manual axis, model shard by model shard."""
    if lax.axis_size(axis) == 1:
        return x
    if how.by_library:
        return over_model(lambda x: reduce(x, axis), x, spec)
    return over_model(lambda x: exchanged_sum(x, axis, how.wire), x, spec)


def total_gradient(x: jax.Array, leaf: Leaf, layout: Layout, how: DataSum) -> jax.Array:
    """A locally accumulated gradient, summed over the step's devices, placed for the optimizer.

    This is the one crossing of `data` per parameter and step at ZeRO 0 (all-reduce) and 1
    (reduce-scatter); at ZeRO 2 and 3 layers crossed as they were accumulated.
    """
    if not (leaf.on_stage or layout.reproducible):  # there summed over stages chunk by chunk
        x = all_reduce(x, layout.accumulator_spec(leaf), STAGE)
    if layout.zero >= 2:
        return x
    if layout.zero == 1:
        return scatter_over_data(x, leaf, how)
    return all_reduce(x, leaf.spec, DATA, how=how)


def whole(param: jax.Array, leaf: Leaf, layout: Layout, *, one_layer: bool = False) -> jax.Array:
    """A parameter as a layer needs it: gathered over data at ZeRO 3, as it is otherwise."""
    return gather_over_data(param, leaf, one_layer=one_layer) if layout.zero >= 3 else param
