"""The mesh that the planner chooses for the devices that are here: `train --mesh auto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from spmd_train.config import Config
from spmd_train.errors import RequestError, listed
from spmd_train.mesh import MeshShape
from spmd_train.plan.both import nothing_fits
from spmd_train.plan.cluster import Cluster, Network, torus
from spmd_train.plan.hardware import accelerators, of_device
from spmd_train.plan.search import COMPUTE_OF_POLICY, Fixed, search
from spmd_train.plan.workload import Remat, ScheduleName

GPUS_PER_HOST = 8
_NETWORK = Network(gigabytes_per_second=50.0)  # one 400 Gb/s card a host, where nobody says more


def mesh_for(config: Config, devices: Sequence[Any]) -> MeshShape:
    """The fastest mesh of these JAX devices on which `config` fits, nothing else of it changed.

    Raises:
        RequestError: the planner does not know the devices, or nothing fits.
    """
    cluster = present(devices[0].device_kind, len(devices))
    schedule, remat = config.pipeline.resolved
    policy = "bf16" if config.precision.policy == "auto" else config.precision.policy
    fixed = Fixed(
        zero=config.parallel.zero,
        microbatches=config.batch.microbatches,
        schedule=cast(ScheduleName, schedule),
        remat=cast(Remat, remat),
        compute=COMPUTE_OF_POLICY[policy],
    )
    plan = search(config, cluster, fixed)
    if not plan.candidates:
        raise RequestError(f"--mesh auto: {nothing_fits(plan, fixed)}")
    return plan.candidates[0].execution.mesh


def present(device_kind: str, count: int) -> Cluster:
    """The cluster that `count` devices of this kind are; GPUs in hosts of 8, a TPU slice whole.

    Raises:
        RequestError: the kind is in no table.
    """
    found = of_device(device_kind)
    if found is None:
        raise RequestError(
            f"--mesh auto: the planner has no numbers for {device_kind!r} devices (it has for "
            f"{listed(a.title for a in accelerators().values())}); give the mesh, as in 4x2x4."
        )
    name, kind = found
    size = max(1, count // kind.devices)
    hosts = size // GPUS_PER_HOST if kind.kind == "gpu" and size % GPUS_PER_HOST == 0 else 1
    return Cluster(
        name="the devices here",
        accelerator_name=name,
        accelerator=kind,
        nodes=hosts,
        per_node=size // hosts,
        topology=torus(size, kind.link.dimensions) if kind.link.kind == "torus" else None,
        link=kind.link,
        network=_NETWORK if hosts > 1 else None,
    )
