"""Steps made by hand; checksums are compared with zlib's over the whole file."""

import json
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_train.checkpoint import files
from spmd_train.checkpoint.files import Keep


def write(directory: Path, step: int, size: int = 100) -> None:
    """What a writer leaves at `saving_path`."""
    path = files.saving_path(directory, step)
    (path / "meta").mkdir(parents=True)
    (path / "meta" / "metadata").write_text(json.dumps({"step": step}))
    (path / "data").write_bytes(bytes(i * step % 256 for i in range(size)))


def commit(directory: Path, *steps: int) -> None:
    for step in steps:
        write(directory, step)
        files.commit(directory, step)


def test_a_step_counts_once_it_is_committed_with_size_and_crc_of_every_file(tmp_path):
    write(tmp_path, 3)
    assert files.steps(tmp_path) == files.numbered(tmp_path) == []
    files.commit(tmp_path, 3)
    assert files.steps(tmp_path) == [3]
    assert files.leftovers(tmp_path) == []
    manifest = json.loads((tmp_path / "3" / files.MANIFEST).read_text())
    data = (tmp_path / "3" / "data").read_bytes()
    assert manifest["files"].keys() == {"data", "meta/metadata"}
    assert manifest["files"]["data"] == [100, f"{zlib.crc32(data):08x}"]
    assert files.damage(tmp_path / "3") == []
    assert files.read_meta(tmp_path / "3") == {"step": 3}


@pytest.mark.parametrize("name", ["data", "meta/metadata"])
def test_damage_names_the_file_and_what_is_wrong(tmp_path, name):
    commit(tmp_path, 3)
    path = tmp_path / "3" / name
    whole = path.read_bytes()

    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    (problem,) = files.damage(tmp_path / "3")
    assert problem.startswith(f"{name} was altered: CRC-32 ")
    assert files.damage(tmp_path / "3", files.SIZES) == [], "contents were not to be read"

    path.write_bytes(whole[: len(whole) // 2])
    (problem,) = files.damage(tmp_path / "3", files.SIZES)
    assert problem == f"{name} has {len(whole) // 2} bytes instead of {len(whole)}"

    path.unlink()
    (problem,) = files.damage(tmp_path / "3")
    assert problem.startswith(f"{name} is missing")


def test_no_flipped_bit_of_the_manifest_goes_unnoticed(tmp_path):
    commit(tmp_path, 3)
    path = tmp_path / "3" / files.MANIFEST
    whole = path.read_bytes()
    for position in range(len(whole)):
        for bit in (1, 4, 32, 128):
            path.write_bytes(
                whole[:position] + bytes([whole[position] ^ bit]) + whole[position + 1 :]
            )
            found = files.damage(tmp_path / "3")
            assert [f.startswith(files.MANIFEST) for f in found] == [True], (position, bit, found)


def test_processes_that_share_the_reading_miss_nothing(tmp_path):
    commit(tmp_path, 3)
    (tmp_path / "3" / "data").write_bytes(b"x" * 100)
    found = [files.damage(tmp_path / "3", slice(i, None, 2)) for i in range(2)]
    assert [len(each) for each in found] == [1, 0]


def test_unfinished_and_empty_directories_never_count(tmp_path):
    commit(tmp_path, 1)
    write(tmp_path, 2)
    (tmp_path / "9").mkdir()
    (tmp_path / "12.saving.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "007").mkdir()
    (tmp_path / "notes").write_text("mine")
    assert files.steps(tmp_path) == [1]
    assert files.numbered(tmp_path) == [1, 9]
    assert files.damage(tmp_path / "9") == ["MANIFEST.json is missing: the step holds nothing"]
    assert [p.name for p in files.remove_leftovers(tmp_path)] == [
        "12.saving.orbax-checkpoint-tmp", "2.saving",
    ]  # fmt: skip
    assert {p.name for p in tmp_path.iterdir()} == {"1", "9", "007", "notes"}
    commit(tmp_path, 9)
    assert files.steps(tmp_path) == [1, 9], "an empty directory is not in the way"


def test_a_damaged_step_is_set_aside_until_it_is_saved_again(tmp_path):
    commit(tmp_path, 1, 2)
    assert files.put_aside(tmp_path, 2).name == "2.damaged"
    assert files.steps(tmp_path) == files.numbered(tmp_path) == [1]
    assert [p.name for p in files.set_aside(tmp_path)] == ["2.damaged"]
    commit(tmp_path, 2)
    assert files.steps(tmp_path) == [1, 2]
    assert files.set_aside(tmp_path) == []


@given(
    steps=st.lists(st.integers(1, 40), min_size=1, unique=True).map(sorted),
    last=st.integers(1, 5),
    every=st.integers(0, 10),
)
def test_the_newest_and_the_multiples_stay(steps, last, every):
    kept = Keep(last, every)(steps)
    assert steps[-1] in kept
    assert set(steps[-last:]) <= kept
    for step in steps[:-last]:
        assert (step in kept) == (every > 0 and step % every == 0)
    assert Keep()(steps) == set(steps)


def test_pruning_never_counts_a_step_that_lost_a_file_as_kept(tmp_path):
    commit(tmp_path, 1, 2, 3)
    (tmp_path / "3" / "data").unlink()
    assert files.prune(tmp_path, Keep(1)) == [1], "2 is the newest whole one"
    commit(tmp_path, 4)
    assert files.prune(tmp_path, Keep(1)) == [2]
    assert files.steps(tmp_path) == [3, 4], "3 is damaged and evidence"


def test_a_failed_commit_leaves_no_step(tmp_path, monkeypatch):
    commit(tmp_path, 1)
    write(tmp_path, 2)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.commit(tmp_path, 2)
    assert files.steps(tmp_path) == [1]
    assert files.damage(tmp_path / "1") == []
