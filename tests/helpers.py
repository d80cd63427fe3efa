"""Fixtures T0 and T1, one compiled step per configuration, and an autodiff reference.

```
run(mesh, *sets)          -> Run       the step of T1 (or `base=T0`) with `--set`s, compiled once
train(mesh, *sets)        -> Trained   losses, first gradients and final weights of a few steps
autodiff(config, params)  -> Trained   one loss and its gradients through the plain forward pass
```

Parameters, gradients and weights are always in the model's own shapes, as flat dictionaries of
float32 numpy arrays. Gradients are read from AdamW's first moment after the first step, undoing
the clip, so that one compilation yields everything a test compares.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmd_train.build import build_step, put_batch
from spmd_train.config import Config, load
from spmd_train.data.batches import Batch, shift
from spmd_train.data.source import TokenSource
from spmd_train.data.stream import Stream
from spmd_train.mesh import MeshShape, build_mesh
from spmd_train.model import build_model
from spmd_train.model.model import Model, unpad
from spmd_train.precision import master_of, take_apart
from spmd_train.sharding import Layout, tree_map_leaves
from spmd_train.state import TrainState

# At tiny shapes the time goes into compiling: without LLVM's optimisations a step takes a third of
# it, without XLA's new fusion emitters (an option that JAX 0.12 no longer has) a sixth.
FAST: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 12):
    FAST["xla_cpu_use_fusion_emitters"] = False
DEFAULT: dict[str, Any] = {}

_OPTIM = ("optim.lr=1e-3", "optim.warmup_steps=0", "optim.schedule=constant")

T0 = (
    *("model.layers=4", "model.width=32", "model.heads=4", "model.kv_heads=2"),
    *("model.head_dim=8", "model.ffn=64", "model.vocab=64", "model.tied=false"),
    *("batch.sequence_length=16", "batch.global_size=8", "batch.microbatches=1"),
    *_OPTIM,
)
T0_LENGTHS = (1, 16, 2, 15, 3, 14, 4, 13)  # of case P01

T1 = (
    *("model.layers=8", "model.width=64", "model.heads=8", "model.kv_heads=8"),
    *("model.head_dim=8", "model.ffn=128", "model.vocab=64", "model.tied=false"),
    *("batch.sequence_length=16", "batch.global_size=64", "batch.microbatches=1"),
    *_OPTIM,
)
T1_LENGTHS = tuple(int(n) for n in np.random.default_rng(2).integers(0, 17, 64))
assert {0, 16} <= set(T1_LENGTHS)

Arrays = dict[str, np.ndarray]


def named(tree: Any) -> Arrays:
    """A tree of arrays as {"blocks/mlp/gate": array}."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        "/".join(str(key.key) for key in path): np.asarray(jax.device_get(x), np.float32)
        for path, x in flat
    }


def configure(mesh: str, *sets: str, base: tuple[str, ...] = T1) -> Config:
    return load(None, [*base, *sets], mesh=mesh)


@functools.cache
def parameters(model: Any) -> Any:
    """Float32 parameters of a model configuration, drawn by numpy at their own shapes.

    Norms and biases are drawn too: a gradient of theirs that is lost must show.
    """
    rng = np.random.default_rng(11)

    def draw(leaf: Any) -> np.ndarray:
        noise = rng.standard_normal(leaf.logical_shape)
        values = 1.0 + 0.1 * noise if "norm" in leaf.axes else 0.03 * noise
        return values.astype(np.float32)

    return tree_map_leaves(draw, build_model(model).leaves(Layout()))


def token_rows(config: Config) -> np.ndarray:
    """[B, T+1] random tokens, alike for vocabularies of 61 and more; fewer rows are the first."""
    high = min(config.model.vocab, 61)
    size = (config.batch.global_size, config.batch.sequence_length + 1)
    return np.random.default_rng(5).integers(0, high, size).astype(np.int32)


def stream_of(tokens: Any, length: int, global_size: int, seed: int, **more: Any) -> Stream:
    """The stream of one corpus of a single document."""
    tokens = np.asarray(tokens)
    source = TokenSource("it", tokens, np.array([0, tokens.size]), "its content")
    return Stream((source,), length, global_size, seed, **more)


def lengths_of(config: Config) -> np.ndarray:
    """Supervised targets of each row: P01's for T0's eight rows, random ones with zeros for T1."""
    rows = config.batch.global_size
    return np.array((T0_LENGTHS if rows <= len(T0_LENGTHS) else T1_LENGTHS)[:rows])


