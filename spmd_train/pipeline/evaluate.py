"""The loss of a batch, forward only: no gradient, no ring, nothing kept but two sums.

The tick of execute.py without its backward half, placed and ordered like it, so what trains on a
mesh is evaluated on it:

    1 look-up -> 2 forward -> 3 head and loss -> 6 send y to the next stage
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd_train.data.batches import Batch
from spmd_train.mesh import DATA, STAGE
from spmd_train.pipeline.accumulate import accumulation
from spmd_train.pipeline.collectives import from_stage, ordered, reduce, shift
from spmd_train.pipeline.execute import Pipeline, at, stage_layers, vocabulary_of, when
from spmd_train.pipeline.reproducible import hidden_zero
from spmd_train.pipeline.schedule import IDLE, forward_only
from spmd_train.precision import fp8
from spmd_train.sharding import only, tree_map_leaves


def loss_sum(
    pipeline: Pipeline, params: Any, scales: fp8.ByProduct, batch: Batch
) -> dict[str, jax.Array]:
    """Cross-entropy summed over the supervised tokens of a batch, in nats; without dropout.

    Args:
        params, scales, batch: as for `execute.loss_and_gradients`.

    Returns:
        {"loss"} float32, a sum and not a mean, and {"tokens"} int32: how many were summed.
    """
    layout, manual = pipeline.layout, {DATA, STAGE}
    mapped = jax.shard_map(
        lambda *a: _scan(pipeline, *a),
        mesh=layout.mesh,
        in_specs=(
            tree_map_leaves(lambda leaf: only(layout.param_spec(leaf), manual), pipeline.leaves),
            P(STAGE),
            only(layout.batch_spec, manual),
        ),
        out_specs=P(),
        axis_names=manual,
        check_vma=False,
    )
    with jax.enable_x64(False):  # a float64 master makes nothing here 64 bits wide
        return mapped(params, scales, batch)


def _scan(p: Pipeline, params: Any, scales: fp8.ByProduct, batch: Batch) -> dict[str, jax.Array]:
    """The body of the manual region; the batch is [M, B, T] with B rows here."""
    layout, (M, B, T) = p.layout, batch.inputs.shape
    schedule = forward_only(p.schedule.num_stages, M)
    S, stage = schedule.num_stages, lax.axis_index(STAGE)
    always, _ = schedule.never_idle
    count = reduce(jnp.sum(batch.targets >= 0), DATA)
    zero, sums = hidden_zero(count), accumulation(layout, p.policy, M)
    vocabulary = vocabulary_of(p, sums, zero)
    layers, aux_of = stage_layers(p, params, scales, batch, lambda m: None, zero)

    def tick(carry: Any, now: dict[str, jax.Array]) -> tuple[Any, None]:
        x, total = carry
        first, mine, last = now["forward"][0], now["forward"][stage], now["forward"][-1]
        looked_up = when(
            always or first != IDLE,
            lambda _: vocabulary.lookup(params, at(batch.inputs, first), None),
            x,
        )
        x = jnp.where(stage == 0, looked_up, x) if S > 1 else looked_up
        # On hardware where trip counts must not differ an idle tick runs on what was left over.
        idle_runs = always or p.idle == "masked"
        trips = layers.count if idle_runs else jnp.where(mine != IDLE, layers.count, 0)
        y = layers.forward(x, aux_of(mine), trips)

        def head(total: Any) -> Any:
            loss = vocabulary.loss(params, from_stage(y, S - 1), at(batch.targets, last))
            return sums.plus(total, loss[0], now["arrival"][-1])

        total = when(always or last != IDLE, head, total)
        if S > 1:
            y = shift(ordered(y, sums.here(total), now["tick"]), +1)
        return (y, total), None

    x = jnp.zeros((B, T, p.model.config.width), p.policy.compute)
    x = layout.constrain(x, "batch", "sequence", "embed")
    tables = {
        "tick": jnp.arange(schedule.num_ticks),
        "forward": jnp.asarray(schedule.forward),
        "arrival": jnp.asarray(schedule.arrivals(schedule.forward)),
    }
    (_, total), _ = lax.scan(tick, (x, sums.start(jnp.zeros((), jnp.float32))), tables)
    return {"loss": sums.losses(total), "tokens": count}
