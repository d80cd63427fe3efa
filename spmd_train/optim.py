"""The optimizer of a configuration, as an optax chain; gradients arrive clipped (step.py).

Update k = 1, 2, ... uses learning rate `schedule(k)`, so the first
update is never a no-op, and the logged rate is the applied one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from spmd_train.precision import Policy, with_fp32_master
from spmd_train.sharding import Layout, Leaf, tree_map_leaves

if TYPE_CHECKING:
    from spmd_train.config import OptimConfig


def learning_rate(config: OptimConfig, steps: int) -> optax.Schedule:
    """Learning rate of update `count + 1`: linear warm-up to `lr`, then decay until `steps`.

    lr * k / warmup_steps for k <= warmup_steps, then from `lr` to `lr * final_lr_fraction` at
    k = steps along the configured shape.
    """
    decay_steps = max(steps - config.warmup_steps, 1)
    end = config.lr * config.final_lr_fraction
    decay = {
        "cosine": optax.cosine_decay_schedule(config.lr, decay_steps, config.final_lr_fraction),
        "linear": optax.linear_schedule(config.lr, end, decay_steps),
        "constant": optax.constant_schedule(config.lr),
    }[config.schedule]
    if config.warmup_steps == 0:
        return lambda count: decay(count + 1)
    warmup = optax.linear_schedule(0.0, config.lr, config.warmup_steps)
    joined = optax.join_schedules([warmup, decay], [config.warmup_steps])
    return lambda count: joined(count + 1)


def kind(leaf: Leaf) -> str:
    """What a parameter is for weight decay, from its logical axes without `layers`.

    Never from `ndim`: a stacked bias is a matrix. A matrix maps from or to `embed`.
    """
    axes = tuple(a for a in leaf.axes if a != "layers")
    if "norm" in axes:
        return "norms"
    if axes[:1] == ("vocab",):
        return "embeddings"
    return "weights" if "embed" in axes and len(axes) > 1 else "biases"


def decay_mask(leaves: Any, exclude: tuple[str, ...]) -> Any:
    """True for every parameter that decays."""
    return tree_map_leaves(lambda leaf: kind(leaf) not in exclude, leaves)


def make_optimizer(
    config: OptimConfig, steps: int, leaves: Any, policy: Policy
) -> optax.GradientTransformationExtraArgs:
    """The whole chain, on FP32 masters where the parameters are not FP32 themselves."""
    adamw = optax.adamw(
        learning_rate(config, steps),
        b1=config.betas[0],
        b2=config.betas[1],
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decay_mask(leaves, config.decay_exclude),
    )
    if policy.has_master:
        return with_fp32_master(adamw, policy.master)
    return optax.with_extra_args_support(adamw)


def by_path(leaves: Any, shape: Callable[[Leaf], Any]) -> Callable[[Any, Any], Leaf | None]:
    """Find the parameter that an array of an optimizer's state belongs to.

    Optimizers name their moments differently but keep the parameters' tree inside them, so the
    parameter is the one whose whole path ends the array's path and whose shape it has.
    """
    flat = jax.tree_util.tree_flatten_with_path(leaves)[0]
    known = [(jax.tree_util.keystr(path), leaf) for path, leaf in flat]

    def find(path: Any, array_shape: Any) -> Leaf | None:
        name = jax.tree_util.keystr(path)
        hits = [
            (len(p), leaf) for p, leaf in known if name.endswith(p) and array_shape == shape(leaf)
        ]
        return max(hits, key=lambda hit: hit[0])[1] if hits else None

    return find


def optimizer_shardings(opt_state: Any, leaves: Any, layout: Layout) -> Any:
    """Sharding of every leaf of an abstract optax state; what is no parameter's is replicated."""
    leaf_of = by_path(leaves, lambda leaf: leaf.shape)

    def place(path: Any, x: Any) -> Any:
        leaf = leaf_of(path, x.shape)
        return layout.named(P() if leaf is None else layout.optimizer_spec(leaf))

    return jax.tree_util.tree_map_with_path(place, opt_state)


def select(condition: jax.Array, new: Any, old: Any) -> Any:
    """`new` where the scalar condition holds, else `old`, leaf by leaf: a skipped step's no-op."""
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)
