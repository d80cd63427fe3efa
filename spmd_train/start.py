"""Where a run starts: at a seed, its own newest checkpoint, or another run's parameters."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from spmd_train import runs
from spmd_train.checkpoint.manager import NOTHING_FOUND, Checkpoints, Found
from spmd_train.config import Config
from spmd_train.differences import first_difference
from spmd_train.errors import RequestError, RunError, listed
from spmd_train.runs import RunDirectory
from spmd_train.state import StateSpec, TrainState
from spmd_train.telemetry.records import RunLog


@dataclass(frozen=True)
class Start:
    """Attributes:
    state: to go on from. step: steps it has taken.
    policy: the precision policy it was saved under, None for a new run.
    source: the run directory whose parameters it took, None for its own.
    found: the saved step it is made of, and the newer ones that were damaged.
    """

    state: TrainState
    step: int = 0
    policy: str | None = None
    source: str | None = None
    found: Found = NOTHING_FOUND


def resume(
    run: RunDirectory,
    checkpoints: Checkpoints,
    config: Config,
    spec: StateSpec,
    data_fingerprint: Mapping[str, Any],
) -> Start:
    """The newest sound step of a run, on whatever mesh `spec` is for.

    A run that was stopped before its first save starts at step 0: whoever resumes it means that.

    Raises:
        RequestError: the step is of another configuration or other data; nothing was allocated.
        RunError: every step is damaged.
    """
    found = checkpoints.newest_sound()
    if found == NOTHING_FOUND:
        return Start(spec.init(config.seed))
    step = sound_step(found, run)
    if step > config.steps:
        raise RequestError(
            f"--steps {config.steps} is less than the {step} steps that {run.path} has taken; "
            f"give {step} or more."
        )
    meta = checkpoints.meta(step)
    for key, ours, theirs in runs.changed(config, meta["config"]):
        raise RequestError(
            f"{key} is {ours} in {run.config} and {theirs} in its checkpoint of step {step}; "
            "a checkpoint goes on only as what it was."
        )
    check_same_data(meta, data_fingerprint, run)
    saved = checkpoints.restore(step, spec.abstract_canonical())
    return Start(spec.from_canonical(saved), step, meta["policy"]["name"], None, found)


def check_same_data(
    meta: Mapping[str, Any], data_fingerprint: Mapping[str, Any], run: RunDirectory
) -> None:
    """Refuse data (`Stream.identity`) that are not those of a checkpoint with this metadata."""
    if difference := first_difference(meta["data"], data_fingerprint):
        raise RequestError(
            f"the data are not those that {run.path} was trained on: {difference}; give the same "
            "corpora, prepared with the same tokenizer."
        )


def init_from(source: RunDirectory, config: Config, spec: StateSpec) -> Start:
    """Step 0 with the parameters of another run's newest sound step; nothing else of it is read.

    Raises:
        RequestError: that run has no complete step, or its model differs; nothing was allocated.
    """
    with Checkpoints(source.checkpoints, read_only=True) as checkpoints:
        found = checkpoints.newest_sound()
        step = sound_step(found, source)
        theirs = checkpoints.meta(step)["config"]
        for key, mine, other in runs.changed(config, theirs, only="model."):
            raise RequestError(
                f"--init-from {source.path}: {key} is {other} there and {mine} here; the parameters"
                " of one model do not fit another."
            )
        params = load_parameters(checkpoints, step, spec)
    state = spec.from_parameters(params)
    return Start(state, source=f"{source.path} step {step}", found=found)


def load_parameters(checkpoints: Checkpoints, step: int, spec: StateSpec) -> Any:
    """The parameters of a step in their canonical form, without its optimizer state."""
    return checkpoints.restore(step, {"params": spec.abstract_canonical()["params"]})["params"]


def load_model(checkpoints: Checkpoints, step: int, spec: StateSpec) -> tuple[Any, Any]:
    """What a forward pass reads of a step: `TrainState.params` and `TrainState.fp8`."""
    wanted = {k: v for k, v in spec.abstract_canonical().items() if k in ("params", "fp8")}
    saved = checkpoints.restore(step, wanted)
    return spec.image(saved["params"]), saved.get("fp8", {})


def find_step(checkpoints: Checkpoints, run: RunDirectory, step: int | None) -> Found:
    """This step of a run, or for None its newest sound one; its files were read and are right.

    Raises:
        RequestError: there is no such step. RunError: it is damaged.
    """
    if step is None:
        found = checkpoints.newest_sound()
        sound_step(found, run)
        return found
    have = checkpoints.steps()
    if step not in have:
        raise RequestError(
            f"no checkpoint of step {step} in {run.checkpoints}: it has {listed(have) or 'none'}."
        )
    if wrong := checkpoints.damage(step):
        raise RunError(f"step {step} in {run.checkpoints} is damaged: {wrong[0]}.")
    return Found(step, {})


def sound_step(found: Found, run: RunDirectory) -> int:
    """The step that was found.

    Raises:
        RequestError: no step was ever finished. RunError: every step is damaged.
    """
    if found.step is not None:
        return found.step
    if not found.damaged:
        raise RequestError(
            f"{run.checkpoints} holds no complete checkpoint yet; let the run go on until it has "
            f"saved one (spmd-train --resume --out {run.path}), or name another run."
        )
    lines = "; ".join(f"step {step}: {wrong[0]}" for step, wrong in found.damaged.items())
    raise RunError(f"no undamaged checkpoint is left in {run.checkpoints}: {lines}.")


def tell_damage(found: Found, log: RunLog | None = None) -> None:
    """Say which steps were passed over and why: in a line each, and as events of a run."""
    if log is not None:
        for step, problems in found.damaged.items():
            log.event("damaged", step=step, problems=problems)
    if found.damaged and jax.process_index() == 0:
        for step, problems in found.damaged.items():
            more = f" (and {len(problems) - 1} more files)" if len(problems) > 1 else ""
            print(f"checkpoint of step {step} is damaged: {problems[0]}{more}", file=sys.stderr)
        print(f"using step {found.step}", file=sys.stderr)
