"""Orbax, with its silences made loud (orbax-checkpoint 0.12.8).

Orbax writes and reads the arrays; what counts as a step, and whether it is sound, is decided by
`checkpoint.files`. Three more things that Orbax lets pass are errors here: a target of another
dtype (it casts), a save that failed in the background, and the kilobytes in which it words damage
(one line is kept).

```
loop     save(20) ..copy to host.. | train on                     | save(40) waits for 20
thread                             | Orbax writes 20.saving, then checksums, rename to 20, prune |
```
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from spmd_train.checkpoint import files
from spmd_train.checkpoint.contents import check_same_tree
from spmd_train.checkpoint.files import KEEP_ALL, Keep
from spmd_train.distributed import agreed
from spmd_train.errors import RequestError, RunError, listed

_ASYNC_TIMEOUT_SECONDS = 300
"""How long processes wait for each other's writes (Orbax's 1200 would hide a dead peer)."""
_CHUNK_BYTES = 64 << 20
"""Largest piece that is read as a whole: what a restore onto smaller shards holds beyond them."""
_SPARE_BYTES = 1 << 20
"""Metadata, manifest and log lines beside the arrays."""


@dataclass(frozen=True)
class Found:
    """The newest sound step, None without one, and what is wrong with each newer one."""

    step: int | None
    damaged: dict[int, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Saved:
    """A step that counts from now on.

    Attributes:
        blocked_seconds: how long the caller waited for it. seconds: how long it took in all.
    """

    step: int
    path: Path
    blocked_seconds: float
    seconds: float


NOTHING_FOUND = Found(None)


class Checkpoints:
    """The steps saved in `directory`.

    All processes of a run call every method together; the directory must be on a file system that
    they share. With `read_only`, another process may be saving there: nothing is changed.
    `on_saved` is called once a step counts, from within the next call of any method.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: Keep = KEEP_ALL,
        *,
        read_only: bool = False,
        on_saved: Callable[[Saved], None] = lambda saved: None,
    ) -> None:
        self._directory = Path(os.path.abspath(directory))  # Orbax fails late on a relative path
        self._keep = keep
        self._read_only = read_only
        self._main = jax.process_index() == 0
        self._on_saved = on_saved
        self._saving: tuple[int, Future[float]] | None = None
        self._blocked_seconds = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        options = ocp.AsyncOptions(timeout_secs=_ASYNC_TIMEOUT_SECONDS)
        self._orbax = ocp.AsyncCheckpointer(_handler(), async_options=options)
        if not read_only and self._main:
            with self._reporting("cannot open checkpoints in"):
                self._directory.mkdir(parents=True, exist_ok=True)
                files.remove_leftovers(self._directory)

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> bool:
        """Save in the background; the arrays may be donated as soon as this returns.

        `meta` is plain JSON. Returns False for a step that is already saved.

        Raises:
            RunError: there is no room for the step or a newer step is there, and nothing was
                written; or the save before failed, and then this step was not saved either.
        """
        started = time.perf_counter()
        self.wait()
        have = self.steps()
        if step in have:
            return False
        if have and step < have[-1]:
            # Those kept are the newest, so an older step would be the first to be deleted.
            raise RunError(
                f"step {step} is older than the saved step {have[-1]} in {self._directory}: a"
                " resume would take the newer one; continue in another run directory."
            )
        self._check_room(step, state)
        save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), state)
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state, save_args=save_args), meta=ocp.args.JsonSave(meta)
        )
        with self._reporting("saving the checkpoint failed:", step):
            # Orbax's threads would wait out their time-out, at exit too, for a missing directory.
            self._directory.mkdir(parents=True, exist_ok=True)
            self._orbax.save(files.saving_path(self._directory, step), args=items, force=True)
        self._saving = step, self._thread.submit(self._commit, step, started)
        self._blocked_seconds = time.perf_counter() - started
        return True

    def check(self) -> None:
        """Raise if the save in the background has failed; does not wait for it."""
        if self._saving is not None and self._saving[1].done():
            self.wait()

    def wait(self) -> None:
        """Block until the save in progress is on disk.

        Raises:
            RunError: it failed; the steps before it are as they were.
        """
        if self._saving is None:
            return
        (step, result), self._saving = self._saving, None
        with self._reporting("saving the checkpoint failed:", step):
            seconds = result.result()
        self._on_saved(Saved(step, self._path(step), self._blocked_seconds, seconds))

    def steps(self) -> list[int]:
        """All complete steps, oldest first, as the first process sees them."""
        self.wait()
        return agreed(lambda: files.steps(self._directory))

    def newest_sound(self) -> Found:
        """The newest step whose files are what was written; damaged newer ones are set aside.

        Each process reads its share of the files. Directories that look like a step and were never
        finished are reported too.

        Raises:
            RunError: a process does not see the files that the first one sees.
        """
        self.wait()
        damaged: dict[int, list[str]] = {}
        for step in reversed(agreed(lambda: files.numbered(self._directory))):
            wrong = self.damage(step)
            if not wrong:
                return Found(step, damaged)
            damaged[step] = wrong
            if not self._read_only:
                self._put_aside(step)
        return Found(None, damaged)

    def damage(self, step: int) -> list[str]:
        """What is wrong with the files of a step, alike on all processes; each reads its share.

        Raises:
            RunError: a process does not see the files that the first one sees.
        """
        path, count = self._path(step), jax.process_count()
        mine = files.damage(path, slice(jax.process_index(), None, count))
        if count == 1:
            return mine
        damaged = multihost_utils.process_allgather(np.bool_(bool(mine)))
        if not damaged.any():
            return []
        whole = agreed(lambda: files.damage(path))
        if not whole:
            raise RunError(
                f"process {listed(np.flatnonzero(damaged))} cannot read step {step} in"
                f" {self._directory} as process 0 can: all processes must share the file system."
            )
        return whole

    def meta(self, step: int) -> dict[str, Any]:
        """The metadata saved with `step`."""
        with self._reporting("the checkpoint is damaged; restore another step:", step):
            return files.read_meta(self._path(step))

    def restore(self, step: int, abstract: Any) -> Any:
        """The state of `step`, each leaf read straight into the shards that `abstract` asks for.

        Args:
            abstract: tree of `ShapeDtypeStruct`s with shardings. It must match what was saved leaf
                by leaf; of the tree's top level, parts may be left out, and are not read then.

        Raises:
            RequestError: no such step, or a leaf differs; nothing was allocated.
            RunError: the step is damaged.
        """
        if step not in self.steps():
            have = listed(self.steps()) or "none"
            raise RequestError(f"no checkpoint of step {step} in {self._directory}: it has {have}.")
        path = self._path(step)
        with self._reporting("the checkpoint is damaged; restore another step:", step):
            saved = self._orbax.metadata(path).item_metadata["state"].tree
        partly = saved.keys() - abstract.keys()
        check_same_tree(abstract, {k: v for k, v in saved.items() if k not in partly}, path)
        target = ocp.args.PyTreeRestore(
            item=abstract,
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
            partial_restore=bool(partly),
        )
        with self._reporting("the checkpoint is damaged; restore another step:", step):
            return self._orbax.restore(path, args=ocp.args.Composite(state=target)).state

    def close(self) -> None:
        """Finish the save in progress (raising if it failed) and stop the threads."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            with self._reporting("cannot close the checkpoints in"):
                self._orbax.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _path(self, step: int | None) -> Path:
        return self._directory if step is None else files.step_path(self._directory, step)

    def _commit(self, step: int, started: float) -> float:
        """In the background: await Orbax, then make the step count and delete what may go.

        Returns the seconds since `started`.
        """
        self._orbax.wait_until_finished()
        if self._main:
            files.commit(self._directory, step)
            files.prune(self._directory, self._keep)
        return time.perf_counter() - started

    def _check_room(self, step: int, state: Any) -> None:
        needed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) + _SPARE_BYTES
        with self._reporting("cannot save in"):
            free = agreed(lambda: files.free_bytes(self._directory))
        if free < needed:
            raise RunError(
                f"no room for the checkpoint of step {step}: it takes {needed / 1e6:,.0f} MB and"
                f" {self._directory} has {free / 1e6:,.0f} MB free; free some, or keep fewer steps"
                f" (checkpoint.keep_last). Saved and intact: {listed(self.steps()) or 'none'}."
            )

    def _put_aside(self, step: int) -> None:
        if self._main:
            with self._reporting("cannot set the damaged step aside:", step):
                files.put_aside(self._directory, step)

    @contextmanager
    def _reporting(self, what: str, step: int | None = None) -> Iterator[None]:
        """Turn whatever Orbax raises (there is no common class) into one line with the place."""
        try:
            yield
        except Exception as error:
            where = self._path(step) if step is None else f"step {step} at {self._path(step)}"
            raise RunError(f"{what} {where} ({_first_line(error)})") from error


def _handler() -> ocp.CompositeCheckpointHandler:
    """Uncompressed: weights shrink by 7 % only, and zstd takes four times as long as the disk."""
    return ocp.CompositeCheckpointHandler(
        state=ocp.PyTreeCheckpointHandler(use_compression=False), meta=ocp.JsonCheckpointHandler()
    )


def _first_line(error: Exception, limit: int = 300) -> str:
    """The cause in one line: Orbax's and TensorStore's messages run to kilobytes.

    Of a long line the end is kept too: TensorStore gives the system's reason last.
    """
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
