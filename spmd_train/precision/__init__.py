"""Precision as data: the policy, and the optax wrappers that keep what must not be rounded."""

from spmd_train.precision.master import MasterState, master_of, with_fp32_master
from spmd_train.precision.policy import Policy, resolve_policy

__all__ = ["MasterState", "Policy", "master_of", "resolve_policy", "with_fp32_master"]
