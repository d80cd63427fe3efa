"""When to save: every so many steps, or once so much time has passed since the last save."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from spmd_train.distributed import agreed

if TYPE_CHECKING:
    from spmd_train.config_groups import CheckpointConfig


class Cadence:
    """Asked after every step, by all processes; the first one's clock holds for all."""

    def __init__(
        self, config: CheckpointConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._clock = clock
        self._last = clock()

    def due(self, step: int) -> bool:
        """Whether to save now that `step` steps are taken; then the time starts again."""
        by_steps = self._config.every_steps > 0 and step % self._config.every_steps == 0
        due = by_steps or self._time_is_up()
        if due:
            self._last = self._clock()
        return due

    def _time_is_up(self) -> bool:
        seconds = self._config.every_seconds
        return seconds is not None and bool(agreed(lambda: self._clock() - self._last >= seconds))
