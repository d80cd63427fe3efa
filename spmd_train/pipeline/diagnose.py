"""Run one batch again, slowly, and measure every tensor on the way: for a step that went wrong.

Manual over `data` and `stage` and placed like the training step (execute.py), so it fits wherever
that fits, but one micro-batch at a time and one stage at a time:

```
look-up -> stages 0 .. S-1 forward -> logits, loss -> stages S-1 .. 0 backward -> look-up gradient
```

What a stage hands on is summed to all stages (`from_stage`), so that every collective needs the
one before. What is measured is summed over `model` only, and waited for (`_once`). Nothing is
reduced over rows or data shards: the point is to tell them apart.

Axes: M micro-batches, L layers, S stages, D data shards, R rows of a micro-batch on all data
shards, B rows here, T sequence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd_train.data.batches import Batch
from spmd_train.mesh import DATA, STAGE
from spmd_train.model import BlockContext
from spmd_train.model.protocol import plain_product
from spmd_train.pipeline.accumulate import Accumulation
from spmd_train.pipeline.collectives import from_stage, ordered, whole
from spmd_train.pipeline.execute import Pipeline, dropout_keys, layer_of, token_weight, typed
from spmd_train.pipeline.vocabulary import Vocabulary
from spmd_train.precision import fp8
from spmd_train.precision.measurements import Seen, Statistics
from spmd_train.sharding import only, tree_map_leaves

Visit = Callable[[str, jax.Array], jax.Array]


def diagnose(
    pipeline: Pipeline,
    params: Any,
    scales: fp8.ByProduct,
    batch: Batch,
    step: jax.Array,
    loss_scale: jax.Array,
) -> Statistics:
    """What every tensor of a step's forward and backward pass looks like.

    Args:
        params, scales, batch, step: as for `loss_and_gradients`.
        loss_scale: gradients are measured scaled, where the step's overflowed.
    """
    layout, manual = pipeline.layout, {DATA, STAGE}
    tokens = only(layout.batch_spec, manual)
    by_row, by_stage_and_row = P(None, DATA), P(None, STAGE, DATA)
    placed: dict[str, Any] = {
        "parameters": P(STAGE, DATA),
        "embedding": by_row,
        "activations": by_stage_and_row,
        "logits": by_stage_and_row,
        "loss": by_row,
        "output_gradient": by_row,
        "activation_gradients": by_stage_and_row,
        "gradients": by_stage_and_row,
    }
    mapped = jax.shard_map(
        lambda *a: _measure(pipeline, *a),
        mesh=layout.mesh,
        in_specs=(
            tree_map_leaves(lambda leaf: only(layout.param_spec(leaf), manual), pipeline.leaves),
            *(P(STAGE), tokens, P(), P()),
        ),
        out_specs=Statistics(**placed),
        axis_names=manual,
        check_vma=False,
    )
    with jax.enable_x64(False):  # a float64 master makes nothing here 64 bits wide
        return mapped(params, scales, batch, step, loss_scale)


def seen(x: jax.Array, keep: int = 0) -> Seen:
    """Measure `x` over all but its first `keep` dimensions."""
    x, over = x.astype(jnp.float32), tuple(range(keep, x.ndim))
    finite = jnp.isfinite(x)
    return Seen(
        jnp.max(jnp.where(finite, jnp.abs(x), 0.0), over),
        jnp.sum(jnp.isinf(x), over, dtype=jnp.int32),
        jnp.sum(jnp.isnan(x), over, dtype=jnp.int32),
    )


def _seen_by_row(x: jax.Array, rows: int) -> Seen:
    """[B]; what a block taps that has no rows counts for every row."""
    if x.ndim and x.shape[0] == rows:
        return seen(x, 1)
    return jax.tree.map(lambda a: jnp.broadcast_to(a, rows), seen(x))


def _by_path(tree: Any, measure: Callable[[jax.Array], Seen]) -> dict[str, Seen]:
    """A tree of arrays as {"mlp/gate": what `measure` says}."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(str(key.key) for key in path): measure(x) for path, x in flat}


