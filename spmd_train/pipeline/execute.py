"""Run any schedule's table as one `lax.scan`: loss and gradients of a whole step.

Manual over `data` and `stage`, automatic (annotated) over `model`. One tick, on every device:

```
        1 look-up            vocabulary over (stage, model)      if stage 0 runs forward
        2 forward            this stage's layers                  0 trips if idle
        3 head and loss      vocabulary over (stage, model)      if the last stage ran forward
        4 backward           this stage's layers                  0 trips if idle
        5 look-up gradient   vocabulary over (stage, model)      if stage 0 ran backward
        6 send y to the next stage, then dx to the previous one
```

1, 3 and 5 are decided by the table alone, so alike on every device; 2 and 4 differ by stage, and
each number's collectives depend on the one before, which gives all devices one order. Gradients
add up locally in FP32 (accumulate.py) and cross `data` after the scan, once (ZeRO 0 and 1), or are
scattered as they are made (ZeRO 2 and 3). With one stage this is plain gradient accumulation.

Where sums are reproducible (reproducible.py) the head takes the vocabulary chunk by chunk, and each
layer is compiled by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd_train.data.batches import Batch
from spmd_train.mesh import DATA, MODEL, STAGE
from spmd_train.model import BlockContext, Model
from spmd_train.model.protocol import plain_product
from spmd_train.pipeline.accumulate import Accumulation, accumulation
from spmd_train.pipeline.collectives import from_stage, maximum, ordered, reduce, shift, whole
from spmd_train.pipeline.layers import StageLayers, together
from spmd_train.pipeline.reproducible import hidden_zero, isolated
from spmd_train.pipeline.schedule import IDLE, Schedule
from spmd_train.pipeline.vocabulary import Vocabulary
from spmd_train.pipeline.vocabulary_chunks import ChunkedVocabulary
from spmd_train.precision import fp8
from spmd_train.precision.policy import Policy
from spmd_train.sharding import Layout, only, tree_map_leaves


@dataclass(frozen=True)
class Pipeline:
    """Everything static about a step's forward and backward pass.

    Attributes:
        model, layout, schedule, policy: what runs, where, when, in which precision.
        leaves: placement of every parameter (`Model.leaves(layout)`).
        remat: "none", "dots", "full" or "stage"; see layers.py.
        idle: "skip" runs no layer in an idle tick; "masked" runs them on zeros and adds nothing,
            for hardware where trip counts must not differ between devices.
        seed: of the dropout masks.
    """

    model: Model
    layout: Layout
    schedule: Schedule
    policy: Policy
    leaves: Any
    remat: str
    idle: str = "skip"
    seed: int = 0


def loss_and_gradients(
    pipeline: Pipeline,
    params: Any,
    scales: fp8.ByProduct,
    batch: Batch,
    step: jax.Array,
    loss_scale: jax.Array,
) -> tuple[dict[str, jax.Array], Any, fp8.ByProduct]:
    """Token-mean loss of a step and its gradients.

    Args:
        params: as `pipeline.leaves` places them, in the compute dtype.
        scales: of fp8 products with delayed scaling, {name: [L, 3]}; else empty.
        batch: tokens [M, B/M, T] of the whole step (`Step.micro_batched`). Its segments, if any,
            need not travel between stages: every stage has the batch of its data shard.
        step: number of the step, for dropout.
        loss_scale: what the gradients (not the loss) are multiplied by; float32.

    Returns:
        {"loss", "z_loss"} float32 and "tokens" int32; gradients in the accumulation dtype, placed
        for the optimizer (`Layout.optimizer_spec`); and the largest values that each entry of
        `scales` was for. With no supervised token at all, loss and gradients are zeros.
    """
    layout, leaves = pipeline.layout, pipeline.leaves
    manual = {DATA, STAGE}

    def manual_specs(spec_of: Callable[[Any], P]) -> Any:
        return tree_map_leaves(lambda leaf: only(spec_of(leaf), manual), leaves)

    tokens = only(layout.batch_spec, manual)
    mapped = jax.shard_map(
        lambda *a: _scan(pipeline, *a),
        mesh=layout.mesh,
        in_specs=(manual_specs(layout.param_spec), P(STAGE), tokens, P(), P()),
        out_specs=(P(), manual_specs(layout.optimizer_spec), P(STAGE)),
        axis_names=manual,
        check_vma=False,
    )
    with jax.enable_x64(False):  # a float64 master makes nothing here 64 bits wide
        return mapped(params, scales, batch, step, loss_scale)


def loop_trips(pipeline: Pipeline) -> dict[str, int]:
    """Trips in a whole step, on any device, of a tick's loops whose length the table decides.

    By the named scope they stand in; a scope of several loops (with `remat=stage`, `backward` has
    two) gives the trips of each. Every stage runs every micro-batch once, whatever the schedule.
    """
    M, S = pipeline.schedule.num_microbatches, pipeline.schedule.num_stages
    layers = M * (pipeline.model.config.layers // S)
    return {"lookup": M, "forward": layers, "head": M, "backward": layers, "lookup_gradient": M}


def when(condition: Any, fn: Callable[[Any], Any], carry: Any) -> Any:
    """`fn(carry)` if `condition`, else `carry`, updated in place.

    A loop of no or one trip: `lax.cond` would hold every accumulator twice.
    """
    if isinstance(condition, bool):
        return fn(carry) if condition else carry
    return lax.fori_loop(0, condition.astype(jnp.int32), lambda _, c: fn(c), carry)


def dropout_keys(p: Pipeline, step: jax.Array, m: Any, rows: int) -> jax.Array | None:
    """Key data of the `rows` rows of micro-batch m on this data shard; None without dropout."""
    if not p.model.uses_dropout:
        return None
    key = jax.random.fold_in(jax.random.key(p.seed), step)
    data, shard, M = lax.axis_size(DATA), lax.axis_index(DATA), p.schedule.num_microbatches
    first = (shard * M + m if p.layout.reproducible else m * data + shard) * rows
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(first + jnp.arange(rows))
    return jax.random.key_data(keys)


def typed(keys: jax.Array | None) -> jax.Array | None:
    """Key data as keys."""
    return None if keys is None else jax.random.wrap_key_data(keys)


def token_weight(targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Supervised tokens of the whole step, and 1 / their number (0 without any)."""
    count = reduce(jnp.sum(targets >= 0), DATA)
    return count, jnp.where(count > 0, 1.0 / jnp.maximum(count, 1), 0.0)


