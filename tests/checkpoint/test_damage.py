"""Every file of a real checkpoint deleted, cut in half, one bit flipped: public case P18.

Found, named, and the step before is used. Orbax alone restores a flipped bit as a wrong number.
"""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_train.checkpoint import files
from spmd_train.checkpoint.manager import Checkpoints


def delete(path: Path) -> None:
    path.unlink()


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 0x10
    path.write_bytes(data)


@pytest.fixture(scope="module")
def state():
    values = np.random.default_rng(0).standard_normal((64, 32), np.float32)
    return {"params": {"w": jnp.asarray(values)}, "step": jnp.int32(2)}


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory, state):
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(1, {**state, "step": jnp.int32(1)}, {"step": 1})
        checkpoints.save(2, state, {"step": 2})
    return directory


@pytest.mark.parametrize("harm", [delete, halve, flip])
def test_harm_to_any_file_is_found_and_named(two_steps, tmp_path, harm):
    names = [
        p.relative_to(two_steps / "2") for p in sorted((two_steps / "2").rglob("*")) if p.is_file()
    ]
    assert len(names) > 10
    for name in names:
        shutil.copytree(two_steps, tmp_path / "copy")
        harm(tmp_path / "copy" / "2" / name)
        with Checkpoints(tmp_path / "copy") as checkpoints:
            found = checkpoints.newest_sound()
        assert found.step == 1, name
        assert str(name) in " ".join(found.damaged[2])
        assert files.steps(tmp_path / "copy") == [1]
        assert (tmp_path / "copy" / "2.damaged").is_dir()
        shutil.rmtree(tmp_path / "copy")


def abstract(state):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state)


def test_after_damage_the_step_can_be_saved_again(two_steps, tmp_path, state):
    shutil.copytree(two_steps, tmp_path / "copy")
    flip(max((tmp_path / "copy" / "2").rglob("d/*"), key=lambda p: p.stat().st_size))
    (tmp_path / "copy" / "9").mkdir()
    (tmp_path / "copy" / "3.saving.orbax-checkpoint-tmp").mkdir()
    with Checkpoints(tmp_path / "copy") as checkpoints:
        found = checkpoints.newest_sound()
        assert (found.step, list(found.damaged)) == (1, [9, 2])
        assert checkpoints.save(2, state, {"step": 2})
        assert checkpoints.save(3, state, {"step": 3})
        assert checkpoints.newest_sound().step == 3
        restored = checkpoints.restore(2, abstract(state))
    np.testing.assert_array_equal(restored["params"]["w"], state["params"]["w"])
    assert {p.name for p in (tmp_path / "copy").iterdir()} == {"1", "2", "3", "9.damaged"}


def test_a_reader_changes_nothing(two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path / "copy")
    delete(tmp_path / "copy" / "2" / "meta" / "metadata")
    (tmp_path / "copy" / "3.saving").mkdir()
    with Checkpoints(tmp_path / "copy", read_only=True) as checkpoints:
        found = checkpoints.newest_sound()
    assert found.step == 1
    assert found.damaged == {2: ["meta/metadata is missing (No such file or directory)"]}
    assert {p.name for p in (tmp_path / "copy").iterdir()} == {"1", "2", "3.saving"}
