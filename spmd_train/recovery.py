"""What the loop does about a step that was skipped: say so, find the cause, go back, or stop.

The decision to skip is the compiled step's (`precision.guard`), alike on every process; nothing
here can undo it. A skipped step counts as a step: its data is used up, its learning rate is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from spmd_train.checkpoint.manager import Checkpoints
from spmd_train.config import Config
from spmd_train.data.batches import Batch
from spmd_train.diagnosis import Diagnosis
from spmd_train.errors import RunError
from spmd_train.precision.guard import APPLIED, EMPTY, NOT_FINITE
from spmd_train.replicas import Replicas, describe
from spmd_train.start import tell_damage
from spmd_train.state import TrainState
from spmd_train.step import Step
from spmd_train.telemetry.records import RunLog


class Recovery:
    """One run's dealings with bad steps; every process calls it with the same metrics."""

    def __init__(
        self,
        config: Config,
        step: Step,
        checkpoints: Checkpoints,
        log: RunLog,
        save: Callable[[TrainState], object],
    ) -> None:
        self._config = config.guard
        self._spec = step.spec
        self._checkpoints = checkpoints
        self._log = log
        self._save = save
        self._replicas = Replicas(step.spec)
        self._diagnosis = Diagnosis(step, config.precision.loss_scale.min)
        self._diagnoses_left = config.guard.diagnoses
        self._found = ""
        self._learned_since_rollback = True

    def after_step(self, state: TrainState, batch: Batch, metrics: dict[str, Any]) -> TrainState:
        """The state to go on from.

        Args:
            batch, metrics: of the step that led to `state`; the metrics on the host.

        Raises:
            RunError: too many bad steps in a row; the weights are those before the first of them.
        """
        verdict = int(metrics["verdict"])
        if verdict == APPLIED:
            self._learned_since_rollback = True
            self._found = ""
            return state
        step = int(state.step)
        if verdict == EMPTY:
            self._log.event("skipped", step=step, reason="no supervised token")
            return state
        reason = "not finite" if verdict == NOT_FINITE else "spike"
        in_a_row = int(metrics["consecutive_skips"])
        found: dict[str, Any] = {}
        if verdict == NOT_FINITE and self._diagnoses_left:
            self._diagnoses_left -= 1
            scale = float(metrics["loss_scale"])
            found["finding"] = self._diagnosis.attribute(state, batch, step - 1, scale)
            self._found = " " + found["finding"]["says"]
        values = {k: metrics[k] for k in ("loss", "grad_norm", "loss_scale")}
        self._log.event("skipped", step=step, reason=reason, in_a_row=in_a_row, **values, **found)
        limit = self._config.rollback_after
        if limit is not None and in_a_row >= limit:
            return self._roll_back(state, in_a_row)
        if in_a_row >= self._config.max_consecutive_skips:
            self._stop(state, f"the last {in_a_row} steps were all skipped ({reason})")
        return state

    def compare_replicas(self, state: TrainState) -> None:
        """End the run where devices that should hold the same bits do not."""
        if findings := self._replicas.check(state):
            step = int(state.step)
            self._log.event("replicas", step=step, findings=findings)
            raise RunError(f"step {step}: {describe(findings)}")

    def _roll_back(self, state: TrainState, in_a_row: int) -> TrainState:
        """The last checkpoint's state at the present position in the data.

        What lies between is not trained on again (Chowdhery et al. 2022, section 5.1).
        """
        found = self._checkpoints.newest_sound()
        tell_damage(found, self._log)
        step, latest = int(state.step), found.step
        if latest is None:
            self._stop(state, f"{in_a_row} bad steps in a row, and no checkpoint to go back to")
        if not self._learned_since_rollback:
            self._stop(state, f"{in_a_row} bad steps in a row again after going back to {latest}")
        saved = self._checkpoints.restore(latest, self._spec.abstract_canonical())
        saved["guard"]["consecutive"] = jnp.zeros_like(saved["guard"]["consecutive"])
        restored = self._spec.from_canonical(saved)
        self._learned_since_rollback = False
        self._log.event("rollback", step=step, to=latest, data_left_out=[latest + 1, step])
        return replace(restored, step=state.step)

    def _stop(self, state: TrainState, what: str) -> NoReturn:
        """End the run; weights that are sound are saved, so that nothing learned is lost."""
        step = int(state.step)
        if _all_finite(state.params):
            self._save(state)
            kept = f"the weights from before them are saved as step {step}"
        else:
            kept = "nothing was saved, since the weights themselves are not finite"
        raise RunError(f"step {step}: {what}; {kept}.{self._found}")


@jax.jit
def _all_finite(params: Any) -> jax.Array:
    return jnp.all(jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(params)]))
