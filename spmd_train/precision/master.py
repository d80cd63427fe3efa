"""FP32 master parameters as an optax wrapper, usable with any optax optimizer.

bfloat16 has 8 bits of mantissa: a step of 1e-3 on a weight of 1.0 rounds away and the weight never
moves. The wrapper keeps an FP32 copy that receives every update; the parameters the model computes
with are its image in the compute dtype, `master.astype(compute)`, refreshed each step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class MasterState(NamedTuple):
    """State of `with_fp32_master`: the master parameters and the inner optimizer's state."""

    master: Any
    inner: Any


def with_fp32_master(
    inner: optax.GradientTransformation, dtype: Any = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """Run `inner` on an FP32 master copy of low-precision parameters.

    The returned updates are the FP32 difference between the new image and the parameters, so
    `optax.apply_updates` gives the new parameters up to one rounding; `master_of(state)` cast to
    the parameters' dtype gives them exactly, which is what the trainer stores.

    Args:
        inner: any optax transformation; it sees FP32 gradients and FP32 parameters only.
        dtype: dtype of the master copy.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> MasterState:
        master = jax.tree.map(lambda p: p.astype(dtype), params)
        return MasterState(master, inner.init(master))

    def update(
        grads: Any, state: MasterState, params: Any = None, **extra: Any
    ) -> tuple[Any, MasterState]:
        if params is None:
            raise ValueError("with_fp32_master needs the parameters: update(grads, state, params)")
        grads = jax.tree.map(lambda g: g.astype(dtype), grads)
        updates, new_inner = inner.update(grads, state.inner, state.master, **extra)
        master = optax.apply_updates(state.master, updates)
        image = jax.tree.map(lambda m, p: m.astype(p.dtype), master, params)
        steps = jax.tree.map(lambda i, p: i.astype(dtype) - p.astype(dtype), image, params)
        return steps, MasterState(master, new_inner)

    return optax.GradientTransformationExtraArgs(init, update)
