"""Whether what should be identical on several devices is, bit for bit.

Every device hashes what it holds, each hash crosses the mesh once, and the devices are compared:

```
array          the same on devices that differ only in          compared with
params         data (not with ZeRO 3), axes not in their spec   each other, their master's image
master         axes not in its spec: never data with ZeRO > 0   each other
moments        as the master                                    each other
step, counts   every axis                                       each other
```

The image of a master in the compute dtype is one more vote on each data shard's slice of the
parameters: with two replicas it decides which of them is wrong.

What it cannot see:
- what only one device holds, as a data shard's moments under ZeRO 1, 2 and 3, and with parameters
  that are their own master, those of ZeRO 3;
- bits of a master that its image rounds away (of a float32 master of bfloat16, most of the low 16);
- with ZeRO 1 and more, what happened before the last update: it writes every device's parameters
  anew, from the one shard of each, so a bit that flipped there is then the same everywhere. Compare
  after every step to find those; a device whose arithmetic differs is found whenever it differs in
  the last step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd_train.errors import listed
from spmd_train.mesh import ARRAY_AXES
from spmd_train.precision import master_of
from spmd_train.sharding import Leaf, as_tuple
from spmd_train.state import StateSpec, TrainState

Finding = dict[str, Any]
Copy = tuple[str, int]  # path of the array, number of the device in the mesh's order


def slice_hashes(x: jax.Array, dim: int = 0, slices: int = 1) -> jax.Array:
    """uint32 [slices]: a hash of each of the equal slices of `x` along `dim`.

    The sum over words w at index i of fmix32(w xor i * odd), modulo 2^32: exact in any order of
    summation. fmix32 (the finaliser of MurmurHash3, Appleby 2011) is a bijection, so every change
    of a single word changes the sum; others escape with probability 2^-32.
    """
    x = x.reshape(x.shape or (1,))
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    words = lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)  # of 64 bits: two words
    words = words.reshape(*words.shape[:dim], slices, -1, *words.shape[dim + 1 :])
    words = jnp.moveaxis(words, dim, 0)
    index, stride = jnp.zeros((), jnp.uint32), 1
    for axis in reversed(range(1, words.ndim)):
        index += lax.broadcasted_iota(jnp.uint32, words.shape, axis) * np.uint32(stride)
        stride *= words.shape[axis]
    mixed = _fmix32(words ^ (index * np.uint32(0x9E3779B1)))
    return jnp.sum(mixed, tuple(range(1, words.ndim)), dtype=jnp.uint32)


def _fmix32(h: jax.Array) -> jax.Array:
    h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


@dataclass(frozen=True)
class Replicas:
    """Compares the copies of a run's state, bit for bit."""

    spec: StateSpec

    def check(self, state: TrainState) -> list[Finding]:
        """Every copy that differs from the majority of its copies; without a majority, every copy.

        A collective: every process calls it, and gets the same answer. A finding is
        `{"array": "params/blocks/mlp/gate", "device": 5, "process": 1, "mesh": {"data": 1, ...},
        "copies": 4, "agrees_with": 0, "outvoted": True}`: of the 4 copies there are, none of the
        other 3 has the same bits, and they are the majority.
        """
        return self.disagreements(np.asarray(self.hashes(state)))

    @cached_property
    def hashes(self) -> Any:
        """Compiled: state -> uint32 [data, stage, model, columns], the same on every process."""
        layout, shardings = self.spec.layout, self.spec.shardings()
        on_each_device = jax.shard_map(
            lambda state: self._local_hashes(state)[None, None, None],
            mesh=layout.mesh,
            in_specs=(jax.tree.map(lambda s: s.spec, shardings),),
            out_specs=P(*ARRAY_AXES, None),
            check_vma=False,
        )
        return jax.jit(on_each_device, in_shardings=(shardings,), out_shardings=layout.named(P()))

    def _local_hashes(self, state: TrainState) -> jax.Array:
        """[columns] of the shards on this device; `_ballots` reads them in the same order."""
        hashes = [slice_hashes(x) for x in jax.tree.leaves(state)]
        for leaf, param, master in self._images(state):
            hashes.append(slice_hashes(param, leaf.data_dim or 0, self._slices(leaf)))
            hashes.append(slice_hashes(master.astype(param.dtype)))
        return jnp.concatenate(hashes)

    def _ballots(self, hashes: np.ndarray) -> Iterator[_Ballot]:
        flat, tree = jax.tree_util.tree_flatten_with_path(self.spec.shardings())
        names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]
        for column, (name, (_, sharding)) in enumerate(zip(names, flat, strict=True)):
            yield _Ballot.of(name, hashes[..., column], sharding.spec)
        column = len(names)
        for leaf, param, master in self._images(jax.tree.unflatten(tree, names)):
            spec, slices = self.spec.layout.param_spec(leaf), self._slices(leaf)
            image = hashes[..., column + slices]
            for index in range(slices):
                copies = _Ballot.of(param, hashes[..., column + index], spec)
                owner = index if slices > 1 else None
                yield copies.joined(_Ballot.of(master, image, spec, owner))
            column += slices + 1

    def _images(self, state: TrainState) -> list[tuple[Leaf, Any, Any]]:
        """(placement, parameter, its master) where the parameters are images of a master."""
        master = master_of(state.opt_state)
        if master is None:
            return []
        trees = (self.spec.leaves, state.params, master)
        return list(zip(*map(jax.tree.leaves, trees), strict=True))

    def _slices(self, leaf: Leaf) -> int:
        """Data shards of the master in what one device holds of the parameter."""
        layout = self.spec.layout
        return layout.size(*_axes(layout.optimizer_spec(leaf)) - _axes(layout.param_spec(leaf)))

    def disagreements(self, hashes: np.ndarray) -> list[Finding]:
        """The findings in `hashes` [data, stage, model, columns]; see `check`."""
        outvoted: dict[Copy, Finding] = {}
        tied: list[dict[Copy, Finding]] = []
        for ballot in self._ballots(hashes):
            for copies, votes in ballot.disputes():
                count = Counter(votes)
                winner, most = count.most_common(1)[0]
                decided = 2 * most > len(votes)
                losers = {
                    copy: self._finding(copy, len(votes), count[vote] - 1, decided)
                    for copy, vote in zip(copies, votes, strict=True)
                    if not decided or vote != winner
                }
                if decided:
                    outvoted |= losers
                else:
                    tied.append(losers)
        # A tie adds nothing where another vote, with the image, has told which copy it is.
        undecided = [losers for losers in tied if not losers.keys() & outvoted.keys()]
        merged: dict[Copy, Finding] = {}
        for losers in (outvoted, *undecided):
            merged |= losers
        return list(merged.values())

    def _finding(self, copy: Copy, copies: int, agrees_with: int, outvoted: bool) -> Finding:
        mesh = self.spec.layout.mesh
        assert mesh is not None
        array, number = copy
        device = mesh.devices.flat[number]
        where = np.unravel_index(number, mesh.devices.shape)
        return {
            "array": array,
            "device": device.id,
            "process": device.process_index,
            "mesh": {axis: int(i) for axis, i in zip(ARRAY_AXES, where, strict=True)},
            "copies": copies,
            "agrees_with": agrees_with,
            "outvoted": outvoted,
        }


