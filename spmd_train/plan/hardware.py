"""Accelerators as data: `hardware.yaml`, and those that a cluster file adds."""

from __future__ import annotations

import importlib.resources
import re
from functools import cache
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from spmd_train.config_groups import Section
from spmd_train.config_yaml import read_yaml
from spmd_train.errors import RequestError, listed, nearest

GIB = 2**30

Positive = Annotated[float, Field(gt=0)]
ComputeType = Literal["bfloat16", "float16", "float8", "float32"]


class Link(Section):
    """How an accelerator is connected to its neighbours.

    Attributes:
        kind: "switch" (all pairs at once: NVLink, PCIe) or "torus" (TPU).
        gigabytes_per_second: one way; of an accelerator for a switch, of one link for a torus.
        dimensions: of a torus; each has two links per accelerator.
        multicast: whether a switch adds up and multicasts itself (NVLink SHARP).
    """

    kind: Literal["switch", "torus"] = "switch"
    gigabytes_per_second: Positive
    dimensions: Literal[1, 2, 3] = 1
    multicast: bool = False


class Target(Section):
    """What XLA is told of a GPU that is not here (`GpuTargetConfigProto`)."""

    capability: tuple[int, int] = Field(strict=False)
    cores: int
    clock_ghz: Positive
    l2_mib: int
    shared_kib: int
    threads: int


class Accelerator(Section):
    """One kind of accelerator; see the head of `hardware.yaml`. Rates are per accelerator."""

    title: str
    kind: Literal["gpu", "tpu"]
    device_kind: str
    devices: int = Field(default=1, ge=1)
    peak_tflops: dict[ComputeType, Positive]
    matmul_tflops: Positive | None = None
    memory_gib: Positive
    memory_gigabytes_per_second: Positive
    link: Link
    target: Target | None = None
    source: str

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)

    def is_called(self, device_kind: str) -> bool:
        """Whether JAX's `device_kind` names this accelerator.

        A kind that names a relative of other speed ("H100 PCIe", "RTX 4090 D") does not.
        """
        return any(
            re.search(rf"\b{re.escape(part)}\b(?! ?(?:lite|PCIe|NVL|D|Laptop)\b)", device_kind)
            for part in self.device_kind.split("|")
        )


@cache
def accelerators() -> dict[str, Accelerator]:
    """Every accelerator of `hardware.yaml`, by name."""
    source = importlib.resources.files("spmd_train.plan") / "hardware.yaml"
    tree = read_yaml(source.read_text(encoding="utf-8"), "hardware.yaml")
    return {name: Accelerator.model_validate(entry) for name, entry in tree.items()}


def accelerator(name: str, more: dict[str, Accelerator] | None = None) -> Accelerator:
    """The accelerator of this name, one of `more` first.

    Raises:
        RequestError: there is none; names the nearest, and all.
    """
    known = {**accelerators(), **(more or {})}
    if name not in known:
        guess = nearest(name, known)
        hint = f"; did you mean {guess!r}?" if guess else ""
        raise RequestError(
            f"accelerator {name!r} is not known{hint} (known are {listed(sorted(known))}; add your "
            "own under `accelerators` of the cluster file)."
        )
    return known[name]


def of_device(device_kind: str) -> tuple[str, Accelerator] | None:
    """The accelerator that JAX calls so; None where it is none of ours (CPUs among them)."""
    named = ((n, each) for n, each in accelerators().items() if each.is_called(device_kind))
    return next(named, None)


def explained(error: ValidationError, source: str) -> RequestError:
    """What is wrong with a hardware or cluster file, a sentence for each mistake."""
    sentences = []
    for each in error.errors():
        key = ".".join(str(part) for part in each["loc"]) or "the file"
        given = "" if each["type"] == "missing" else f" ({each['input']!r:.60})"
        sentences.append(f"{source}: {key}{given}: {each['msg'].removeprefix('Value error, ')}.")
    return RequestError("\n".join(sentences))
