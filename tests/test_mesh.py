"""Mesh shapes and the devices behind them.

What depends on how JAX was started runs in a process of its own; real accelerators are imitated by
plain objects with the attributes that JAX reads.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from spmd_train.errors import RequestError
from spmd_train.mesh import MeshShape, build_mesh, describe, fitting_shapes, prepare_devices


def refusal(text: str) -> str:
    with pytest.raises(RequestError) as caught:
        MeshShape.parse(text)
    return str(caught.value)


# ------------------------------------------------------------------------------------------ shapes


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("4x2x4", MeshShape(4, 2, 4)),
        ("4X2X4", MeshShape(4, 2, 4)),
        ("data=4,model=2,stage=4", MeshShape(4, 2, 4)),
        ("stage=4, data=4", MeshShape(4, 1, 4)),
        ("model=8", MeshShape(1, 8, 1)),
    ],
)
def test_parse(text: str, shape: MeshShape) -> None:
    assert MeshShape.parse(text) == shape


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4x2", "does not give three sizes; write data x model x stage as in 4x2x4"),
        ("4x2x4x1", "does not give three sizes"),
        ("", "does not give three sizes"),
        ("8", "does not give three sizes"),
        ("3x0x2", "gives model the size '0', which is not an integer of at least 1"),
        ("3x-1x2", "gives model the size '-1'"),
        ("3x2x1.5", "gives stage the size '1.5'"),
        ("axbxc", "gives data the size 'a'"),
        ("4xx4", "gives model the size ''"),
        ("4x\u0662x4", "gives model the size"),  # a digit to int(), but not to us
        ("9" * 5000 + "x1x1", "gives data the size"),
        ("data=4,modle=2", "the axis 'modle', which does not exist; did you mean 'model'?"),
        ("zzz=4", "does not exist (the axes are data, model, stage)"),
        ("data=4,data=2", "gives the axis 'data' twice"),
        ("data=0", "gives data the size '0'"),
        ("data=", "gives data the size ''"),
        ("data=4,", "has '' where axis=size belongs"),
        ("4x2x4,stage=2", "has '4x2x4' where axis=size belongs"),
    ],
)
def test_bad_shapes_are_refused(text: str, expected: str) -> None:
    assert expected in refusal(text)


def test_a_shape_cannot_be_empty() -> None:
    with pytest.raises(RequestError, match="model=0 must be at least 1"):
        MeshShape(4, 0, 1)


sizes = st.integers(1, 10**6)


@given(st.builds(MeshShape, sizes, sizes, sizes), st.permutations(["data", "model", "stage"]))
def test_parse_round_trips(shape: MeshShape, order: list[str]) -> None:
    assert MeshShape.parse(str(shape)) == shape
    assert MeshShape.parse(",".join(f"{axis}={getattr(shape, axis)}" for axis in order)) == shape
    assert MeshShape.parse(shape.named) == shape
    assert shape.size == np.prod(shape.array_shape, dtype=object)


@given(st.integers(1, 64))
def test_fitting_shapes(n: int) -> None:
    shapes = fitting_shapes(n)
    axes = range(1, n + 1)
    expected = sum(1 for d in axes for m in axes if n % (d * m) == 0)
    assert len(set(shapes)) == len(shapes) == expected
    assert all(shape.size == n for shape in shapes)
    assert shapes[0] == MeshShape(n, 1, 1)


# ----------------------------------------------------------------------------- simulated devices


def start(code: str, **environment: str) -> str:
    """The last line that `code` prints, or raises, in a fresh process."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_FLAGS", "JAX_"))}
    imports = "from spmd_train.mesh import *\nfrom spmd_train.mesh import MeshShape as M\n"
    done = subprocess.run(
        [sys.executable, "-c", imports + code],
        env=keep | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return (done.stdout + done.stderr).strip().splitlines()[-1]


def test_a_mesh_is_simulated_on_cpu() -> None:
    code = """
prepare_devices(M(4, 2, 4), None)
mesh, shape = build_mesh(M(4, 2, 4), None)
ids = [[[d.id for d in row] for row in plane] for plane in mesh.devices]
assert mesh.axis_names == ("data", "stage", "model"), mesh
assert ids[0] == [[0, 1], [2, 3], [4, 5], [6, 7]], ids
print(describe(mesh, shape))
"""
    expected = "mesh 4x2x4 (data=4, model=2, stage=4): 32 simulated CPU devices on 1 host"
    assert start(code) == expected


def test_devices_asked_for_in_xla_flags_are_kept() -> None:
    code = """
prepare_devices(M(2, 1, 1), "cpu")
import jax
print(len(jax.devices()), describe(*build_mesh(M(2, 1, 1), "cpu")))
"""
    line = start(code, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert line.startswith("4 mesh 2x1x1")
    assert line.endswith("2 simulated CPU devices on 1 host")  # the first ones


def test_each_process_simulates_its_share() -> None:
    code = "prepare_devices(M(4, 2, 1), None)\nimport jax; print(len(jax.devices()))"
    assert start(code, JAX_NUM_PROCESSES="2") == "4"
    assert "JAX_NUM_PROCESSES is 'two'" in start(code, JAX_NUM_PROCESSES="two")


def test_an_absurd_mesh_is_refused_not_simulated() -> None:
    line = start("prepare_devices(M(99999, 1, 1), None)\nbuild_mesh(M(99999, 1, 1), None)")
    assert "mesh 99999x1x1 needs 99999 devices, but 1 CPU device is present" in line
    assert "XLA_FLAGS=--xla_force_host_platform_device_count=99999" in line


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="needs a machine without accelerator")
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_missing_platform_says_what_to_install(platform: str) -> None:
    line = start(f"prepare_devices(None, {platform!r})\nbuild_mesh(None, {platform!r})")
    assert f"RequestError: the {platform} platform is not available" in line
    assert "platforms present: cpu" in line
    assert f"pip install 'spmd-train[{platform}]'" in line


def test_unknown_platform() -> None:
    with pytest.raises(RequestError, match="'cuda' is not one of cpu, gpu, tpu"):
        prepare_devices(None, "cuda")


# ------------------------------------------------------------------------------- real accelerators


@dataclass(frozen=True)
class FakeDevice:
    id: int
    platform: str
    device_kind: str
    process_index: int = 0
    coords: tuple[int, ...] = ()
    core_on_chip: int = 0
    slice_index: int = 0


H100 = [FakeDevice(i, "gpu", "NVIDIA H100") for i in range(8)]
V5P = [
    FakeDevice(x + 4 * y + 16 * z, "tpu", "TPU v5", coords=(x, y, z))
    for z in range(2)
    for y in range(4)
    for x in range(4)
]
CPUS_OF_TWO_PROCESSES = [FakeDevice(i, "cpu", "cpu", process_index=i // 4) for i in range(8)]


def present(monkeypatch: pytest.MonkeyPatch, devices: list[FakeDevice]) -> None:
    monkeypatch.setattr(jax, "devices", lambda: devices)


def test_all_devices_go_to_data_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    present(monkeypatch, H100)
    mesh, shape = build_mesh(None, "gpu")
    assert shape == MeshShape(8, 1, 1)
    assert mesh.axis_types == (AxisType.Auto,) * 3
    line = "mesh 8x1x1 (data=8, model=1, stage=1): 8 NVIDIA H100 on 1 host"
    assert describe(mesh, shape) == line


@pytest.mark.parametrize("size", ["4x2x4", "2x2x1"])
def test_real_devices_must_match_the_mesh(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    present(monkeypatch, H100)
    with pytest.raises(RequestError) as caught:
        build_mesh(MeshShape.parse(size), None)
    message = str(caught.value)
    assert "8 GPU devices are present" in message
    listed = message.partition("shapes that fit: ")[2].partition(";")[0].split(", ")
    assert {MeshShape.parse(text) for text in listed} == set(fitting_shapes(8))
    assert "simulate the mesh on CPU with JAX_PLATFORMS=cpu" in message


def test_many_fitting_shapes_are_cut_to_the_closest(monkeypatch: pytest.MonkeyPatch) -> None:
    present(monkeypatch, [FakeDevice(i, "gpu", "NVIDIA H100") for i in range(64)])
    with pytest.raises(RequestError, match=r"fit: 4x4x4, .* and 16 more;"):
        build_mesh(MeshShape(4, 4, 5), None)


def test_another_platform_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    present(monkeypatch, H100)
    with pytest.raises(RequestError, match=r"the tpu platform is not available.*present: cpu, gpu"):
        build_mesh(None, "tpu")


@pytest.mark.parametrize("size", ["4x2x4", "8x2x2", "32x1x1"])  # the second splits a torus axis
def test_tpu_layouts_use_every_chip_once(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    present(monkeypatch, V5P)
    shape = MeshShape.parse(size)
    mesh, _ = build_mesh(shape, "tpu")
    assert mesh.devices.shape == shape.array_shape
    assert sorted(device.id for device in mesh.devices.flat) == list(range(32))


def test_several_processes_may_not_leave_devices_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    present(monkeypatch, CPUS_OF_TWO_PROCESSES)
    mesh, shape = build_mesh(MeshShape(2, 2, 2), None)
    assert describe(mesh, shape).endswith("8 simulated CPU devices in 2 processes")
    with pytest.raises(RequestError, match="needs 4 devices, but 8 CPU devices are present"):
        build_mesh(MeshShape(2, 2, 1), None)
    with pytest.raises(RequestError, match="count=16 / the number of processes"):
        build_mesh(MeshShape(4, 2, 2), None)
