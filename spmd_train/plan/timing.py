"""Seconds of one training step, closed-form: what each part costs and what of it is exposed.

    step = compute + bubble + exposed communication (data, model, stage) + optimizer

A stage's time for one micro-batch is its layers' (`layer_time`) plus the collectives that cross the
model axis inside them. How many forwards and backwards follow one another comes from the schedule's
own table (`pipeline.schedule`, or `interleaved`): a step in which no stage waits would take M
micro-batches of the average stage; what it takes more is the bubble.

In lock step (the trainer) all stages meet at every tick: the ticks of the table are counted as they
are. On their own (Megatron-LM) the slowest stage sets the pace and the table's idle ticks fill and
drain the pipeline.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from spmd_train.errors import RequestError
from spmd_train.pipeline.schedule import make_schedule
from spmd_train.plan.cluster import Cluster
from spmd_train.plan.interleaved import timeline
from spmd_train.plan.layer_time import EndsTime, LayerTime, Part, ends_time, layer_time
from spmd_train.plan.links import Group, Links, all_reduce, group, half, send
from spmd_train.plan.rates import DTYPE_BYTES, Rates, streaming
from spmd_train.plan.workload import Execution, Transformer
from spmd_train.telemetry.flops import model_flops_per_token

# Per parameter and step. The trainer: gradient read for its norm (4) and for the update (4), master
# and two moments read and written (24), image written (2). Megatron-LM of 2021 besides copies fp16
# gradients to FP32 (6), unscales them (8), clips them (8), and reads the master for the image (4).
OPTIMIZER_BYTES, EAGER_OPTIMIZER_BYTES = 34, 60


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, on the devices that are busiest.

    Attributes:
        compute: of an average stage, recomputation included.
        recompute: of it, forward work repeated before the backward.
        bubble: waiting for other stages, slower ones among them.
        data_comm_exposed, model_comm_exposed, stage_comm_exposed: not hidden behind compute.
        optimizer: update of the parameters.
        data_comm_hidden, context_comm_hidden: hidden behind compute.
        data_bytes, model_bytes, stage_bytes: that one device sends in a step.
        tokens: of a step.
        mfu: PaLM's convention, of the dense bfloat16 peak.
    """

    compute: float
    recompute: float
    bubble: float
    data_comm_exposed: float
    model_comm_exposed: float
    stage_comm_exposed: float
    optimizer: float
    data_comm_hidden: float
    context_comm_hidden: float
    data_bytes: float
    model_bytes: float
    stage_bytes: float
    tokens: int
    mfu: float

    @property
    def total(self) -> float:
        communication = self.data_comm_exposed + self.model_comm_exposed + self.stage_comm_exposed
        return self.compute + self.bubble + communication + self.optimizer

    @property
    def bubble_fraction(self) -> float:
        return self.bubble / self.total

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.total

    @property
    def comm_bytes(self) -> dict[str, float]:
        """What one device sends in a step, by mesh axis."""
        return {"data": self.data_bytes, "model": self.model_bytes, "stage": self.stage_bytes}

    def itemised(self) -> dict[str, float]:
        """The `step_seconds` of `plan --json`."""
        return {
            "compute": self.compute,
            "bubble": self.bubble,
            "data_comm_exposed": self.data_comm_exposed,
            "model_comm_exposed": self.model_comm_exposed,
            "stage_comm_exposed": self.stage_comm_exposed,
            "optimizer": self.optimizer,
            "total": self.total,
        }


class Machine(NamedTuple):
    """What a cluster is to the models."""

    cluster: Cluster
    rates: Rates
    links: Links


_machines: dict[int, Machine] = {}


def machine_of(cluster: Cluster) -> Machine:
    """Made once for each cluster object: a cluster holds dicts, so has no hash."""
    found = _machines.get(id(cluster))
    if found is None:
        found = _machines[id(cluster)] = Machine(cluster, Rates.of(cluster), Links.of(cluster))
    return found


