"""Both ends of the model, sharded by vocabulary over (stage, model): look-up, loss, gradients.

The softmax is split over all stages, so no stage idles on the head, and a tied embedding is simply
the same shards used twice: one gradient, no copies to drift. The head's gradient is taken by hand
around its softmax: differentiating *through* a `psum` in a region with `check_vma=False` would
multiply it by the number of stages, silently.

Axes: B rows of one micro-batch here, T sequence, D width, V_local vocabulary rows of this stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd_train.mesh import MODEL, STAGE
from spmd_train.model import Model, VocabRows
from spmd_train.pipeline.accumulate import Accumulation
from spmd_train.pipeline.collectives import maximum, reduce, whole
from spmd_train.precision.policy import Policy
from spmd_train.sharding import Layout, tree_map_leaves

MASKED = -1e30
LOGITS_BYTES = 64 * 2**20  # float32 logits held at a time on one device


def in_parts(x: jax.Array, parts: int) -> jax.Array:
    """[B, T, ...] as equal parts of the sequence, [parts, B, T/parts, ...]."""
    return jnp.swapaxes(x.reshape(x.shape[0], parts, -1, *x.shape[2:]), 0, 1)


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary-sharded ends of `model`.

    Attributes:
        model, layout: what to run, where.
        leaves: placements of the parameter groups "embed" and "head".
        policy: dtypes of activations and logits.
        sums: how gradients add up.
    """

    model: Model
    layout: Layout
    leaves: Any
    policy: Policy
    sums: Accumulation

    def accumulators(self) -> Any:
        """Empty accumulators of both groups' gradients."""
        return {g: tree_map_leaves(self.sums.zeros, self.leaves[g]) for g in ("embed", "head")}

    def gradients(self, totals: Any) -> Any:
        """The gradients of the whole step, placed for the optimizer."""
        return {g: self._totals(g, totals[g]) for g in ("embed", "head")}

    def _totals(self, group: str, totals: Any) -> Any:
        def total(leaf: Any, total: Any) -> jax.Array:
            return self.sums.total(total, leaf)

        return tree_map_leaves(total, self.leaves[group], totals)

    @property
    def z_loss(self) -> float:
        """Coefficient of (log Z)^2 per token (Chowdhery et al. 2022, section 5)."""
        return self.model.config.z_loss

    def logits(self, read: Any, y: jax.Array, rows: VocabRows) -> jax.Array:
        """Float32 logits [B, t, V] of some rows, as precise as the policy says."""
        logits = self.model.head(read, y, rows)
        kept = jnp.finfo(self.policy.logits)
        if kept.bits >= 32:
            return logits
        return lax.reduce_precision(logits, kept.nexp, kept.nmant)

    def rows(self) -> VocabRows:
        """This stage's rows; within them `model` shards stay automatic."""
        vocab = self.model.config.vocab
        size = self.layout.padded(("vocab",), (vocab,))[0] // self.layout.size(STAGE)
        return VocabRows(lax.axis_index(STAGE) * size, size, vocab)

    def _whole(self, params: Any, group: str) -> Any:
        def gather(leaf: Any, p: jax.Array) -> jax.Array:
            return whole(p, leaf, self.layout)

        return tree_map_leaves(gather, self.leaves[group], params[group])

    def _accumulate(self, group: str, totals: Any, gradients: Any, arrival: Any) -> Any:
        def add(leaf: Any, total: Any, g: jax.Array) -> Any:
            return self.sums.add(total, g, leaf, arrival)

        return tree_map_leaves(add, self.leaves[group], totals, gradients)

    def lookup(self, params: Any, tokens: jax.Array, row_keys: jax.Array | None) -> jax.Array:
        """Embed tokens [B, T] -> [B, T, D], the same on every stage."""
        share = self.model.embed({"embed": self._whole(params, "embed")}, tokens, self.rows())
        x = self.layout.constrain(reduce(share, STAGE), "batch", "sequence", "embed")
        return self.model.embed_dropout(x, row_keys).astype(self.policy.compute)

    def lookup_gradient(
        self,
        params: Any,
        totals: Any,
        tokens: jax.Array,
        row_keys: jax.Array | None,
        dx: jax.Array,
        arrival: Any,
    ) -> Any:
        """Add the embedding's gradient to `totals`, given that of the first block's input.

        Summed in float32: one frequent token may collect thousands of rows. `arrival` numbers the
        micro-batches as they come here.
        """
        _, undrop = jax.vjp(lambda x: self.model.embed_dropout(x, row_keys), dx)
        dx = self.layout.constrain(undrop(dx)[0].astype(jnp.float32), "batch", None, "embed")
        embed = jax.tree.map(lambda p: p.astype(jnp.float32), self._whole(params, "embed"))
        gradients = self._embed_gradients(embed, tokens, dx)
        return {**totals, "embed": self._accumulate("embed", totals["embed"], gradients, arrival)}

    def _embed_gradients(self, embed: Any, tokens: jax.Array, dx: jax.Array) -> Any:
        rows = self.rows()
        _, pullback = jax.vjp(lambda e: self.model.embed({"embed": e}, tokens, rows), embed)
        return pullback(dx)[0]

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
        """Loss of one micro-batch and its gradients.

        Args:
            y: [B, T, D] output of the last block, the same on every stage.
            targets: [B, T] int32, negative where unsupervised.
            weight: what every supervised token's loss is multiplied by: 1 / tokens of the step.
            scale: the loss scale, of the gradients alone.
            arrival: number of micro-batches that came here before.

        Returns:
            totals with the head's gradients added; weighted sums [2] of cross-entropy and z-loss
            over this micro-batch; dy [B, T, D].
        """
        rows, groups = self.rows(), self.model.head_reads
        read = {group: self._whole(params, group) for group in groups}
        y = self.layout.constrain(y, "batch", None, "embed")
        chunks = self._chunks(y.shape, rows.size // self.layout.size(MODEL))

        def one(carry: Any, chunk: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
            losses, sums = carry
            added, gradients, dy = self._head_chunk(read, *chunk, weight, scale, rows)
            sums = jax.tree.map(lambda s, g: s + g.astype(s.dtype), sums, gradients)
            return (losses + added, sums), dy

        if chunks == 1:
            losses, sums, dy = self._head_chunk(read, y, targets, weight, scale, rows)
        else:
            # Chunks along the sequence: the whole [tokens, vocabulary] is never held in float32.
            parts = (in_parts(y, chunks), in_parts(targets, chunks))
            zero = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), read)
            (losses, sums), dy = lax.scan(one, (jnp.zeros(2, jnp.float32), zero), parts)
            dy = jnp.swapaxes(dy, 0, 1).reshape(y.shape)
        added = {g: self._accumulate(g, totals[g], sums[g], arrival) for g in groups}
        return {**totals, **added}, losses, self.layout.constrain(dy, "batch", "sequence", "embed")

    def loss(self, params: Any, y: jax.Array, targets: jax.Array) -> jax.Array:
        """Sums [2] of cross-entropy and z-loss over one micro-batch's tokens, without gradients."""
        rows, read = self.rows(), {g: self._whole(params, g) for g in self.model.head_reads}
        y = self.layout.constrain(y, "batch", None, "embed")
        chunks = self._chunks(y.shape, rows.size // self.layout.size(MODEL))

        def one(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
            y, targets = chunk
            return self._softmax(self._placed_logits(read, y, rows), targets, 1.0, rows)[0]

        return lax.map(one, (in_parts(y, chunks), in_parts(targets, chunks))).sum(0)

    def over_logits(self, params: Any, y: jax.Array, fn: Callable[[jax.Array], Any]) -> Any:
        """`fn` of the logits [B, t, V_local] of equal parts of the sequence, stacked first."""
        read = {group: self._whole(params, group) for group in self.model.head_reads}
        y = self.layout.constrain(y, "batch", None, "embed")
        rows = self.rows()
        parts = in_parts(y, self._chunks(y.shape, rows.size // self.layout.size(MODEL)))
        return lax.map(lambda y: fn(self.logits(read, y, rows)), parts)

    def _placed_logits(self, read: Any, y: jax.Array, rows: VocabRows) -> jax.Array:
        return self.layout.constrain(self.logits(read, y, rows), "batch", None, "vocab")

    def _chunks(self, shape: tuple[int, ...], size: int) -> int:
        """Fewest equal parts of the sequence whose logits of `size` rows fit `LOGITS_BYTES`."""
        B, T, _ = shape
        per_position = 4 * B * size
        wanted = math.ceil(T * per_position / LOGITS_BYTES)
        return next(n for n in range(1, T + 1) if T % n == 0 and (n >= wanted or n == T))

    def _head_chunk(
        self,
        read: Any,
        y: jax.Array,
        targets: jax.Array,
        weight: jax.Array,
        scale: jax.Array,
        rows: VocabRows,
    ) -> tuple[jax.Array, Any, jax.Array]:
        logits, pullback = jax.vjp(lambda read, y: self._placed_logits(read, y, rows), read, y)
        losses, of_tokens = self._softmax(logits, targets, weight, rows)
        exponentials, slope, hot, token_weight = of_tokens
        # Scaled in float32, before anything is cast down: to the step's mean first, or a loss scale
        # of 2^16 would overflow float16 by construction.
        d_logits = exponentials * slope[..., None] - hot
        gradients, dy = pullback(d_logits * (token_weight * scale)[..., None])
        return losses, gradients, reduce(dy, STAGE)

    def _softmax(
        self, logits: jax.Array, targets: jax.Array, weight: Any, rows: VocabRows
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Weighted sums [2] of cross-entropy and z-loss, and what their gradient is made of:
        exponentials and hot targets [B, t, V_local], slope and weight of each token [B, t]."""
        logits = jnp.where(rows.padding, MASKED, logits)
        top = maximum(logits.max(-1), STAGE)[..., None]
        exponentials = jnp.exp(logits - top)
        hot = rows.hot(targets)
        total, at_target = reduce(
            jnp.stack([exponentials.sum(-1), jnp.where(hot, logits - top, 0.0).sum(-1)]), STAGE
        )
        log_total = jnp.log(total)
        log_z = log_total + top[..., 0]
        token_weight = jnp.where(targets >= 0, weight, 0.0)
        losses = jnp.stack(
            [
                jnp.sum((log_total - at_target) * token_weight),
                jnp.sum(self.z_loss * log_z**2 * token_weight),
            ]
        )
        slope = (1.0 + 2.0 * self.z_loss * log_z) / total  # d(nll + z log_z^2) / d(exponential)
        return losses, (exponentials, slope, hot, token_weight)