@dataclass(frozen=True, eq=False)
class Trained:
    """What a few steps (or the reference) give.

    Attributes:
        losses, z_losses, tokens, grad_norms: one per step.
        gradients: of the first step.
        params: FP32 weights after the last step.
    """

    losses: np.ndarray
    z_losses: np.ndarray
    tokens: np.ndarray
    grad_norms: np.ndarray
    gradients: Arrays
    params: Arrays


class Run:
    """One configuration on one mesh; its step is compiled when first called."""

    def __init__(self, config: Config, compiler_options: dict[str, Any] = FAST) -> None:
        assert config.mesh is not None
        mesh, _ = build_mesh(MeshShape.parse(config.mesh))
        self.config = config
        self.step, self.resolved = build_step(config, mesh)
        self.spec = self.step.spec
        self.compiler_options = compiler_options
        self._compiled: Any = None

    def state(self, params: Any = None) -> TrainState:
        """Step 0 from canonical parameters, padded and placed."""

        def padded(leaf: Any, x: np.ndarray) -> jax.Array:
            widths = [(0, n - m) for n, m in zip(leaf.shape, x.shape, strict=True)]
            return jnp.asarray(np.pad(x, widths))

        params = parameters(self.config.model) if params is None else params
        fresh = self.spec.fresh(tree_map_leaves(padded, self.spec.leaves, params))
        return jax.device_put(fresh, self.spec.shardings())

    def batch(self, rows: Any = None, lengths: Any = None) -> Batch:
        rows = token_rows(self.config) if rows is None else np.asarray(rows)
        lengths = lengths_of(self.config) if lengths is None else np.asarray(lengths)
        return self.placed(shift(rows, lengths))

    def placed(self, batch: Batch) -> Batch:
        """A host batch [B, T] as the step takes it."""
        return put_batch(self.step, self.step.micro_batched(batch))

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        """One step; `state` is donated."""
        if self._compiled is None:
            lowered = self.step.jitted().lower(state, batch)
            self._compiled = lowered.compile(compiler_options=self.compiler_options)
        return self._compiled(state, batch)

    def gradients(self, state: TrainState, metrics: dict[str, Any]) -> Any:
        """The gradients that the first step gave the optimizer, at their run-time shapes."""
        optim, norm = self.config.optim, float(metrics["grad_norm"])
        clip = 1.0 if optim.clip_norm is None else min(1.0, optim.clip_norm / norm)
        moments = optax.tree.get(state.opt_state, "mu")
        scale = (1.0 - optim.betas[0]) * clip
        return jax.tree.map(lambda m: jax.device_get(m) / scale, moments)

    def unpadded(self, tree: Any) -> Arrays:
        return named(tree_map_leaves(unpad, self.spec.leaves, jax.device_get(tree)))

    def weights(self, state: TrainState) -> Arrays:
        master = master_of(state.opt_state)
        return self.unpadded(state.params if master is None else master)

    def train(
        self, steps: int, params: Any = None, rows: Any = None, lengths: Any = None
    ) -> Trained:
        """`steps` steps on one and the same batch."""
        return self.train_on(self.batch(rows, lengths), steps, params)

    def train_on(self, batch: Batch, steps: int, params: Any = None) -> Trained:
        state = self.state(params)
        log: list[dict[str, Any]] = []
        gradients: Arrays = {}
        for _ in range(steps):
            state, metrics = self(state, batch)
            log.append({name: np.asarray(value) for name, value in metrics.items()})
            gradients = gradients or self.unpadded(self.gradients(state, metrics))
        series = {name: np.stack([entry[name] for entry in log]) for name in log[0]}
        return Trained(
            series["loss"],
            series["z_loss"],
            series["tokens"],
            series["grad_norm"],
            gradients,
            self.weights(state),
        )


@functools.cache
def _run(config: Config) -> Run:
    return Run(config)


def run(mesh: str, *sets: str, base: tuple[str, ...] = T1) -> Run:
    return _run(configure(mesh, *sets, base=base))


@functools.cache
def _train(config: Config, steps: int) -> Trained:
    return _run(config).train(steps)


def train(mesh: str, *sets: str, base: tuple[str, ...] = T1, steps: int = 5) -> Trained:
    """The fixture's own rows and lengths from its own parameters; computed once."""
    return _train(configure(mesh, *sets, base=base), steps)


