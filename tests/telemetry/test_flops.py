"""FLOPs against counts made here matrix by matrix; peaks against the project's hardware table."""

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from spmd_train.telemetry.flops import model_flops_per_token, peak_flops

TABLE = Path(__file__).resolve().parents[3] / "shared/reference/tables/hardware_specs.csv"


@dataclass(frozen=True)
class Shape:
    layers: int = 3
    width: int = 64
    heads: int = 4
    head_dim: int = 8
    vocab: int = 100
    tied: bool = False


def test_flops_against_a_count_of_every_matrix_product():
    c, length, ffn = Shape(), 16, 128
    inner = c.heads * c.head_dim
    matrices = c.layers * (4 * c.width * inner + 3 * c.width * ffn) + c.width * c.vocab
    scores_and_values = c.layers * 2 * (inner * length)  # multiply-adds per token, unmasked
    expected = 3 * 2 * (matrices + scores_and_values)  # backward is twice forward
    stored = matrices + c.width * c.vocab
    assert model_flops_per_token(c, length, stored) == expected
    assert model_flops_per_token(replace(c, tied=True), length, matrices) == expected


def test_palm_540b():
    """The paper's appendix B: 540.35e9 parameters in all, attention figures of its table 1."""
    palm = Shape(layers=118, width=18432, heads=48, head_dim=256, vocab=256_000, tied=True)
    flops = model_flops_per_token(palm, 2048, 540_350_000_000)
    assert flops == 6 * 540_350_000_000 + 12 * 118 * 48 * 256 * 2048


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40GB SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA B200", "B200 SXM"),
        ("NVIDIA B300 SXM6 AC", "B300 SXM"),
        ("NVIDIA GB200", "GB200 (per GPU)"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("TPU v4", "TPU v4"),
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5e", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("TPU v5p", "TPU v5p"),
        ("TPU v6 lite", "TPU v6e Trillium"),
        ("TPU v6e", "TPU v6e Trillium"),
        ("TPU7x", "TPU v7 Ironwood (TPU7x)"),
    ],
)
def test_peaks_are_those_of_the_hardware_table(kind, row):
    if not TABLE.exists():
        pytest.skip("the reference table is not beside this checkout")
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    table = {line["name"]: float(line["bf16_tflops"]) for line in csv.DictReader(lines)}
    devices_per_chip = 2 if re.match("TPU7x", kind) else 1
    assert peak_flops(kind) == pytest.approx(table[row] * 1e12 / devices_per_chip)


@pytest.mark.parametrize(
    "kind",
    ["cpu", "", "NVIDIA H20", "NVIDIA L40", "NVIDIA GeForce RTX 4090 Laptop GPU", "TPU v4 lite"],
)
def test_unknown_devices_have_no_peak(kind):
    assert peak_flops(kind) is None


def test_slower_relatives_are_not_taken_for_the_sxm_part():
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA H100 NVL") == 835e12
