"""Bad steps are skipped whole: an optax wrapper, usable with any optax optimizer.

A step is bad if its gradient norm or loss is not finite or, with a `SpikeRule`, far above what was
seen lately. A bad step changes nothing that the inner optimizer keeps: no moment, no count, no
schedule, no weight. `optax.apply_if_finite` lets the update through once its budget of errors is
used up, which destroys the weights; this wrapper never does. It counts, and whoever runs the loop
stops (`SkipState.consecutive`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

# What became of a step (`SkipState.verdict`).
APPLIED, EMPTY, NOT_FINITE, SPIKE = range(4)


@dataclass(frozen=True)
class SpikeRule:
    """Skip a loss or gradient norm more than `sigma` deviations above its window's mean.

    OLMo-core's rule (`SkipStepOptimizer`): 6 deviations, the last 128 steps, unbiased deviation,
    in force once half a window was seen. Spikes enter the window too, so that a level which has
    really changed is accepted in time.
    """

    sigma: float = 6.0
    window: int = 128


class Window(NamedTuple):
    """The last finite losses and gradient norms, [window] float32 rings, and how many were seen."""

    losses: Any
    norms: Any
    seen: Any


class SkipState(NamedTuple):
    """State of `skip_bad_steps`.

    Attributes:
        consecutive: int32, bad steps in a row until now. total: int32, bad steps of the run.
        grad_norm: float32, of the last step, before any clipping.
        verdict: int32, APPLIED, EMPTY, NOT_FINITE or SPIKE: what became of the last step.
        window: what the spike rule looks at; () without one.
        inner: the inner optimizer's state.
    """

    consecutive: Any
    total: Any
    grad_norm: Any
    verdict: Any
    window: Any
    inner: Any


def float32_norm(tree: Any) -> jax.Array:
    """Global L2 norm in float32; not finite if any entry is not."""
    return optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), tree))


def skip_bad_steps(
    inner: optax.GradientTransformation,
    *,
    spike: SpikeRule | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Run `inner` on good steps only.

    `update(grads, state, params, value=loss, empty=...)`: the loss is looked at if it is given; an
    `empty` step (no supervised token) changes nothing at all and is no bad one; a caller that has
    the gradients' global norm gives it as `grad_norm`. The updates of a skipped step are -0.0,
    which leaves every bit of the parameters as it is.

    Args:
        inner: any optax transformation; gets the norm as the extra argument `grad_norm`.
        spike: also skip outliers.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> SkipState:
        window: Any = ()
        if spike is not None:
            losses, norms = jnp.zeros((2, spike.window), jnp.float32)  # no buffer twice: donatable
            window = Window(losses, norms, jnp.int32(0))
        return SkipState(
            jnp.int32(0), jnp.int32(0), jnp.float32(0), jnp.int32(0), window, inner.init(params)
        )

    def update(
        grads: Any,
        state: SkipState,
        params: Any = None,
        *,
        value: Any = None,
        empty: Any = False,
        grad_norm: Any = None,
        **extra: Any,
    ) -> tuple[Any, SkipState]:
        grad_norm = float32_norm(grads) if grad_norm is None else grad_norm
        loss = jnp.float32(0) if value is None else jnp.asarray(value, jnp.float32)
        # An infinite norm of finite entries is as bad: clipping by it would make the update zero.
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
        window, spiked = state.window, jnp.bool_(False)
        if spike is not None:
            spiked = finite & _is_spike(spike, window, loss, grad_norm)
            window = _push(window, loss, grad_norm, finite & ~jnp.asarray(empty))
        verdict = jnp.where(
            empty, EMPTY, jnp.where(~finite, NOT_FINITE, jnp.where(spiked, SPIKE, APPLIED))
        ).astype(jnp.int32)
        applies = verdict == APPLIED
        bad = (verdict == NOT_FINITE) | (verdict == SPIKE)
        updates, new_inner = inner.update(
            grads, state.inner, params, value=value, grad_norm=grad_norm, **extra
        )
        return jax.tree.map(
            lambda u: jnp.where(applies, u, -jnp.zeros_like(u)), updates
        ), SkipState(
            consecutive=jnp.where(
                empty, state.consecutive, jnp.where(bad, state.consecutive + 1, 0)
            ),
            total=state.total + bad,
            grad_norm=grad_norm,
            verdict=verdict,
            window=window,
            inner=select(applies, new_inner, state.inner),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def select(condition: jax.Array, new: Any, old: Any) -> Any:
    """`new` where the scalar condition holds, else `old`, leaf by leaf: a skipped step's no-op."""
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def clip_by_grad_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Scale gradients down to `max_norm`, by the norm that `skip_bad_steps` has taken.

    `optax.clip_by_global_norm` would take it again, in an order of its own.
    """

    def update(
        grads: Any, state: Any, params: Any = None, *, grad_norm: jax.Array, **extra: Any
    ) -> tuple[Any, Any]:
        factor = max_norm / jnp.maximum(grad_norm, max_norm)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _is_spike(rule: SpikeRule, window: Window, loss: Any, grad_norm: Any) -> jax.Array:
    count = jnp.minimum(window.seen, rule.window)
    valid = jnp.arange(rule.window) < count

    def far(values: jax.Array, latest: jax.Array) -> jax.Array:
        mean = jnp.sum(jnp.where(valid, values, 0.0)) / jnp.maximum(count, 1)
        square = jnp.sum(jnp.where(valid, (values - mean) ** 2, 0.0)) / jnp.maximum(count - 1, 1)
        return latest - mean > rule.sigma * jnp.sqrt(square)

    active = count >= max(2, rule.window // 2)
    return active & (far(window.losses, loss) | far(window.norms, grad_norm))


def _push(window: Window, loss: Any, grad_norm: Any, counts: jax.Array) -> Window:
    at = window.seen % window.losses.shape[0]

    def put(ring: jax.Array, x: jax.Array) -> jax.Array:
        return ring.at[at].set(jnp.where(counts, x, ring[at]))

    return Window(put(window.losses, loss), put(window.norms, grad_norm), window.seen + counts)
