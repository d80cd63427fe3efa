"""The precision policy: which number format each quantity of a step has.

```
master (FP32) --cast--> params --matmul--> activations --> logits (FP32) --> loss (FP32)
   ^                                  compute                                     | x scale
   '--- update <-- moments (FP32) <-- gradients: accumulate, reduce (FP32) <------'
```

A policy is the only place where a dtype is chosen; the model itself never calls `astype` on a
parameter. A combination that loses information without a word is refused, each with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from spmd_train.errors import RequestError

if TYPE_CHECKING:
    from spmd_train.config_groups import PrecisionConfig

DType = Any


@dataclass(frozen=True)
class Policy:
    """Number formats of one training step. Softmax and loss are float32 in every policy.

    Attributes:
        name: what a run prints and records.
        compute: the parameters the forward pass reads, and the activations.
        fp8: scaling of the block's fp8 matrix products, "current" or "delayed"; None computes them
            in `compute`.
        accumulate: gradient accumulators over micro-batches.
        compensated: accumulators keep what each addition rounded away (Kahan 1965).
        reduce: gradients on their way between data shards; summed in float32 on arrival.
        master: the parameters the optimizer updates.
        logits: what the head hands to the softmax.
        moments: the optimizer's first moment; the second follows the master.
        loss_scale: "none", "static" or "dynamic".
    """

    name: str
    compute: DType
    fp8: str | None = None
    accumulate: DType = jnp.float32
    compensated: bool = False
    reduce: DType = jnp.float32
    master: DType = jnp.float32
    logits: DType = jnp.float32
    moments: DType = jnp.float32
    loss_scale: str = "none"

    @property
    def has_master(self) -> bool:
        """Whether the optimizer keeps its own copy; with equal dtypes the params are the master."""
        return jnp.dtype(self.compute) != jnp.dtype(self.master)

    def described(self) -> dict[str, Any]:
        """As a run records it: names of dtypes."""
        return {k: v if _plain(v) else jnp.dtype(v).name for k, v in vars(self).items()}

    def __str__(self) -> str:
        """One line for a person, quantities of one dtype together."""
        by_dtype: dict[str, list[str]] = {}
        for key in _DTYPES[1:]:
            by_dtype.setdefault(jnp.dtype(getattr(self, key)).name, []).append(key)
        products = f", {self.fp8} fp8 products" if self.fp8 else ""
        parts = [f"compute {jnp.dtype(self.compute).name}{products}"]
        parts += [f"{', '.join(keys)} {dtype}" for dtype, keys in by_dtype.items()]
        parts += ["compensated sums"] * self.compensated
        parts += [f"{self.loss_scale} loss scale"] * (self.loss_scale != "none")
        return f"{self.name}: {'; '.join(parts)}"


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, bool))


POLICIES = {
    "fp32": Policy("fp32", compute=jnp.float32),
    "bf16": Policy("bf16", compute=jnp.bfloat16),
    "fp16": Policy("fp16", compute=jnp.float16, loss_scale="dynamic"),
    "fp8": Policy("fp8", compute=jnp.bfloat16, fp8="current"),
}

# bfloat16 is emulated on CPU (slower than float32), native on accelerators.
DEFAULT_POLICY = {"cpu": "fp32", "gpu": "bf16", "tpu": "bf16"}

_DTYPES = ("compute", "accumulate", "reduce", "master", "logits", "moments")


def resolve_policy(
    config: PrecisionConfig, platform: str, first_moment_decay: float = 0.9
) -> Policy:
    """The policy of a run on `platform` ("cpu", "gpu", "tpu"): named, then refined by key.

    Raises:
        RequestError: the combination loses information silently, and `allow_unsafe` is not set.
    """
    policy = POLICIES[DEFAULT_POLICY[platform] if config.policy == "auto" else config.policy]
    refined: dict[str, Any] = {
        key: jnp.dtype(getattr(config, key)) for key in _DTYPES if getattr(config, key) != "auto"
    }
    changed = {k: v for k, v in refined.items() if v != jnp.dtype(getattr(policy, k))}
    compute = jnp.dtype(changed.get("compute", policy.compute))
    rule = config.loss_scale.rule
    if rule == "auto":
        rule = "dynamic" if compute == jnp.float16 else "none"
    policy = replace(
        policy,
        **changed,
        name="+".join([policy.name, *(f"{k}={v.name}" for k, v in changed.items())]),
        fp8=config.fp8_scaling if policy.fp8 else None,
        compensated=config.compensated,
        loss_scale=rule,
    )
    if not config.allow_unsafe and (reasons := list(_losses(policy, first_moment_decay))):
        raise RequestError(
            "\n".join(f"{r}; precision.allow_unsafe=true accepts it." for r in reasons)
        )
    return policy


def _losses(policy: Policy, first_moment_decay: float) -> Iterator[str]:
    """What a policy would lose without a word, one sentence a combination."""
    if jnp.finfo(policy.master).bits < 32:
        yield (
            f"precision.master={jnp.dtype(policy.master).name}: updates below 1/256 of a weight "
            "round away, and training stalls; use float32"
        )
    if jnp.finfo(policy.accumulate).bits < 32 and not policy.compensated:
        yield (
            f"precision.accumulate={jnp.dtype(policy.accumulate).name}: a micro-batch's gradient "
            "below 1/256 of the sum so far is lost; use float32, or precision.compensated=true"
        )
    if jnp.dtype(policy.compute) == jnp.float16 and policy.loss_scale == "none":
        yield (
            "precision.loss_scale.rule=none with float16 compute: gradients below 6e-8 become "
            "zero; use dynamic, or compute in bfloat16"
        )
    if jnp.dtype(policy.reduce) == jnp.float16 and policy.loss_scale == "none":
        yield (
            "precision.reduce=float16 without a loss scale: gradients below 6e-8 become zero "
            "between data shards; use float32, or precision.loss_scale.rule=dynamic"
        )
    if jnp.dtype(policy.reduce) == jnp.bfloat16:
        yield (
            "precision.reduce=bfloat16: every data shard's gradient is rounded to 8 bits before "
            "the sum; use float32"
        )
    if jnp.finfo(policy.logits).bits < 32:
        yield (
            f"precision.logits={jnp.dtype(policy.logits).name}: the loss of a token comes in steps "
            "of 1/16 near 12, and is 0 where it is small; use float32"
        )
    if jnp.finfo(policy.moments).bits < 32 and 1 - first_moment_decay < 2**-7:
        yield (
            f"precision.moments={jnp.dtype(policy.moments).name} with a decay of "
            f"{first_moment_decay:g} (optim.betas): what a step adds to the moment rounds away; "
            "use float32, or a decay of at most 0.99"
        )
