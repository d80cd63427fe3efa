r"""Sums in one fixed order, whatever the mesh: the arithmetic of `precision.reproducible`.

A step's rows are cut into G logical shards of K micro-batches, the same on every mesh, and every
sum over them is one binary tree. For G = 8 on data = 2, data shard 0 holds the left half:

```
logical shard    0     1     2     3  |  4     5     6     7     K micro-batches, added in order
                  \   /       \   /   |   \   /       \   /
                   [0,2)      [2,4)   |   [4,6)      [6,8)       `push`, as they arrive
                      \       /       |      \       /
                        [0,4)         |        [4,8)
                             \        |       /
                               the whole sum                     `tree_sum`, slices exchanged
```

A data shard holds whole subtrees, since both numbers are powers of two, so where the line runs
changes no addition. Floating-point addition commutes, so a schedule whose backward passes come
newest first (gpipe) walks the mirror image of the tree and gets the same bits.

Two things besides the order of sums would change bits. What a compiler fuses decides which products
and sums it contracts into FMAs, and fusions change with the shapes around a computation: whatever
multiplies runs `isolated`, in one shape on every mesh, or elementwise with `rounded_products`. And
x + 0 is not x for x = -0: what is summed with zeros to move it between devices uses -0
(collectives.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import Literal
from jax.sharding import PartitionSpec as P

from spmd_train.mesh import DATA, MODEL, STAGE
from spmd_train.sharding import Layout, Leaf, as_tuple, tree_map_leaves

# What XLA would otherwise decide by the size of the whole program (seen on CPU, JAX 0.10.2):
# - where a bfloat16 value is used in float32 again, whether the rounding is left out;
# - which kernels share a module, and so whether they are optimised (without LLVM's optimisations,
#   as the tests compile, a module still gets them where one of its kernels calls exp or pow).
COMPILER_OPTIONS: dict[str, Any] = {
    "xla_allow_excess_precision": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


def hidden_zero(step: jax.Array) -> jax.Array:
    """0, int32, of a step number; the compiler cannot know that steps are not negative."""
    return jnp.minimum(step, 0)


def isolated(fn: Callable[..., Any], zero: jax.Array) -> Callable[..., Any]:
    """`fn`, compiled by itself: nothing is fused into it, and it is fused into nothing.

    A loop of 1 + `zero` trips, which the compiler cannot inline. (`lax.optimization_barrier` does
    not do on CPU with JAX 0.10.2: XLA drops it before it fuses.) The arguments go around the loop
    and change on the way, or what depends on them alone would be moved out of it.
    """

    def call(*args: Any) -> Any:
        def once(_: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            args = carry[0]
            return jax.tree.map(jnp.zeros_like, args), fn(*args)

        like = jax.eval_shape(fn, *args)
        start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        return lax.fori_loop(0, 1 + zero, once, (args, start))[1]

    return call


def tree_sum(x: jax.Array, axis: int = 0) -> jax.Array:
    """Sum over an axis, neighbours first, then neighbouring pairs; an odd one out moves up."""
    while (n := x.shape[axis]) > 1:
        even = lax.slice_in_dim(x, 0, n - n % 2, 2, axis)
        odd = lax.slice_in_dim(x, 1, n, 2, axis)
        pairs = even + odd
        rest = lax.slice_in_dim(x, n - n % 2, n, 1, axis)
        x = lax.concatenate([pairs, rest], axis) if n % 2 else pairs
    return lax.squeeze(x, (axis,))


def stack_depth(leaves: int) -> int:
    """Slots that `push` needs for a power of two of leaves: log2 + 1."""
    return leaves.bit_length()


def push(
    stack: jax.Array, part: jax.Array, arrival: Any, terms: int, layer: Any = None
) -> jax.Array:
    """Add the next part to a tree of partial sums, in place: a binary counter of accumulators.

    Leaf j of the tree is the sum, in order, of parts j*terms to (j+1)*terms - 1. While it grows it
    is the top of a stack whose lower slots hold the finished subtrees, one for each bit of j; once
    finished it is merged with as many of them as j has trailing ones. The sum of all of a power of
    two of leaves ends in slot 0.

    Args:
        stack: [slots, ...], or [slots, layers, ...] of which only `layer` is touched.
        part: what arrives. arrival: its number, from 0 on, traced. terms: parts of a leaf.
    """
    leaf, term = arrival // terms, arrival % terms
    top = lax.population_count(leaf)
    merges = jnp.where(term == terms - 1, lax.population_count(leaf ^ (leaf + 1)) - 1, 0)
    index = () if layer is None else (layer,)

    def take(stack: jax.Array, slot: Any) -> jax.Array:
        start = (slot, *index, *(0,) * part.ndim)
        sizes = (1,) * (1 + len(index)) + part.shape
        return lax.dynamic_slice(stack, start, sizes).reshape(part.shape)

    def put(stack: jax.Array, slot: Any, value: jax.Array) -> jax.Array:
        value = value.reshape((1,) * (1 + len(index)) + part.shape)
        return lax.dynamic_update_slice(stack, value, (slot, *index, *(0,) * part.ndim))

    def merge(n: Any, stack: jax.Array) -> jax.Array:
        below = top - 1 - n
        return put(stack, below, take(stack, below) + take(stack, below + 1))

    part = part.astype(stack.dtype)
    stack = put(stack, top, jnp.where(term == 0, part, take(stack, top) + part))
    return lax.fori_loop(0, merges, merge, stack)


_PRODUCTS = ("mul", "integer_pow", "square")


def rounded_products(fn: Callable[..., Any], zero: jax.Array) -> Callable[..., Any]:
    """`fn`, an elementwise computation, with every product rounded before it is added to anything.

    Whether a compiler makes an FMA of `a * b + c` (and of which product in `a * b + c * d`) changes
    with the fusion around it and so with the shape of a shard. Adding a `zero` that it cannot know
    to the product's bits keeps it from doing so, in any fusion, at the cost of an integer addition.
    """

    def rounded(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        bits = lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")
        return lax.bitcast_convert_type(bits + zero.astype(bits.dtype), x.dtype)

    def evaluate(jaxpr: Any, constants: Any, *args: Any) -> list[Any]:
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *args), strict=True))
        for eqn in jaxpr.eqns:
            inputs = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
            if "jaxpr" in eqn.params and eqn.primitive.name in ("jit", "pjit"):
                inner = eqn.params["jaxpr"]
                outputs = evaluate(inner.jaxpr, inner.consts, *inputs)
            else:
                found = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
                outputs = found if eqn.primitive.multiple_results else [found]
            if eqn.primitive.name in _PRODUCTS:
                outputs = [rounded(x) for x in outputs]
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]

    def call(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        outputs = evaluate(closed.jaxpr, closed.consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return call


def chunk_counts(leaf: Leaf, layout: Layout) -> tuple[int, ...]:
    """Into how many parts each dimension of a parameter is cut for the norm.

    As many as any mesh with this `model` may have shards: each layer, each chunk of the vocabulary,
    each logical slice of `data_dim`, and the model shards.
    """

    def count(d: int) -> int:
        if leaf.axes[d] == "layers":
            return leaf.shape[d]
        if leaf.axes[d] == "vocab" or d == leaf.data_dim:
            return layout.logical_shards
        return layout.size(*as_tuple(leaf.spec[d]))

    return tuple(count(d) for d in range(len(leaf.shape)))


def global_norm(gradients: Any, leaves: Any, layout: Layout, step: jax.Array) -> jax.Array:
    """Global norm of gradients placed for the optimizer, replicas counted once; float32.

    Where sums are reproducible: squares summed over parts of one shape on every mesh, then
    `tree_sum`.
    """
    if not layout.reproducible:
        return optax.tree.norm(gradients)
    zero = hidden_zero(step)

    def sum_of_squares(x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        return jnp.sum(x * x)

    def partial_sums(leaf: Leaf, gradient: jax.Array) -> jax.Array:
        counts = chunk_counts(leaf, layout)
        part = tuple(n // c for n, c in zip(leaf.shape, counts, strict=True))

        def local(x: jax.Array, zero: jax.Array) -> jax.Array:
            grid = tuple(n // p for n, p in zip(x.shape, part, strict=True))

            def one(i: Any, sums: jax.Array) -> jax.Array:
                index = jnp.unravel_index(i, grid)
                start = [k * p for k, p in zip(index, part, strict=True)]
                squares = isolated(sum_of_squares, zero)(lax.dynamic_slice(x, start, part))
                return lax.dynamic_update_index_in_dim(sums, squares, i, 0)

            n = math.prod(grid)
            return lax.fori_loop(0, n, one, jnp.zeros(n, jnp.float32)).reshape(grid)

        spec = leaf.zero_spec
        sums = jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=(spec, P()),
            out_specs=spec,
            axis_names={DATA, MODEL, STAGE},
            check_vma=False,
        )(gradient, zero)
        return lax.with_sharding_constraint(sums, layout.named(P())).reshape(-1)

    sums = jax.tree.leaves(tree_map_leaves(partial_sums, leaves, gradients))
    return jnp.sqrt(tree_sum(jnp.concatenate(sums)))
