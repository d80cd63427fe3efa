"""Every mesh, ZeRO level, schedule and option against 1x1x1 with one micro-batch and ZeRO 0.

The full product is thousands of compilations, so a greedy all-pairs cover: every two values of two
different factors meet in some run. Its first ten rows, one for each factorisation of 8, are the
default set; the whole cover runs with `-m slow`. Tolerances: docs/design.md.
"""

from __future__ import annotations

import itertools
import random

import pytest
from helpers import assert_same_gradients, assert_same_training, autodiff, configure, train

MESHES = [f"{d}x{m}x{8 // d // m}" for d in (1, 2, 4, 8) for m in (1, 2, 4, 8) if 8 % (d * m) == 0]

# The model's own choices, for which there is one reference each; any two of them meet.
MODELS = {
    "tied, 8 KV heads, vocabulary 64": ("model.tied=true",),
    "tied, 2 KV heads, vocabulary 61": ("model.tied=true", "model.kv_heads=2", "model.vocab=61"),
    "untied, 8 KV heads, vocabulary 61": ("model.vocab=61", "model.qkv_bias=true"),
    "untied, 2 KV heads, vocabulary 64": (
        *("model.kv_heads=2", "model.qk_norm=true"),
        *("model.z_loss=1e-3", "model.logit_softcap=5.0"),
    ),
}

FACTORS: dict[str, list[object]] = {
    "mesh": [*MESHES, "1x1x1"],
    "model": list(MODELS),
    "parallel.zero": [0, 1, 2, 3],
    "pipeline.schedule": ["1f1b", "gpipe"],
    "batch.microbatches": [1, 2, 4, 8],
    "pipeline.remat": ["none", "dots", "full", "stage"],
    "pipeline.idle": ["skip", "masked"],
    "parallel.sequence_parallel": ["true", "false"],
}

Combination = tuple[object, ...]


def pairs(row: Combination) -> set[tuple[int, object, int, object]]:
    numbered = enumerate(row)
    return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(numbered, 2)}


def cover() -> list[Combination]:
    """Greedy all pairs: each row is the best of a few hundred random ones, from a fixed seed.

    The first rows take one mesh each, so that a short prefix sees them all.
    """
    draw = random.Random(0)
    names, values = list(FACTORS), list(FACTORS.values())
    missing = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(names)), 2)
        for a in values[i]
        for b in values[j]
    }
    rows: list[Combination] = []
    while missing:
        if len(rows) < len(MESHES):
            start = [(0, MESHES[len(rows)])]
        else:  # grow from a pair that is still missing, or the last few take for ever
            i, a, j, b = min(missing, key=repr)
            start = [(i, a), (j, b)]

        def candidate(start=start) -> Combination:
            row = [draw.choice(v) for v in values]
            for i, a in start:
                row[i] = a
            return tuple(row)

        best = max((candidate() for _ in range(300)), key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        rows.append(best)
    return rows


COVER = cover()
DEFAULT, SLOW = COVER[: len(MESHES)], COVER[len(MESHES) :]


def label(row: Combination) -> str:
    return "-".join(str(value).replace(" ", "_") for value in row)


def check(row: Combination) -> None:
    choice = dict(zip(FACTORS, row, strict=True))
    mesh, model = str(choice.pop("mesh")), MODELS[str(choice.pop("model"))]
    got = train(mesh, *model, *(f"{key}={value}" for key, value in choice.items()))
    assert_same_training(got, train("1x1x1", *model, "parallel.zero=0"))


def test_the_cover_meets_every_pair():
    wanted = sum(len(a) * len(b) for a, b in itertools.combinations(map(list, FACTORS.values()), 2))
    assert len(set().union(*map(pairs, COVER))) == wanted
    assert len(COVER) <= 60
    for position, values in enumerate(FACTORS.values()):
        met = {row[position] for row in DEFAULT}
        assert met >= set(values) - {"1x1x1"}, "the default set leaves a value out"


@pytest.mark.parametrize("row", DEFAULT, ids=label)
def test_training_equals_one_device(row):
    check(row)


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW, ids=label)
def test_training_equals_one_device_all_pairs(row):
    check(row)


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_the_one_device_run_equals_autodiff(model):
    """The reference itself, against `jax.grad` through the plain forward pass."""
    got, want = train("1x1x1", *model, "parallel.zero=0"), autodiff(configure("1x1x1", *model))
    assert got.tokens[0] == want.tokens[0]
    assert abs(got.losses[0] - want.losses[0]) <= 1e-6 * want.losses[0]
    assert abs(got.z_losses[0] - want.z_losses[0]) <= 1e-5 * want.z_losses[0]
    assert_same_gradients(got.gradients, want.gradients)
    assert abs(got.grad_norms[0] - want.grad_norms[0]) <= 1e-5 * want.grad_norms[0]