def layer_of(p: Pipeline, params: Any, scales: fp8.ByProduct, i: Any) -> tuple[Any, Any]:
    """Weights and fp8 scales of layer i of this stage."""

    def pick(leaf: Any, a: jax.Array) -> jax.Array:
        a = lax.dynamic_index_in_dim(a, i, 0, keepdims=False)
        return whole(a, leaf, p.layout, one_layer=True)

    weights = tree_map_leaves(pick, p.leaves["blocks"], params["blocks"])
    return weights, jax.tree.map(lambda s: at(s, i), scales)


def vocabulary_of(p: Pipeline, sums: Accumulation, zero: jax.Array) -> Vocabulary:
    """Both ends of the model; `zero` is `reproducible.hidden_zero`."""
    ends = (p.model, p.layout, p.leaves, p.policy, sums)
    return ChunkedVocabulary(*ends, zero) if p.layout.reproducible else Vocabulary(*ends)


def stage_layers(
    p: Pipeline,
    params: Any,
    scales: fp8.ByProduct,
    batch: Batch,
    row_keys: Callable[[Any], jax.Array | None],
    zero: jax.Array,
) -> tuple[StageLayers, Callable[[Any], Callable[[Any], Any]]]:
    """The layers of this stage, and for micro-batch m what layer i is given besides x.

    Args:
        batch: [M, B, T] with the B rows here.
        row_keys: dropout keys of the rows of a micro-batch, None for no dropout.
        zero: `reproducible.hidden_zero`.
    """
    layout, T = p.layout, batch.inputs.shape[-1]
    L = p.model.config.layers // p.schedule.num_stages
    stage = lax.axis_index(STAGE)
    isolate = partial(isolated, zero=zero) if layout.reproducible else together
    shared = p.model.shared(T) if batch.segments is None else None

    def block(layer_params: Any, x: jax.Array, aux: Any) -> jax.Array:
        params, scales = layer_params
        shared, segments, layer, keys = aux
        product = fp8.product_with(scales) if p.policy.fp8 else plain_product
        context = BlockContext(
            *(shared, layer, typed(keys), layout, p.model.attention, product), segments=segments
        )
        return layout.constrain(p.model.block(params, x, context), "batch", "sequence", "embed")

    def aux_of(m: Any) -> Callable[[Any], Any]:
        keys = row_keys(m)
        if batch.segments is None:
            return lambda i: (shared, None, stage * L + i, keys)
        segments = at(batch.segments, m)
        of_rows = isolate(partial(p.model.shared, T))(segments)
        return lambda i: (of_rows, segments, stage * L + i, keys)

    def layer_params(i: Any) -> Any:
        return layer_of(p, params, scales, i)

    in_order = layout.size(MODEL) == 1
    return StageLayers(block, layer_params, L, p.remat, isolate, in_order), aux_of


