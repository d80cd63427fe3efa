"""Descriptions of devices that are not here, against one written by hand and names libtpu takes."""

from __future__ import annotations

import re

import pytest

from spmd_train.errors import RequestError
from spmd_train.plan.cluster import load_cluster
from spmd_train.plan.hardware import accelerator, accelerators
from spmd_train.plan.targets import cluster_site, gpu_target, requested_site, site

# Of a description written by hand from NVIDIA's documents, with which JAX 0.10.2 and 0.12 compiled.
RTX4090 = {
    "threads_per_block_limit": "1024",
    "threads_per_warp": "32",
    "shared_memory_per_block": "49152",
    "shared_memory_per_core": "102400",
    "threads_per_core_limit": "1536",
    "core_count": "128",
    "fpus_per_core": "128",
    "memory_bandwidth": "1008000000000",
    "l2_cache_size": "75497472",
    "clock_rate_ghz": "2.52",
    "shared_memory_per_block_optin": "101376",
    "registers_per_core_limit": "65536",
    "device_description_str": '"NVIDIA GeForce RTX 4090"',
}


def of(name, devices, hosts=None):
    return site(name, accelerator(name), devices, hosts)


def test_the_rtx_4090_is_as_written_by_hand():
    text = gpu_target("rtx4090-24gb", accelerator("rtx4090-24gb"))
    fields = dict(re.findall(r'(\w+): ("[^"]*"|[\d.]+)', text))
    assert {key: fields[key] for key in RTX4090} == RTX4090
    assert "cuda_compute_capability { major: 8 minor: 9 }" in text
    assert int(fields["device_memory_size"]) == pytest.approx(25757220864, rel=1e-3)


def test_every_accelerator_is_a_target():
    for name, each in accelerators().items():
        assert site(name, each, 8).devices == 8


@pytest.mark.parametrize(
    ("name", "devices", "topology", "hosts"),
    [
        ("h100-80gb", 32, "1x4x8", 4),
        ("h100-80gb", 4, "1x1x4", 1),
        ("v5p", 1, "v5p:1x1x1", 1),
        ("v5p", 2, "v5p:1x1x2", 1),
        ("v5p", 4, "v5p:2x2x1", 1),
        ("v5p", 32, "v5p:2x4x4", 8),
        ("v5p", 36, "v5p:2x6x3", 9),  # whole hosts of 2x2, so not 3x3x4
        ("v5e", 8, "v5e:2x4", 2),
        ("v6e", 256, "v6e:16x16", 64),
        ("tpu7x", 128, "tpu7x:4x4x4", 16),  # two devices a chip
    ],
)
def test_devices_become_hosts_and_slices(name, devices, topology, hosts):
    made = of(name, devices)
    assert (made.topology, made.hosts) == (topology, hosts)


def test_memory_is_of_a_device():
    assert of("tpu7x", 8).memory_bytes == 96 * 2**30
    assert of("v5p", 8).memory_bytes == accelerator("v5p").memory_bytes


@pytest.mark.parametrize(
    ("name", "devices", "hosts", "message"),
    [
        ("h100-80gb", 32, 3, "--hosts 3 does not divide the 32 devices.*1, 2, 4, 8"),
        ("v5p", 32, 0, "--hosts 0 does not divide"),
        ("h100-80gb", 9, None, "9 GPUs are no whole number of hosts of 8; give --hosts"),
        ("v5p", 6, None, "no slice of v5p has 6 chips.*2x2.*4, 8"),
        ("v5e", 15, None, "no slice of v5e has 15 chips.*12, 16"),
        ("tpu7x", 9, None, "a chip of tpu7x is 2 devices"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(name, devices, hosts, message):
    with pytest.raises(RequestError, match=message):
        of(name, devices, hosts)


def test_a_gpu_without_a_description_is_refused():
    plain = accelerator("l4-24gb").model_copy(update={"target": None})
    with pytest.raises(RequestError, match="'mine' has no `target`"):
        site("mine", plain, 8)


def test_a_cluster_gives_accelerator_hosts_and_topology():
    assert requested_site(64, None, None, "v5p-128").topology == "v5p:4x4x4"
    assert requested_site(32, None, None, "32x24gb").topology == "1x4x8"
    cluster = load_cluster("v5p-128").model_copy(update={"topology": (2, 4, 8)})
    assert cluster_site(cluster, 64).topology == "v5p:2x4x8"
    assert cluster_site(cluster, 8).topology == "v5p:2x2x2"


def test_without_target_or_cluster_there_is_nothing_to_compile_for():
    with pytest.raises(RequestError, match="needs --target"):
        requested_site(8, None, None, None)