def step_time(transformer: Transformer, execution: Execution, cluster: Cluster) -> StepTime:
    """What a step of `execution` takes on `cluster`.

    Raises:
        RequestError: the cluster has fewer devices than the mesh, or the schedule cannot run these
            micro-batches.
    """
    t, e = transformer, execution
    if e.devices > cluster.devices:
        raise RequestError(
            f"mesh {e.mesh} needs {e.devices} devices, but {cluster.name} has {cluster.devices}."
        )
    _, rates, links = machine_of(cluster)
    mesh, S, M, v = e.mesh, e.mesh.stage, e.microbatches, e.virtual_stages
    model, context, stage, data = _groups(links, e.order, mesh.model, e.context, S, mesh.data)
    on = Part(
        e.microbatch_size,
        e.sequence_length // e.context,
        e.sequence_length,
        mesh.model,
        e.compute,
        e.sequence_parallel and mesh.model > 1,
        e.fused_attention,
        e.eager,
    )
    layer = layer_time(rates, t, on)
    spread = e.vocabulary == "spread"
    ends = ends_time(rates, t, on, mesh.model * (S if spread else 1))
    crossing = _model_crossing(links, model, t.width, on, e.remat, layer.waits)
    ring_exposed, ring_hidden = _context_crossing(links, context, t, on, layer)
    recompute = layer.recompute(e.remat, e.eager)

    layers = t.layers / S
    forward = layers * (layer.forward + crossing.forward + ring_exposed)
    backward = layers * (layer.backward + recompute + crossing.backward + 2 * ring_exposed)
    pace = _pace(e.schedule, S, M, v, e.lockstep)
    with_sums = EndsTime(ends.head + crossing.ends, ends.lookup)
    busy, ideal = _busy(pace, t, e, forward, backward, with_sums)

    communicated = M * (
        layers * (crossing.forward + crossing.backward) + _ends_share(crossing.ends, S, spread)
    )
    exchanged, stage_bytes = _stage_crossing(links, stage, model, t, e, on, pace)
    reduced = _data_crossing(links, data, t, e, layer, recompute, layers)
    held = reduced.parameters / (mesh.data if e.zero else 1)
    update = EAGER_OPTIMIZER_BYTES if e.eager else OPTIMIZER_BYTES
    optimizer = streaming(rates, update * held)
    ring = M * layers * 3 * ring_exposed
    total = busy + exchanged + reduced.exposed + optimizer
    flops = model_flops_per_token(t, e.sequence_length, t.parameters) * e.tokens
    a = cluster.accelerator
    peak = a.peak_tflops["bfloat16"] * 1e12 / a.devices * e.devices
    return StepTime(
        compute=ideal - communicated - ring,
        recompute=M * layers * recompute,
        bubble=busy - ideal,
        data_comm_exposed=reduced.exposed,
        model_comm_exposed=communicated + ring,
        stage_comm_exposed=exchanged,
        optimizer=optimizer,
        data_comm_hidden=reduced.hidden,
        context_comm_hidden=M * layers * 3 * ring_hidden,
        data_bytes=reduced.sent,
        model_bytes=M * layers * crossing.sent,
        stage_bytes=stage_bytes,
        tokens=e.tokens,
        mfu=flops / total / peak,
    )


def _ends_share(seconds: float, S: int, spread: bool) -> float:
    """Of what happens at the ends, the average stage's part."""
    return seconds if spread else seconds / S


@cache
def _groups(
    links: Links, order: tuple[str, ...], model: int, context: int, stage: int, data: int
) -> tuple[Group, Group, Group, Group]:
    sizes = {"model": model, "context": context, "stage": stage, "data": data}
    found, inner = {}, 1
    for axis in order:
        found[axis] = group(links, sizes[axis], inner)
        inner *= sizes[axis]
    return found["model"], found["context"], found["stage"], found["data"]


class Pace(NamedTuple):
    """What a schedule's table says.

    Attributes:
        forwards, backwards: that follow one another on the way through a step, in micro-batches of
            a whole stage; M each if nothing waits.
        exchanges: times that a stage sends or receives in each direction.
    """

    forwards: float
    backwards: float
    exchanges: int


@cache
def _pace(schedule: str, S: int, M: int, v: int, lockstep: bool) -> Pace:
    if schedule == "interleaved":
        try:
            wait = timeline(S, M, v).bubble * M
        except ValueError as error:
            raise RequestError(f"schedule interleaved: {error}.") from error
        return Pace(M + wait, M + wait, M * v + S - 1)
    table = make_schedule(schedule, S, M)
    ticks = table.num_ticks if lockstep else table.busy_forward
    return Pace(table.busy_forward, table.busy_backward, ticks)


def _busy(
    pace: Pace, t: Transformer, e: Execution, forward: float, backward: float, ends: EndsTime
) -> tuple[float, float]:
    """Seconds of all ticks, and of M micro-batches of the average stage.

    `forward` and `backward` are the average stage's, `ends` with the collectives there.
    """
    S, M = e.mesh.stage, e.microbatches
    both, at_ends = forward + backward, ends.head + ends.lookup
    if e.vocabulary == "spread":
        busy = pace.forwards * forward + pace.backwards * backward + M * at_ends
        return busy, M * (both + at_ends)
    mean, slowest = both + at_ends / S, both + at_ends
    if S > 1:
        # Where the layers do not fill the chunks, the stages with the head, then the look-up, have
        # one fewer (Llama 3: 126 layers in 128 places).
        chunks = S * e.virtual_stages
        full = math.ceil(t.layers / chunks) * e.virtual_stages
        free, layer = full * S - t.layers, both * S / t.layers
        last, first = full - min(free, 1), full - max(0, min(free - 1, 1))
        slowest = max(last * layer + ends.head, first * layer + ends.lookup, both)
        if S > 2:
            slowest = max(slowest, full * layer)
    waiting = (pace.forwards - M) * forward + (pace.backwards - M) * backward
    return M * slowest + waiting * mean / both, M * mean


