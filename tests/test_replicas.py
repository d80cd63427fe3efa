"""A bit flipped in one device's memory is named: device, place in the mesh, array.

Real states, one device's shard edited in place; what must be found is told by the edit alone.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import T0, Run, run
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_train.mesh import ARRAY_AXES
from spmd_train.replicas import Replicas, describe, slice_hashes
from spmd_train.state import TrainState

GATE, SCALE, TABLE = "params/blocks/mlp/gate", "params/head/norm/scale", "params/embed/table"
MASTER = "opt_state/inner/master/"


@functools.cache
def checked(mesh: str, policy: str = "fp32", zero: int = 1) -> tuple[TrainState, Replicas, Run]:
    """A state as a run begins with it, and what checks it; some meshes pad the vocabulary."""
    sets = (f"precision.policy={policy}", f"parallel.zero={zero}", "model.vocab=61")
    made = run(mesh, "batch.microbatches=2", "model.layers=2", *sets, base=T0)
    return made.state(), Replicas(made.spec), made


hashed = jax.jit(slice_hashes)


def array_names(state: TrainState) -> list[str]:
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]


def flipped(state: TrainState, array: str, device: int, bit: int, element: int = 0) -> TrainState:
    """`state` with one bit of one element of one device's shard flipped."""

    def edit(shard: Any) -> jax.Array:
        if shard.device.id != device:
            return shard.data
        host = np.array(shard.data)
        words = host.reshape(-1).view(np.dtype(f"u{host.dtype.itemsize}"))
        words[element] ^= words.dtype.type(1 << bit)
        return jax.device_put(host, shard.device)

    leaves, tree = jax.tree.flatten(state)
    index = array_names(state).index(array)
    x = leaves[index]
    shards = [edit(shard) for shard in x.addressable_shards]
    leaves[index] = jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)
    return jax.tree.unflatten(tree, leaves)


def place(replicas: Replicas, device: int) -> dict[str, int]:
    mesh = replicas.spec.layout.mesh
    (where,) = np.argwhere(np.vectorize(lambda d: d.id)(mesh.devices) == device)
    return dict(zip(ARRAY_AXES, where.tolist(), strict=True))


class TestHash:
    @given(
        dtype=st.sampled_from(["bfloat16", "float16", "float32", "int32", "uint8", "bool"]),
        shape=st.sampled_from([(), (7,), (2, 3, 2)]),
        data=st.data(),
    )
    @settings(max_examples=60)
    def test_one_changed_element_always_shows(self, dtype, shape, data):
        """Any bits of it, whatever the array holds; zeros are the hardest."""
        itemsize = jnp.dtype(dtype).itemsize
        size = int(np.prod(shape))
        seed = data.draw(st.integers(0, 3))
        words = np.random.default_rng(seed).integers(0, 256, size * itemsize, np.uint8)
        words = words % 2 if dtype == "bool" else words * bool(seed)
        before = words.view(jnp.dtype(dtype)).reshape(shape)
        element = data.draw(st.integers(0, size - 1))
        high = 1 if dtype == "bool" else 2 ** (8 * itemsize) - 1
        change = data.draw(st.integers(1, high)).to_bytes(itemsize, "little")
        changed = words.reshape(size, itemsize).copy()
        changed[element] ^= np.frombuffer(change, np.uint8)
        after = changed.reshape(-1).view(jnp.dtype(dtype)).reshape(shape)
        assert hashed(before) != hashed(after)

    def test_every_bit_of_a_float32(self):
        """32 flips, 33 different hashes; those of NaN and infinity among them."""
        word = np.float32(1.5).view(np.uint32) ^ np.uint32([0, *(1 << np.arange(32))])
        arrays = np.zeros((33, 2, 5), np.float32)
        arrays[:, 1, 2] = word.view(np.float32)
        hashes = jax.vmap(slice_hashes)(jnp.asarray(arrays))
        assert len(np.unique(hashes)) == 33

    def test_order_matters(self):
        x = np.arange(24, dtype=np.float32).reshape(4, 6)
        moved = (x.T.copy().reshape(4, 6), x[::-1], x[:, ::-1], np.roll(x, 1))
        hashes = {int(slice_hashes(jnp.asarray(a))[0]) for a in (x, *moved)}
        assert len(hashes) == 5

    @pytest.mark.parametrize("dim", [0, 1, 2])
    def test_slices_hash_as_arrays_of_their_own(self, dim):
        x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 6, 8)), jnp.bfloat16)
        want = np.concatenate([slice_hashes(part) for part in jnp.split(x, 2, dim)])
        np.testing.assert_array_equal(slice_hashes(x, dim, 2), want)

    def test_is_the_published_function(self):
        """One word at index 0: fmix32 of it. 0x514E28B7 is MurmurHash3's of 1 (Appleby's code)."""
        assert int(slice_hashes(jnp.uint32(1))[0]) == 0x514E28B7
        assert int(slice_hashes(jnp.uint32(0))[0]) == 0


