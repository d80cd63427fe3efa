"""Pipeline schedules as plain tables: which micro-batch each stage runs forward and backward, when.

A tick is one turn of the executor's scan: every stage runs at most one forward, the head runs at
most once (spread over all stages), then every stage runs at most one backward. What a stage sends
is there for its neighbour in the next tick. `1f1b` with 4 stages and 4 micro-batches (forward /
backward; a dot is an idle half-tick and costs nothing):

```
tick      0    1    2    3    4    5    6    7    8    9
stage 0  0/.  1/.  2/.  3/.  ./.  ./.  ./0  ./1  ./2  ./3
stage 1  ./.  0/.  1/.  2/.  3/.  ./0  ./1  ./2  ./3  ./.
stage 2  ./.  ./.  0/.  1/.  2/0  3/1  ./2  ./3  ./.  ./.
stage 3  ./.  ./.  ./.  0/0  1/1  2/2  3/3  ./.  ./.  ./.
```

Letters: S stages, M micro-batches. This module knows no JAX: the executor runs these tables, the
planner costs them and the tests check them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

IDLE = -1


@dataclass(frozen=True, eq=False)
class Schedule:
    """One schedule; tables are int32 [ticks, S], IDLE (-1) where a stage has nothing to do.

    Attributes:
        name: key in `SCHEDULES`.
        num_stages, num_microbatches: S and M.
        forward, backward: micro-batch each stage runs in each tick.
    """

    name: str
    num_stages: int
    num_microbatches: int
    forward: np.ndarray
    backward: np.ndarray

    @property
    def num_ticks(self) -> int:
        return len(self.forward)

    @cached_property
    def in_flight(self) -> np.ndarray:
        """[S] most micro-batches a stage holds between their forward and their backward."""
        started = np.cumsum(self.forward != IDLE, axis=0)
        finished = np.cumsum(self.backward != IDLE, axis=0)
        before = np.vstack([np.zeros((1, self.num_stages), int), finished[:-1]])
        return np.max(started - before, axis=0)

    @cached_property
    def num_slots(self) -> int:
        """Size of the ring that keeps what a forward leaves for its backward."""
        return int(self.in_flight.max())

    @cached_property
    def num_head_slots(self) -> int:
        """Size of the ring of head gradients, made on the last stage's forward tick."""
        return int(self.in_flight[-1])

    def slot(self, microbatch: np.ndarray, size: int) -> np.ndarray:
        """Ring slot of each micro-batch: a stage's micro-batches start in order, so m mod size.

        Valid when no two live micro-batches of a stage share a slot (the tests check every table).
        """
        return np.where(microbatch == IDLE, size, microbatch % size).astype(np.int32)

    @staticmethod
    def arrivals(table: np.ndarray) -> np.ndarray:
        """How many micro-batches came before this one; without meaning where idle. [ticks, S]"""
        return (np.cumsum(table != IDLE, axis=0) - 1).astype(np.int32)

    @property
    def busy_forward(self) -> int:
        """Ticks in which some stage runs forward; the scan waits for the slowest stage."""
        return int((self.forward != IDLE).any(axis=1).sum())

    @property
    def busy_backward(self) -> int:
        return int((self.backward != IDLE).any(axis=1).sum())

    def bubble_fraction(self, backward_cost: float = 2.0) -> float:
        """Share of the step a stage waits, a forward costing 1 and a backward `backward_cost`.

        (S-1)/(M+S-1) for gpipe and 1f1b: Narayanan et al. 2021, section 2.2.
        """
        total = self.busy_forward + self.busy_backward * backward_cost
        return 1.0 - self.num_microbatches * (1.0 + backward_cost) / total

    @property
    def never_idle(self) -> tuple[bool, bool]:
        """Whether every stage runs (forward, backward) in every tick: then nothing is dynamic."""
        return bool((self.forward != IDLE).all()), bool((self.backward != IDLE).all())


At = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (micro-batches, stages) -> ticks
Rule = Callable[[int, int], tuple[At, At]]


def _one_f_one_b(S: int, M: int) -> tuple[At, At]:
    """Backward of a micro-batch starts in the tick that ends its forward on the last stage."""
    return (lambda m, s: m + s), (lambda m, s: m + 2 * (S - 1) - s)


def _gpipe(S: int, M: int) -> tuple[At, At]:
    """All forwards, then all backwards, newest first (Huang et al. 2019)."""
    last = M + S - 2
    return (lambda m, s: m + s), (lambda m, s: last + (M - 1 - m) + (S - 1 - s))


SCHEDULES: dict[str, Rule] = {"gpipe": _gpipe, "1f1b": _one_f_one_b}


def make_schedule(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """The table of a named schedule.

    Raises:
        KeyError: no such schedule.
        ValueError: fewer than one stage or micro-batch.
    """
    S, M = num_stages, num_microbatches
    if S < 1 or M < 1:
        raise ValueError(
            f"a schedule needs at least one stage and one micro-batch, not {S} and {M}"
        )
    forward_at, backward_at = SCHEDULES[name](S, M)
    m, s = (index.ravel() for index in np.indices((M, S)))
    ticks = 1 + int(backward_at(m, s).max())
    forward = np.full((ticks, S), IDLE, np.int32)
    backward = np.full((ticks, S), IDLE, np.int32)
    forward[forward_at(m, s), s] = m
    backward[backward_at(m, s), s] = m
    return Schedule(name, S, M, forward, backward)


def forward_only(num_stages: int, num_microbatches: int) -> Schedule:
    """The table of an evaluation, M + S - 1 ticks without a backward."""
    S, M = num_stages, num_microbatches
    whole = make_schedule("gpipe", S, M)
    forward = whole.forward[: M + S - 1]
    return Schedule("forward", S, M, forward, np.full_like(forward, IDLE))
