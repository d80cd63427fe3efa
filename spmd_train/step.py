"""One training step, as one compiled SPMD program.

Where things cross devices, and in which dtype (everything summed is FP32):
- over `stage`: activations between neighbours (compute dtype), the vocabulary's sums;
- over `model`: activations inside a layer, by annotation;
- over `data`: each parameter's gradient once (`loss_and_gradients`), and its updated value once
  on the way from the optimizer's placement back to the parameters'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmd_train.data.batches import Batch, micro_batched
from spmd_train.mesh import DATA
from spmd_train.optim import select
from spmd_train.pipeline.execute import Pipeline, loss_and_gradients
from spmd_train.pipeline.reproducible import (
    COMPILER_OPTIONS,
    global_norm,
    hidden_zero,
    rounded_products,
)
from spmd_train.precision import master_of
from spmd_train.sharding import Leaf, tree_map_leaves
from spmd_train.state import StateSpec, TrainState

Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class Step:
    """A run's step function with what it needs.

    Attributes:
        pipeline: forward and backward pass.
        spec: the state and its optimizer.
        schedule: learning rate of update `count + 1`, for the log.
        clip_norm: largest global gradient norm; None clips nothing.
    """

    pipeline: Pipeline
    spec: StateSpec
    schedule: Callable[[Any], Any]
    clip_norm: float | None = None

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Forward and backward, reduce, check, update.

        A step without a supervised token changes nothing but the step number.
        """
        losses, gradients = loss_and_gradients(self.pipeline, state.params, batch, state.step)
        norm = global_norm(gradients, self.spec.leaves, self.spec.layout, state.step)
        if self.clip_norm is not None:
            share = jnp.minimum(1.0, self.clip_norm / norm)
            gradients = jax.tree.map(lambda g: g * share.astype(g.dtype), gradients)
        applies = losses["tokens"] > 0
        params, opt_state = self._update(state, gradients, applies)
        new_state = TrainState(state.step + 1, params, opt_state)
        metrics = {
            **losses,
            "grad_norm": norm,
            "lr": jnp.asarray(self.schedule(_count(state.opt_state)), jnp.float32),
            "skipped": ~applies,
        }
        return new_state, metrics

    def _update(self, state: TrainState, gradients: Any, applies: jax.Array) -> tuple[Any, Any]:
        """The optimizer on its own shards, then the parameters gathered once.

        A skipped step is undone on the shards: choosing between whole parameters would hold both.
        """
        spec, layout = self.spec, self.spec.layout

        def placed(spec_of: Callable[[Leaf], Any], tree: Any) -> Any:
            return tree_map_leaves(
                lambda leaf, x: jax.lax.with_sharding_constraint(x, layout.named(spec_of(leaf))),
                spec.leaves,
                tree,
            )

        params = placed(layout.optimizer_spec, state.params)
        update = spec.tx.update
        if layout.reproducible:
            update = rounded_products(update, hidden_zero(state.step))
        updates, opt_state = update(gradients, state.opt_state, params)
        opt_state = select(applies, opt_state, state.opt_state)
        master = master_of(opt_state)
        if master is None:
            new = select(applies, optax.apply_updates(params, updates), params)
        else:
            new = jax.tree.map(lambda m, p: m.astype(p.dtype), master, params)
        return placed(layout.param_spec, placed(layout.optimizer_spec, new)), opt_state

    def micro_batched(self, batch: Batch) -> Batch:
        """A host batch [B, T] as the step reads it, [M, B/M, T].

        Reproducible sums want the rows of a logical shard together, on whatever mesh.
        """
        layout = self.spec.layout
        runs = layout.size(DATA) if layout.reproducible else 1
        return micro_batched(batch, self.pipeline.schedule.num_microbatches, runs)

    def abstract_batch(self, global_size: int, length: int) -> Batch:
        """A step's batch [M, B/M, T] as shapes with shardings."""
        sharding = self.spec.layout.named(self.spec.layout.batch_spec)
        microbatches = self.pipeline.schedule.num_microbatches
        shape = (microbatches, global_size // microbatches, length)
        spec = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
        return Batch(spec, spec)

    def jitted(self) -> Any:
        """The compiled form: state donated, every placement fixed, so that nothing recompiles."""
        shardings = self.spec.shardings()
        batch = self.spec.layout.named(self.spec.layout.batch_spec)
        return jax.jit(
            self.train_step,
            in_shardings=(shardings, Batch(batch, batch)),
            out_shardings=(shardings, None),
            donate_argnums=0,
            compiler_options=COMPILER_OPTIONS if self.spec.layout.reproducible else None,
        )


def _count(opt_state: Any) -> jax.Array:
    """Updates applied so far, from the optimizer's own counter."""
    counts = optax.tree.get_all_with_path(opt_state, "count")
    return counts[0][1]