class Crossing(NamedTuple):
    """Model-axis seconds of one layer and micro-batch, of the ends, and bytes sent by a layer."""

    forward: float
    backward: float
    ends: float
    sent: float


@cache
def _model_crossing(
    links: Links, who: Group, width: int, on: Part, remat: str, waits: tuple[float, float]
) -> Crossing:
    """Two sums of the residual in each direction (Shoeybi et al. 2019, section 3), each a
    reduce-scatter and an all-gather under sequence parallelism; once more where recomputed.
    While the device waits for the host, they cost nothing."""
    if who.size == 1:
        return Crossing(0.0, 0.0, 0.0, 0.0)
    whole = on.tokens * width * DTYPE_BYTES[on.compute if on.compute != "float8" else "bfloat16"]
    one = 2 * half(links, who, whole) if on.sequence_parallel else all_reduce(links, who, whole)
    again = {"full": 2.0 if on.eager else 1.5, "stage": 3.5}.get(remat, 0.0)
    sent = (4 + again) * 2 * (who.size - 1) / who.size * whole
    forward = max(0.0, 2 * one - waits[0])
    repeated = max(0.0, again * one - waits[0])
    return Crossing(forward, max(0.0, 2 * one - waits[1]) + repeated, 2 * one, sent)


@cache
def _context_crossing(
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


def _stage_crossing(
    links: Links, who: Group, model: Group, t: Transformer, e: Execution, on: Part, pace: Pace
) -> tuple[float, float]:
    """Exposed seconds and bytes sent between stages in a step."""
    if who.size == 1:
        return 0.0, 0.0
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
        return 2 * pace.exchanges * hop, 2 * M * e.virtual_stages * part
    shard = elements / model.size if on.sequence_parallel else elements
    sends = 2 * pace.exchanges * send(links, who, shard * size)
    if e.vocabulary != "spread":
        return sends, 2 * pace.exchanges * shard * size
    # collectives.reduce sums in FP32: the look-up and the head's input gradient whole, the last
    # stage's output and the first block's input gradient as they lie (pipeline/execute.py).
    sums = M * 2 * (all_reduce(links, who, 4 * elements) + all_reduce(links, who, 4 * shard))
    sent = 2 * pace.exchanges * shard * size + M * 2 * 2 * (S - 1) / S * 4 * (elements + shard)
    return sends + sums, sent


class Reduced(NamedTuple):
    """Data-axis seconds of a step, bytes sent, and parameters of the fullest device."""

    exposed: float
    hidden: float
    sent: float
    parameters: float


def _data_crossing(
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
        return Reduced(0.0, 0.0, 0.0, parameters)
    grads, weights = e.reduce_bytes, 4 if e.compute == "float32" else 2
    factor = (who.size - 1) / who.size
    if e.zero == 0:
        backward = all_reduce(links, who, grads * parameters)
        forward, sent = 0.0, 2 * factor * grads * parameters
    elif e.zero == 1:
        backward = half(links, who, grads * parameters)
        forward = half(links, who, weights * parameters)
        sent = factor * (grads + weights) * parameters
    else:
        gather, scatter = half(links, who, weights * one), half(links, who, grads * one)
        backward = M * layers * scatter + half(links, who, grads * ends) * M
        sent = factor * M * grads * parameters
        if e.zero == 2:
            forward = half(links, who, weights * parameters)
            sent += factor * weights * parameters
        else:
            passes = 2 if e.remat == "stage" else 1
            forward = M * passes * (layers * gather + half(links, who, weights * ends))
            backward += M * layers * gather
            sent += factor * M * (passes + 1) * weights * parameters
    if not e.overlap_data:
        return Reduced(forward + backward, 0.0, sent, parameters)
    turns = M if e.zero >= 2 else 1
    hidden_forward = min(forward, turns * layers * layer.forward)
    hidden_backward = min(backward, turns * layers * (layer.backward + recompute))
    hidden = (hidden_forward + hidden_backward) * (1 - 1 / t.layers)  # the first has nothing ahead
    return Reduced(forward + backward - hidden, hidden, sent, parameters)
