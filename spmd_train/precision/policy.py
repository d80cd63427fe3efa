"""The precision policy: which dtype each quantity of a step has.

```
master (FP32) --cast--> params --matmul--> activations --> logits (FP32) --> loss (FP32)
   ^                                  compute                                     |
   '--- update <-- moments (FP32) <-- gradients: accumulate, reduce (FP32) <------'
```

A policy is the only place where a dtype is chosen; the model itself never calls `astype` on a
parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

if TYPE_CHECKING:
    from spmd_train.config import PrecisionConfig

DType = Any


@dataclass(frozen=True)
class Policy:
    """Dtypes of one training step.

    Attributes:
        name: what a run prints and records.
        compute: the parameters the forward pass reads, and the activations.
        accumulate: gradient accumulators over micro-batches.
        master: the parameters the optimizer updates; its moments follow them.

    Sums across devices, logits, softmax and loss are float32 in every policy.
    """

    name: str
    compute: DType
    accumulate: DType = jnp.float32
    master: DType = jnp.float32

    @property
    def has_master(self) -> bool:
        """Whether the optimizer keeps its own copy; with equal dtypes the params are the master."""
        return jnp.dtype(self.compute) != jnp.dtype(self.master)

    def __str__(self) -> str:
        names = {k: jnp.dtype(v).name for k, v in vars(self).items() if k != "name"}
        return f"{self.name} ({', '.join(f'{k} {v}' for k, v in names.items())})"


POLICIES = {
    "fp32": Policy("fp32", compute=jnp.float32),
    "bf16": Policy("bf16", compute=jnp.bfloat16),
}

# bfloat16 is emulated on CPU (slower than float32), native on accelerators.
DEFAULT_POLICY = {"cpu": "fp32", "gpu": "bf16", "tpu": "bf16"}


def resolve_policy(config: PrecisionConfig, platform: str) -> Policy:
    """The policy of a run on `platform` ("cpu", "gpu", "tpu"): named, then refined by key."""
    name = DEFAULT_POLICY[platform] if config.policy == "auto" else config.policy
    policy = POLICIES[name]
    if config.compute == "auto" or jnp.dtype(config.compute) == jnp.dtype(policy.compute):
        return policy
    return replace(policy, name=f"{name}+{config.compute}", compute=jnp.dtype(config.compute))
