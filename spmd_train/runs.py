"""A run directory: where a run writes, and how it is opened again.

```
config.yaml   tokenizer.json   metrics.jsonl   events.jsonl   checkpoints/
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from spmd_train import config as configuration
from spmd_train.config import Config
from spmd_train.differences import differences
from spmd_train.disk import write_whole
from spmd_train.errors import RequestError

# What a resumed run may change: where and how long it runs and what it shows, never what it learns.
FREE_ON_RESUME = (
    *("mesh", "steps", "name", "precision.policy", "log.", "eval.", "checkpoint.", "watchdog."),
    *("guard.max_consecutive_skips", "guard.diagnoses", "guard.rollback_after"),
    "guard.replicas_every",
    *("data.source", "data.mixing", "data.tokenizer"),  # paths; the checkpoint knows the contents
)


@dataclass(frozen=True)
class RunDirectory:
    """Paths of a run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def exists(self) -> bool:
        """Whether the directory holds a run."""
        return self.config.exists()

    def read_config(self) -> Config:
        """The configuration the run was started with.

        Raises:
            RequestError: this is no run directory.
        """
        return configuration.load(self.saved_config())

    def write_config(self, config: Config) -> None:
        """Make the directory that of a run with this configuration.

        Raises:
            OSError: the disk is full, or the place cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.config, configuration.dump(config).encode())

    def saved_config(self) -> Path:
        """The path of `config.yaml`.

        Raises:
            RequestError: this is no run directory.
        """
        if not self.exists():
            raise RequestError(
                f"{self.path} is no run directory: it has no config.yaml; "
                f"runs in {self.path.parent}: {_siblings(self.path)}."
            )
        return self.config


@dataclass(frozen=True)
class Launch:
    """What a run is to do, before anything of it is started.

    Attributes:
        resume: continue from the newest sound checkpoint in `run`.
        init_from: another run, whose parameters this one starts with.
        stop_after: save and leave after this step, as a preemption would; None runs to the end.
    """

    config: Config
    run: RunDirectory
    resume: bool = False
    init_from: RunDirectory | None = None
    stop_after: int | None = None

    @property
    def last_step(self) -> int:
        return min(self.config.steps, self.stop_after or self.config.steps)


def _siblings(path: Path) -> str:
    runs = sorted(p.parent.name for p in path.parent.glob("*/config.yaml"))
    return ", ".join(runs) or "none"


def new_run(out: str | None, name: str) -> RunDirectory:
    """The directory of a run to be started.

    Raises:
        RequestError: it holds a run already.
    """
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    run = RunDirectory(Path(out) if out else Path("runs") / f"{name}-{stamp}")
    if run.exists():
        raise RequestError(
            f"--out {run.path} already holds a run; add --resume to continue it, "
            "or give another directory."
        )
    if run.path.exists() and not run.path.is_dir():
        raise RequestError(f"--out {run.path} is a file; give a directory.")
    return run


def resumed_config(
    run: RunDirectory, path: str | None, overrides: Sequence[str], **top: Any
) -> Config:
    """The configuration of a resumed run: its own, with what may change on top.

    Raises:
        RequestError: a key that decides what the run learns differs, named with both values.
    """
    saved = run.read_config()
    if path is None:
        requested = configuration.load(run.config, overrides, **top)
    else:
        requested = configuration.load(path, overrides, **{"mesh": saved.mesh, **_given(top)})
    differing = [
        f"{key} is {ours} in the request and {theirs} in {run.config}"
        for key, ours, theirs in changed(requested, saved.model_dump())
    ]
    if differing:
        raise RequestError(
            f"what a run learns cannot be changed: {'; '.join(differing)}. "
            "May change: mesh, steps, precision.policy, log, eval, checkpoint, watchdog, most "
            "guard keys and where the same data lie."
        )
    return requested


def changed(
    config: Config, other: Mapping[str, Any], only: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Each key (starting with `only`) that decides what is learned and differs, with both values.

    Args:
        other: a configuration as plain values, perhaps written before some keys existed.

    Raises:
        RequestError: `other` has keys or values that this version does not know.
    """
    try:
        theirs = Config.model_validate(other).model_dump()
    except ValidationError as error:
        first = error.errors()[0]
        raise RequestError(
            f"{'.'.join(map(str, first['loc']))} in the saved configuration is not known to this "
            f"version ({first['msg']}); use the version of spmd_train that wrote it."
        ) from error
    for key, mine, their in differences(config.model_dump(), theirs):
        if key.startswith(only) and not key.startswith(FREE_ON_RESUME):
            yield key, mine, their


def _given(top: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in top.items() if value is not None}