class TestClean:
    @pytest.mark.parametrize(
        ("mesh", "policy", "zero"),
        [
            ("2x1x2", "fp32", 1),
            ("2x2x2", "bf16", 1),
            pytest.param("2x2x2", "fp32", 1, marks=pytest.mark.slow),
            pytest.param("2x1x2", "bf16", 3, marks=pytest.mark.slow),
            pytest.param("4x1x1", "fp32", 0, marks=pytest.mark.slow),
        ],
    )
    def test_three_steps_leave_every_copy_alike(self, mesh, policy, zero):
        _, replicas, made = checked(mesh, policy, zero)
        state, batch = made.state(), made.batch()
        for _ in range(3):
            state, _ = made(state, batch)
            assert replicas.check(state) == []


class TestFlippedBit:
    @pytest.mark.parametrize("zero", [0, 1])
    @pytest.mark.parametrize("array", [GATE, SCALE, TABLE, "step"])
    def test_four_replicas_name_the_odd_one(self, array, zero):
        state, replicas, _ = checked("4x1x1", "fp32", zero)
        (finding,) = replicas.check(flipped(state, array, device=2, bit=0))
        assert finding == {
            "array": array,
            "device": 2,
            "process": 0,
            "mesh": {"data": 2, "stage": 0, "model": 0},
            "copies": 4,
            "agrees_with": 0,
            "outvoted": True,
        }
        assert f"{array} on device 2 (process 0, data=2, stage=0, model=0)" in describe([finding])

    def test_two_replicas_are_both_named(self):
        state, replicas, _ = checked("2x1x2")
        findings = replicas.check(flipped(state, GATE, device=3, bit=7, element=9))
        assert [(f["array"], f["device"], f["mesh"]["stage"]) for f in findings] == [
            (GATE, 1, 1),
            (GATE, 3, 1),
        ]
        assert not any(f["outvoted"] for f in findings)
        assert "differs between devices 1, 3, and no majority" in describe(findings)

    @pytest.mark.parametrize("device", range(8))
    @pytest.mark.parametrize("zero", [0, 1])
    def test_the_image_of_the_master_decides_between_two(self, device, zero):
        """bf16 on 2x2x2: a weight's shard has two copies; each slice of it has a master as well."""
        state, replicas, _ = checked("2x2x2", "bf16", zero)
        for element in (0, -1):  # slices of both data shards
            (finding,) = replicas.check(flipped(state, GATE, device, 3, element))
            assert (finding["array"], finding["device"]) == (GATE, device)
            assert finding["mesh"] == place(replicas, device)
            assert finding["outvoted"]

    @pytest.mark.parametrize("array", [GATE, SCALE, TABLE])
    @pytest.mark.parametrize(("mesh", "device"), [("2x1x2", 1), ("4x1x1", 3), ("2x2x2", 6)])
    def test_of_a_sharded_master(self, mesh, device, array):
        """Its image differs from every replica's slice: padding rows and replicated norms too."""
        state, replicas, _ = checked(mesh, "bf16", 1)
        master = MASTER + array.removeprefix("params/")
        odd = flipped(state, master, device, bit=30, element=-1)
        assert [(f["array"], f["device"], f["outvoted"]) for f in replicas.check(odd)] == [
            (master, device, True)
        ]

    def test_of_a_norm_replicated_over_model_and_stage(self):
        state, replicas, _ = checked("2x2x2")
        (finding,) = replicas.check(flipped(state, SCALE, device=5, bit=31, element=4))
        assert (finding["array"], finding["device"], finding["copies"]) == (SCALE, 5, 8)
        assert finding["mesh"] == place(replicas, 5) == {"data": 1, "stage": 0, "model": 1}

    def test_of_weights_that_nothing_replicates_but_their_master(self):
        """ZeRO 3 with data 2 x stage 2: two votes, so both are named, on the same device."""
        state, replicas, _ = checked("2x1x2", "bf16", 3)
        findings = replicas.check(flipped(state, GATE, device=2, bit=5))
        assert {(f["array"], f["device"]) for f in findings} == {
            (GATE, 2),
            (MASTER + "blocks/mlp/gate", 2),
        }

    def test_of_a_moment_only_where_it_has_copies(self):
        """One data shard's moment is nobody else's: the limit that the docstring tells."""
        for zero, found in ((0, [1]), (1, [])):
            state, replicas, _ = checked("4x1x1", "fp32", zero)
            (array,) = [n for n in array_names(state) if "/mu/" in n and n.endswith("mlp/gate")]
            findings = replicas.check(flipped(state, array, device=1, bit=12))
            assert [f["device"] for f in findings] == found

    def test_two_faults_are_both_named(self):
        state, replicas, _ = checked("4x1x1")
        findings = replicas.check(flipped(flipped(state, GATE, 1, 2), SCALE, 3, 2))
        assert {(f["array"], f["device"]) for f in findings} == {(GATE, 1), (SCALE, 3)}
        assert "(and 1 more arrays)" in describe(findings)
