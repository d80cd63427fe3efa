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
from spmd_train.plan.crossings import (
    context_crossing,
    data_crossing,
    groups,
    model_crossing,
    stage_crossing,
)
from spmd_train.plan.interleaved import timeline
from spmd_train.plan.layer_time import EndsTime, Part, ends_time, layer_time
from spmd_train.plan.links import Links
from spmd_train.plan.rates import Rates, streaming
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
    model, context, stage, data = groups(links, e.order, mesh.model, e.context, S, mesh.data)
    on = Part.of(e)
    layer = layer_time(rates, t, on)
    spread = e.vocabulary == "spread"
    ends = ends_time(rates, t, on, mesh.model * (S if spread else 1))
    crossing = model_crossing(links, model, t.width, on, e.remat, layer.waits)
    ring_exposed, ring_hidden = context_crossing(links, context, t, on, layer)
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
    exchanged = stage_crossing(links, stage, model, t, e, on, pace.exchanges)
    reduced = data_crossing(links, data, t, e, layer, recompute, layers)
    held = reduced.parameters / (data.size if e.zero else 1)
    update = EAGER_OPTIMIZER_BYTES if e.eager else OPTIMIZER_BYTES
    optimizer = streaming(rates, update * held)
    ring = M * layers * 3 * ring_exposed
    between_stages = exchanged.hops + exchanged.sums
    total = busy + between_stages + reduced.exposed + optimizer
    flops = model_flops_per_token(t, e.sequence_length, t.parameters) * e.tokens
    a = cluster.accelerator
    peak = a.peak_tflops["bfloat16"] * 1e12 / a.devices * e.devices
    return StepTime(
        compute=ideal - communicated - ring,
        recompute=M * layers * recompute,
        bubble=busy - ideal,
        data_comm_exposed=reduced.exposed,
        model_comm_exposed=communicated + ring,
        stage_comm_exposed=between_stages,
        optimizer=optimizer,
        data_comm_hidden=reduced.hidden,
        context_comm_hidden=M * layers * 3 * ring_hidden,
        data_bytes=reduced.gradients_sent + reduced.weights_sent,
        model_bytes=M * (layers * crossing.sent + _ends_share(crossing.ends_sent, S, spread)),
        stage_bytes=exchanged.hops_sent + exchanged.sums_sent,
        tokens=e.tokens,
        mfu=flops / total / peak,
    )


def _ends_share(amount: float, S: int, spread: bool) -> float:
    """Of the seconds or bytes at the ends, the average stage's part."""
    return amount if spread else amount / S


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
