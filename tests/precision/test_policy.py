"""Policies: what each name means, and what is refused with its reason."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from spmd_train.config import load
from spmd_train.errors import RequestError
from spmd_train.precision import Policy, resolve_policy


def policy(*sets: str, platform: str = "cpu") -> Policy:
    config = load(None, [f"precision.{s}" if "optim" not in s else s for s in sets])
    return resolve_policy(config.precision, platform, config.optim.betas[0])


@pytest.mark.parametrize(
    ("name", "compute", "fp8", "loss_scale"),
    [
        ("fp32", "float32", None, "none"),
        ("bf16", "bfloat16", None, "none"),
        ("fp16", "float16", None, "dynamic"),
        ("fp8", "bfloat16", "current", "none"),
    ],
)
def test_named_policies(name, compute, fp8, loss_scale):
    found = policy(f"policy={name}").described()
    high = dict.fromkeys(("accumulate", "reduce", "master", "logits", "moments"), "float32")
    assert found == {
        "name": name, "compute": compute, "fp8": fp8, "loss_scale": loss_scale,
        "compensated": False, **high,
    }  # fmt: skip


def test_auto_follows_the_platform():
    assert [policy(platform=p).name for p in ("cpu", "gpu", "tpu")] == ["fp32", "bf16", "bf16"]


def test_refining_is_named():
    refined = policy("policy=bf16", "compute=float16")
    assert refined.name == "bf16+compute=float16"
    assert refined.loss_scale == "dynamic"  # follows what is computed in
    assert policy("policy=fp32", "compute=float32").name == "fp32"
    assert "compute float16" in str(refined)


@pytest.mark.parametrize(
    ("sets", "reason"),
    [
        (["master=bfloat16"], "updates below 1/256 of a weight round away"),
        (["accumulate=bfloat16"], "below 1/256 of the sum so far is lost"),
        (["policy=fp16", "loss_scale.rule=none"], "gradients below 6e-8 become zero"),
        (["reduce=float16"], "precision.reduce=float16 without a loss scale"),
        (["reduce=bfloat16"], "rounded to 8 bits before the sum"),
        (["logits=bfloat16"], "in steps of 1/16 near 12"),
        (["moments=bfloat16", "optim.betas=[0.995, 0.999]"], "a decay of 0.995"),
    ],
)
def test_silent_losses_are_refused(sets, reason):
    with pytest.raises(RequestError) as caught:
        policy(*sets)
    assert reason in str(caught.value)
    assert "precision.allow_unsafe=true" in str(caught.value)
    assert policy(*sets, "allow_unsafe=true")


@pytest.mark.parametrize(
    "sets",
    [
        ["accumulate=bfloat16", "compensated=true"],
        ["policy=fp16", "loss_scale.rule=static"],
        ["policy=fp16", "reduce=float16"],
        ["moments=bfloat16"],  # DeepSeek-V3 trains so
        ["master=float64"],
    ],
)
def test_sound_combinations_are_not(sets):
    assert policy(*sets)


def test_every_reason_is_given_at_once():
    with pytest.raises(RequestError) as caught:
        policy("master=bfloat16", "logits=bfloat16")
    assert len(str(caught.value).splitlines()) == 2


def test_master_only_where_it_differs():
    assert not policy("policy=fp32").has_master
    assert policy("policy=fp32", "master=float64").has_master
    assert jnp.dtype(policy("policy=fp8").master) == jnp.float32
