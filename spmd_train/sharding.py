"""Logical axis names -> mesh axes: the one table, and the placement of every array of a run.

```
               data            model                stage
params     zero 3 only    heads, mlp, vocab     layers, vocab
gradients  zero 2, 3       (as the params)      (as the params)     while they accumulate
optimizer  zero 1, 2, 3    (as the params)      (as the params)
batch      rows                 -                    -
residual       -          sequence (if parallel)     -              between blocks
```

A parameter's logical axes are plain metadata (`nnx.Param(value, axes=("embed", "mlp"))`). A ZeRO
level is nothing but the choice of which of the three kinds of array also has its `data_dim` sharded
over `data`; no code elsewhere asks for the level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_train.mesh import DATA, MODEL, STAGE

Axes = tuple[str | None, ...]

RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": DATA,
    "layers": STAGE,
    "vocab": (STAGE, MODEL),
    "heads": MODEL,
    "kv_heads": MODEL,
    "mlp": MODEL,
    "embed": None,
    "head_dim": None,
    "norm": None,
    "sequence": None,
}

# Sequence parallelism is one more row of the table: the residual stream between blocks.
SEQUENCE_PARALLEL_RULES = {**RULES, "sequence": MODEL}

# Fewer KV heads than model shards: every shard keeps all of them (see model/attention.py).
REPLICATED_WHEN_INDIVISIBLE = frozenset({"kv_heads"})

# Padded up to a multiple of its shards; every reader outside the step sees the unpadded rows.
PADDED = frozenset({"vocab"})


def as_tuple(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """A PartitionSpec entry as a tuple of mesh axes."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def only(spec: P, axes: set[str] | frozenset[str]) -> P:
    """`spec` restricted to some mesh axes (a `shard_map` takes only those it makes manual)."""
    kept = [tuple(a for a in as_tuple(e) if a in axes) for e in spec]
    return P(*[k if len(k) > 1 else k[0] if k else None for k in kept])


@dataclass(frozen=True)
class Leaf:
    """Where one parameter, its gradient and its optimizer state live.

    Attributes:
        axes: logical axes, `layers` first for stacked blocks.
        logical_shape: the model's own shape, as checkpoints hold it.
        shape: the shape at run time; the vocabulary padded to its shards.
        spec: mesh axes without `data`.
        data_dim: the dimension ZeRO shards over `data`; None where none divides (by
            `Layout.logical_shards`, if set: the same dimension on every mesh).
    """

    axes: Axes
    logical_shape: tuple[int, ...]
    shape: tuple[int, ...]
    spec: P
    data_dim: int | None

    @property
    def zero_spec(self) -> P:
        """`spec` with `data_dim` sharded over data as well."""
        if self.data_dim is None:
            return self.spec
        entries = list(self.spec)
        entries[self.data_dim] = DATA
        return P(*entries)

    @property
    def on_stage(self) -> bool:
        """Whether stages hold different parts; if not, each adds to one shared gradient."""
        return any(STAGE in as_tuple(e) for e in self.spec)


