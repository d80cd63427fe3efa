"""What crosses each mesh axis in a step: seconds, and bytes that one device sends.

model    sums of the residual in every layer, each way
context  keys and values, round a ring, in every layer
stage    activations and their gradients, every tick; in the trainer sums for both ends besides
data     gradients, and weights, as the ZeRO level asks
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from spmd_train.plan.layer_time import LayerTime, Part
from spmd_train.plan.links import Group, Links, all_reduce, group, half, send
from spmd_train.plan.rates import DTYPE_BYTES
from spmd_train.plan.workload import Execution, Transformer


class Groups(NamedTuple):
    """Who takes part in the collectives of each axis."""

    model: Group
    context: Group
    stage: Group
    data: Group


@cache
def groups(
    links: Links, order: tuple[str, ...], model: int, context: int, stage: int, data: int
) -> Groups:
    """From the axes' sizes and their order, innermost first."""
    sizes = {"model": model, "context": context, "stage": stage, "data": data}
    found, apart, inner = {}, {}, 1
    for axis in order:
        found[axis], apart[axis] = group(links, sizes[axis], inner), inner
        inner *= sizes[axis]
    if context > 1:  # devices that split a sequence hold the same weights, as data shards do
        inner = min(apart["context"], apart["data"])
        found["data"] = group(links, context * data, inner)
    return Groups(**found)


class Crossing(NamedTuple):
    """Model-axis seconds of one layer and micro-batch, of the ends, and bytes sent by each."""

    forward: float
    backward: float
    ends: float
    sent: float
    ends_sent: float


@cache
def model_crossing(
    links: Links, who: Group, width: int, on: Part, remat: str, waits: tuple[float, float]
) -> Crossing:
    """Two sums of the residual in each direction (Shoeybi et al. 2019, section 3), each a
    reduce-scatter and an all-gather under sequence parallelism; once more where recomputed.
    While the device waits for the host, they cost nothing."""
    if who.size == 1:
        return Crossing(0.0, 0.0, 0.0, 0.0, 0.0)
    whole = on.tokens * width * DTYPE_BYTES[on.compute if on.compute != "float8" else "bfloat16"]
    one = 2 * half(links, who, whole) if on.sequence_parallel else all_reduce(links, who, whole)
    counts = _model_sums(on)
    again = {"full": counts.again, "stage": 2 + counts.again}.get(remat, 0.0)
    once = 2 * (who.size - 1) / who.size * whole
    sent = (2 + counts.backward + again) * once
    forward = max(0.0, 2 * one - waits[0])
    backward = max(0.0, counts.backward * one - waits[1]) + max(0.0, again * one - waits[0])
    return Crossing(forward, backward, counts.ends * one, sent, counts.ends * once)


class _Sums(NamedTuple):
    backward: float
    again: float
    ends: float


def _model_sums(on: Part) -> _Sums:
    """Sums over model in a layer's backward pass and its recomputation, and at both ends; a
    gather or a scatter alone is half of one.

    Eager: Megatron-LM, which recomputes all of a layer, and hides the third gather. Compiled: as
    counted in the trainer's step compiled for 32 H100. Recomputation leaves out the last sum. Under
    sequence parallelism the backward pass gathers its inputs once more, for the weights' gradients.
    """
    if on.eager:
        return _Sums(2.0, 2.0, 2.0)
    return _Sums(3.0, 1.5, 2.5) if on.sequence_parallel else _Sums(2.0, 1.0, 2.0)


