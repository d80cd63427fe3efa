"""From made-up measurements to findings: every cause, and the first place in execution order."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from spmd_train.precision.attribution import Conditions, attribute
from spmd_train.precision.measurements import Seen, Statistics, bad_rows, sightings

M, L, S, D, R = 2, 4, 2, 2, 6

FP32 = Conditions("float32", 3.4028235e38)
BF16 = Conditions("bfloat16", 3.3895314e38)
FP16 = Conditions("float16", 65504.0, loss_scale=2.0**16)


def clean(size: float = 1.0) -> Statistics:
    """Every magnitude `size`."""

    def seen(*shape: int) -> Seen:
        zero = np.zeros(shape, np.int32)
        return Seen(np.full(shape, size, np.float32), zero.copy(), zero.copy())

    return Statistics(
        parameters={"blocks/w": seen(L, D), "embed/t": seen(S, D), "head/n": seen(S, D)},
        embedding=seen(M, R),
        activations={name: seen(M, L, R) for name in ("query", "hidden", "output")},
        logits=seen(M, S, R),
        loss=seen(M, D),
        output_gradient=seen(M, R),
        activation_gradients={name: seen(M, L, R) for name in ("input", "query", "hidden")},
        gradients={"blocks/w": seen(M, L, D), "embed/t": seen(M, S, D), "head/n": seen(M, S, D)},
    )


def spoil(seen: Seen, index: Any, value: str = "nan") -> None:
    (seen.nans if value == "nan" else seen.infs)[index] = 3
    seen.largest[index] = 0


def test_tensors_come_in_the_order_of_execution() -> None:
    order = [(x.kind.split()[-1], x.tensor, x.layer) for x in sightings(clean())]
    assert len(order) % M == 0
    half = order[: len(order) // M]
    assert order == half * M
    forward = [("activation", n, i) for i in range(L) for n in ("query", "hidden", "output")]
    backward = [
        ("gradient", n, i) for i in (3, 2, 1, 0) for n in ("hidden", "query", "blocks/w", "input")
    ]
    assert half == [
        ("activation", "embedding", None),
        *forward,
        ("activation", "logits", None),
        ("loss", "loss", None),
        *(("gradient", "output", None), ("gradient", "head/n", None)),
        *backward,
        ("gradient", "embed/t", None),
    ]


class TestFirst:
    def test_of_two_places_the_earlier(self) -> None:
        s = clean()
        spoil(s.activations["hidden"], (1, 2, [4, 5]), "inf")
        spoil(s.activations["query"], (1, 3))
        spoil(s.activation_gradients["input"], (1, slice(None), 4))
        assert attribute(s, s, FP32)["first"] == {
            "kind": "activation",
            "tensor": "hidden",
            "layer": 2,
            "stage": 1,
            "microbatch": 1,
            "data_shards": [1],
            "rows": [R + 4, R + 5],
            "value": "inf",
        }

    def test_a_later_layer_of_an_earlier_micro_batch_goes_first(self) -> None:
        s = clean()
        spoil(s.activations["query"], (1, 0, 0))
        spoil(s.activation_gradients["query"], (0, 1, 2))
        first = attribute(s, s, FP32)["first"]
        assert (first["kind"], first["microbatch"], first["layer"]) == ("activation gradient", 0, 1)

    @pytest.mark.parametrize("path", ["head/n", "embed/t"])
    def test_a_parameter_gradient_has_a_shard_and_no_rows(self, path: str) -> None:
        s = clean()
        spoil(s.gradients[path], (1, 0, 1))
        assert attribute(s, s, FP32)["first"] == {
            "kind": "parameter gradient",
            "tensor": path,
            "layer": None,
            "stage": None,
            "microbatch": 1,
            "data_shards": [1],
            "rows": None,
            "value": "nan",
        }

    def test_a_block_s_parameter_gradient(self) -> None:
        s = clean()
        spoil(s.gradients["blocks/w"], (0, 2, 0), "inf")
        spoil(s.activation_gradients["input"], (0, 2, 0))
        found = attribute(s, s, FP32)
        assert (found["first"]["tensor"], found["first"]["stage"]) == ("blocks/w", 1)
        assert found["largest"] == {"tensor": "blocks/w", "layers": [3, 2], "values": [1.0, 1.0]}

    def test_logits_and_loss(self) -> None:
        s = clean()
        spoil(s.loss, (0, 1), "inf")
        assert attribute(s, s, FP32)["first"]["data_shards"] == [1]
        spoil(s.logits, (0, 1, 3))
        found = attribute(s, s, FP32)
        assert (found["first"]["tensor"], found["first"]["rows"]) == ("logits", [3])
        assert found["largest"]["tensor"] == "output"
        assert found["largest"]["layers"] == [0, 1, 2, 3]


def test_magnitudes_on_the_way_are_of_the_same_tensor() -> None:
    s = clean()
    s.activations["hidden"].largest[0, :, 1] = [10, 200, 3000, 4]
    spoil(s.activations["hidden"], (0, 3, 2), "inf")
    found = attribute(s, clean(), FP16)
    assert found["largest"] == {
        "tensor": "hidden",
        "layers": [0, 1, 2, 3],
        "values": [10.0, 200.0, 3000.0, 4.0],
    }
    assert "3e+03" in found["says"]  # the largest up to there


def test_affected_rows_are_those_of_the_forward_pass() -> None:
    s = clean()
    spoil(s.activations["output"], (1, 0, 4))
    spoil(s.activation_gradients["input"], (0, 0))  # all rows, but a consequence
    assert np.flatnonzero(bad_rows(s)).tolist() == [R + 4]
    assert attribute(s, s, FP32)["rows"] == {
        "affected": 1,
        "of": M * R,
        "listed": [R + 4],
        "microbatches": [1],
        "data_shards": [1],
    }
    spoil(backward := clean().activation_gradients["query"], (0, 2, 1))
    s = clean()._replace(activation_gradients={"input": backward})
    assert np.flatnonzero(bad_rows(s)).tolist() == [1]


# ------------------------------------------------------------------------------------ causes


def cause(seen: Statistics, float32: Statistics | None, on: Conditions) -> tuple[str, str]:
    found = attribute(seen, float32, on)
    json.dumps(found, allow_nan=False)  # an event
    return found["cause"], found["says"]


def bad_forward(value: str = "inf", rows: Any = slice(None)) -> Statistics:
    s = clean()
    spoil(s.activations["hidden"], (slice(None), 1, rows), value)
    return s


def bad_backward(value: str = "inf") -> Statistics:
    s = clean()
    spoil(s.activation_gradients["hidden"], (0, 1, 0), value)
    return s


class TestOverflow:
    @pytest.mark.parametrize("value", ["inf", "nan"])
    def test_of_a_gradient_at_a_high_scale_is_expected(self, value: str) -> None:
        kind, says = cause(bad_backward(value), clean(), FP16)
        assert kind == "overflow"
        assert "loss scale 65536: expected now and then" in says

    def test_of_a_gradient_at_the_lowest_scale_is_not(self) -> None:
        on = dataclasses.replace(FP16, loss_scale=1.0)
        kind, says = cause(bad_backward(), clean(), on)
        assert kind == "overflow"
        assert "at loss scale 1, the lowest" in says
        assert "precision.policy=bf16" in says

    def test_of_an_activation_is_no_matter_of_the_scale(self) -> None:
        kind, says = cause(bad_forward(), clean(), FP16)
        assert kind == "overflow"
        assert "inf in the hidden of layer 1 (micro-batch 0)" in says
        assert "precision.policy=bf16" in says

    def test_of_an_fp8_product(self) -> None:
        on = dataclasses.replace(BF16, narrow_products=True)
        kind, says = cause(bad_forward("nan"), clean(), on)
        assert kind == "overflow"
        assert "fp8" in says

    def test_of_a_float16_image(self) -> None:
        s = bad_forward()
        spoil(s.parameters["blocks/w"], (2, 0), "inf")
        kind, says = cause(s, clean(), FP16)
        assert kind == "overflow"
        assert "blocks/w of layer 2" in says
        assert "6.55e+04" in says

    def test_of_the_sum_over_micro_batches_alone(self) -> None:
        s = clean()
        s.gradients["embed/t"].largest[:, 0, :] = 2e4
        on = dataclasses.replace(FP16, reduce_limit=65504.0)
        kind, says = cause(s, None, on)
        assert kind == "overflow"
        assert "8e+04" in says
        assert "precision.reduce=float32" in says

    def test_that_rounding_decides(self) -> None:
        assert cause(clean(6e4), None, FP16)[0] == "overflow"
        assert cause(clean(3e4), None, FP16)[0] == "vanished"

    @pytest.mark.parametrize(
        ("seen", "on", "kind"),
        [
            (bad_backward("nan"), FP16, "overflow"),
            (bad_forward("inf"), FP16, "overflow"),
            (bad_forward("nan"), FP16, "unknown"),
            (bad_forward("inf"), BF16, "unknown"),
        ],
    )
    def test_without_float32(self, seen: Statistics, on: Conditions, kind: str) -> None:
        got, says = cause(seen, None, on)
        assert got == kind
        assert "which did not run" in says


def test_nan_of_ordinary_magnitudes_in_bfloat16_only_is_rounding() -> None:
    assert cause(bad_forward("nan"), clean(), BF16)[0] == "rounding"
    large = bad_forward("inf")
    large.activations["query"].largest[0, 1] = 1e38
    assert cause(large, clean(), BF16)[0] == "overflow"


class TestFloat32Too:
    def test_all_rows_are_a_bug(self) -> None:
        kind, says = cause(bad_forward("nan"), bad_forward("nan"), FP16)
        assert kind == "bug"
        assert "nan in the hidden of layer 1" in says
        assert "no overflow" in says

    @pytest.mark.parametrize("on", [FP32, BF16, FP16])
    def test_some_rows_are_data(self, on: Conditions) -> None:
        s = bad_forward("nan", [4])
        kind, says = cause(s, s, on)
        assert kind == "data"
        assert "2 of 12 rows are affected (4, 10; all on data shard 1" in says

    def test_infinity_after_huge_numbers_is_divergence(self) -> None:
        s = bad_forward()
        s.activations["query"].largest[0] = 1e30
        assert cause(s, s, FP32)[0] == "diverged"
        assert cause(bad_forward(), bad_forward(), FP32)[0] == "bug"

    def test_a_gradient_whose_square_overflows_is_divergence(self) -> None:
        s = clean()
        s.gradients["blocks/w"].largest[0, 1, 0] = 1e20
        assert cause(s, s, FP32)[0] == "diverged"
        assert cause(s, s, dataclasses.replace(FP32, loss_scale=2.0**10))[0] == "vanished"


class TestParameters:
    def test_every_damaged_one_is_listed(self) -> None:
        s = bad_forward("nan")
        spoil(s.parameters["blocks/w"], (1, 1))
        spoil(s.parameters["blocks/w"], (3, slice(None)), "inf")
        spoil(s.parameters["head/n"], slice(None))
        found = attribute(s, s, FP16)
        assert found["cause"] == "parameters"
        assert [(p["tensor"], p["layer"], p["stage"]) for p in found["parameters"]] == [
            *(("blocks/w", 1, 0), ("blocks/w", 3, 1)),
            ("head/n", None, None),
        ]
        assert [p["data_shards"] for p in found["parameters"]] == [[1], [0, 1], [0, 1]]
        assert {p["entries"] for p in found["parameters"]} == {3}
        assert found["first"] == {"kind": "parameter", **found["parameters"][0]}
        assert "Restore the last checkpoint" in found["says"]

    def test_a_sound_master_points_at_memory(self) -> None:
        s = bad_forward("nan")
        spoil(s.parameters["embed/t"], (0, 0))
        kind, says = cause(s, clean(), FP16)
        assert kind == "parameters"
        assert "master it is made from is" in says

    def test_a_damaged_master_of_a_sound_image(self) -> None:
        master = clean()
        spoil(master.parameters["embed/t"], (0, 0))
        kind, says = cause(bad_forward("nan"), master, FP16)
        assert kind == "parameters"
        assert "float32 master is not finite" in says


def test_a_finite_run_has_vanished() -> None:
    found = attribute(clean(), None, FP16)
    assert (found["cause"], found["first"], found["rows"]) == ("vanished", None, None)
    assert "Suspect the hardware" in found["says"]
