"""Calibration on simulated devices, its file, and that the planner uses every figure of it.

Nothing is timed in an assertion: what a simulated device is measured at only has to be a number.
"""

from __future__ import annotations

import math
from pathlib import Path

import jax
import pytest
import yaml

from spmd_train.config import load
from spmd_train.errors import RequestError
from spmd_train.mesh import MeshShape
from spmd_train.plan import calibrate as calibration
from spmd_train.plan.calibrate import Effort, calibrate, calibrate_file, with_link, write
from spmd_train.plan.cluster import Cluster, Measured, bundled_clusters, load_cluster
from spmd_train.plan.hardware import of_device
from spmd_train.plan.links import Links, all_reduce, group
from spmd_train.plan.timing import step_time
from spmd_train.plan.workload import Execution, Workload

TEXT = """\
# My two nodes.
accelerator: mine
nodes: 2
per_node: 4
network: {gigabytes_per_second: 25}  # as ordered

# What they are.
accelerators:
  mine:
    title: A processor
    kind: gpu
    device_kind: cpu
    peak_tflops: {bfloat16: 0.001, float16: 0.001, float32: 0.001}
    memory_gib: 1.0
    memory_gigabytes_per_second: 10
    link: {kind: switch, gigabytes_per_second: 10}
    source: made up
"""
QUICK = Effort((16,), 0.001, 256, 4096, (2, 2))
EVERY = Measured(
    matmul_tflops={"bfloat16": 0.4, "float32": 0.2},
    link_gigabytes_per_second=3.5,
    link_latency_microseconds=11.0,
    network_gigabytes_per_second=7.25,
    network_latency_microseconds=13.0,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(TEXT)
    return path


def figures(measured: Measured) -> list[float]:
    tree = measured.model_dump(exclude_none=True)
    return [*tree.pop("matmul_tflops").values(), *tree.values()]


def test_on_eight_simulated_devices(file: Path) -> None:
    measured = calibrate_file(file, jax.devices(), QUICK)
    assert set(measured.matmul_tflops) == {"bfloat16", "float16", "float32"}
    assert len(figures(measured)) == 7
    assert all(math.isfinite(value) and value > 0 for value in figures(measured))
    for was, now in zip(figures(measured), figures(load_cluster(file).measured), strict=True):
        assert now == pytest.approx(was, rel=1e-3)
    assert file.read_text().startswith(TEXT)


def test_one_device_has_no_links(file: Path) -> None:
    file.write_text(TEXT.replace("nodes: 2", "nodes: 1").replace("per_node: 4", "per_node: 1"))
    measured = calibrate(load_cluster(file), jax.devices()[:1], QUICK)
    assert set(measured.model_dump(exclude_none=True)) == {"matmul_tflops"}


@pytest.mark.parametrize("name", ["cluster-a", "32xh100", "v5p-128"])
def test_the_planner_predicts_what_was_measured(name: str) -> None:
    """Times made by the planner's formula with known figures give these figures again."""
    cluster = load_cluster(name).resized(4)
    known = Measured(
        link_gigabytes_per_second=123,
        link_latency_microseconds=17,
        network_gigabytes_per_second=21,
        network_latency_microseconds=31,
    )
    links = Links.of(cluster.model_copy(update={"measured": known}))
    found = Measured()
    for devices, between in ((cluster.per_node, False), (cluster.devices, True)):
        times = {size: all_reduce(links, group(links, devices, 1), size) for size in (2**15, 2**28)}
        found = with_link(cluster, found, times, between)
    assert figures(found) == pytest.approx(figures(known), rel=2e-3)


@pytest.mark.parametrize("taken", [0.0, 1e9])
@pytest.mark.parametrize("between", [False, True])
def test_times_beyond_the_formula_stay_figures(taken: float, between: bool) -> None:
    """A positive latency, and at most ten times the data sheet's bandwidth."""
    cluster = load_cluster("cluster-a")
    found = with_link(cluster, Measured(), {2**15: taken, 2**28: taken}, between)
    bandwidth, latency = (
        (found.network_gigabytes_per_second, found.network_latency_microseconds)
        if between
        else (found.link_gigabytes_per_second, found.link_latency_microseconds)
    )
    assert 0 < bandwidth <= 10.01 * (25 if between else 300)
    assert 0 < latency <= 1.001e6


def seconds(cluster: Cluster, measured: Measured, compute: str = "bfloat16") -> float:
    """Of a step whose model axis is in a node, and data axis between nodes."""
    t = Workload.of(load("llama-7b"), "gpu").transformer
    e = Execution(MeshShape(4, 4, 2), 4, 2, 1024, compute=compute)
    return step_time(t, e, cluster.model_copy(update={"measured": measured})).total


@pytest.mark.parametrize("field", sorted(set(Measured.model_fields) - {"matmul_tflops"}))
def test_every_figure_of_a_link_counts(field: str) -> None:
    cluster = load_cluster("32xh100")
    slower = 10.0 if "latency" in field else 0.1
    base = Measured(
        link_gigabytes_per_second=300,
        link_latency_microseconds=20,
        network_gigabytes_per_second=200,
        network_latency_microseconds=10,
    )
    worse = base.model_copy(update={field: slower * getattr(base, field)})
    assert seconds(cluster, worse) > seconds(cluster, base)
    alone = Measured.model_validate({field: getattr(worse, field)})
    assert seconds(cluster, alone) > seconds(cluster, Measured())


@pytest.mark.parametrize("compute", ["bfloat16", "float16", "float8", "float32"])
def test_every_rate_of_products_counts(compute: str) -> None:
    cluster = load_cluster("32xh100")
    slow, fast = (Measured(matmul_tflops={compute: rate}) for rate in (100, 400))
    assert seconds(cluster, slow, compute) > seconds(cluster, fast, compute)
    other = "float32" if compute == "float16" else "float16"
    unchanged = Measured(matmul_tflops={compute: 100, other: 50})
    assert seconds(cluster, unchanged, compute) == seconds(cluster, slow, compute)


def test_a_slower_file_gives_a_slower_step(tmp_path: Path) -> None:
    path = tmp_path / "copy.yaml"
    path.write_text(bundled_clusters()["32xh100"].read_text())
    before = seconds(load_cluster(path), load_cluster(path).measured)
    write(path, Measured(matmul_tflops={"bfloat16": 200}))
    slow = load_cluster(path)
    assert slow.measured.matmul_tflops == {"bfloat16": 200}
    assert seconds(slow, slow.measured) > before
    write(path, Measured(matmul_tflops={"bfloat16": 100}))
    slower = load_cluster(path)
    assert seconds(slower, slower.measured) > seconds(slow, slow.measured)


OLD = {
    "block": "measured:\n  matmul_tflops:\n    float8: 9\n  link_latency_microseconds: 5\n",
    "braces": "measured: {matmul_tflops: {float8: 9}, link_latency_microseconds: 5}  # old\n",
    "lines of braces": "measured: {matmul_tflops: {float8: 9},\n   link_latency_microseconds: 5}\n",
    "none": "",
}


@pytest.mark.parametrize("old", OLD)
@pytest.mark.parametrize("place", ["first", "middle", "last", "unended"])
def test_the_rest_of_the_file_stays(tmp_path: Path, old: str, place: str) -> None:
    """Every other line is there as it was, comments and blank lines too."""
    path, block = tmp_path / "mine.yaml", OLD[old]
    middle = TEXT.replace("\n# What they are.", f"{block}\n# What they are.")
    text = {
        "first": block + TEXT, "middle": middle, "last": TEXT + block,
        "unended": (TEXT + block).rstrip("\n"),
    }[place]  # fmt: skip
    path.write_text(text)
    for measured in (Measured(matmul_tflops={"float16": 7}), EVERY):  # a second time, too
        write(path, measured)
    edited = path.read_text()
    kept = iter(edited.splitlines())
    assert all(line in kept for line in TEXT.splitlines())  # in this order
    assert edited.count("measured:") == 1
    assert edited.count("plan --calibrate") == 1
    assert "old" not in edited
    rates = {**({"float8": 9.0} if block else {}), "float16": 7.0, **EVERY.matmul_tflops}
    assert load_cluster(path).measured == EVERY.model_copy(update={"matmul_tflops": rates})
    assert list(tmp_path.iterdir()) == [path]


def test_a_text_that_cannot_be_edited_is_left_alone(file: Path) -> None:
    text = str(yaml.safe_load(TEXT)).replace("'", '"')  # all in braces, on one line
    file.write_text(text)
    assert load_cluster(file).nodes == 2
    with pytest.raises(RequestError, match=r"(?s)cannot be replaced.*matmul_tflops"):
        write(file, EVERY)
    assert file.read_text() == text


def test_other_devices_are_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is measured."""
    monkeypatch.setattr(calibration, "seconds_of_one", pytest.fail)
    with pytest.raises(RequestError, match=r"mine is 8 x A processor.* here are 4 x cpu"):
        calibrate_file(file, jax.devices()[:4], QUICK)
    with pytest.raises(RequestError, match="here are none"):
        calibrate_file(file, [], QUICK)
    file.write_text("accelerator: h100-80gb\nnodes: 1\nper_node: 8\n")
    with pytest.raises(RequestError, match=r"8 x NVIDIA H100.* here are 8 x cpu"):
        calibrate_file(file, jax.devices(), QUICK)
    assert "measured" not in file.read_text()


@pytest.mark.parametrize("path", ["32xh100", "meshes/32xh100.yaml", bundled_clusters()["32xh100"]])
def test_bundled_files_are_refused(path: str | Path) -> None:
    for call in (lambda: write(path, EVERY), lambda: calibrate_file(path, jax.devices(), QUICK)):
        with pytest.raises(RequestError, match=r"comes with the package.*copy"):
            call()
    with pytest.raises(RequestError, match="no such cluster file"):
        write("nowhere.yaml", EVERY)


def test_a_relative_of_other_speed_has_another_name() -> None:
    h100 = load_cluster("8xh100").accelerator
    assert h100.is_called("NVIDIA H100 80GB HBM3")
    assert not h100.is_called("NVIDIA H100 PCIe")
    assert of_device("NVIDIA H100 PCIe") is None
