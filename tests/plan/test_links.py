"""Collective times against measured all-reduces and the formulas of the references."""

from __future__ import annotations

import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent / "published"))
import published_tables
from published_cases import gpu_cluster

from spmd_train.mesh import MeshShape
from spmd_train.plan.cluster import Measured, load_cluster
from spmd_train.plan.crossings import groups
from spmd_train.plan.hardware import accelerator
from spmd_train.plan.links import Group, Links, all_reduce, group, half, send

MIB = 2**20
ACCELERATORS = {"A100": "a100-80gb", "H200": "h200-141gb", "B200": "b200-180gb"}


def measured_all_reduces() -> dict[str, list[tuple[int, float, float]]]:
    """System -> (bytes, measured seconds, predicted seconds)."""
    found = defaultdict(list)
    for row in published_tables.read("allreduce_busbw_measured.csv"):
        n = int(re.match(r"\d+", row["system"]).group())
        name = next((name for key, name in ACCELERATORS.items() if key in row["system"]), None)
        if name is None or row["collective"] != "all_reduce" or "NVLS off" in row["system"]:
            continue  # V100 is not in hardware.yaml; multicast is on unless turned off
        links = Links.of(gpu_cluster(name, n, 400))
        seconds = row["bytes"] * 2 * (n - 1) / n / (row["busbw_GBps"] * 1e9)
        found[row["system"]].append(
            (row["bytes"], seconds, all_reduce(links, group(links, n, 1), row["bytes"]))
        )
    return found


def test_all_reduces_take_what_was_measured() -> None:
    """nccl-tests on 2 to 8 A100, 8 H200, 8 and 32 B200."""
    for system, rows in measured_all_reduces().items():
        errors = {size: abs(predicted / seconds - 1) for size, seconds, predicted in rows}
        large = statistics.mean(e for size, e in errors.items() if size >= 32 * MIB)
        assert large < (0.16 if "B200" in system else 0.10), (system, large)
        if "A100" in system:
            assert statistics.mean(e for size, e in errors.items() if size >= MIB) < 0.15, system


def test_between_nodes_the_hierarchical_form() -> None:
    """2 (k-1)/k P/g over each device's share of the network (ml-engineering), the node's links
    being faster."""
    links = Links.of(gpu_cluster("a100-80gb", 32, 25))
    P = 1e12
    share = links.network
    assert share == pytest.approx(25e9 * 0.74 / 8)
    whole = all_reduce(links, group(links, 32, 1), P)
    assert whole == pytest.approx(2 * 3 / 4 * P / 8 / share, rel=1e-3)
    apart = all_reduce(links, group(links, 4, 8), P)  # one device of each node
    assert apart == pytest.approx(2 * 3 / 4 * P / share, rel=1e-3)


def test_on_a_torus_each_dimension_adds_two_links() -> None:
    """bytes / (2 x link x dimensions), whatever the number of chips (scaling-book)."""
    links = Links.of(load_cluster("v5p-128"))
    P = 1e11
    one, two, every = (half(links, group(links, n, 1), P) for n in (4, 16, 64))
    ring = 90e9 * 0.9 * 2
    assert one == pytest.approx(3 / 4 * P / ring, rel=1e-3)
    assert two == pytest.approx(15 / 16 * P / ring / 2, rel=1e-3)
    assert every == pytest.approx(63 / 64 * P / ring / 3, rel=1e-3)


def test_two_devices_of_a_chip_are_no_dimension() -> None:
    """TPU7x: 64 chips are 128 devices, each with half of the chip's links."""
    a = accelerator("tpu7x")
    torus = load_cluster("v5p-128").model_copy(update={"accelerator": a, "link": a.link})
    links = Links.of(torus)
    assert links.per_node == 128
    assert [group(links, n, 1).dimensions for n in (2, 8, 32, 128)] == [1, 1, 2, 3]
    assert group(links, 4, 8).dimensions == 1
    assert links.link == pytest.approx(100e9 / 2 * 2 * 0.9)


def test_model_stays_in_the_node_and_data_crosses() -> None:
    """The device order of mesh.py: model innermost, then stage, then data."""
    links = Links.of(load_cluster("32xh100"))
    mesh = MeshShape(data=4, model=2, stage=4)
    order = ("model", "context", "stage", "data")
    model, _, stage, data = groups(links, order, mesh.model, 1, mesh.stage, mesh.data)
    assert (model, stage, data) == (Group(2, 2), Group(4, 4), Group(4, 1))
    order = ("model", "context", "data", "stage")
    _, _, stage, data = groups(links, order, mesh.model, 1, mesh.stage, mesh.data)
    assert (stage, data) == (Group(4, 1), Group(4, 4))


@given(st.integers(0, 5), st.floats(1e3, 1e10), st.floats(1.0, 8.0))
def test_more_bytes_take_longer_and_faster_links_never_do(
    log_size: int, size_bytes: float, factor: float
) -> None:
    cluster = load_cluster("cluster-a")
    assert cluster.network is not None
    faster_network = cluster.network.model_copy(
        update={"gigabytes_per_second": cluster.network.gigabytes_per_second * factor}
    )
    slow = Links.of(cluster)
    fast = Links.of(cluster.model_copy(update={"network": faster_network}))
    for inner in (1, 2, 8):
        n = 2 ** min(log_size, 5 if inner == 1 else 2)
        who = group(slow, n, inner)
        for collective in (half, all_reduce, send):
            seconds = collective(slow, who, size_bytes)
            assert collective(fast, who, size_bytes) <= seconds
            assert collective(slow, who, size_bytes * factor) >= seconds
            assert (seconds == 0) == (n == 1)


def test_what_was_measured_replaces_the_data_sheet() -> None:
    cluster = load_cluster("cluster-a")
    known = Measured(
        link_gigabytes_per_second=100,
        link_latency_microseconds=7,
        network_gigabytes_per_second=16,
        network_latency_microseconds=3,
    )
    links = Links.of(cluster.model_copy(update={"measured": known}))
    assert (links.link, links.latency) == (100e9, 7e-6)
    assert (links.network, links.network_latency) == (2e9, 3e-6)
