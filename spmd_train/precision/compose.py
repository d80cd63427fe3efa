"""The wrappers in their one right order, and the optimizer state they make taken apart.

```
gradients (scaled) --> unscale --> norm, finite check --> clip --> optimizer --> FP32 master
                       dynamic_loss_scale  skip_bad_steps     |--- with_fp32_master ---|
```

Clipping before unscaling would clip every step by about the scale; a finite check after clipping
would see what the clip made of an infinity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import optax

from spmd_train.precision.guard import SkipState, SpikeRule, clip_by_grad_norm, skip_bad_steps
from spmd_train.precision.loss_scale import LossScaleState, dynamic_loss_scale
from spmd_train.precision.master import MasterState, with_fp32_master
from spmd_train.precision.policy import Policy

if TYPE_CHECKING:
    from spmd_train.config_groups import GuardConfig, LossScaleConfig


def compose(
    optimizer: optax.GradientTransformation,
    policy: Policy,
    scale: LossScaleConfig,
    guard: GuardConfig,
    clip_norm: float | None,
) -> optax.GradientTransformationExtraArgs:
    """Everything between a step's gradients and its new parameters, around an update rule."""
    tx = optimizer
    if jnp.finfo(policy.master).bits < 32:  # unsafe: then the moments are no better either
        tx = optax.chain(optax.stateless(lambda g, _: optax.tree.cast(g, policy.master)), tx)
    if clip_norm is not None:
        tx = optax.chain(clip_by_grad_norm(clip_norm), tx)
    if policy.has_master:
        tx = with_fp32_master(tx, policy.master)
    spike = None
    if guard.spike_sigma is not None:
        spike = SpikeRule(guard.spike_sigma, guard.spike_window)
    if policy.loss_scale == "none":
        return skip_bad_steps(tx, spike=spike)
    return dynamic_loss_scale(
        tx,
        initial=scale.initial,
        growth_interval=scale.growth_interval if policy.loss_scale == "dynamic" else None,
        factor=scale.factor,
        backoff=scale.backoff,
        hysteresis=scale.hysteresis,
        min_scale=scale.min,
        max_scale=scale.max,
        spike=spike,
    )


def guard_of(opt_state: Any) -> SkipState:
    """The state of `skip_bad_steps` inside a composed optimizer's."""
    return opt_state.inner if isinstance(opt_state, LossScaleState) else opt_state


def master_of(opt_state: Any) -> Any | None:
    """The master parameters inside an optimizer state, or None where the params are the master."""
    while isinstance(opt_state, (LossScaleState, SkipState)):
        opt_state = opt_state.inner
    return opt_state.master if isinstance(opt_state, MasterState) else None


def take_apart(opt_state: Any, params: Any) -> dict[str, Any]:
    """A composed optimizer's state as a checkpoint holds it, the same tree for every policy.

    Without loss scaling the scale is stored as 0, which no scale ever is.
    """
    guard = guard_of(opt_state)
    scale = {"scale": jnp.float32(0), "clean": jnp.int32(0), "hysteresis": jnp.int32(0)}
    if isinstance(opt_state, LossScaleState):
        scale = {k: getattr(opt_state, k) for k in scale}
    master = master_of(opt_state)
    return {
        "params": params if master is None else master,
        "optimizer": guard.inner if master is None else guard.inner.inner,
        "loss_scale": scale,
        "guard": {k: v for k, v in guard._asdict().items() if k != "inner"},
    }


def put_together(saved: dict[str, Any], fresh: Any) -> Any:
    """The optimizer state that `take_apart` took apart, under the policy of `fresh`.

    Args:
        fresh: a new state of the same optimizer; gives the scale where none was saved.
    """
    inner = saved["optimizer"]
    if isinstance(guard_of(fresh).inner, MasterState):
        inner = MasterState(saved["params"], inner)
    state: Any = SkipState(**saved["guard"], inner=inner)
    if isinstance(fresh, LossScaleState):
        known = saved["loss_scale"]["scale"] > 0
        kept = {k: jnp.where(known, v, getattr(fresh, k)) for k, v in saved["loss_scale"].items()}
        state = LossScaleState(**kept, inner=state)
    return state
