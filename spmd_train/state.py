"""The train state: what a step reads and writes, and what a checkpoint holds of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_train.model import Model
from spmd_train.model.model import pad, unpad
from spmd_train.optim import by_path, optimizer_shardings
from spmd_train.precision import Policy, put_together, take_apart
from spmd_train.precision.fp8 import ByProduct
from spmd_train.sharding import Layout, Leaf, tree_map_leaves


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "opt_state", "fp8"],
    meta_fields=[],
)
@dataclass(frozen=True)
class TrainState:
    """Attributes:
    step: int32 scalar, the number of steps taken; with the seed it fixes data order and dropout.
    params: what the forward pass reads, in the compute dtype.
    opt_state: state of the composed optimizer: loss scale, step guard, FP32 master, moments.
    fp8: largest values of the last steps, for delayed scaling; else empty.
    """

    step: Any
    params: Any
    opt_state: Any
    fp8: ByProduct = field(default_factory=dict)


@dataclass(frozen=True)
class StateSpec:
    """How to make, place, save and restore the state of one run.

    Attributes:
        model, layout, policy, tx: what the state belongs to.
        leaves: placement of every parameter.
        fp8: placement of every array of `TrainState.fp8`.
    """

    model: Model
    layout: Layout
    policy: Policy
    tx: optax.GradientTransformationExtraArgs
    leaves: Any
    fp8: ByProduct = field(default_factory=dict)

    def abstract_params(self, dtype: Any) -> Any:
        return tree_map_leaves(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), self.leaves)

    def shardings(self) -> TrainState:
        """A `NamedSharding` for every leaf of the state."""
        named, layout = self.layout.named, self.layout
        opt_state = jax.eval_shape(self.tx.init, self.abstract_params(self.policy.compute))
        return TrainState(
            step=named(P()),
            params=tree_map_leaves(lambda leaf: named(layout.param_spec(leaf)), self.leaves),
            opt_state=optimizer_shardings(opt_state, self.leaves, layout),
            fp8=tree_map_leaves(lambda leaf: named(leaf.spec), self.fp8),
        )

    def fresh(self, params: Any) -> TrainState:
        """Step 0 from FP32 parameters."""
        opt_state = self.tx.init(jax.tree.map(lambda p: p.astype(self.policy.master), params))
        image = jax.tree.map(lambda p: p.astype(self.policy.compute), params)
        history = tree_map_leaves(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), self.fp8)
        return TrainState(jnp.int32(0), image, opt_state, history)

    def init(self, seed: int) -> TrainState:
        """Step 0 from a seed, each shard made where it lives."""

        def make() -> TrainState:
            return self.fresh(self.model.init(jax.random.key(seed), self.leaves))

        return jax.jit(make, out_shardings=self.shardings())()

    def abstract(self) -> TrainState:
        """The state as `ShapeDtypeStruct`s with shardings, nothing allocated."""
        params = self.abstract_params(self.policy.master)
        shapes = jax.eval_shape(self.fresh, params)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            shapes,
            self.shardings(),
        )

    # Checkpoints are canonical: the model's own shapes, FP32 parameters, no half-precision leaf.
    def canonical(self, state: TrainState) -> dict[str, Any]:
        """What a checkpoint holds, independent of mesh, ZeRO level, padding and policy."""
        tree, target = _canonical_tree(state), self.abstract_canonical()

        def on_mesh(x: Any, target: Any) -> Any:
            # By way of the host: where each process has one device, JAX (0.10, 0.12) puts an array
            # of one process on all of them in a way that cannot be read.
            placed = isinstance(x.sharding, NamedSharding)
            return x if placed else jax.device_put(jax.device_get(x), target.sharding)

        tree = jax.tree.map(on_mesh, tree, target)
        alike = jax.tree.map(lambda x, t: (x.shape, x.dtype) == (t.shape, t.dtype), tree, target)
        if all(jax.tree.leaves(alike)):
            return tree
        shardings = jax.tree.map(lambda t: t.sharding, target)
        return jax.jit(self._canonical_arrays, out_shardings=shardings)(tree)

    def abstract_canonical(self) -> dict[str, Any]:
        """`canonical` as shapes with shardings: what a restore asks for.

        A dimension that is padded at run time has no even shards in its own size: left whole.
        """
        padded = _canonical_tree(self.abstract())

        def place(x: Any, padded: Any) -> Any:
            spec = padded.sharding.spec if isinstance(padded.sharding, NamedSharding) else P()
            even = (e if x.shape[d] == padded.shape[d] else None for d, e in enumerate(spec))
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.layout.named(P(*even)))

        return jax.tree.map(place, jax.eval_shape(self._canonical_arrays, padded), padded)

    def from_canonical(self, saved: dict[str, Any]) -> TrainState:
        """The run-time state: padded, placed, the compute-dtype image made from the master."""

        target = _canonical_tree(self.abstract())

        def build(saved: dict[str, Any]) -> TrainState:
            tree = jax.tree.map(lambda x, t: x.astype(t.dtype), self._padded(saved), target)
            fresh = self.fresh(tree["params"])
            opt_state = put_together(tree, fresh.opt_state)
            return TrainState(tree["step"], fresh.params, opt_state, tree.get("fp8", {}))

        return self._built(build, self.shardings(), saved)

    def from_parameters(self, params: Any) -> TrainState:
        """Step 0 from the parameters of a checkpoint."""

        def build(saved: Any) -> TrainState:
            return self.fresh(self._padded(saved)["params"])

        return self._built(build, self.shardings(), {"params": params})

    def image(self, params: Any) -> Any:
        """What the forward pass reads, of a checkpoint's parameters."""

        def build(saved: Any) -> Any:
            return jax.tree.map(
                lambda p: p.astype(self.policy.compute), self._padded(saved)["params"]
            )

        return self._built(build, self.shardings().params, {"params": params})

    def _built(self, build: Callable[[Any], Any], shardings: Any, saved: Any) -> Any:
        """`build(saved)` in the place of `saved`, of which nothing else is held."""
        with warnings.catch_warnings():
            # A vocabulary that is padded here has no array of its padded size to be put into.
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            return jax.jit(build, out_shardings=shardings, donate_argnums=0)(saved)

    def _padded(self, saved: Any) -> Any:
        """Every array of a checkpoint that has a parameter's shape, at its run-time shape."""
        return self._map_parameters(pad, lambda leaf: leaf.logical_shape, saved)

    def _canonical_arrays(self, tree: Any) -> Any:
        """Unpadded, and what is in half precision in FP32, which holds each of its values."""
        unpadded = self._map_parameters(unpad, lambda leaf: leaf.shape, tree)
        half = (jnp.bfloat16, jnp.float16)
        return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype in half else x, unpadded)

    def _map_parameters(
        self, fn: Callable[[Leaf, Any], Any], shape: Callable[[Leaf], Any], tree: Any
    ) -> Any:
        """`fn(leaf, x)` on every array of a state tree with a parameter's path and shape."""
        leaf_of = by_path(self.leaves, shape)

        def visit(path: Any, x: Any) -> Any:
            leaf = leaf_of(path, x.shape)
            return x if leaf is None else fn(leaf, x)

        return jax.tree_util.tree_map_with_path(visit, tree)


def _canonical_tree(state: TrainState) -> dict[str, Any]:
    return {
        "step": state.step,
        **take_apart(state.opt_state, state.params),
        **({"fp8": state.fp8} if state.fp8 else {}),
    }
