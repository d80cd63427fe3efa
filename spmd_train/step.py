"""One training step, as one compiled SPMD program; and the loss alone, as another.

Where things cross devices, and in which dtype (everything summed is FP32):
- over `stage`: activations between neighbours (compute dtype), the vocabulary's sums;
- over `model`: activations inside a layer, by annotation;
- over `data`: each parameter's gradient once (`policy.reduce`), and its updated value once
  on the way from the optimizer's placement back to the parameters'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmd_train.data.batches import Batch, micro_batched
from spmd_train.mesh import DATA
from spmd_train.pipeline.evaluate import loss_sum
from spmd_train.pipeline.execute import Pipeline, loss_and_gradients
from spmd_train.pipeline.reproducible import (
    COMPILER_OPTIONS,
    global_norm,
    hidden_zero,
    rounded_products,
)
from spmd_train.precision import fp8, guard_of, master_of, scale_of
from spmd_train.precision.guard import APPLIED, select
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
        packed: whether batches have segments.
    """

    pipeline: Pipeline
    spec: StateSpec
    schedule: Callable[[Any], Any]
    packed: bool = False

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Forward and backward, reduce, check, update.

        A bad step, or one without a supervised token, changes nothing that is learned: only the
        step number, the loss scale and the guard's counters move.
        """
        scale = scale_of(state.opt_state)
        losses, gradients, largest = loss_and_gradients(
            self.pipeline, state.params, fp8.scales_from(state.fp8), batch, state.step, scale
        )
        params, opt_state = self._update(state, gradients, losses)
        guard = guard_of(opt_state)
        history = select(guard.verdict == APPLIED, fp8.remember(state.fp8, largest), state.fp8)
        metrics = {
            **losses,
            "grad_norm": guard.grad_norm,
            "lr": jnp.asarray(self.schedule(_count(state.opt_state)), jnp.float32),
            "loss_scale": scale,
            "verdict": guard.verdict,
            "consecutive_skips": guard.consecutive,
        }
        return TrainState(state.step + 1, params, opt_state, history), metrics

    def _update(
        self, state: TrainState, gradients: Any, losses: dict[str, jax.Array]
    ) -> tuple[Any, Any]:
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
        update: Callable[..., Any] = partial(
            spec.tx.update,
            value=losses["loss"] + losses["z_loss"],
            empty=losses["tokens"] == 0,
            grad_norm=global_norm(gradients, spec.leaves, layout, state.step),
        )
        if layout.reproducible:
            update = rounded_products(update, hidden_zero(state.step))
        updates, opt_state = update(gradients, state.opt_state, params)
        master = master_of(opt_state)
        if master is None:
            # Explicit, since adding even -0.0 flushes a subnormal to zero on a CPU.
            applied = guard_of(opt_state).verdict == APPLIED
            new = select(applied, optax.apply_updates(params, updates), params)
        else:
            new = jax.tree.map(lambda m, p: m.astype(p.dtype), master, params)
        return placed(layout.param_spec, placed(layout.optimizer_spec, new)), opt_state

    def eval_step(self, params: Any, history: fp8.ByProduct, batch: Batch) -> dict[str, jax.Array]:
        """The loss summed over a batch's tokens, and their number; see `pipeline.evaluate`.

        Args:
            params, history: of a train state.
        """
        return loss_sum(self.pipeline, params, fp8.scales_from(history), batch)

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
        return self._batch_of(jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding))

    def _batch_of(self, each: Any) -> Batch:
        """`each` for every array of a batch."""
        return Batch(each, each, each if self.packed else None)

    def jitted(self) -> Any:
        """The compiled form: state donated, every placement fixed, so that nothing recompiles."""
        shardings = self.spec.shardings()
        return jax.jit(
            self.train_step,
            in_shardings=(shardings, self._batch_shardings),
            out_shardings=(shardings, None),
            donate_argnums=0,
            compiler_options=self._compiler_options,
        )

    def jitted_eval(self) -> Any:
        """The compiled form of `eval_step`; nothing is donated."""
        shardings = self.spec.shardings()
        return jax.jit(
            self.eval_step,
            in_shardings=(shardings.params, shardings.fp8, self._batch_shardings),
            compiler_options=self._compiler_options,
        )

    @property
    def _batch_shardings(self) -> Batch:
        return self._batch_of(self.spec.layout.named(self.spec.layout.batch_spec))

    @property
    def _compiler_options(self) -> dict[str, Any] | None:
        return COMPILER_OPTIONS if self.spec.layout.reproducible else None


def _count(opt_state: Any) -> jax.Array:
    """Updates applied so far, from the optimizer's own counter."""
    counts = optax.tree.get_all_with_path(opt_state, "count")
    return counts[0][1]
