"""How many elements of a model's parameters one device holds, by the trainer's own rules table.

Nothing is approximated here: the leaves are those of the model that trains, placed by `Layout` on
an abstract mesh, so padding, replicated KV heads and leaves that ZeRO cannot split are counted as
they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from jax.sharding import AbstractMesh

from spmd_train.mesh import ARRAY_AXES, MeshShape
from spmd_train.model import build_model
from spmd_train.optim import matrix_dims
from spmd_train.sharding import Layout, Leaf, as_tuple

if TYPE_CHECKING:
    from spmd_train.config_groups import ModelConfig


@dataclass(frozen=True)
class Placed:
    """Elements of parameters on one device.

    Attributes:
        whole: without ZeRO. split: with every leaf that divides split over `data`.
        layer: of one block, without ZeRO. embed, head: of these groups, without ZeRO.
        largest: of the largest leaf of the blocks; large: of all leaves of that size.
        rest_split: of all the other leaves, split over `data`.
        moments: how many float32 elements an optimizer keeps for one element of `split` or `whole`:
            {name: (first moments, second moments)}, in elements of (whole, split).
    """

    whole: int
    split: int
    layer: int
    embed: int
    head: int
    largest: int
    large: int
    rest_split: int
    moments: dict[str, tuple[tuple[int, int], tuple[int, int]]]


@cache
def _declared(model: ModelConfig) -> tuple[tuple[str, Any], ...]:
    """(group, leaf) of every parameter at the model's own shape."""
    leaves = build_model(model).leaves(Layout())
    return tuple((group, leaf) for group, tree in leaves.items() for leaf in _flat(tree))


def _flat(tree: Any) -> Iterator[Leaf]:
    if isinstance(tree, Leaf):
        yield tree
        return
    for part in tree.values():
        yield from _flat(part)


@cache
def placed(model: ModelConfig, mesh: MeshShape, logical_shards: int = 0) -> Placed:
    """What one device of `mesh` holds of `model`.

    Args:
        logical_shards: of reproducible sums, 0 without them.
    """
    layout = Layout(AbstractMesh(mesh.array_shape, ARRAY_AXES), logical_shards=logical_shards)
    leaves = [(g, layout.leaf(leaf.axes, leaf.logical_shape)) for g, leaf in _declared(model)]

    def total(spec: Callable[[Leaf], Any], group: str | None = None) -> int:
        return sum(_elements(leaf, spec(leaf), layout) for g, leaf in leaves if group in (None, g))

    def plain(leaf: Leaf) -> Any:
        return leaf.spec

    def both(of: Callable[[Leaf], float]) -> tuple[int, int]:
        return tuple(
            int(sum(of(leaf) * _elements(leaf, spec(leaf), layout) for _, leaf in leaves))
            for spec in (plain, lambda leaf: leaf.zero_spec)
        )  # type: ignore[return-value]

    one, none = (lambda leaf: 1.0), (lambda leaf: 0.0)
    # Adafactor's factors have no parameter's shape, and are replicated (optim.optimizer_shardings).
    factors = sum(_factors(leaf) for _, leaf in leaves)
    unfactored = both(lambda leaf: float(not _factors(leaf)))
    moments = {
        "adamw": (both(one), both(one)),
        "lion": (both(one), both(none)),
        "muon": (both(one), both(lambda leaf: float(matrix_dims(leaf) is None))),
        "adafactor": (both(none), (unfactored[0] + factors, unfactored[1] + factors)),
    }
    blocks = [(_elements(x, x.spec, layout), x) for group, x in leaves if group == "blocks"]
    largest = max(count for count, _ in blocks)
    large = [x for count, x in blocks if count == largest]
    split = total(lambda leaf: leaf.zero_spec)
    return Placed(
        largest=largest,
        large=largest * len(large),
        rest_split=split - sum(_elements(x, x.zero_spec, layout) for x in large),
        whole=total(plain),
        split=split,
        layer=total(plain, "blocks") // (model.layers // mesh.stage),
        embed=total(plain, "embed"),
        head=total(plain, "head"),
        moments=moments,
    )


def _elements(leaf: Leaf, spec: Any, layout: Layout) -> int:
    shards = layout.size(*(axis for entry in spec for axis in as_tuple(entry)))
    return math.prod(leaf.shape) // shards


def _factors(leaf: Leaf) -> int:
    """Elements of Adafactor's row and column factors, over the two largest dimensions of one layer
    where both have 128 or more (optax's `scale_by_factored_rms`); 0 where it keeps a whole one."""
    layers, *sizes = leaf.logical_shape
    largest = sorted(sizes)[-2:]
    if "layers" not in leaf.axes or len(largest) < 2 or largest[0] < 128:
        return 0
    return layers * sum(largest)
