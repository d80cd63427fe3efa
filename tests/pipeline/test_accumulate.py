"""What sums of gradients lose, by number format: told by hand, and measured in the trainer."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import T0, assert_same_gradients, differences, run, train

from spmd_train.pipeline.accumulate import Accumulation, accumulation
from spmd_train.precision.policy import POLICIES
from spmd_train.sharding import Layout

BF16 = {"accumulate": jnp.bfloat16}
KINDS = {"float32": {}, "bfloat16": BF16, "compensated": {**BF16, "compensated": True}}


def kind(name: str) -> Accumulation:
    return accumulation(Layout(), replace(POLICIES["bf16"], **KINDS[name]), 1)


@pytest.mark.parametrize("layer", [None, 1])
@pytest.mark.parametrize(
    ("name", "expected"), [("float32", 2.0), ("bfloat16", 1.0), ("compensated", 2.0)]
)
def test_512_small_terms(name, expected, layer):
    """deepspeedai/DeepSpeed#1800: 512 times 2^-8 stops at 1.0 in bfloat16."""
    sums = kind(name)
    part = jnp.full(3, 2.0**-8, jnp.bfloat16)
    start = jnp.zeros((3,) if layer is None else (2, 3), sums.policy.accumulate)
    add = jax.jit(lambda total, n: sums.plus(total, part, n, layer))
    total = sums.start(start)
    for n in range(512):
        total = add(total, jnp.int32(n))
    got = sums.here(total)
    np.testing.assert_array_equal(got if layer is None else got[layer], np.full(3, expected))


def test_random_terms_against_float64():
    """1000 terms of either sign: bfloat16 is off by percents, compensated by its last bits."""
    terms = np.float32(np.random.default_rng(0).standard_normal((1000, 64)) + 0.5)
    want = terms.astype(np.float64).sum(0)
    errors = {}
    for name in KINDS:
        sums = kind(name)
        total = sums.start(jnp.zeros(64, sums.policy.accumulate))
        total, _ = jax.lax.scan(
            lambda t, x, sums=sums: (sums.plus(t, x, 0), None), total, jnp.asarray(terms)
        )
        errors[name] = np.abs(np.float64(sums.here(total)) - want).max() / np.abs(want).max()
    assert errors["float32"] < 1e-5
    assert errors["compensated"] < 2e-4
    assert errors["bfloat16"] > 1e-2


@pytest.mark.parametrize("mesh", ["1x1x1", "2x2x2"])
def test_in_the_trainer(mesh):
    """Four micro-batches' gradients: to float32's 3e-5 compensated, to 1e-3 and worse without."""
    sets = ("batch.microbatches=4", "precision.allow_unsafe=true", "precision.accumulate=bfloat16")
    want = train("1x1x1", base=T0).gradients
    compensated = train(mesh, *sets, "precision.compensated=true", base=T0, steps=1).gradients
    assert_same_gradients(compensated, want, 3e-5)
    plain = differences(train(mesh, *sets, base=T0, steps=1).gradients, want)
    assert max(plain.values()) > 1e-3


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_gradients_that_cross_data_in_16_bits(wire):
    """Each shard's is rounded once on the way and added up in float32: half the bytes."""
    sets = (f"precision.reduce={wire}", "precision.allow_unsafe=true")
    want = train("1x1x1", base=T0)
    got = train("4x1x1", *sets, base=T0, steps=1)
    off = differences(got.gradients, want.gradients)
    rounding = 2.0**-8 if wire == "bfloat16" else 2.0**-11
    assert rounding / 20 < max(off.values()) < 2 * rounding
    compiled = run("4x1x1", *sets, base=T0)._compiled.as_text()
    exchanges = [line for line in compiled.splitlines() if " all-to-all(" in line]
    assert exchanges
    if wire == "float16":  # XLA's CPU compiler widens bfloat16
        assert all("f16[" in line for line in exchanges)


def test_bfloat16_logits_lose_what_they_are_refused_for():
    """Only with allow_unsafe: the loss of an untrained model is off by bfloat16's steps."""
    sets = ("precision.logits=bfloat16", "precision.allow_unsafe=true")
    want = train("1x1x1", base=T0)
    got = train("1x1x1", *sets, base=T0, steps=1)
    assert 1e-7 < abs(got.losses[0] - want.losses[0]) < 1e-2
