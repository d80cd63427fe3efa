"""Mesh shapes, the devices behind them, and devices that are only simulated.

`4x2x4` means data=4, model=2, stage=4. The devices are laid out with `model` innermost, so that the
axis which talks most (twice in every layer) has the fastest links, then `stage`, then `data`; for
`2x2x2`, device ids are

                 stage=0       stage=1
    data=0     [0 1]         [2 3]         <- model=0, model=1
    data=1     [4 5]         [6 7]

On the CPU platform a mesh may be larger than the machine: virtual devices are requested before JAX
starts its backend. JAX is imported inside the functions, so that a malformed request is answered
before the second that the import takes.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import math
import os
import pkgutil
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spmd_train.errors import RequestError, listed, nearest

if TYPE_CHECKING:
    from jax.sharding import Mesh

DATA = "data"
MODEL = "model"
STAGE = "stage"
AXES = (DATA, MODEL, STAGE)  # as a shape is written
ARRAY_AXES = (DATA, STAGE, MODEL)  # as the device array is laid out: the last has the fastest links

JAX_PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}  # our name -> jax_platforms
MAX_SIMULATED_DEVICES = 512  # per process; each virtual device costs threads and memory

_NVIDIA_PLUGINS = {"xla_cuda12", "xla_cuda13"}
# Of NVIDIA GPUs (the last also under WSL), then of TPUs; on other machines there is none of them.
_ACCELERATOR_FILES = ("/dev/nvidia*", "/dev/dxg", "/dev/accel*", "/dev/vfio/[0-9]*")

_HOW_TO_WRITE = "write data x model x stage as in 4x2x4, or named as in data=4,model=2,stage=4"
_SIZE = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True)
class MeshShape:
    """How many ways each axis splits the work; the product is the number of devices."""

    data: int = 1
    model: int = 1
    stage: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise RequestError(f"mesh axis {axis}={getattr(self, axis)} must be at least 1.")

    def __str__(self) -> str:
        return f"{self.data}x{self.model}x{self.stage}"

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.data * self.model * self.stage

    @property
    def array_shape(self) -> tuple[int, int, int]:
        """The shape of the device array, in the order of `ARRAY_AXES`."""
        return (self.data, self.stage, self.model)

    @property
    def named(self) -> str:
        """The named form, `data=4, model=2, stage=4`."""
        return listed(f"{axis}={getattr(self, axis)}" for axis in AXES)

    @classmethod
    def parse(cls, text: str) -> MeshShape:
        """Read `4x2x4` or `data=4,model=2,stage=4` (any order; an axis left out is 1)."""
        named = "=" in text or "," in text
        return cls(**(_parse_named(text) if named else _parse_positional(text)))


def _parse_positional(text: str) -> dict[str, int]:
    sizes = text.strip().lower().split("x")
    if len(sizes) != len(AXES):
        raise RequestError(f"mesh {text!r} does not give three sizes; {_HOW_TO_WRITE}.")
    return {axis: _parse_size(text, axis, size) for axis, size in zip(AXES, sizes, strict=True)}


def _parse_named(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise RequestError(
                f"mesh {text!r} has {part!r} where axis=size belongs; {_HOW_TO_WRITE}."
            )
        if axis not in AXES:
            guess = nearest(axis, AXES)
            hint = f"; did you mean {guess!r}?" if guess else ""
            raise RequestError(
                f"mesh {text!r} names the axis {axis!r}, which does not exist{hint} "
                f"(the axes are {listed(AXES)})."
            )
        if axis in sizes:
            raise RequestError(f"mesh {text!r} gives the axis {axis!r} twice; give each once.")
        sizes[axis] = _parse_size(text, axis, size)
    return sizes


def _parse_size(text: str, axis: str, size: str) -> int:
    size = size.strip()
    if not _SIZE.fullmatch(size) or int(size) < 1:
        raise RequestError(
            f"mesh {text!r} gives {axis} the size {size!r}, which is not an integer of at least 1; "
            f"{_HOW_TO_WRITE}."
        )
    return int(size)


def fitting_shapes(n_devices: int) -> list[MeshShape]:
    """Every shape of exactly `n_devices` devices, those with the most data parallelism first."""
    divisors = [d for d in range(n_devices, 0, -1) if n_devices % d == 0]
    return [
        MeshShape(data, model, n_devices // data // model)
        for data in divisors
        for model in divisors
        if n_devices // data % model == 0
    ]


def prepare_devices(shape: MeshShape | None, platform: str | None) -> None:
    """Choose the platform and request simulated CPU devices, before JAX starts its backend.

    Does nothing to devices that exist already: a backend that has started keeps what it has, and
    `build_mesh` then says whether that is enough. XLA_FLAGS wins, being the more explicit of the
    two ways to ask (JAX itself would silently prefer `jax_num_cpu_devices`).
    """
    if platform is not None and platform not in JAX_PLATFORMS:
        raise RequestError(f"platform {platform!r} is not one of {listed(JAX_PLATFORMS)}.")
    per_process = None if shape is None else max(1, shape.size // _num_processes())
    config = _jax_config()
    if platform is not None:
        config.update("jax_platforms", JAX_PLATFORMS[platform])
    elif not config.jax_platforms and _installed_only_to_compile():
        config.update("jax_platforms", "cpu")
    if (
        per_process is not None
        and per_process <= MAX_SIMULATED_DEVICES
        and platform in (None, "cpu")
        and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", "")
    ):
        # JAX 0.10 and 0.12 refuse this update with a RuntimeError once a backend has started.
        with contextlib.suppress(RuntimeError):
            config.update("jax_num_cpu_devices", per_process)


def _installed_only_to_compile() -> bool:
    """Whether there are backends of GPUs or TPUs but no such device, as `compile` needs them.

    JAX (0.10 and 0.12) would end on the CPU all the same, after a traceback for each CUDA library
    that it misses and libtpu's complaints; told that the platform is the CPU it says nothing.
    """
    plugins = importlib.util.find_spec("jax_plugins")
    found = (
        {m.name for m in pkgutil.iter_modules(plugins.submodule_search_locations)}
        if plugins
        else set()
    )
    libtpu = importlib.util.find_spec("libtpu") is not None
    if not (found or libtpu) or not found <= _NVIDIA_PLUGINS:
        return False
    return not any(glob.glob(pattern) for pattern in _ACCELERATOR_FILES)


def _jax_config() -> Any:
    """`jax.config`, whose options JAX leaves untyped."""
    import jax

    return jax.config


def _num_processes() -> int:
    text = os.environ.get("JAX_NUM_PROCESSES", "1")
    if not _SIZE.fullmatch(text) or int(text) < 1:
        raise RequestError(f"JAX_NUM_PROCESSES is {text!r}; it must be an integer of at least 1.")
    return int(text)


def build_mesh(shape: MeshShape | None, platform: str | None = None) -> tuple[Mesh, MeshShape]:
    """The JAX mesh of this shape on the devices present; without a shape, all of them on `data`."""
    devices = _devices(platform)
    shape = shape or MeshShape(data=len(devices))
    _check_count(shape, devices)
    return arrange(devices[: shape.size], shape), shape


def _devices(platform: str | None) -> Sequence[Any]:
    """The devices of the requested platform, or a RequestError that says what there is instead."""
    import jax

    try:
        devices = jax.devices()
    # JAX 0.10.2 fails with a bare AssertionError where the CUDA plugin is not installed.
    except (RuntimeError, AssertionError) as error:
        reason = (str(error) or "its plugin is missing or failed to start").splitlines()[0]
        raise RequestError(_missing(platform, reason)) from error
    if platform is not None and devices[0].platform != platform:
        raise RequestError(_missing(platform, "its backend is not the one that started"))
    return devices


def _missing(platform: str | None, reason: str) -> str:
    wanted = platform or os.environ.get("JAX_PLATFORMS") or "default"
    remedy = {
        "gpu": "install its support with: pip install 'spmd-train[gpu]'",
        "tpu": "install its support with: pip install 'spmd-train[tpu]'",
    }.get(wanted, "check JAX_PLATFORMS")
    return (
        f"the {wanted} platform is not available ({reason}); "
        f"platforms present: {listed(_platforms_present()) or 'none'}; {remedy}."
    )


def _platforms_present() -> list[str]:
    """What JAX finds when it is free to choose; only asked once the request has failed."""
    import jax

    config = _jax_config()
    requested = config.jax_platforms
    config.update("jax_platforms", None)
    try:
        return sorted({jax.devices()[0].platform, "cpu"})
    except (RuntimeError, AssertionError):
        return []
    finally:
        config.update("jax_platforms", requested)


def _check_count(shape: MeshShape, devices: Sequence[Any]) -> None:
    """A simulated mesh may leave devices idle; real ones, and those of several hosts, may not."""
    present, needed, kind = len(devices), shape.size, devices[0].platform
    several_processes = len({device.process_index for device in devices}) > 1
    if needed == present or (needed < present and kind == "cpu" and not several_processes):
        return
    remedy = f"shapes that fit: {_closest_shapes(shape, present)}"
    if kind != "cpu":
        remedy += "; or simulate the mesh on CPU with JAX_PLATFORMS=cpu"
    elif needed > present:
        flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
        per = " / the number of processes" if several_processes else ""
        remedy += f"; or simulate it by starting with {flag}{per}"
    raise RequestError(
        f"mesh {shape} needs {needed} devices, but {present} {kind.upper()} "
        f"{'device is' if present == 1 else 'devices are'} present; {remedy}."
    )


def _closest_shapes(shape: MeshShape, n_devices: int, count: int = 12) -> str:
    """The fitting shapes that change the requested one least, in powers of each axis."""

    def distance(other: MeshShape) -> float:
        pairs = zip(shape.array_shape, other.array_shape, strict=True)
        return sum(abs(math.log(mine / theirs)) for mine, theirs in pairs)

    shapes = sorted(fitting_shapes(n_devices), key=distance)
    more = f" and {len(shapes) - count} more" if len(shapes) > count else ""
    return listed(shapes[:count]) + more


def arrange(devices: Sequence[Any], shape: MeshShape) -> Mesh:
    """Lay devices out by their physical topology; simulated ones have none, so by their order."""
    import jax
    import numpy as np
    from jax.experimental import mesh_utils
    from jax.sharding import AxisType, Mesh

    types = (AxisType.Auto,) * len(ARRAY_AXES)
    if devices[0].platform == "cpu":
        return Mesh(np.array(devices).reshape(shape.array_shape), ARRAY_AXES, axis_types=types)
    try:
        return jax.make_mesh(shape.array_shape, ARRAY_AXES, axis_types=types, devices=devices)
    # Some legal shapes (8x2x2 on a 4x4x2 TPU torus) need a physical axis split between two of ours,
    # which make_mesh allows on v5e only.
    except NotImplementedError:
        array = mesh_utils.create_device_mesh(
            shape.array_shape, devices, allow_split_physical_axes=True
        )
        return Mesh(array, ARRAY_AXES, axis_types=types)


def describe(mesh: Mesh, shape: MeshShape) -> str:
    """One line for a person: the mesh, and on what it really runs."""
    devices = list(mesh.devices.flat)
    if devices[0].platform == "cpu":
        simulated = "simulated " if len(devices) > 1 else ""
        what = f"{simulated}CPU device{'s' if len(devices) > 1 else ''}"
    else:
        what = devices[0].device_kind
    processes = len({device.process_index for device in devices})
    where = "on 1 host" if processes == 1 else f"in {processes} processes"
    return f"mesh {shape} ({shape.named}): {len(devices)} {what} {where}"