def describe(findings: list[Finding]) -> str:
    """What `check` found, in one sentence, for a `RunError`."""
    first = findings[0]
    where = f"process {first['process']}, {listed(f'{a}={i}' for a, i in first['mesh'].items())}"
    if first["outvoted"]:
        said = (
            f"{first['array']} on device {first['device']} ({where}) differs from the majority of "
            f"its {first['copies']} copies"
        )
    else:
        devices = {f["device"]: None for f in findings if f["array"] == first["array"]}
        said = f"{first['array']} differs between devices {listed(devices)}, and no majority tells "
        said += "which is wrong"
    others = len({f["array"] for f in findings}) - 1
    more = f" (and {others} more arrays)" if others else ""
    return (
        f"{said}{more}: a device stored or computed something else than the others; leave it out, "
        "and resume from a checkpoint of before."
    )


@dataclass(frozen=True)
class _Ballot:
    """Votes on the parts of an array (its different shards), a row a part.

    Attributes:
        arrays: [copies] whose copy votes. devices: [parts, copies] numbers in the mesh's order.
        hashes: [parts, copies], equal along each row if all is well.
    """

    arrays: list[str]
    devices: np.ndarray
    hashes: np.ndarray

    @classmethod
    def of(cls, array: str, hashes: np.ndarray, spec: P, data: int | None = None) -> _Ballot:
        """From hashes [data, stage, model] of an array placed as `spec`; of one data index only."""
        voters = slice(None) if data is None else slice(data, data + 1)
        sharded = _axes(spec)
        order = sorted(range(len(ARRAY_AXES)), key=lambda d: ARRAY_AXES[d] not in sharded)
        parts = math.prod(hashes.shape[d] for d in order[: len(sharded)])

        def rows(x: np.ndarray) -> np.ndarray:
            return x[voters].transpose(order).reshape(parts, -1)

        devices = rows(np.arange(hashes.size).reshape(hashes.shape))
        return cls([array] * devices.shape[1], devices, rows(hashes))

    def joined(self, other: _Ballot) -> _Ballot:
        """Votes of two arrays on the same parts."""
        return _Ballot(
            self.arrays + other.arrays,
            np.concatenate([self.devices, other.devices], axis=1),
            np.concatenate([self.hashes, other.hashes], axis=1),
        )

    def disputes(self) -> Iterator[tuple[list[Copy], list[int]]]:
        """Copies and votes of each part on which they differ."""
        for part in np.flatnonzero((self.hashes != self.hashes[:, :1]).any(axis=1)):
            copies = list(zip(self.arrays, self.devices[part].tolist(), strict=True))
            yield copies, self.hashes[part].tolist()


def _axes(spec: P) -> set[str]:
    """The mesh axes that a placement splits over."""
    return {axis for entry in spec for axis in as_tuple(entry)}
