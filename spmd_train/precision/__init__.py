"""Precision as data: the policy, and optax wrappers that keep what must not be lost.

`with_fp32_master`, `skip_bad_steps` and `dynamic_loss_scale` work with any optax optimizer on their
own; `compose` is the order in which the trainer uses them.
"""

from spmd_train.precision.compose import compose, guard_of, master_of, put_together, take_apart
from spmd_train.precision.guard import SkipState, SpikeRule, clip_by_grad_norm, skip_bad_steps
from spmd_train.precision.loss_scale import LossScaleState, dynamic_loss_scale, scale_of
from spmd_train.precision.master import MasterState, with_fp32_master
from spmd_train.precision.policy import Policy, resolve_policy

__all__ = [
    "LossScaleState",
    "MasterState",
    "Policy",
    "SkipState",
    "SpikeRule",
    "clip_by_grad_norm",
    "compose",
    "dynamic_loss_scale",
    "guard_of",
    "master_of",
    "put_together",
    "resolve_policy",
    "scale_of",
    "skip_bad_steps",
    "take_apart",
    "with_fp32_master",
]
