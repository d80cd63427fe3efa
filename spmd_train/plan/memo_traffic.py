"""What crosses which mesh axis, when, over which link: the parts of `timing.step_time`."""

from __future__ import annotations

from dataclasses import dataclass

from spmd_train.pipeline.schedule import make_schedule
from spmd_train.plan.cluster import Cluster
from spmd_train.plan.crossings import data_crossing, groups, model_crossing, stage_crossing
from spmd_train.plan.layer_time import Part, layer_time
from spmd_train.plan.links import Group
from spmd_train.plan.timing import machine_of
from spmd_train.plan.workload import Execution, Transformer


@dataclass(frozen=True)
class Flow:
    """One kind of traffic in a step.

    Attributes:
        axis: of the mesh. what, when, link, dtype: in words.
        sent: bytes that one device sends in a step.
        seconds: of a step.
        exposed: of them, seconds in which the device waits.
    """

    axis: str
    what: str
    when: str
    link: str
    dtype: str
    sent: float
    seconds: float
    exposed: float


def flows(t: Transformer, e: Execution, cluster: Cluster) -> list[Flow]:
    """Of an execution that the trainer runs: stages in lock step, the vocabulary over them all."""
    _, rates, links = machine_of(cluster)
    mesh, S, M = e.mesh, e.mesh.stage, e.microbatches
    model, _, stage, data = groups(links, e.order, mesh.model, 1, S, mesh.data)
    on = Part.of(e)
    layer = layer_time(rates, t, on)
    layers, ticks = t.layers // S, make_schedule(e.schedule, S, M).num_ticks
    compute = "float32" if e.compute == "float32" else _SIXTEEN[e.compute]
    times = f"{M} times" if M > 1 else "once"
    found: list[Flow] = []

    def add(
        axis: str, who: Group, what: str, when: str, dtype: str, sent: float, seconds: float,
        hidden: float = 0.0,
    ) -> None:  # fmt: skip
        link = link_name(cluster, who)
        found.append(Flow(axis, what, when, link, dtype, sent, seconds, seconds - hidden))

    if mesh.model > 1:
        crossing = model_crossing(links, model, t.width, on, e.remat, layer.waits)
        one = crossing.forward + crossing.backward
        how = "gathered and scattered by position" if on.sequence_parallel else "summed"
        add("model", model, f"activations and their gradients inside layers, {how}",
            f"in each of {layers} layers, {times} a step, forward and backward", compute,
            M * layers * crossing.sent, M * layers * one)  # fmt: skip
        add("model", model, "the same at look-up and head", f"{times} a step", compute,
            M * crossing.ends_sent, M * crossing.ends)  # fmt: skip
    if S > 1:
        exchanged = stage_crossing(links, stage, model, t, e, on, ticks)
        add("stage", stage, "activations to the next stage, their gradients to the one before",
            f"at each of {ticks} ticks", compute, exchanged.hops_sent, exchanged.hops)  # fmt: skip
        sums = "float32" if links.topology is None else compute
        add("stage", stage, "sums over all stages for look-up and head, which share the vocabulary",
            f"4 per micro-batch, {4 * M} a step", sums,
            exchanged.sums_sent, exchanged.sums)  # fmt: skip
    if mesh.data > 1:
        recompute = layer.recompute(e.remat, e.eager)
        reduced = data_crossing(links, data, t, e, layer, recompute, layers)
        summed = "gradients, all-reduced" if e.zero == 0 else "gradients, reduce-scattered"
        often = f"each layer, {times} a step" if e.zero >= 2 else "once a step, after the last"
        often += "" if e.zero >= 2 else " micro-batch"
        add("data", data, summed, often, "float32" if e.reduce_bytes == 4 else "16-bit",
            reduced.gradients_sent, reduced.gradients)  # fmt: skip
        if e.zero:
            passes = "three passes" if e.remat == "stage" else "forward and backward"
            when = f"each layer, {passes}, {times} a step"
            when = when if e.zero == 3 else "once a step, after the update"
            add("data", data, "weights, all-gathered", when, compute,
                reduced.weights_sent, reduced.weights, reduced.hidden)  # fmt: skip
    return found


_SIXTEEN = {"bfloat16": "bfloat16", "float16": "float16", "float8": "bfloat16"}


def link_name(cluster: Cluster, who: Group) -> str:
    """What a group's messages travel over, with its data-sheet rate, one way and per device."""
    devices = cluster.accelerator.devices
    rate = f"{cluster.link.gigabytes_per_second / devices:g} GB/s"
    if cluster.topology is not None:
        ways = f"{who.dimensions} dimension{'s' if who.dimensions > 1 else ''}"
        inside = f"torus, {ways}, 2 x {rate} in each"
    else:
        inside = f"links in the node, {rate}"
    if who.nodes == 1:
        return inside
    assert cluster.network is not None
    share = cluster.network.gigabytes_per_second / cluster.per_node / devices
    between = f"network between {who.nodes} nodes, {share:.3g} GB/s"
    return between if who.inside == 1 else f"{between}, and {inside}"