def _block(p: Pipeline, visit: Visit, params: Any, x: jax.Array, aux: Any) -> jax.Array:
    """One layer, with `visit` on its tapped tensors and products in the order they are made.

    `params` is the pair of a layer's weights and fp8 scales.
    """
    shared, segments, layer, keys = aux
    weights, scales = params
    compute = fp8.product_with(scales) if p.policy.fp8 else plain_product
    used = {"input", "output"}  # ours

    def tap(name: str, x: jax.Array) -> jax.Array:
        names = (name if k == 1 else f"{name} {k}" for k in count(1))
        unique = next(n for n in names if n not in used)
        used.add(unique)
        return visit(unique, x)

    def product(name: str, subscripts: str, x: jax.Array, w: jax.Array) -> jax.Array:
        return tap(f"{name} product", compute(name, subscripts, x, w))

    context = BlockContext(
        *(shared, layer, typed(keys), p.layout, p.model.attention, product, tap), segments
    )
    return p.layout.constrain(p.model.block(weights, x, context), "batch", "sequence", "embed")


def _tapped(p: Pipeline, params: Any, x: jax.Array, aux: Any) -> OrderedDict[str, jax.Array]:
    """A layer's tensors in the order in which it makes them; the last one is its output."""
    found: OrderedDict[str, jax.Array] = OrderedDict()
    found["output"] = _block(p, lambda name, x: found.setdefault(name, x), params, x, aux)
    return found


def _pulled_back(
    p: Pipeline, params: Any, x: jax.Array, aux: Any, dy: jax.Array
) -> tuple[Any, OrderedDict[str, jax.Array]]:
    """Gradients of a layer's parameters, and of its input and tensors in the forward order."""
    zeros = OrderedDict(
        (name, jnp.zeros(a.shape, a.dtype))
        for name, a in jax.eval_shape(lambda *a: _tapped(p, *a), params, x, aux).items()
        if name != "output" and jnp.issubdtype(a.dtype, jnp.floating)
    )

    def layer(params: Any, x: jax.Array, zeros: OrderedDict[str, jax.Array]) -> jax.Array:
        # The gradient of a zero that is added to a tensor is the tensor's own.
        def visit(name: str, x: jax.Array) -> jax.Array:
            return x + zeros[name] if name in zeros else x

        return _block(p, visit, params, x, aux)

    _, pullback = jax.vjp(layer, params, x, zeros)
    gradients, dx, of_tensors = pullback(dy)
    return gradients, OrderedDict([("input", dx), *of_tensors.items()])


