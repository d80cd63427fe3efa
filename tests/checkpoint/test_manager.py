"""Saved and restored bits are compared with the arrays themselves; damage is done by hand."""

from concurrent.futures import wait
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_train.checkpoint import files
from spmd_train.checkpoint.files import Keep
from spmd_train.checkpoint.manager import Checkpoints
from spmd_train.errors import RequestError, RunError

META = {"step": 7, "data": {"seed": 1}, "history": [0.5, None, "nan"]}


class Moments(NamedTuple):
    mu: object
    empty: tuple = ()


def mesh(*shape):
    devices = jax.devices()[: int(np.prod(shape))]
    return Mesh(np.array(devices).reshape(shape), ("data", "model", "stage"))


def state(on, seed=0):
    """A train state in small: sharded, replicated, half precision, scalar, key, named tuple."""
    draw = np.random.default_rng(seed).standard_normal

    def put(value, *spec):
        return jax.device_put(value, NamedSharding(on, P(*spec)))

    return {
        "params": {
            "kernel": put(draw((8, 16), np.float32), "data", "model"),
            "half": put(jnp.asarray(draw(8), jnp.bfloat16), "stage"),
        },
        "optimizer": (Moments(put(draw((4, 8)), ("stage", "model"))), put(jnp.int32(seed))),
        "key": put(jax.random.key(seed)),
    }


def abstract_of(tree, on=None):
    """The specs of `tree`, on its own mesh or with the same axes on another."""

    def leaf(x):
        sharding = x.sharding if on is None else NamedSharding(on, x.sharding.spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(leaf, tree)


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture(scope="module")
def saved():
    return state(mesh(2, 2, 2), seed=3)


@pytest.fixture
def directory(tmp_path, saved):
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.steps() == []
        assert checkpoints.save(7, saved, META)
    return tmp_path / "checkpoints"


def reopened(directory):
    return Checkpoints(directory)


def test_restores_every_bit_in_the_same_place(directory, saved):
    with reopened(directory) as checkpoints:
        assert checkpoints.steps() == [7]
        restored = checkpoints.restore(7, abstract_of(saved))
        assert checkpoints.meta(7) == META
    assert_same_bits(restored, saved)
    for new, old in zip(jax.tree.leaves(restored), jax.tree.leaves(saved), strict=True):
        assert new.sharding == old.sharding


@pytest.mark.parametrize("shape", [(1, 1, 4), (8, 1, 1), (1, 1, 1)])
def test_restores_every_bit_on_another_mesh(directory, saved, shape):
    target = abstract_of(saved, mesh(*shape))
    with reopened(directory) as checkpoints:
        restored = checkpoints.restore(7, target)
    assert_same_bits(restored, saved)
    for new, want in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
        assert new.sharding == want.sharding


def refused(directory, target):
    with reopened(directory) as checkpoints, pytest.raises(RequestError) as caught:
        checkpoints.restore(7, target)
    assert str(directory / "7") in str(caught.value)
    return str(caught.value)


def test_another_dtype_is_refused_by_name(directory, saved):
    target = abstract_of(saved)
    half = target["params"]["half"]
    target["params"]["half"] = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=half.sharding)
    message = refused(directory, target)
    assert "params.half is bfloat16[8] in the checkpoint and float32[8] in the run" in message


def test_another_shape_is_refused_by_name(directory, saved):
    target = abstract_of(saved)
    moments = target["optimizer"][0]
    wider = jax.ShapeDtypeStruct((8, 8), moments.mu.dtype, sharding=moments.mu.sharding)
    target["optimizer"] = (Moments(wider), target["optimizer"][1])
    assert "optimizer.0.mu is float32[4, 8] in the checkpoint and float32[8, 8]" in refused(
        directory, target
    )


def test_missing_and_extra_leaves_are_refused_by_name(directory, saved):
    target = abstract_of(saved)
    kernel = target["params"].pop("kernel")
    assert "params.kernel is float32[8, 16] in the checkpoint and absent in" in refused(
        directory, target
    )
    target["params"] |= {"kernel": kernel, "bias": kernel}
    assert "params.bias is absent in the checkpoint and float32[8, 16]" in refused(
        directory, target
    )


def test_a_step_that_is_not_there(directory, saved):
    with reopened(directory) as checkpoints, pytest.raises(RequestError, match="it has 7"):
        checkpoints.restore(6, abstract_of(saved))


