"""What a checkpoint holds, in words (the metadata beside the arrays), and whether two agree."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from spmd_train.errors import RequestError
from spmd_train.sharding import Leaf

if TYPE_CHECKING:
    from pathlib import Path

    from spmd_train.config import Config
    from spmd_train.state import StateSpec

_WORDS = {
    "step": "steps taken (int32). It is the position in the data, on any mesh and any number of "
    "processes: the next sample is number step x batch.global_size of the seed's order. With the "
    "seed it also fixes dropout: no random generator has a state.",
    "params": "parameters in the master's dtype (float32 unless the policy says otherwise), in the "
    "model's own shapes: blocks stacked over layers, the vocabulary unpadded.",
    "optimizer": "state of the optax optimizer: moments in the parameters' shapes, and the number "
    "of updates applied, which is the position in the learning-rate schedule.",
    "loss_scale": "dynamic loss scale and its counters; scale 0 means that the loss is not scaled.",
    "guard": "bad steps in a row and in all, and the window of losses and norms that outliers are "
    "judged by.",
    "fp8": "largest magnitudes of the last steps, for delayed scaling.",
}


def describe(
    step: int,
    canonical: Mapping[str, Any],
    config: Config,
    spec: StateSpec,
    data_fingerprint: Mapping[str, Any],
) -> dict[str, Any]:
    """The metadata of a step, plain JSON.

    Args:
        canonical: the tree that is saved, of arrays or `ShapeDtypeStruct`s.
        data_fingerprint: of the samples and their order, plain JSON.
    """
    axes = {f"params.{name}": leaf.axes for name, leaf in leaves(spec.leaves).items()}
    return {
        "what": "a training step of spmd_train: arrays in state/, readable with plain Orbax, as "
        "global arrays that do not depend on mesh, ZeRO level, stages, schedule or padding",
        "step": step,
        "saved": datetime.now(UTC).isoformat(timespec="seconds"),
        "contents": {part: _WORDS[part] for part in canonical},
        "arrays": {
            name: spell(leaf) + (f" ({', '.join(axes[name])})" if name in axes else "")
            for name, leaf in leaves(canonical).items()
        },
        "next_sample": step * config.batch.global_size,
        "data": dict(data_fingerprint),
        "mesh": config.mesh,
        "processes": jax.process_count(),
        "policy": spec.policy.described(),
        "versions": {"jax": jax.__version__},
        "config": config.model_dump(mode="json"),
    }


def check_same_tree(abstract: Any, saved: Any, path: Path) -> None:
    """Refuse a state whose leaves differ in name, shape or dtype from those on disk.

    Raises:
        RequestError: naming the first leaf that differs, with both shapes.
    """
    wanted, stored = leaves(abstract), leaves(saved)
    for name in [*wanted, *(name for name in stored if name not in wanted)]:
        have, want = spell(stored.get(name)), spell(wanted.get(name))
        if have != want:
            raise RequestError(
                f"the checkpoint {path} does not fit this run: {name} is {have} in the checkpoint"
                f" and {want} in the run; resume with the configuration that wrote it."
            )


def leaves(tree: Any) -> dict[str, Any]:
    """Leaves by dotted path. Orbax's metadata has dicts and lists where the state has tuples and
    named tuples; the path reads the same."""
    pairs = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, Leaf))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in pairs}


def spell(leaf: Any) -> str:
    """Dtype and shape on disk, where a typed PRNG key is its uint32 data."""
    if leaf is None:
        return "absent"
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return f"{leaf.dtype}{list(leaf.shape)}"