@dataclass(frozen=True)
class Layout:
    """The rules table applied to one mesh, with the run's choices that change it.

    Attributes:
        mesh: mesh with axes data, stage, model, an abstract one where nothing is to be placed; None
            for plain single-device use.
        zero: 0 to 3, see the table above.
        sequence_parallel: shard the residual stream's sequence over `model`.
        logical_shards: parts of every sum, the same on every mesh (pipeline/reproducible.py); 0
            where sums may follow the mesh.
    """

    mesh: Mesh | AbstractMesh | None = None
    zero: int = 1
    sequence_parallel: bool = False
    logical_shards: int = 0

    @property
    def reproducible(self) -> bool:
        return self.logical_shards > 0

    def size(self, *axes: str) -> int:
        """Number of shards over the given mesh axes."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[a] for a in axes)

    @property
    def rules(self) -> dict[str, str | tuple[str, ...] | None]:
        return SEQUENCE_PARALLEL_RULES if self.sequence_parallel else RULES

    def shards(self, name: str) -> int:
        """Number of shards of a logical axis."""
        return self.size(*as_tuple(self.rules[name]))

    def padded(self, axes: Axes, shape: tuple[int, ...]) -> tuple[int, ...]:
        """`shape` with padded logical axes rounded up to a multiple of their shards.

        Of `logical_shards` where sums are reproducible, which shards then divide.
        """

        def up(name: str, n: int) -> int:
            multiple = self.logical_shards or self.shards(name)
            return -(-n // multiple) * multiple

        return tuple(up(a, n) if a in PADDED else n for a, n in zip(axes, shape, strict=True))

    def leaf(self, axes: Axes, shape: tuple[int, ...]) -> Leaf:
        """Place one parameter of the model's own `shape`.

        Raises:
            ValueError: `axes` does not fit `shape`, or names an unknown logical axis.
        """
        if len(axes) != len(shape) or any(a is not None and a not in RULES for a in axes):
            raise ValueError(
                f"logical axes {axes} of {shape}: one of {sorted(RULES)} per dimension"
            )
        padded = self.padded(axes, shape)
        entries: list[Any] = []
        for name, n in zip(axes, padded, strict=True):
            rule = self.rules[name] if name else None
            if name in REPLICATED_WHEN_INDIVISIBLE and n % self.size(*as_tuple(rule)):
                rule = None
            entries.append(rule)
        data = self.logical_shards or self.size(DATA)
        data_dim = next(
            (
                d
                for d, (name, n) in enumerate(zip(axes, padded, strict=True))
                if data > 1 and name != "layers" and entries[d] is None and n % data == 0
            ),
            None,
        )
        return Leaf(axes, tuple(shape), padded, P(*entries), data_dim)

    # The ZeRO levels, in full.
    def param_spec(self, leaf: Leaf) -> P:
        return leaf.zero_spec if self.zero >= 3 else leaf.spec

    def accumulator_spec(self, leaf: Leaf) -> P:
        return leaf.zero_spec if self.zero >= 2 else leaf.spec

    def optimizer_spec(self, leaf: Leaf) -> P:
        return leaf.zero_spec if self.zero >= 1 else leaf.spec

    @property
    def batch_spec(self) -> P:
        """A step's tokens [M, B/M, T]."""
        return P(None, DATA, None)

    def named(self, spec: P) -> NamedSharding:
        assert self.mesh is not None
        return NamedSharding(self.mesh, spec)

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Annotate an activation by logical axes; axes that are manual here are already local."""
        if self.mesh is None:
            return x
        spec = P(*[self.rules[a] if a else None for a in axes])
        automatic = set(self.mesh.axis_names) - set(jax.sharding.get_abstract_mesh().manual_axes)
        if MODEL not in automatic:
            return x
        local = only(spec, automatic)
        inside = len(automatic) < len(self.mesh.axis_names)
        return jax.lax.with_sharding_constraint(x, local if inside else self.named(local))

    def shard_by_shard(self, fn: Any, *arrays: jax.Array, axes: Axes, whole: Any) -> jax.Array:
        """Apply `fn` to the `model` shards of arrays with the same logical axes, as its result.

        `whole` is the last argument of `fn`, the same on every shard: an array or None.
        """
        if self.mesh is None:
            return fn(*arrays, whole)
        spec = only(P(*[self.rules[a] if a else None for a in axes]), {MODEL})
        return jax.shard_map(
            fn,
            in_specs=(*(spec,) * len(arrays), P()),
            out_specs=spec,
            axis_names={MODEL},
            check_vma=False,
        )(*arrays, whole)


def tree_map_leaves(fn: Any, leaves: Any, *trees: Any) -> Any:
    """`jax.tree.map` over a tree of `Leaf` and trees of the same structure."""
    return jax.tree.map(fn, leaves, *trees, is_leaf=lambda x: isinstance(x, Leaf))
