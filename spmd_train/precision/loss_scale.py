"""Loss scaling as an optax wrapper: small fp16 gradients are scaled into its range and back.

float16 ends at 6e-8: gradients below become zero. So the loss is multiplied by a scale, and the
gradients are divided by it, in float32, before anything looks at them (Micikevicius et al. 2017).
Too high a scale overflows; the step is then skipped (`skip_bad_steps`) and the scale comes down.

The rule, in full. A step whose gradients are finite and which was applied is clean; one whose
gradients or loss are not finite is an overflow; one that was skipped as a spike or for want of
tokens is neither.

    overflow     clean = 0; hysteresis = max(hysteresis - 1, 0)
                 if hysteresis is 0: scale = max(scale * backoff, min)
    clean step   clean += 1
                 if clean == growth_interval: clean = 0, hysteresis is refilled,
                 scale = min(scale * factor, max)

Hysteresis is refilled by growth alone: refilled by every clean step (apex, DeepSpeed's
`consecutive_hysteresis`), an overflow on every second step never lowers the scale, and half of all
steps are skipped for ever.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spmd_train.precision.guard import APPLIED, NOT_FINITE, skip_bad_steps


class LossScaleState(NamedTuple):
    """State of `dynamic_loss_scale`.

    Attributes:
        scale: float32, what the next step's loss is to be multiplied by.
        clean: int32, clean steps since the scale last moved.
        hysteresis: int32, overflows that are still forgiven, and the one that is not.
        inner: `SkipState` of the wrapped optimizer.
    """

    scale: Any
    clean: Any
    hysteresis: Any
    inner: Any


def dynamic_loss_scale(
    inner: optax.GradientTransformation,
    *,
    initial: float = 2.0**16,
    growth_interval: int | None = 2000,
    factor: float = 2.0,
    backoff: float = 0.5,
    hysteresis: int = 1,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
    **guard: Any,
) -> optax.GradientTransformationExtraArgs:
    """Unscale, skip what overflowed, run `inner` on the rest, move the scale.

        loss, grads = jax.value_and_grad(lambda p: loss_of(p) * scale_of(opt_state))(params)
        updates, opt_state = tx.update(grads, opt_state, params)

    Args:
        inner: any optax transformation; it sees unscaled, finite, float32 gradients only.
        growth_interval: clean steps before the scale grows; None keeps it where it is (a static
            scale): overflows are skipped all the same.
        guard: arguments of `skip_bad_steps`, which is what decides on a step.
    """
    guarded = skip_bad_steps(inner, **guard)

    def init(params: Any) -> LossScaleState:
        return LossScaleState(
            jnp.float32(initial), jnp.int32(0), jnp.int32(hysteresis), guarded.init(params)
        )

    def update(
        grads: Any,
        state: LossScaleState,
        params: Any = None,
        *,
        grad_norm: Any = None,
        **extra: Any,
    ) -> tuple[Any, LossScaleState]:
        unscale = 1.0 / state.scale
        if grad_norm is not None:  # of the gradients as they came
            extra["grad_norm"] = grad_norm * unscale
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) * unscale, grads)
        updates, judged = guarded.update(grads, state.inner, params, **extra)
        if growth_interval is None:
            return updates, state._replace(inner=judged)
        overflow, applied = judged.verdict == NOT_FINITE, judged.verdict == APPLIED
        left = jnp.maximum(state.hysteresis - overflow, 0)
        clean = jnp.where(overflow, 0, state.clean + applied)
        grows = applied & (clean == growth_interval)
        scale = jnp.where(
            overflow & (left == 0), jnp.maximum(state.scale * backoff, min_scale), state.scale
        )
        return updates, LossScaleState(
            scale=jnp.where(grows, jnp.minimum(scale * factor, max_scale), scale),
            clean=jnp.where(grows, 0, clean),
            hysteresis=jnp.where(grows, hysteresis, left),
            inner=judged,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def scale_of(opt_state: Any) -> jax.Array:
    """What to multiply the loss by: the state's scale, or 1 where nothing is scaled."""
    return opt_state.scale if isinstance(opt_state, LossScaleState) else jnp.float32(1)
