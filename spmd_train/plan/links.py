"""How long a collective takes: algorithm, bytes, participants, links, message size.

A group of `size` participants has `inside` of them in each node and meets `size / inside` nodes:

    all-gather of P bytes (each participant starts with P/size), and reduce-scatter, its mirror:

        seconds = latency + ramp + max( P (inside-1)/inside / link,
                                        P/inside (nodes-1)/nodes / share of the network )

The two maxima are the hierarchical form (ml-engineering, network README; Horovod and NCCL): a
participant carries 1/inside of the message between nodes, while the links inside the node move the
rest at the same time. An all-reduce is one of each, with one latency.
On a torus a group owns both links of each dimension it lies along (scaling-book, "Sharding").

Letters: P bytes of the whole message; all times in seconds, bandwidths in bytes per second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from spmd_train.plan.cluster import Cluster

# One way, of the data-sheet figure of a link that a large collective reaches: NCCL's ring on 8 A100
# 234.9/300 (4 of them 222), on 8 H200 365/450, on 8 B200 682/900 (allreduce_busbw_measured.csv).
SWITCH_EFFICIENCY = 0.78
# The same between nodes: 32 B200 reach 381.8 of the 516 GB/s their cards would allow.
NETWORK_EFFICIENCY = 0.74
# A TPU ring has no protocol to lose time to; the scaling book counts 90 %.
TORUS_EFFICIENCY = 0.9
# A switch that adds up and multicasts (NVLink SHARP) moves an all-reduce's bytes once: 8 H200 reach
# a bus bandwidth of 480 GB/s, so take in 480 / 1.75 of their links' 450.
MULTICAST_EFFICIENCY = 0.61
# Of a collective without content, in a node: nccl-tests takes 44 us for 1 MiB among 2 A100, 51
# among 4, 93 among 8, and 40 to 48 for 32 KiB among 8 A100, H200 or B200. A TPU starts one in about
# a microsecond per hop.
SWITCH_LATENCY_SECONDS, STEP_LATENCY_SECONDS = 20e-6, 2.5e-6
HOP_LATENCY_SECONDS = 1e-6
# What a ring loses to filling and draining before large messages run at full speed: on 8 A100 the
# excess over bytes / bandwidth grows to some 150 us at 64 MiB and stays there; between 4 nodes of
# B200 to some 400 us.
RAMP_SECONDS, NETWORK_RAMP_SECONDS = 150e-6, 400e-6
RAMP_BYTES = 32 * 2**20


@dataclass(frozen=True, eq=False)
class Links:
    """What connects the devices of a cluster; hashed by identity, for speed.

    Attributes:
        per_node: devices of a node.
        devices: of one accelerator (TPU7x: 2).
        topology: of a torus, accelerators along each dimension; None for a switch.
        link: of one device within its node, of a torus along one dimension.
        latency: of a small collective in a node, besides its steps; on a torus of one hop.
        network: of one device's share between nodes; 0 with one node.
        network_latency: of one hop between nodes.
        multicast: whether the switch does the sums.
    """

    per_node: int
    devices: int
    topology: tuple[int, ...] | None
    link: float
    latency: float
    network: float
    network_latency: float
    multicast: bool

    @classmethod
    def of(cls, cluster: Cluster) -> Links:
        """Data-sheet figures by the constants above; what was measured replaces them."""
        measured, devices = cluster.measured, cluster.accelerator.devices
        per_node = cluster.per_node * devices
        torus = cluster.topology is not None
        link = cluster.link.gigabytes_per_second * 1e9 / devices
        link *= 2 * TORUS_EFFICIENCY if torus else SWITCH_EFFICIENCY
        if measured.link_gigabytes_per_second:
            dimensions = sum(n > 1 for n in cluster.topology) if cluster.topology else 1
            link = measured.link_gigabytes_per_second * 1e9 / devices / max(dimensions, 1)
        latency = HOP_LATENCY_SECONDS if torus else SWITCH_LATENCY_SECONDS
        if measured.link_latency_microseconds:
            latency = measured.link_latency_microseconds * 1e-6
        network, network_latency = 0.0, 0.0
        if cluster.network is not None:
            network = cluster.network.gigabytes_per_second * 1e9 * NETWORK_EFFICIENCY
            network_latency = cluster.network.latency_microseconds * 1e-6
            if measured.network_gigabytes_per_second:
                network = measured.network_gigabytes_per_second * 1e9
            if measured.network_latency_microseconds:
                network_latency = measured.network_latency_microseconds * 1e-6
        return cls(
            per_node=per_node,
            devices=devices,
            topology=cluster.topology,
            link=link,
            latency=latency,
            network=network / per_node,
            network_latency=network_latency,
            multicast=cluster.link.multicast and not measured.link_gigabytes_per_second,
        )


@dataclass(frozen=True)
class Group:
    """Who takes part in a collective.

    Attributes:
        size: participants.
        inside: of them in one node.
        dimensions: of the torus that they lie along; 1 for a switch.
        next_in_node: whether the next participant is (almost always) in the same node.
    """

    size: int
    inside: int
    dimensions: int = 1

    @property
    def nodes(self) -> int:
        return self.size // self.inside

    @property
    def next_in_node(self) -> bool:
        return self.inside > 1


@cache
def group(links: Links, size: int, inner: int) -> Group:
    """Participants `inner` devices apart: `inner` is the product of the sizes of inner axes."""
    if size == 1:
        return Group(1, 1)
    inside = math.gcd(size, max(1, links.per_node // inner))
    if links.topology is None:
        return Group(size, inside)
    first, end = max(1, inner // links.devices), max(1, inner * inside // links.devices)
    return Group(size, inside, _dimensions(links.topology, first, end))


def _dimensions(topology: tuple[int, ...], first: int, end: int) -> int:
    """Dimensions of the torus along which accelerators first, 2 first ... end lie."""
    touched, before = 0, 1
    for length in reversed(topology):
        after = before * length
        if length > 1 and after > first and before < end:
            touched += 1
        before = after
    return max(1, touched)


@cache
def half(links: Links, who: Group, size_bytes: float) -> float:
    """Seconds of an all-gather whose result has `size_bytes`, or a reduce-scatter of so many."""
    return (
        0.0
        if who.size == 1
        else _start(links, who, size_bytes, 1) + _moving(links, who, size_bytes)
    )


@cache
def all_reduce(links: Links, who: Group, size_bytes: float) -> float:
    """Seconds of an all-reduce of `size_bytes`: a reduce-scatter and an all-gather."""
    if who.size == 1:
        return 0.0
    moving = 2 * _moving(links, who, size_bytes)
    if links.multicast and who.nodes == 1:
        once = size_bytes / (links.link * MULTICAST_EFFICIENCY / SWITCH_EFFICIENCY)
        moving = min(moving, once)
    return _start(links, who, size_bytes, 2) + moving


@cache
def send(links: Links, who: Group, size_bytes: float) -> float:
    """Seconds for every participant to send `size_bytes` to the next one, all at once.

    In a ring of several nodes the slowest hop, between nodes, is what all wait for.
    """
    if who.size == 1:
        return 0.0
    if who.nodes > 1:
        return links.network_latency + size_bytes / _network(links)
    return links.latency / 2 + size_bytes / links.link


def _network(links: Links) -> float:
    return links.network or links.link


def _moving(links: Links, who: Group, size_bytes: float) -> float:
    inside = size_bytes * (who.inside - 1) / who.inside / (links.link * who.dimensions)
    if who.nodes == 1:
        return inside
    between = size_bytes / who.inside * (who.nodes - 1) / who.nodes / _network(links)
    return max(inside, between)


def _start(links: Links, who: Group, size_bytes: float, passes: int) -> float:
    """Latency, and on a switch the time to get up to speed."""
    between = passes * math.ceil(math.log2(who.nodes)) * links.network_latency
    if links.topology is not None:
        hops = math.ceil(who.inside ** (1 / who.dimensions) / 2) * who.dimensions
        return links.latency * passes * hops + between
    ramp = RAMP_SECONDS if who.nodes == 1 else NETWORK_RAMP_SECONDS
    ramp *= size_bytes / (size_bytes + RAMP_BYTES)
    steps = passes * (who.inside - 1)
    return links.latency + STEP_LATENCY_SECONDS * steps + ramp * passes / 2 + between
