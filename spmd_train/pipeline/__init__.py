"""The pipeline: schedules as tables, and one scan that runs any of them."""

from spmd_train.pipeline.schedule import SCHEDULES, Schedule, make_schedule

__all__ = ["SCHEDULES", "Schedule", "make_schedule"]
