"""Clusters as data: nodes of accelerators, and what connects them.

A node is what fast links connect: a server of GPUs, or a slice of a TPU pod. Between nodes is the
network.
"""

from __future__ import annotations

import importlib.resources
import math
from os import PathLike
from pathlib import Path

from pydantic import Field, ValidationError, model_validator

from spmd_train.config_groups import Section
from spmd_train.config_yaml import read_yaml
from spmd_train.errors import RequestError, listed, nearest
from spmd_train.plan.hardware import (
    Accelerator,
    ComputeType,
    Link,
    Positive,
    accelerator,
    explained,
)


class Network(Section):
    """Between nodes; `gigabytes_per_second` one way and per node, all its cards together."""

    gigabytes_per_second: Positive
    latency_microseconds: Positive = 10.0


class Measured(Section):
    """What `plan --calibrate` measured on the cluster itself; it replaces the model's assumptions.

    Attributes:
        matmul_tflops: of large products, by compute dtype.
        link_gigabytes_per_second: bus bandwidth of a large all-reduce in a node.
        link_latency_microseconds: time of a tiny one.
        network_gigabytes_per_second, network_latency_microseconds: the same across all nodes, the
            bandwidth per node.
    """

    matmul_tflops: dict[ComputeType, Positive] = Field(default_factory=dict)
    link_gigabytes_per_second: Positive | None = None
    link_latency_microseconds: Positive | None = None
    network_gigabytes_per_second: Positive | None = None
    network_latency_microseconds: Positive | None = None


class ClusterFile(Section):
    """A file of `meshes/`."""

    name: str
    accelerator: str
    nodes: int = Field(ge=1)
    per_node: int = Field(ge=1)
    topology: tuple[int, ...] | None = Field(default=None, strict=False)
    link: Link | None = None
    network: Network | None = None
    measured: Measured = Measured()
    accelerators: dict[str, Accelerator] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> ClusterFile:
        if self.nodes > 1 and self.network is None:
            raise ValueError(f"{self.nodes} nodes need a network between them: set `network`")
        if self.topology is not None and math.prod(self.topology) != self.per_node:
            raise ValueError(
                f"topology {'x'.join(map(str, self.topology))} has {math.prod(self.topology)} "
                f"accelerators, but per_node is {self.per_node}"
            )
        return self


class Cluster(Section):
    """A cluster, its accelerator looked up.

    Attributes:
        accelerator_name: as `compile --target` takes it.
        topology: of a torus node, the accelerators along each dimension; else None.
        link: in a node. network: between nodes; None with one node.
    """

    name: str
    accelerator_name: str
    accelerator: Accelerator
    nodes: int
    per_node: int
    topology: tuple[int, ...] | None
    link: Link
    network: Network | None
    measured: Measured = Measured()

    @property
    def size(self) -> int:
        """Accelerators in all."""
        return self.nodes * self.per_node

    @property
    def devices(self) -> int:
        """JAX devices in all."""
        return self.size * self.accelerator.devices

    def resized(self, nodes: int) -> Cluster:
        """The same with another number of nodes; one that had no network gets the usual one."""
        network = self.network
        if nodes > 1 and network is None:
            network = Network(gigabytes_per_second=50.0)
        return self.model_copy(update={"nodes": nodes, "network": network if nodes > 1 else None})


def load_cluster(path: str | PathLike[str]) -> Cluster:
    """Read a cluster file, or the bundled one of that name.

    Raises:
        RequestError: no such file, a broken one, or an accelerator that is not known.
    """
    source = _find(path)
    try:
        tree = read_yaml(source.read_text(encoding="utf-8"), str(source))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{source}: cannot be read ({error}).") from error
    if not isinstance(tree, dict):
        raise RequestError(f"{source}: must be a mapping of keys such as `nodes: 4`.")
    try:
        file = ClusterFile.model_validate({"name": source.stem, **tree})
    except ValidationError as error:
        raise explained(error, str(source)) from error
    found = accelerator(file.accelerator, file.accelerators)
    link = file.link or found.link
    topology = file.topology
    if link.kind == "torus" and topology is None:
        topology = torus(file.per_node, link.dimensions)
    return Cluster(
        name=file.name,
        accelerator_name=file.accelerator,
        accelerator=found,
        nodes=file.nodes,
        per_node=file.per_node,
        topology=topology if link.kind == "torus" else None,
        link=link,
        network=file.network if file.nodes > 1 else None,
        measured=file.measured,
    )


def torus(size: int, dimensions: int) -> tuple[int, ...]:
    """The most cubic torus of `size` accelerators, longest side last: 64 in 3 is 4x4x4."""
    if dimensions == 1:
        return (size,)
    root = round(size ** (1 / dimensions))
    side = next(d for d in range(max(root, 1), 0, -1) if size % d == 0)
    return (side, *torus(size // side, dimensions - 1))


def bundled_clusters() -> dict[str, Path]:
    """The cluster files that come with the package, by name."""
    folder = importlib.resources.files("spmd_train") / "meshes"
    paths = (Path(str(entry)) for entry in folder.iterdir())
    return {path.stem: path for path in sorted(paths) if path.suffix == ".yaml"}


def _find(path: str | PathLike[str]) -> Path:
    """The file itself, or the bundled one of that name: `meshes/32x24gb.yaml` from anywhere."""
    path, bundled = Path(path), bundled_clusters()
    if path.is_file():
        return path
    name = path.name.removesuffix(".yaml")
    if name in bundled:
        return bundled[name]
    guess = nearest(name, bundled)
    hint = f"; did you mean {guess!r}?" if guess else ""
    raise RequestError(f"{path}: no such cluster file{hint} (bundled are {listed(bundled)}).")
