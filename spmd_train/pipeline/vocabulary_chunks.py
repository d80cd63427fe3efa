"""The vocabulary's ends in a fixed number of chunks, so that their sums do not follow the mesh.

A sum over the vocabulary is split over (stage, model), so plainly taken it would have another order
on every mesh. Here the rows form C = `Layout.logical_shards` chunks everywhere; a device loops over
its own C / (stages x model shards) of them, in kernels of one shape, and the chunks' partial sums
meet in one binary tree: on the device as they come, then across devices.

The softmax takes two passes over the chunks, since no gradient can be made before the whole sum of
exponentials is known; the second computes the logits again instead of holding all of them.

Axes: B rows of one micro-batch here, T sequence in Q parts of T/Q, D width, C chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd_train.mesh import MODEL, STAGE
from spmd_train.model import VocabRows
from spmd_train.pipeline.collectives import exchanged_sum
from spmd_train.pipeline.reproducible import isolated, push, stack_depth, tree_sum
from spmd_train.pipeline.vocabulary import MASKED, Vocabulary, in_parts
from spmd_train.sharding import Leaf, tree_map_leaves

FROM_HEAD = "embed, from the head"


@dataclass(frozen=True)
class ChunkedVocabulary(Vocabulary):
    """`Vocabulary` whose every sum over vocabulary rows has one order.

    Attributes:
        zero: 0, not known to the compiler (`reproducible.hidden_zero`).
    """

    zero: jax.Array

    # The two gradients of a tied embedding arrive in an order that depends on the number of stages:
    # each has its own accumulator, and the two sums are added last.
    def accumulators(self) -> Any:
        empty = super().accumulators()
        if self.model.architecture.tied:
            empty[FROM_HEAD] = tree_map_leaves(self.sums.zeros, self.leaves["embed"])
        return empty

    def gradients(self, totals: Any) -> Any:
        gradients = super().gradients(totals)
        if self.model.architecture.tied:
            from_head = self._totals("embed", totals[FROM_HEAD])
            gradients["embed"] = jax.tree.map(jnp.add, gradients["embed"], from_head)
        return gradients

    def _embed_gradients(self, embed: Any, tokens: jax.Array, dx: jax.Array) -> Any:
        leaves = self.leaves["embed"]

        def gradients(part: Any, first: Any, tokens: jax.Array, dx: jax.Array) -> Any:
            rows = self._chunk_rows(first)
            _, pullback = jax.vjp(lambda e: self.model.embed({"embed": e}, tokens, rows), part)
            return pullback(dx)[0], ()

        def local(embed: Any, zero: jax.Array, *arrays: jax.Array) -> Any:
            return self._sum_over_chunks(gradients, leaves, embed, arrays, (), zero)[0]

        return self._by_model_shard(local, leaves, lambda of_params: of_params)(
            embed, self.zero, tokens, dx
        )

    def head(
        self,
        params: Any,
        totals: Any,
        y: jax.Array,
        targets: jax.Array,
        weight: jax.Array,
        scale: jax.Array,
        arrival: Any,
    ) -> tuple[Any, jax.Array, jax.Array]:
        groups = self.model.head_reads
        leaves = {group: self.leaves[group] for group in groups}
        head = self._by_model_shard(self._head, leaves, lambda of_params: (P(), of_params, P()))
        losses, gradients, dy = head(
            {group: params[group] for group in groups},
            self.zero,
            self.layout.constrain(y, "batch", None, "embed"),
            targets,
            weight,
            scale,
        )
        added = {}
        for group in groups:
            name = FROM_HEAD if group == "embed" else group
            added[name] = self._accumulate(group, totals[name], gradients[group], arrival)
        return {**totals, **added}, losses, self.layout.constrain(dy, "batch", "sequence", "embed")

    def loss(self, params: Any, y: jax.Array, targets: jax.Array) -> jax.Array:
        leaves = {group: self.leaves[group] for group in self.model.head_reads}
        loss = self._by_model_shard(self._sum_loss, leaves, lambda of_params: P())
        y = self.layout.constrain(y, "batch", None, "embed")
        return loss({group: params[group] for group in leaves}, self.zero, y, targets)

    def _sum_loss(self, read: Any, zero: jax.Array, y: jax.Array, targets: jax.Array) -> jax.Array:
        Q = self._chunks(y.shape, self._chunk_size)
        one = jnp.float32(1.0)
        return self._softmax_of(read, zero, in_parts(y, Q), in_parts(targets, Q), one, one)[0]

    def _head(
        self,
        read: Any,
        zero: jax.Array,
        y: jax.Array,
        targets: jax.Array,
        weight: jax.Array,
        scale: jax.Array,
    ) -> tuple[jax.Array, Any, jax.Array]:
        """One model shard's part of `head`: losses [2], gradients of `read`, dy [B, T, D]."""
        leaves = {group: self.leaves[group] for group in read}
        B, T, D = y.shape
        Q = self._chunks(y.shape, self._chunk_size)
        y, targets = in_parts(y, Q), in_parts(targets, Q)
        losses, *of_tokens = self._softmax_of(read, zero, y, targets, weight, scale)

        def differentiate(part: Any, first: Any, *arrays: jax.Array) -> tuple[Any, jax.Array]:
            rows = self._chunk_rows(first)

            def one(sums: Any, now: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
                y, targets, top, slope, token_weight = now
                logits, pullback = jax.vjp(lambda p, y: self._masked_logits(p, y, rows), part, y)
                exponentials = jnp.exp(logits - top[..., None])
                d_logits = exponentials * slope[..., None] - rows.hot(targets)
                gradients, dy = pullback(d_logits * token_weight[..., None])
                return jax.tree.map(lambda s, g: s + g.astype(s.dtype), sums, gradients), dy

            empty = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), part)
            sums, dy = lax.scan(one, empty, arrays)
            return sums, jnp.swapaxes(dy, 0, 1).reshape(B, T, D)

        arrays, like = (y, targets, *of_tokens), jax.ShapeDtypeStruct((B, T, D), jnp.float32)
        gradients, dy = self._sum_over_chunks(differentiate, leaves, read, arrays, like, zero)
        return losses, gradients, dy.astype(y.dtype)

    def _masked_logits(self, part: Any, y: jax.Array, rows: VocabRows) -> jax.Array:
        return jnp.where(rows.padding, MASKED, self.logits(part, y, rows))

    def _softmax_of(
        self,
        read: Any,
        zero: jax.Array,
        y: jax.Array,
        targets: jax.Array,
        weight: jax.Array,
        scale: jax.Array,
    ) -> Any:
        """The first pass, of parts y [Q, B, T/Q, D]: losses [2]; then of each token the largest
        logit, the slope of its loss and its scaled weight [Q, B, T/Q]."""
        leaves = {group: self.leaves[group] for group in read}
        Q, B, t = targets.shape

        def measure(part: Any, first: Any, y: jax.Array, targets: jax.Array) -> jax.Array:
            rows = self._chunk_rows(first)

            def one(_: None, now: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
                y, targets = now
                logits = self._masked_logits(part, y, rows)
                top = logits.max(-1)
                exponentials = jnp.exp(logits - top[..., None]).sum(-1)
                at_target = jnp.where(rows.hot(targets), logits, 0.0).sum(-1)
                return None, jnp.stack([top, exponentials, at_target])

            return lax.scan(one, None, (y, targets))[1]

        def measure_chunk(c: Any, measures: jax.Array) -> jax.Array:
            part, first = self._chunk(leaves, read, c), self._first_row(c)
            found = isolated(measure, zero)(part, first, y, targets)
            return lax.dynamic_update_index_in_dim(measures, found, c, 0)

        def softmax(measures: Any, targets: Any, weight: Any, scale: Any) -> Any:
            tops, totals, at_targets = (measures[:, :, k] for k in range(3))
            top = tops.max(0)
            total = tree_sum(totals * jnp.exp(tops - top))
            log_total, at_target = jnp.log(total), tree_sum(at_targets) - top
            log_z = log_total + top
            token_weight = jnp.where(targets >= 0, weight, 0.0)
            losses = jnp.stack(
                [
                    jnp.sum((log_total - at_target) * token_weight),
                    jnp.sum(self.z_loss * log_z**2 * token_weight),
                ]
            )
            slope = (1.0 + 2.0 * self.z_loss * log_z) / total  # d(nll + z log_z^2) / d(exponential)
            return losses, top, slope, token_weight * scale

        measures = jnp.zeros((self._chunks_here, Q, 3, B, t), jnp.float32)
        measures = lax.fori_loop(0, self._chunks_here, measure_chunk, measures)
        measures = lax.all_gather(measures, (STAGE, MODEL), tiled=True)  # [C, Q, 3, B, T/Q]
        return isolated(softmax, zero)(measures, targets, weight, scale)

    # ------------------------------------------------------------------------------ the chunks
    @property
    def _chunks_here(self) -> int:
        return self.layout.logical_shards // self.layout.size(STAGE, MODEL)

    @property
    def _chunk_size(self) -> int:
        vocab = self.model.config.vocab
        return self.layout.padded(("vocab",), (vocab,))[0] // self.layout.logical_shards

    def _first_row(self, c: Any) -> jax.Array:
        """First row of this device's chunk c; devices hold the vocabulary stage by stage."""
        device = lax.axis_index(STAGE) * self.layout.size(MODEL) + lax.axis_index(MODEL)
        return (device * self._chunks_here + c) * self._chunk_size

    def _chunk_rows(self, first: jax.Array) -> VocabRows:
        return VocabRows(first, self._chunk_size, self.model.config.vocab)

    def _chunk(self, leaves: Any, params: Any, c: Any) -> Any:
        """The parameters with chunk c of their vocabulary rows only."""

        def cut(leaf: Leaf, p: jax.Array) -> jax.Array:
            if "vocab" not in leaf.axes:
                return p
            d = leaf.axes.index("vocab")
            return lax.dynamic_slice_in_dim(p, c * self._chunk_size, self._chunk_size, d)

        return tree_map_leaves(cut, leaves, params)

    def _by_model_shard(
        self, fn: Callable[..., Any], leaves: Any, out_specs: Callable[[Any], Any]
    ) -> Callable[..., Any]:
        """`fn(params, *arrays)` with `model` manual: vocabulary rows cut, all else whole."""

        def spec(leaf: Leaf) -> P:
            return P(*[MODEL if axis == "vocab" else None for axis in leaf.axes])

        of_params = tree_map_leaves(spec, leaves)

        def mapped(params: Any, *arrays: jax.Array) -> Any:
            return jax.shard_map(
                fn,
                in_specs=(of_params, *(P(),) * len(arrays)),
                out_specs=out_specs(of_params),
                axis_names={MODEL},
                check_vma=False,
            )(params, *arrays)

        return mapped

    def _sum_over_chunks(
        self,
        fn: Callable[..., tuple[Any, Any]],
        leaves: Any,
        params: Any,
        arrays: tuple[jax.Array, ...],
        like: Any,
        zero: jax.Array,
    ) -> tuple[Any, Any]:
        """Sum of `fn(parameters of a chunk, its first row, *arrays) -> (their gradients, more)`.

        Args:
            like: shapes of `more`, arrays to be summed as they are.

        Returns:
            Gradients, float32: of vocabulary rows this device's own, of other parameters summed
            over the chunks of all devices. The sum of `more`, likewise.
        """

        def stack(x: Any) -> jax.Array:
            return jnp.zeros((stack_depth(self._chunks_here), *x.shape), jnp.float32)

        def empty(leaf: Leaf, p: jax.Array) -> jax.Array:
            return jnp.zeros(p.shape, jnp.float32) if "vocab" in leaf.axes else stack(p)

        def one(c: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            def add(leaf: Leaf, total: jax.Array, g: jax.Array) -> jax.Array:
                if "vocab" not in leaf.axes:
                    return push(total, g, c, 1)
                d = leaf.axes.index("vocab")
                g = g.astype(jnp.float32)
                return lax.dynamic_update_slice_in_dim(total, g, c * self._chunk_size, d)

            part, first = self._chunk(leaves, params, c), self._first_row(c)
            gradients, more = isolated(fn, zero)(part, first, *arrays)
            return (
                tree_map_leaves(add, leaves, carry[0], gradients),
                jax.tree.map(lambda total, x: push(total, x, c, 1), carry[1], more),
            )

        def whole(stack: jax.Array) -> jax.Array:
            return exchanged_sum(stack[0], (STAGE, MODEL))

        start = (tree_map_leaves(empty, leaves, params), jax.tree.map(stack, like))
        gradients, more = lax.fori_loop(0, self._chunks_here, one, start)
        return (
            tree_map_leaves(
                lambda leaf, g: g if "vocab" in leaf.axes else whole(g), leaves, gradients
            ),
            jax.tree.map(whole, more),
        )
