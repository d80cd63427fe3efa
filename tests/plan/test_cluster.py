"""Hardware and clusters as data: what ships is complete, and a broken file says what is wrong."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from spmd_train.errors import RequestError
from spmd_train.plan.cluster import bundled_clusters, load_cluster, torus
from spmd_train.plan.hardware import accelerator, accelerators, of_device

TABLE = Path(__file__).resolve().parents[3] / "shared/reference/tables/hardware_specs.csv"

ROW_OF = {
    "a100-40gb": "A100-40GB SXM", "a100-80gb": "A100-80GB SXM", "h100-80gb": "H100 SXM",
    "h200-141gb": "H200 SXM", "b200-180gb": "B200 SXM", "gb200-186gb": "GB200 (per GPU)",
    "rtx4090-24gb": "RTX 4090", "a10g-24gb": "A10G", "l4-24gb": "L4", "l40s-48gb": "L40S",
    "v4": "TPU v4", "v5e": "TPU v5e", "v5p": "TPU v5p", "v6e": "TPU v6e Trillium",
    "tpu7x": "TPU v7 Ironwood (TPU7x)",
}  # fmt: skip


@pytest.mark.parametrize("name", ROW_OF)
def test_numbers_are_those_of_the_reference_table(name: str) -> None:
    if not TABLE.exists():
        pytest.skip("the reference table is not beside this checkout")
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    row = next(r for r in csv.DictReader(lines) if r["name"] == ROW_OF[name])
    kind = accelerator(name)
    assert kind.peak_tflops["bfloat16"] == float(row["bf16_tflops"])
    if row["fp8_tflops"]:
        assert kind.peak_tflops["float8"] == float(row["fp8_tflops"])
    assert kind.memory_gigabytes_per_second == float(row["hbm_GBps"])
    unit = 2**30 if row["hbm_unit"] == "GiB" else 1e9
    assert kind.memory_bytes == pytest.approx(float(row["hbm"]) * unit, rel=0.09)


def test_every_kind_of_the_reference_table_is_there() -> None:
    assert set(ROW_OF) == set(accelerators())
    assert all(kind.source for kind in accelerators().values())
    assert all(
        (kind.target is not None) == (kind.kind == "gpu") for kind in accelerators().values()
    )


def test_every_bundled_cluster_loads() -> None:
    sizes = {name: load_cluster(name).size for name in bundled_clusters()}
    for name, size in (("8x80gb", 8), ("8x40gb", 8), ("32x24gb", 32), ("32xh100", 32),
                       ("64x80gb", 64), ("v5p-128", 64)):  # fmt: skip
        assert sizes[name] == size
    assert load_cluster("v5p-128").topology == (4, 4, 4)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"), ("NVIDIA L40S", "l40s-48gb"),
        ("NVIDIA GB200", "gb200-186gb"), ("TPU v5 lite", "v5e"), ("TPU v5", "v5p"),
        ("NVIDIA H100 PCIe", None), ("TPU v4 lite", None), ("cpu", None),
    ],
)  # fmt: skip
def test_devices_are_recognised(kind: str, name: str | None) -> None:
    found = of_device(kind)
    assert (found[0] if found else None) == name


@pytest.mark.parametrize(
    ("size", "dimensions", "shape"), [(64, 3, (4, 4, 4)), (16, 2, (4, 4)), (32, 3, (2, 4, 4))]
)
def test_the_most_cubic_torus(size: int, dimensions: int, shape: tuple[int, ...]) -> None:
    assert torus(size, dimensions) == shape


def written(path: Path, text: str) -> Path:
    file = path / "mine.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("accelerator: h100-80g\nnodes: 1\nper_node: 8", "did you mean 'h100-80gb'"),
        ("accelerator: h100-80gb\nnodes: 0\nper_node: 8", r"nodes \(0\): Input should be greater"),
        ("accelerator: h100-80gb\nnodes: 2\nper_node: 8", "2 nodes need a network between them"),
        ("accelerator: h100-80gb\nnodes: 1", "per_node: Field required"),
        ("accelerator: h100-80gb\nnodes: 1\nper_node: 8\nlinks: 3", "links .*not permitted"),
        ("accelerator: v5p\nnodes: 1\nper_node: 8\ntopology: [2, 2]", "topology 2x2 has 4 accel"),
        ("- 3", "must be a mapping of keys"),
    ],
)
def test_a_broken_file_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        load_cluster(written(tmp_path, text))


def test_no_such_file_names_the_nearest() -> None:
    with pytest.raises(RequestError, match="did you mean '32xh100'"):
        load_cluster("32h100")


def test_an_accelerator_of_ones_own(tmp_path: Path) -> None:
    text = """
accelerator: mine
nodes: 1
per_node: 4
accelerators:
  mine:
    title: Mine
    kind: gpu
    device_kind: MINE
    peak_tflops: {bfloat16: 100}
    memory_gib: 10
    memory_gigabytes_per_second: 500
    link: {gigabytes_per_second: 20}
    source: data sheet
"""
    cluster = load_cluster(written(tmp_path, text))
    assert (cluster.accelerator.title, cluster.size) == ("Mine", 4)
    assert cluster.link.gigabytes_per_second == 20