def largest_file(directory):
    files = [path for path in directory.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("item", ["7/state/d", "7/state/_METADATA"])
@pytest.mark.parametrize("damage", ["truncated", "deleted"])
def test_damage_is_a_run_error_with_step_and_place(directory, saved, item, damage):
    path = directory / item
    path = largest_file(path) if path.is_dir() else path
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        path.unlink()
    with reopened(directory) as checkpoints, pytest.raises(RunError) as caught:
        checkpoints.restore(7, abstract_of(saved))
    message = str(caught.value)
    assert f"step 7 at {directory / '7'}" in message
    assert "damaged" in message
    assert "\n" not in message
    assert len(message) < 600
    assert caught.value.__cause__ is not None


def test_only_the_parameters_are_read_if_only_they_are_asked_for(directory, saved):
    target = {"params": abstract_of(saved)["params"]}
    with reopened(directory) as checkpoints:
        restored = checkpoints.restore(7, target)
        assert_same_bits(restored, {"params": saved["params"]})
        target["params"].pop("half")
        with pytest.raises(
            RequestError, match=r"params.half is bfloat16\[8\] .* absent in the run"
        ):
            checkpoints.restore(7, target)


def test_no_piece_is_read_whole_that_is_larger_than_the_limit(tmp_path, monkeypatch):
    """A restore onto smaller shards must not hold whole arrays: pieces are what is read at once."""
    monkeypatch.setattr("spmd_train.checkpoint.manager._CHUNK_BYTES", 4096)
    array = jax.device_put(np.zeros((64, 64), np.float32), jax.devices()[0])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": array}, {})
        checkpoints.wait()
        leaf = checkpoints._orbax.metadata(tmp_path / "1").item_metadata["state"].tree["x"]
        assert np.prod(leaf.storage.chunk_shape) * 4 <= 4096


def test_a_step_without_its_manifest_does_not_count(directory):
    (directory / "7" / files.MANIFEST).unlink()
    with reopened(directory) as checkpoints:
        assert checkpoints.steps() == []


def test_any_step_is_saved_and_the_last_are_kept(tmp_path):
    array = {"x": jnp.arange(4.0)}
    with Checkpoints(tmp_path, Keep(2)) as checkpoints:
        for step in (1, 4, 5, 13):
            assert checkpoints.save(step, array, {})
        assert checkpoints.steps() == [5, 13]
        assert not checkpoints.save(13, array, {})
        with pytest.raises(RunError, match="step 6 is older than the saved step 13"):
            checkpoints.save(6, array, {})
    with Checkpoints(tmp_path) as checkpoints:
        for step in (14, 15):
            checkpoints.save(step, array, {})
        assert checkpoints.steps() == [5, 13, 14, 15]


def test_buffers_may_be_donated_once_save_has_returned(tmp_path):
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros((256, 256))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": x}, {})
        add(x)
        target = {"x": jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=x.sharding)}
        restored = checkpoints.restore(1, target)
    assert not np.asarray(restored["x"]).any()


def test_a_save_without_room_writes_nothing_and_says_how_much_it_takes(tmp_path, monkeypatch):
    array = {"x": jnp.zeros(1_000_000)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, array, {})
        checkpoints.wait()
        monkeypatch.setattr(files, "free_bytes", lambda _: 2_000_000)
        with pytest.raises(RunError, match=r"step 2: it takes 5 MB and .* has 2 MB free") as caught:
            checkpoints.save(2, array, {})
        assert "Saved and intact: 1." in str(caught.value)
        assert {p.name for p in tmp_path.iterdir()} == {"1"}


def test_relative_directories_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Checkpoints("run/checkpoints") as checkpoints:
        checkpoints.save(1, {"x": jnp.zeros(2)}, {})
    assert files.steps(tmp_path / "run/checkpoints") == [1]


def break_writes(monkeypatch):
    """Make the background part of every write fail, as a full disk does."""

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("spmd_train.checkpoint.files.commit", full)


@pytest.mark.parametrize("surfaces_in", ["save", "wait", "check", "steps", "close"])
def test_a_failed_background_save_is_raised_with_path_and_cause(tmp_path, monkeypatch, surfaces_in):
    checkpoints = Checkpoints(tmp_path)
    array = {"x": jnp.zeros(2)}
    with monkeypatch.context() as patch:
        break_writes(patch)
        checkpoints.save(3, array, {})
        arguments = (4, array, {}) if surfaces_in == "save" else ()
        wait([checkpoints._saving[1]])
        with pytest.raises(RunError) as caught:
            getattr(checkpoints, surfaces_in)(*arguments)
    assert f"step 3 at {tmp_path / '3'}" in str(caught.value)
    assert "No space left on device" in str(caught.value)
    if surfaces_in != "close":
        assert checkpoints.steps() == []
        assert checkpoints.save(4, array, {})
        assert checkpoints.steps() == [4]
        checkpoints.close()


def test_a_file_in_place_of_the_directory(tmp_path):
    path: Path = tmp_path / "checkpoints"
    path.write_text("")
    with pytest.raises(RunError, match=f"cannot open checkpoints in {path}"):
        Checkpoints(path)


def test_a_directory_replaced_by_a_file_during_the_run(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    (tmp_path / "c").rmdir()
    (tmp_path / "c").write_text("")
    with pytest.raises(RunError, match=f"step 1 at {tmp_path}/c/1"):
        checkpoints.save(1, {"x": jnp.zeros(2)}, {})
