"""Saving by steps and by a clock that the test moves."""

from spmd_train.checkpoint.cadence import Cadence
from spmd_train.config_groups import CheckpointConfig


def saved(config: CheckpointConfig, seconds_a_step: float, steps: int) -> list[int]:
    now = [0.0]
    cadence = Cadence(config, clock=lambda: now[0])
    due = []
    for step in range(1, steps + 1):
        now[0] += seconds_a_step
        if cadence.due(step):
            due.append(step)
    return due


def test_never_unless_asked_to():
    assert saved(CheckpointConfig(), 100.0, 10) == []


def test_every_so_many_steps():
    assert saved(CheckpointConfig(every_steps=4), 1.0, 10) == [4, 8]


def test_once_so_much_time_has_passed_since_the_last_save():
    assert saved(CheckpointConfig(every_seconds=10), 4.0, 10) == [3, 6, 9]
    assert saved(CheckpointConfig(every_seconds=10), 11.0, 3) == [1, 2, 3]


def test_a_save_by_steps_starts_the_time_again():
    config = CheckpointConfig(every_steps=5, every_seconds=12)
    assert saved(config, 4.0, 10) == [3, 5, 8, 10]
