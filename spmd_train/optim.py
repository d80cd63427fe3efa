"""The update rule of a configuration as an optax chain; `precision.compose` guards and clips it.

```
gradient --clip--> direction --> + weight_decay * parameter --> * -schedule(k) --> update k
                   Adam, Lion, Muon or Adafactor
```

The optimizers differ in the direction only. Update k = 1, 2, ... uses learning rate `schedule(k)`,
so the first update is never a no-op, and the logged rate is the applied one. What an optimizer does
to a tensor as a whole (Muon, Adafactor), it does to one layer's, never to the stack of all layers,
and to the model's own rows, never to padding: so it does the same on every mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from spmd_train.precision import Policy
from spmd_train.sharding import Layout, Leaf, tree_map_leaves

if TYPE_CHECKING:
    from spmd_train.config_groups import OptimConfig


def learning_rate(config: OptimConfig, steps: int) -> optax.Schedule:
    """Learning rate of update `count + 1`: linear warm-up to `lr`, then decay until `steps`.

    lr * k / warmup_steps for k <= warmup_steps, then from `lr` to `lr * final_lr_fraction` at
    k = steps along the configured shape. `wsd` (warm-up, stable, decay: Hu et al. 2024, MiniCPM)
    stays at `lr` and falls linearly in the last `decay_fraction` of all steps only.
    """
    decay_steps = max(steps - config.warmup_steps, 1)
    end = config.lr * config.final_lr_fraction
    constant = optax.constant_schedule(config.lr)
    final_steps = min(max(round(config.decay_fraction * steps), 1), decay_steps)
    final = optax.linear_schedule(config.lr, end, final_steps)
    decay = {
        "cosine": optax.cosine_decay_schedule(config.lr, decay_steps, config.final_lr_fraction),
        "linear": optax.linear_schedule(config.lr, end, decay_steps),
        "constant": constant,
        "wsd": optax.join_schedules([constant, final], [decay_steps - final_steps]),
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


def first_moment_decay(config: OptimConfig) -> float:
    """How slowly the first moment changes; Lion's only moment decays with the second rate."""
    return config.betas[1 if config.name == "lion" else 0]


def base_optimizer(
    config: OptimConfig, steps: int, leaves: Any, policy: Policy
) -> optax.GradientTransformation:
    """The optimizer alone: it sees clipped gradients and the parameters that it updates."""
    b1, b2 = config.betas
    adam = optax.scale_by_adam(b1, b2, config.eps, mu_dtype=policy.moments)
    direction = {
        "adamw": lambda: adam,
        "lion": lambda: optax.scale_by_lion(b1, b2, mu_dtype=policy.moments),
        "muon": lambda: _muon(config, leaves, policy.moments, others=adam),
        "adafactor": lambda: _adafactor(leaves),
    }[config.name]()
    return optax.chain(
        direction,
        optax.add_decayed_weights(config.weight_decay, decay_mask(leaves, config.decay_exclude)),
        optax.scale_by_learning_rate(learning_rate(config, steps)),
    )


def matrix_dims(leaf: Leaf) -> optax.contrib.MuonDimensionNumbers | None:
    """Which dimensions of a block's stacked weight [L, ...] a matrix product sums over, and which
    it yields; None where the parameter is not such a weight.

    Weights map from `embed`, as queries [L, D, H, E] do, or to it, as their output [L, H, E, D].
    """
    if "layers" not in leaf.axes or kind(leaf) != "weights":
        return None
    dims = tuple(range(1, len(leaf.axes)))
    if leaf.axes[1] == "embed":
        return optax.contrib.MuonDimensionNumbers(dims[:1], dims[1:])
    if leaf.axes[-1] == "embed":
        return optax.contrib.MuonDimensionNumbers(dims[:-1], dims[-1:])
    return None


def _muon(
    config: OptimConfig, leaves: Any, moments: Any, others: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for the blocks' matrices, layer by layer, `others` for the rest.

    Scaled by 0.2 sqrt(max(rows, columns)), an update is as large as Adam's, and one learning rate
    suits both groups (Liu et al. 2025, "Muon is scalable for LLM training", eq. 4).
    """
    dims = tree_map_leaves(lambda leaf: matrix_dims(leaf) or optax.MaskedNode(), leaves)
    groups = tree_map_leaves(lambda leaf: "matrices" if matrix_dims(leaf) else "others", leaves)

    def scale(x: jax.Array, sides: optax.contrib.MuonDimensionNumbers) -> jax.Array:
        return x * (0.2 * math.sqrt(max(math.prod(x.shape[d] for d in side) for side in sides)))

    orthogonal = optax.contrib.scale_by_muon(
        beta=config.betas[0], eps=config.eps, mu_dtype=moments, weight_dimension_numbers=dims
    )
    scaled = optax.stateless(lambda updates, _: jax.tree.map(scale, updates, dims))
    return optax.partition({"matrices": optax.chain(orthogonal, scaled), "others": others}, groups)


def _adafactor(leaves: Any) -> optax.GradientTransformation:
    """Adafactor (Shazeer & Stern 2018) with a given learning rate and without first moment.

    Second moments of the blocks' parameters are factored over the two largest dimensions of one
    layer, where both have 128 entries or more. Those of embedding and head are not: the factors of
    a padded vocabulary would depend on the mesh.
    """
    groups = tree_map_leaves(lambda leaf: "layers" if "layers" in leaf.axes else "rest", leaves)
    factored = _layer_by_layer(optax.scale_by_factored_rms())
    whole = optax.scale_by_factored_rms(factored=False)
    rms = optax.partition({"layers": factored, "rest": whole}, groups)
    return optax.chain(rms, _clip_rms(leaves))


def _layer_by_layer(factored: optax.GradientTransformation) -> optax.GradientTransformation:
    """`scale_by_factored_rms` on each layer of stacked parameters, which share its count."""
    state_axes = optax.FactoredState(None, 0, 0, 0)
    return optax.GradientTransformation(
        jax.vmap(factored.init, out_axes=state_axes),
        jax.vmap(factored.update, in_axes=(0, state_axes, 0), out_axes=(0, state_axes)),
    )


def _clip_rms(leaves: Any) -> optax.GradientTransformation:
    """Scale down each update, layer by layer, whose root mean square is above 1 (Shazeer & Stern
    2018, section 6); the mean is over the model's own entries, without padding."""

    def clip(leaf: Leaf, update: jax.Array) -> jax.Array:
        first = int("layers" in leaf.axes)
        total = jnp.sum(update**2, tuple(range(first, update.ndim)), keepdims=True)
        return update / jnp.maximum(1.0, jnp.sqrt(total / math.prod(leaf.logical_shape[first:])))

    return optax.stateless(lambda updates, _: tree_map_leaves(clip, leaves, updates))


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
