"""The divisibility rules: each refusal names the values that work, and they do work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_train.config import Config, load
from spmd_train.errors import RequestError, nearest, nearest_divisors, nearest_multiples
from spmd_train.mesh import MeshShape
from spmd_train.shape_rules import sequence_parallel_on, validate_shape


def refusal(mesh: str, *overrides: str) -> str:
    with pytest.raises(RequestError) as caught:
        validate_shape(load(None, overrides), MeshShape.parse(mesh))
    return str(caught.value)


@pytest.mark.parametrize(
    ("mesh", "overrides", "expected"),
    [
        (
            "1x1x3",
            [],
            "stage=3 does not divide 4 layers; sizes that do: 1, 2, 4; "
            "nearest model.layers for stage=3: 3, 6.",
        ),
        (
            "1x3x1",
            ["model.heads=8", "model.ffn=384", "batch.sequence_length=129"],
            "model=3 does not divide 8 heads; sizes that do: 1, 2, 4, 8.",
        ),
        (
            "1x4x1",
            ["model.ffn=350"],
            "model=4 does not divide the ffn width 350; sizes that do: 1, 2, 5, 7, 10, 14; "
            "nearest model.ffn for model=4: 348, 352.",
        ),
        (
            "2x1x1",
            ["batch.global_size=30"],
            "batch.global_size=30 is not divisible by data=2 x batch.microbatches=4 = 8; "
            "nearest sizes that are: 24, 32; batch.microbatches that work for 30: 1, 3, 5, 15.",
        ),
        (
            "4x1x1",
            ["batch.global_size=30"],
            "nearest sizes that are: 16, 32; no number of micro-batches works, "
            "since data=4 does not divide 30.",
        ),
        ("4x1x1", ["batch.global_size=3"], "nearest sizes that are: 16;"),
        (
            "1x2x1",
            ["batch.sequence_length=127"],
            "batch.sequence_length=127 is not divisible by model=2, over which sequence "
            "parallelism splits it; nearest lengths that are: 126, 128, "
            "or set parallel.sequence_parallel=false.",
        ),
    ],
)
def test_each_rule_says_what_would_work(mesh: str, overrides: list[str], expected: str) -> None:
    message = refusal(mesh, *overrides)
    assert expected in message
    assert "\n" not in message  # this rule and no other


def test_all_broken_rules_come_in_one_message() -> None:
    message = refusal("3x3x3")
    assert len(message.splitlines()) == 5
    for start in ("stage=3", "model=3 does not divide 4", "model=3 does not divide the ffn"):
        assert any(line.startswith(start) for line in message.splitlines())


def test_kv_heads_and_vocabulary_need_not_divide() -> None:
    config = load(None, ["model.kv_heads=1", "model.vocab=257"])
    validate_shape(config, MeshShape(2, 4, 4))


@pytest.mark.parametrize(
    ("setting", "model", "on"),
    [
        ("auto", 1, False),
        ("auto", 2, True),
        ("true", 1, False),
        ("true", 2, True),
        ("false", 2, False),
    ],
)
def test_sequence_parallel_on(setting: str, model: int, on: bool) -> None:
    config = load(None, [f"parallel.sequence_parallel={setting}"])
    assert sequence_parallel_on(config, MeshShape(1, model, 1)) is on


def test_sequence_may_be_odd_where_it_is_not_split() -> None:
    odd = ["batch.sequence_length=127", "parallel.sequence_parallel=false"]
    validate_shape(load(None, odd), MeshShape(1, 2, 1))
    validate_shape(load(None, odd[:1]), MeshShape(4, 1, 1))


small = st.integers(1, 8)


@given(
    shape=st.builds(MeshShape, small, small, small),
    layers=st.integers(1, 16),
    heads=st.integers(1, 16),
    ffn=st.integers(1, 64),
    rows=st.integers(1, 64),
    microbatches=small,
    length=st.integers(1, 32),
)
def test_what_is_accepted_divides_and_what_divides_is_accepted(
    shape: MeshShape, layers: int, heads: int, ffn: int, rows: int, microbatches: int, length: int
) -> None:
    model = {"layers": layers, "heads": heads, "kv_heads": 1, "head_dim": 8, "ffn": ffn}
    batch = {"global_size": rows, "microbatches": microbatches, "sequence_length": length}
    config = Config.model_validate({"model": model, "batch": batch})
    divides = (
        layers % shape.stage == 0
        and heads % shape.model == 0
        and ffn % shape.model == 0
        and rows % (shape.data * microbatches) == 0
        and length % shape.model == 0
    )
    try:
        validate_shape(config, shape)
    except RequestError:
        assert not divides
    else:
        assert divides


@given(st.integers(1, 500), st.integers(1, 500))
def test_nearest_values(number: int, other: int) -> None:
    divisors = nearest_divisors(number, other)
    assert divisors == sorted(set(divisors))
    assert all(number % d == 0 for d in divisors)
    closest = min(abs(d - other) for d in range(1, number + 1) if number % d == 0)
    assert closest in {abs(d - other) for d in divisors}
    multiples = nearest_multiples(number, other)
    assert all(m > 0 and m % other == 0 and abs(m - number) <= other for m in multiples)
    assert (multiples == [number]) == (number % other == 0)


def test_nearest_name() -> None:
    assert nearest("Modle", ["data", "model"]) == "model"
    assert nearest("zzz", ["data", "model"]) is None