def _stage_by_stage(
    p: Pipeline,
    one: Callable[[Any, jax.Array], tuple[jax.Array, Any]],
    x: jax.Array,
    backward: bool = False,
) -> tuple[jax.Array, Any]:
    """Take `x` through all layers, or back; the stages take turns.

    Args:
        one: (layer number on this stage, x) -> (next x, what to keep of this layer).

    Returns:
        The last x, on every stage, and what was kept of this stage's layers [L/S, ...].
    """
    S = p.schedule.num_stages
    L, stage = p.model.config.layers // S, lax.axis_index(STAGE)
    kept = jax.tree.map(
        lambda a: jnp.zeros((L, *a.shape), a.dtype), jax.eval_shape(lambda x: one(0, x)[1], x)
    )

    def layer(k: Any, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        x, kept = carry
        i = L - 1 - k if backward else k
        x, of_layer = one(i, x)
        return x, jax.tree.map(lambda a, b: a.at[i].set(b), kept, of_layer)

    def turn(carry: tuple[jax.Array, Any], of: jax.Array) -> tuple[tuple[jax.Array, Any], None]:
        x, kept = lax.fori_loop(0, jnp.where(stage == of, L, 0), layer, carry)
        return (from_stage(x, of), kept), None

    turns = jnp.arange(S)
    return lax.scan(turn, (x, kept), turns[::-1] if backward else turns)[0]


def _once(x: jax.Array, measured: Any, m: jax.Array) -> jax.Array:
    """`x`, once `measured` is there: keeps the measurements' collectives in one order."""
    sums = [jnp.sum(a, dtype=jnp.float32) for a in jax.tree.leaves(measured)]
    return ordered(x, jnp.stack(sums).sum(), m)


def _measure(
    p: Pipeline,
    params: Any,
    scales: fp8.ByProduct,
    batch: Batch,
    step: jax.Array,
    loss_scale: jax.Array,
) -> Statistics:
    """The body of the manual region; the batch is [M, B, T]."""
    layout, config = p.layout, p.model.config
    M, B, T = batch.inputs.shape
    first_layer = lax.axis_index(STAGE) * (config.layers // p.schedule.num_stages)
    _, weight = token_weight(batch.targets)
    # ZeRO 2 and 3 would sum a gradient over data as it is made: gather here, once, and do not.
    ends = {
        group: tree_map_leaves(lambda f, x: whole(x, f, layout), p.leaves[group], params[group])
        for group in ("embed", "head")
    }
    apart = replace(layout, zero=min(layout.zero, 1))
    vocabulary = Vocabulary(p.model, apart, p.leaves, p.policy, Accumulation(apart, p.policy))
    no_gradient = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), ends)

    def layer(i: Any) -> tuple[Any, Any]:
        return layer_of(p, params, scales, i)

    def by_row(tensors: OrderedDict[str, jax.Array]) -> OrderedDict[str, Seen]:
        return OrderedDict((name, _seen_by_row(x, B)) for name, x in tensors.items())

    def ends_of(tree: Any, *groups: str) -> dict[str, Seen]:
        """[S, D] of arrays that stages share out by vocabulary."""
        chosen = {group: tree[group] for group in groups}
        return _by_path(chosen, lambda a: _on_axes(seen(a), 0, 1))

    def microbatch(_: None, now: tuple[jax.Array, Batch]) -> tuple[None, dict[str, Any]]:
        m, tokens = now
        inputs, targets, segments = tokens.inputs, tokens.targets, tokens.segments
        shared, keys = p.model.shared(T, segments), dropout_keys(p, step, m, B)

        def forward(i: Any, x: jax.Array) -> tuple[jax.Array, Any]:
            found = _tapped(p, layer(i), x, (shared, segments, first_layer + i, keys))
            return found["output"], (x, by_row(found))

        def backward(i: Any, dy: jax.Array) -> tuple[jax.Array, Any]:
            aux = (shared, segments, first_layer + i, keys)
            (gradients, _), found = _pulled_back(p, layer(i), block_inputs[i], aux, dy)
            of_parameters = _by_path({"blocks": gradients}, lambda a: _on_axes(seen(a), 0))
            return found["input"], (of_parameters, by_row(found))

        x = vocabulary.lookup(ends, inputs, typed(keys))
        embedding = seen(x, 1)
        y, (block_inputs, activations) = _stage_by_stage(p, forward, _once(x, embedding, m))
        logits = vocabulary.over_logits(ends, y, lambda logits: seen(logits, 1)).over_first()
        y = _once(y, logits, m)
        totals, losses, dy = vocabulary.head(ends, no_gradient, y, targets, weight, loss_scale, m)
        output_gradient, of_head = seen(dy, 1), ends_of(totals, "head")
        dy = _once(dy, (output_gradient, of_head), m)
        dx, (of_blocks, activation_gradients) = _stage_by_stage(p, backward, dy, backward=True)
        totals = vocabulary.lookup_gradient(ends, totals, inputs, typed(keys), dx, m)
        return None, {
            "embedding": embedding,
            "activations": activations,
            "logits": _on_axes(logits, 0),
            "loss": _on_axes(seen(losses), 0),
            "output_gradient": output_gradient,
            "activation_gradients": activation_gradients,
            "gradients": {**of_head, **of_blocks, **ends_of(totals, "embed")},
        }

    of_blocks = _by_path({"blocks": params["blocks"]}, lambda a: _on_axes(seen(a, 1), 1))
    parameters = {**of_blocks, **ends_of(params, "embed", "head")}
    batch = replace(batch, inputs=_once(batch.inputs, parameters, step))
    _, measured = lax.scan(microbatch, None, (jnp.arange(M), batch))
    return Statistics(parameters=parameters, **measured)


def _on_axes(measured: Seen, *axes: int) -> Seen:
    """With axes of length 1 for the mesh axes that hold different values."""
    return jax.tree.map(lambda a: jnp.expand_dims(a, axes), measured)
