"""Devices that are not here, as XLA's compilers are told of them.

A GPU is a `GpuTargetConfigProto` in text form, made from the `target` block of `hardware.yaml`, and
a topology of `slices x hosts x GPUs per host`. A TPU slice is a name that libtpu knows, with the
chips along each dimension: `v5p:2x4x4`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from spmd_train.errors import RequestError, listed, nearest_divisors
from spmd_train.plan.cluster import Cluster, load_cluster
from spmd_train.plan.hardware import Accelerator, accelerator

GPUS_PER_HOST = 8  # unless the request says how many hosts there are
CHIPS_PER_HOST = (2, 2, 1)  # of every TPU slice of more than two chips; libtpu's default

_MIB, _KIB = 2**20, 2**10

# The fields that JAX 0.10.2 and 0.12 both accept; later fields are unknown to earlier versions.
# Those without a placeholder are alike on all of NVIDIA's GPUs from Ampere on.
_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  threads_per_core_limit: {threads}
  core_count: {cores}
  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {optin}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{title}"
"""


@dataclass(frozen=True)
class Site:
    """Where a step is compiled for; plain data, so that it can be sent to another process.

    Attributes:
        name: of the accelerator.
        platform: "gpu" or "tpu".
        devices: JAX devices.
        hosts: processes they belong to.
        topology: "1x4x8" (GPU) or "v5p:2x4x4" (TPU).
        options: further arguments of `jax.experimental.topologies.get_topology_desc`.
        memory_bytes: of one device.
    """

    name: str
    platform: Literal["gpu", "tpu"]
    devices: int
    hosts: int
    topology: str
    memory_bytes: int
    options: dict[str, Any] = field(default_factory=dict)


def requested_site(
    devices: int, target: str | None, hosts: int | None, cluster: str | None
) -> Site:
    """What the flags of `compile` ask for.

    Raises:
        RequestError: neither an accelerator nor a cluster; one that is not known; as `site`.
    """
    if cluster is None:
        if target is None:
            raise RequestError("compile needs --target, an accelerator such as h100-80gb or v5p.")
        return site(target, accelerator(target), devices, hosts)
    return cluster_site(load_cluster(cluster), devices, hosts, target)


def cluster_site(
    cluster: Cluster, devices: int, hosts: int | None = None, target: str | None = None
) -> Site:
    """`devices` devices of a cluster, whole nodes first; of `target`, if that is something else."""
    if target not in (None, cluster.accelerator_name):
        return site(str(target), accelerator(str(target)), devices, hosts)
    per_node = cluster.per_node * cluster.accelerator.devices
    if hosts is None and devices % per_node == 0:
        hosts = devices // per_node
    torus = cluster.topology if devices == per_node else None
    return site(cluster.accelerator_name, cluster.accelerator, devices, hosts, torus)


def site(
    name: str,
    kind: Accelerator,
    devices: int,
    hosts: int | None = None,
    torus: tuple[int, ...] | None = None,
) -> Site:
    """`devices` devices of an accelerator.

    Args:
        name: of the accelerator; for a TPU the one that libtpu knows.
        hosts: that GPUs are spread over; by default 8 GPUs each. A TPU slice has hosts of its own.
        torus: chips along each dimension of a TPU slice; by default the most cubic.

    Raises:
        RequestError: they cannot be spread so, or are no slice.
    """
    if hosts is not None and (hosts < 1 or devices % hosts):
        raise RequestError(
            f"--hosts {hosts} does not divide the {devices} devices of the mesh; "
            f"numbers that do: {listed(nearest_divisors(devices, hosts))}."
        )
    memory = kind.memory_bytes // kind.devices
    if kind.kind == "tpu":
        return _slice(name, kind, devices, torus, memory)
    if hosts is None:
        hosts = math.ceil(devices / GPUS_PER_HOST)
        if devices % hosts:
            raise RequestError(
                f"{devices} GPUs are no whole number of hosts of {GPUS_PER_HOST}; give --hosts, "
                f"one of {listed(nearest_divisors(devices, hosts))}."
            )
    return Site(
        name,
        "gpu",
        devices,
        hosts,
        f"1x{hosts}x{devices // hosts}",
        memory,
        {"target_config": gpu_target(name, kind)},
    )


def gpu_target(name: str, kind: Accelerator) -> str:
    """The `GpuTargetConfigProto` of a GPU, as text.

    Raises:
        RequestError: its entry has no `target`.
    """
    target = kind.target
    if target is None:
        raise RequestError(
            f"accelerator {name!r} has no `target`, which tells the compiler what the GPU is; add "
            "one as in hardware.yaml."
        )
    major, minor = target.capability
    return _GPU.format(
        shared=target.shared_kib * _KIB,
        optin=(target.shared_kib - 1) * _KIB,  # the driver keeps 1 KiB of a block's
        threads=target.threads,
        cores=target.cores,
        fpus=64 if (major, minor) == (8, 0) else 128,  # float32 lanes: half as many on the A100
        bandwidth=round(kind.memory_gigabytes_per_second * 1e9),
        l2=target.l2_mib * _MIB,
        clock=target.clock_ghz,
        memory=kind.memory_bytes,
        major=major,
        minor=minor,
        title=kind.title,
    )


def _slice(
    name: str,
    kind: Accelerator,
    devices: int,
    torus: tuple[int, ...] | None,
    memory: int,
) -> Site:
    per_chip = kind.devices
    if devices % per_chip:
        raise RequestError(
            f"a chip of {name} is {per_chip} devices; the mesh's {devices} are no multiple of that."
        )
    chips = devices // per_chip
    if torus is not None and math.prod(torus) != chips:
        raise RequestError(
            f"the cluster's topology {'x'.join(map(str, torus))} has {math.prod(torus)} chips, the "
            f"mesh {chips}."
        )
    sides = torus or slice_shape(name, chips, kind.link.dimensions)
    padded = (*sides, 1, 1)[:3]
    whole = all(side % of == 0 for side, of in zip(padded, CHIPS_PER_HOST, strict=True))
    host = CHIPS_PER_HOST if whole else padded
    options: dict[str, Any] = {"chips_per_host_bounds": list(host)}
    if name == "v4":  # else libtpu shows the two cores of a chip as two devices
        options["chip_config_name"] = "megacore"
    topology = f"{name}:{'x'.join(map(str, sides))}"
    hosts = max(1, chips // math.prod(host))
    return Site(name, "tpu", devices, hosts, topology, memory, options)


def slice_shape(name: str, chips: int, dimensions: int) -> tuple[int, ...]:
    """The most cubic slice of so many chips, in hosts of 2x2 or a part of one: 32 is 2x4x4.

    Raises:
        RequestError: there is none; names the nearest numbers.
    """
    if chips <= 2:
        return (1,) * (dimensions - 1) + (chips,)
    found = [sides for sides in _boxes(chips, dimensions) if sides[0] % 2 == sides[1] % 2 == 0]
    if not found:
        below = chips // 4 * 4
        raise RequestError(
            f"no slice of {name} has {chips} chips, since its hosts have 2x2; numbers near it that "
            f"work: {listed(n for n in (below, below + 4) if n)}."
        )
    return min(found, key=lambda sides: (sum(sides), sides))


def _boxes(size: int, dimensions: int) -> list[tuple[int, ...]]:
    """Every way to write `size` as so many factors."""
    if dimensions == 1:
        return [(size,)]
    sides = [d for d in range(1, size + 1) if size % d == 0]
    return [(d, *rest) for d in sides for rest in _boxes(size // d, dimensions - 1)]