def _scan(
    p: Pipeline,
    params: Any,
    scales: fp8.ByProduct,
    batch: Batch,
    step: jax.Array,
    loss_scale: jax.Array,
) -> tuple[dict[str, jax.Array], Any, fp8.ByProduct]:
    """The body of the manual region; the batch is [M, B, T] with B rows here."""
    schedule, layout, policy = p.schedule, p.layout, p.policy
    S = schedule.num_stages
    inputs, targets = batch.inputs, batch.targets
    M, B, T = inputs.shape
    stage = lax.axis_index(STAGE)
    count, weight = token_weight(targets)
    sums = accumulation(layout, policy, M)
    zero = hidden_zero(step)
    vocabulary = vocabulary_of(p, sums, zero)

    def row_keys(m: Any) -> jax.Array | None:
        return dropout_keys(p, step, m, B)

    layers, aux_of = stage_layers(p, params, scales, batch, row_keys, zero)
    x_like = jax.ShapeDtypeStruct((B, T, p.model.config.width), policy.compute)
    recipe = layers.recipe(x_like, aux_of(jnp.int32(0))(jnp.int32(0)))
    keeps_input = p.remat == "stage"
    always_forward, always_backward = schedule.never_idle
    # An idle tick that still writes does so in one slot more, that nobody reads.
    idle_writes = (keeps_input or p.idle == "masked") and not always_forward
    slots = schedule.num_slots + idle_writes

    def trips(active: jax.Array, never_idle: bool) -> Any:
        L = layers.count
        return L if never_idle or p.idle == "masked" else jnp.where(active, L, 0)

    def masked(active: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(active, x, jnp.zeros_like(x)) if p.idle == "masked" else x

    def forward(x: jax.Array, ring: Any, m: Any, slot: Any) -> tuple[jax.Array, Any]:
        active = m != IDLE
        n, x = trips(active, always_forward), masked(active, x)
        if not keeps_input:
            return layers.forward_keeping(x, ring, slot, aux_of(m), n)
        ring = lax.dynamic_update_index_in_dim(ring, x, slot, 0)
        return layers.forward(x, aux_of(m), n), ring

    def backward(
        totals: Any, dy: jax.Array, ring: Any, m: Any, slot: Any, arrival: Any
    ) -> tuple[Any, jax.Array]:
        def add(carry: Any, i: Any, found: Any) -> Any:
            (totals, seen), (gradients, largest) = carry, found
            totals = tree_map_leaves(
                lambda leaf, total, g: sums.add(total, g, leaf, arrival, layer=i),
                p.leaves["blocks"],
                totals,
                gradients,
            )
            return totals, jax.tree.map(lambda s, a: s.at[i].max(a), seen, largest)

        active = m != IDLE
        n, dy, aux = trips(active, always_backward), masked(active, dy), aux_of(m)
        if keeps_input:
            x = masked(active, lax.dynamic_index_in_dim(ring, slot, 0, keepdims=False))
            _, ring = layers.forward_keeping(x, layers.ring(recipe, 1), 0, aux, n)
            slot = 0
        (gradients, seen), dx = layers.backward(totals, dy, ring, slot, recipe, aux, n, add)
        if p.idle == "masked":  # an idle tick's values are nobody's
            seen = jax.tree.map(lambda new, old: jnp.where(active, new, old), seen, totals[1])
        return (gradients, seen), dx

    def tick(carry: dict[str, Any], now: dict[str, jax.Array]) -> tuple[dict[str, Any], None]:
        c = dict(carry)
        first_in, last_out = now["forward"][0], now["forward"][-1]
        forward_m, backward_m = now["forward"][stage], now["backward"][stage]
        first_out = now["backward"][0]

        # 1 look-up
        with jax.named_scope("lookup"):
            x = when(
                always_forward or first_in != IDLE,
                lambda _: vocabulary.lookup(
                    params, at(inputs, first_in), typed(row_keys(first_in))
                ),
                c["x"],
            )
        x = jnp.where(stage == 0, x, c["x"]) if S > 1 else x
        # 2 forward
        with jax.named_scope("forward"):
            y, c["ring"] = forward(x, c["ring"], forward_m, now["forward_slot"][stage])

        # 3 head and loss; its gradient waits in a ring for the last stage's backward
        def head(carry: Any) -> Any:
            totals, losses, dys = carry
            arrival = now["forward_arrival"][-1]
            totals, added, dy = vocabulary.head(
                params,
                totals,
                from_stage(y, S - 1),
                at(targets, last_out),
                weight,
                loss_scale,
                arrival,
            )
            dys = lax.dynamic_update_index_in_dim(dys, dy, now["head_slot"], 0)
            return totals, sums.plus(losses, added, arrival), dys

        with jax.named_scope("head"):
            c["ends"], c["losses"], c["head_dy"] = when(
                always_forward or last_out != IDLE, head, (c["ends"], c["losses"], c["head_dy"])
            )
        # 4 backward
        head_dy = lax.dynamic_index_in_dim(c["head_dy"], now["head_slot_read"], 0, keepdims=False)
        dy = jnp.where(stage == S - 1, head_dy, c["dy"]) if S > 1 else head_dy
        arrivals = now["backward_arrival"]
        with jax.named_scope("backward"):
            c["blocks"], dx = backward(
                c["blocks"], dy, c["ring"], backward_m, now["backward_slot"][stage], arrivals[stage]
            )

        # 5 look-up gradient
        def lookup_gradient(carry: Any) -> Any:
            totals, dx = carry
            dx = from_stage(dx, 0)
            keys = typed(row_keys(first_out))
            tokens = at(inputs, first_out)
            totals = vocabulary.lookup_gradient(params, totals, tokens, keys, dx, arrivals[0])
            return totals, dx

        with jax.named_scope("lookup_gradient"):
            c["ends"], first_dx = when(
                always_backward or first_out != IDLE, lookup_gradient, (c["ends"], dx)
            )
        # 6 sends
        if S > 1:
            t = now["tick"]
            c["x"] = shift(ordered(y, first_dx, t), +1)
            c["dy"] = shift(ordered(dx, c["x"], t), -1)
        return c, None

    x0 = layout.constrain(jnp.zeros(x_like.shape, x_like.dtype), "batch", "sequence", "embed")
    carry: dict[str, Any] = {
        "x": x0,
        "dy": x0,
        "ring": jnp.zeros((slots, *x0.shape), x0.dtype)
        if keeps_input
        else layers.ring(recipe, slots),
        "head_dy": jnp.zeros((schedule.num_head_slots, *x0.shape), x0.dtype),
        "ends": vocabulary.accumulators(),
        "blocks": (
            tree_map_leaves(sums.zeros, p.leaves["blocks"]),
            jax.tree.map(jnp.zeros_like, scales),
        ),
        "losses": sums.start(jnp.zeros(2, jnp.float32)),
    }
    carry, _ = lax.scan(tick, carry, _tables(schedule))
    totals, seen = carry["blocks"]
    blocks = tree_map_leaves(lambda leaf, t: sums.total(t, leaf), p.leaves["blocks"], totals)
    gradients = {"blocks": blocks, **vocabulary.gradients(carry["ends"])}
    loss, z_loss = sums.losses(carry["losses"])
    seen = jax.tree.map(lambda a: maximum(a, DATA), seen)
    return {"loss": loss, "z_loss": z_loss, "tokens": count}, gradients, seen


def _tables(schedule: Schedule) -> dict[str, jax.Array]:
    """The schedule as the scan reads it: one row a tick."""
    ring, head = schedule.num_slots, schedule.num_head_slots
    tables = {
        "tick": jnp.arange(schedule.num_ticks),
        "forward": schedule.forward,
        "backward": schedule.backward,
        "forward_arrival": schedule.arrivals(schedule.forward),
        "backward_arrival": schedule.arrivals(schedule.backward),
        "forward_slot": schedule.slot(schedule.forward, ring),
        "backward_slot": schedule.slot(schedule.backward, ring),
        "head_slot": schedule.slot(schedule.forward[:, -1], head),
        "head_slot_read": schedule.slot(schedule.backward[:, -1], head),
    }
    return {name: jnp.asarray(table) for name, table in tables.items()}


def at(x: jax.Array, m: Any) -> jax.Array:
    """Micro-batch m of x [M, B, T]."""
    return lax.dynamic_index_in_dim(x, m, 0, keepdims=False)