# ------------------------------------------------------------------------------- the reference


def plain_loss(model: Model, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Token means [B, T] of cross-entropy and of z-loss, through `Model.logits`: no mesh, no
    micro-batches, nothing sharded."""
    logits = model.logits(params, batch.inputs, batch.segments)
    weight = batch.targets >= 0
    log_z = jax.nn.logsumexp(logits, -1)
    target = jnp.take_along_axis(logits, jnp.maximum(batch.targets, 0)[..., None], -1)[..., 0]
    tokens = jnp.sum(weight)
    z_loss = model.config.z_loss * jnp.sum(log_z**2 * weight) / tokens
    return jnp.sum((log_z - target) * weight) / tokens, z_loss


def autodiff(config: Config, params: Any = None, rows: Any = None, lengths: Any = None) -> Trained:
    """Loss and gradients of one step by `jax.grad` of the plain forward pass on one device."""
    params = parameters(config.model) if params is None else params
    rows = token_rows(config) if rows is None else np.asarray(rows)
    lengths = lengths_of(config) if lengths is None else np.asarray(lengths)
    batch, model = shift(rows, lengths), build_model(config.model)

    def total(params: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        loss, z_loss = plain_loss(model, params, batch)
        return loss + z_loss, (loss, z_loss)

    differentiate = jax.jit(jax.value_and_grad(total, has_aux=True))
    compiled = differentiate.lower(params).compile(compiler_options=FAST)
    (_, (loss, z_loss)), gradients = compiled(params)
    return Trained(
        np.array([loss]),
        np.array([z_loss]),
        np.array([np.sum(batch.targets >= 0)]),
        np.array([optax.tree.norm(gradients)]),
        named(gradients),
        named(params),
    )


# ------------------------------------------------------------------------------ comparing runs


def learned(state: TrainState) -> dict[str, Any]:
    """What a step learns: parameters, master, moments and counts, on the host."""
    apart = take_apart(state.opt_state, state.params)
    return jax.device_get({"image": state.params, **{k: apart[k] for k in ("params", "optimizer")}})


def assert_same_bits(got: Any, want: Any) -> None:
    """Equal to the last bit, the sign of a zero included."""

    def equal(got: Any, want: Any) -> None:
        got, want = np.asarray(got), np.asarray(want)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))

    jax.tree.map(lambda g, w: equal(np.atleast_1d(g), np.atleast_1d(w)), got, want)


def differences(got: Arrays, want: Arrays) -> dict[str, float]:
    """Largest difference of every tensor as a share of its largest entry in `want`."""
    assert got.keys() == want.keys()
    tiny = np.finfo(np.float32).tiny
    return {
        name: float(np.abs(got[name] - want[name]).max() / max(np.abs(want[name]).max(), tiny))
        for name in want
    }


def assert_same_gradients(got: Arrays, want: Arrays, tolerance: float = 1e-5) -> None:
    too_far = {n: d for n, d in differences(got, want).items() if not d <= tolerance}
    assert not too_far, too_far


def assert_same_weights(got: Trained, want: Trained, lr: float) -> None:
    """After a few AdamW steps: within a hundredth of one step.

    Adam divides a gradient by its own size: where the gradient is below what two summation orders
    differ by (1e-5 of the tensor's largest; here some 1e-8, as small as Adam's eps), so is the sign
    of the update. Seen: one program at two optimisation levels of the compiler moves such an entry
    by 0.07 of a step. They are few, and held to half a step.
    """
    for name, weights in want.params.items():
        size = np.abs(want.gradients[name])
        vague = (size < 1e-5 * size.max()) & (size > 0)
        assert vague.mean() < 0.02, name
        far = np.abs(got.params[name] - weights) > np.where(vague, 0.5, 1e-2) * lr
        assert not far.any(), (name, np.argwhere(far), got.params[name][far], weights[far])


def assert_same_training(got: Trained, want: Trained, lr: float = 1e-3) -> None:
    """docs/design.md, in its order."""
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.losses[0], want.losses[0], rtol=1e-6)
    assert_same_gradients(got.gradients, want.gradients)
    np.testing.assert_allclose(got.grad_norms[0], want.grad_norms[0], rtol=1e-5)
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5)
    np.testing.assert_allclose(got.z_losses, want.z_losses, rtol=1e-5)
    assert_same_weights(got, want, lr)