@cache
def context_crossing(
    links: Links, who: Group, t: Transformer, on: Part, layer: LayerTime
) -> tuple[float, float]:
    """Keys and values go round a ring while blocks of scores are computed: (exposed, hidden) in
    one pass."""
    if who.size == 1:
        return 0.0, 0.0
    kv_heads = max(t.kv_heads // on.model, 1)
    block = 2 * on.tokens * kv_heads * t.head_dim * DTYPE_BYTES["bfloat16"]
    moving = (who.size - 1) * send(links, who, block)
    hidden = min(moving, layer.attention * (who.size - 1) / who.size)
    return moving - hidden, hidden


class Exchanged(NamedTuple):
    """Stage-axis seconds of a step, all exposed, and bytes sent: from stage to stage, and in the
    sums over all stages for both ends."""

    hops: float
    sums: float
    hops_sent: float
    sums_sent: float


def stage_crossing(
    links: Links, who: Group, model: Group, t: Transformer, e: Execution, on: Part, exchanges: int
) -> Exchanged:
    """What goes between stages in a step of so many `exchanges`, the times that a stage sends, or
    receives, in each direction."""
    if who.size == 1:
        return Exchanged(0.0, 0.0, 0.0, 0.0)
    M, S = e.microbatches, who.size
    elements = on.tokens * t.width
    size = 4 if e.compute == "float32" else 2
    if not e.lockstep:
        # Each model shard sends its part, and the parts are gathered there (scatter/gather,
        # Narayanan et al. 2021, section 4.1); under sequence parallelism parts are all there is.
        part = elements * size / model.size
        hop = send(links, who, part)
        if not on.sequence_parallel:
            hop += half(links, model, elements * size)
        return Exchanged(2 * exchanges * hop, 0.0, 2 * M * e.virtual_stages * part, 0.0)
    shard = elements / model.size if on.sequence_parallel else elements
    hops, hops_sent = 2 * exchanges * send(links, who, shard * size), 2 * exchanges * shard * size
    if e.vocabulary != "spread":
        return Exchanged(hops, 0.0, hops_sent, 0.0)
    # The look-up, the last stage's output, the head's input gradient and the first block's, for
    # each micro-batch (pipeline/execute.py). XLA sums over model first, so parts cross here; they
    # do in FP32, but on TPUs in the compute dtype (both seen in steps compiled for 32 devices).
    width = 4 if links.topology is None else size
    sums = M * 4 * all_reduce(links, who, width * shard)
    return Exchanged(hops, sums, hops_sent, M * 4 * 2 * (S - 1) / S * width * shard)


class Reduced(NamedTuple):
    """Data-axis seconds of a step, hidden ones among them, bytes sent, and parameters of the
    fullest device."""

    gradients: float
    weights: float
    hidden: float
    gradients_sent: float
    weights_sent: float
    parameters: float

    @property
    def exposed(self) -> float:
        return self.gradients + self.weights - self.hidden


def data_crossing(
    links: Links,
    who: Group,
    t: Transformer,
    e: Execution,
    layer: LayerTime,
    recompute: float,
    layers: float,
) -> Reduced:
    """Gradients summed over data and weights gathered, as the ZeRO level asks."""
    S, M, m = e.mesh.stage, e.microbatches, e.mesh.model
    tables = t.vocab * t.width * (1 if t.tied and (S == 1 or e.vocabulary == "spread") else 2)
    ends = tables / (m * S) if e.vocabulary == "spread" else tables / m / min(S, 2)
    one = t.layer_parameters / m
    parameters = layers * one + ends
    if who.size == 1:
        return Reduced(0.0, 0.0, 0.0, 0.0, 0.0, parameters)
    grads, weights = e.reduce_bytes, 4 if e.compute == "float32" else 2
    once = (who.size - 1) / who.size * parameters  # elements of one pass over the fullest device
    forward, again, weights_sent = 0.0, 0.0, 0.0  # weights before the forward, and the backward
    if e.zero == 0:
        summed = all_reduce(links, who, grads * parameters)
        grads_sent = 2 * grads * once
    elif e.zero == 1:
        summed = half(links, who, grads * parameters)
        grads_sent = grads * once
    else:
        scatter = half(links, who, grads * one)
        summed = M * layers * scatter + half(links, who, grads * ends) * M
        grads_sent = M * grads * once
    if e.zero in (1, 2):
        forward, weights_sent = half(links, who, weights * parameters), weights * once
    elif e.zero == 3:
        passes, gather = 2 if e.remat == "stage" else 1, half(links, who, weights * one)
        forward = M * (passes * layers * gather + half(links, who, weights * ends))
        again = M * layers * gather
        weights_sent = M * (passes + 1) * weights * once
    hidden = 0.0
    if e.overlap_data:
        turns = M if e.zero >= 2 else 1
        hidden = min(forward, turns * layers * layer.forward)
        hidden += min(summed + again, turns * layers * (layer.backward + recompute))
        hidden *= 1 - 1 / t.layers  # the first has nothing ahead
    return Reduced(summed, forward + again, hidden, grads_sent, weights_sent, parameters)
