"""`checkpoint ls`, `verify` and `show`: the steps of a run as data and as text. No JAX needed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from spmd_train.checkpoint import files
from spmd_train.config_yaml import write_yaml
from spmd_train.errors import RequestError, listed

COMPLETE, SOUND, DAMAGED, ASIDE = "complete", "sound", "damaged", "set aside"


@dataclass(frozen=True)
class StepReport:
    """One directory that is, or was, a step.

    Attributes:
        state: `complete` (all files there, contents not read), `sound` (contents read and right),
            `damaged`, or `set aside` (found damaged by a run, which went on from an older step).
        problems: what is wrong, a sentence a file.
    """

    step: int
    state: str
    bytes: int
    saved: str | None = None
    mesh: str | None = None
    policy: str | None = None
    problems: tuple[str, ...] = ()


def steps(directory: Path, only: int | None = None, *, read: bool = False) -> list[StepReport]:
    """The steps in a run's checkpoint directory, oldest first.

    Args:
        only: this step alone. read: compare every file's contents with its checksum.

    Raises:
        RequestError: there is no such step.
    """
    there = files.numbered(directory)
    if only is not None and only not in there:
        raise RequestError(
            f"no checkpoint of step {only} in {directory}: it has {listed(there) or 'none'}."
        )
    return [_report(files.step_path(directory, s), s, read) for s in there if only in (None, s)]


def aside(directory: Path) -> list[StepReport]:
    """The steps that a run found damaged and set aside."""
    paths = files.set_aside(directory)
    return [StepReport(int(p.name.split(".")[0]), ASIDE, files.size_bytes(p)) for p in paths]


def as_json(directory: Path, found: list[StepReport]) -> str:
    """One JSON document; `leftovers` are unfinished writes, which the next run removes."""
    left = [path.name for path in files.leftovers(directory)]
    document = {"directory": str(directory), "steps": list(map(asdict, found)), "leftovers": left}
    return json.dumps(document, indent=2)


def print_table(directory: Path, found: list[StepReport]) -> None:
    """A line a step, then what is wrong."""
    table = Table("step", "state", "saved (UTC)", "size", "mesh", "policy", box=None)
    for each in found:
        saved = (each.saved or "").replace("T", " ").removesuffix("+00:00")
        size = f"{each.bytes / 1e6:,.1f} MB"
        table.add_row(str(each.step), each.state, saved, size, each.mesh or "", each.policy or "")
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(table if found else f"no checkpoint in {directory}")
    for each in found:
        for problem in each.problems:
            console.print(f"step {each.step}: {problem}")
    for path in files.leftovers(directory):
        console.print(f"{path.name}: being written now, or left by a process that was killed")


def print_meta(meta: dict[str, Any], path: Path) -> None:
    """What a step holds, in words, then its arrays and the configuration of its run."""
    head = {key: meta[key] for key in ("what", "step", "saved", "mesh", "processes", "next_sample")}
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"{path}\n{write_yaml(head)}\n{write_yaml({'contents': meta['contents']})}")
    width = max(map(len, meta["arrays"]))
    for name, spelled in meta["arrays"].items():
        console.print(f"{name:<{width}}  {spelled}")
    console.print(f"\n{write_yaml({'policy': meta['policy'], 'config': meta['config']})}")


def _report(path: Path, step: int, read: bool) -> StepReport:
    problems = files.damage(path, slice(None) if read else files.SIZES)
    try:
        meta = files.read_meta(path)
    except ValueError:  # among the problems already
        meta = {}
    return StepReport(
        step=step,
        state=DAMAGED if problems else SOUND if read else COMPLETE,
        bytes=files.size_bytes(path),
        saved=meta.get("saved"),
        mesh=meta.get("mesh"),
        policy=meta.get("policy", {}).get("name"),
        problems=tuple(problems),
    )
