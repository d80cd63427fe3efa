"""Orbax, with its silences made loud (orbax-checkpoint 0.12.8).

Three things Orbax lets pass are errors here: a target of another dtype (it casts), a save that
failed in the background (it lists the step all the same), and the kilobytes in which it words
damage (one line is kept). A step counts only once its `commit_success.txt` is written
(COMMIT_FILE atomicity): every reader of these directories must be opened with this class.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from spmd_train.errors import RequestError, RunError, listed

_ASYNC_TIMEOUT_SECONDS = 300
"""How long processes wait for each other's writes (Orbax's 1200 would hide a dead peer)."""


class Checkpoints:
    """The steps saved in `directory`, of which the last `keep_last` (None: all) are kept.

    All processes of a run call every method together. With `read_only`, another process may be
    saving there: nothing is removed, not even what looks unfinished.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep_last: int | None = None,
        *,
        read_only: bool = False,
    ) -> None:
        self._directory = os.path.abspath(directory)  # Orbax takes a relative path, then fails late
        self._saving: int | None = None
        with self._reporting("cannot open checkpoints in"):
            os.makedirs(self._directory, exist_ok=True)  # Orbax does not mind a file there
            self._manager = _open(self._directory, keep_last, read_only)

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> bool:
        """Save in the background; the arrays may be donated as soon as this returns.

        `meta` is plain JSON. Returns False for a step that is already saved. A failure of the
        save before is raised here, and then this step was not saved.
        """
        latest = self.latest()
        if step in self._manager.all_steps():
            return False
        if latest is not None and step < latest:
            # Orbax would keep the N written last, so an older step would push out a newer one.
            raise RunError(
                f"step {step} is older than the saved step {latest} in {self._directory}: a resume"
                " would take the newer one; continue in another run directory."
            )
        self._saving = step
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        with self._reporting("saving the checkpoint failed:", step):
            # Orbax's threads would wait out their time-out, at exit too, for a missing directory.
            os.makedirs(self._directory, exist_ok=True)
            return bool(self._manager.save(step, args=items, force=True))  # when is our policy

    def latest(self) -> int | None:
        """The newest step that is complete on disk, None without one."""
        return max(self.steps(), default=None)

    def steps(self) -> list[int]:
        """All complete steps, oldest first."""
        self.wait()
        return sorted(self._manager.all_steps())

    def restore(self, step: int, abstract: Any) -> tuple[Any, dict[str, Any]]:
        """The state and meta of `step`, placed as `abstract` (ShapeDtypeStructs) says.

        The state takes the tree of `abstract`, which must match what was saved leaf by leaf.
        """
        if step not in self.steps():
            have = listed(self.steps()) or "none"
            raise RequestError(f"no checkpoint of step {step} in {self._directory}: it has {have}.")
        with self._reporting("the checkpoint is damaged; restore another step:", step):
            saved = self._manager.item_metadata(step)["state"].tree
        _check_same(abstract, saved, self._path(step))
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract), meta=ocp.args.JsonRestore()
        )
        with self._reporting("the checkpoint is damaged; restore another step:", step):
            restored = self._manager.restore(step, args=items)
        return restored.state, restored.meta

    def wait(self) -> None:
        """Block until the save in progress is on disk; raise if it failed."""
        with self._reporting("saving the checkpoint failed:", self._saving):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Finish the save in progress (raising if it failed) and stop Orbax's threads."""
        try:
            self.wait()  # Orbax's own close leaves its threads running when this fails
        finally:
            with self._reporting("cannot close the checkpoints in"):
                self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _path(self, step: int | None) -> str:
        return self._directory if step is None else os.path.join(self._directory, str(step))

    @contextmanager
    def _reporting(self, what: str, step: int | None = None) -> Iterator[None]:
        """Turn whatever Orbax raises (there is no common class) into one line with the place."""
        try:
            yield
        except Exception as error:
            where = self._path(step) if step is None else f"step {step} at {self._path(step)}"
            raise RunError(f"{what} {where} ({_first_line(error)})") from error


def _open(directory: str, keep_last: int | None, read_only: bool) -> ocp.CheckpointManager:
    """Handlers are named here, or the metadata of a step could not be read before its data."""
    return ocp.CheckpointManager(
        directory,
        item_handlers={
            "state": ocp.StandardCheckpointHandler(),
            "meta": ocp.JsonCheckpointHandler(),
        },
        options=ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(keep_last),
            atomicity_options=ocp.options.AtomicityOptions(
                mode=ocp.options.AtomicityMode.COMMIT_FILE
            ),
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
            async_options=ocp.AsyncOptions(timeout_secs=_ASYNC_TIMEOUT_SECONDS),
        ),
    )


def _check_same(abstract: Any, saved: Any, path: str) -> None:
    """Refuse a state whose leaves differ in name, shape or dtype from those on disk."""
    wanted, stored = _leaves(abstract), _leaves(saved)
    for name in [*wanted, *(name for name in stored if name not in wanted)]:
        have, want = _spell(stored.get(name)), _spell(wanted.get(name))
        if have != want:
            raise RequestError(
                f"the checkpoint {path} does not fit this run: {name} is {have} in the checkpoint"
                f" and {want} in the run; resume with the configuration that wrote it."
            )


def _leaves(tree: Any) -> dict[str, Any]:
    """Leaves by dotted path. Orbax's metadata has dicts and lists where the state has tuples and
    named tuples; the path reads the same."""
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in pairs}


def _spell(leaf: Any) -> str:
    """Dtype and shape on disk, where a typed PRNG key is its uint32 data."""
    if leaf is None:
        return "absent"
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return f"{leaf.dtype}{list(leaf.shape)}"


def _first_line(error: Exception, limit: int = 300) -> str:
    """The cause in one line: Orbax's and TensorStore's messages run to kilobytes."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."
