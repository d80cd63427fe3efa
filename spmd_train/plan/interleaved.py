"""The interleaved schedule as data (Narayanan et al. 2021, section 2.2; Megatron-LM schedules.py).

The layers are cut into S x v chunks, chunk c on stage c mod S, so each stage has v of them and a
micro-batch goes round the stages v times. The bubble is v times shorter than 1F1B's:
(S-1) / (v M) of the ideal time. The planner costs it; the trainer does not run it.

A stage's order of work is a list of (kind, micro-batch, chunk), written below; when each item runs
follows from what it depends on. With 2 stages, v = 2, 2 micro-batches (chunk 0 lower case, chunk 1
upper case; micro-batches a, b; an apostrophe marks backward):

```
stage 0  a  b  A  B  .  .  A' .  B' a' b'
stage 1  .  a  b  A  A' B  B' a' b'
```

Letters: S stages, M micro-batches, v chunks of a stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

FORWARD, BACKWARD = "F", "B"
Work = tuple[str, int, int]


def orders(S: int, M: int, v: int) -> list[list[Work]]:
    """What each stage does, in order.

    Micro-batches go in groups of S: the group through chunk 0, then through chunk 1 ... A stage
    starts with 2(S - 1 - s) + (v - 1) S forwards, alternates, and ends with the backwards left.

    Raises:
        ValueError: M is not a multiple of S (with v > 1), or a size below one.
    """
    if min(S, M, v) < 1 or (v > 1 and M % S):
        raise ValueError(f"interleaving needs micro-batches by the {S} stages, not {M}")
    forward = [(m, c) for first in range(0, M, S) for c in range(v) for m in _group(first, S, M)]
    backward = [(m, v - 1 - c) for m, c in forward]
    found = []
    for s in range(S):
        warm = S - 1 - s if v == 1 else 2 * (S - 1 - s) + (v - 1) * S
        warm = min(warm, M * v)
        order = [(FORWARD, *work) for work in forward[:warm]]
        for f, b in zip(forward[warm:], backward, strict=False):
            order += [(FORWARD, *f), (BACKWARD, *b)]
        order += [(BACKWARD, *work) for work in backward[M * v - warm :]]
        found.append(order)
    return found


def _group(first: int, S: int, M: int) -> range:
    return range(first, min(first + S, M))


@dataclass(frozen=True)
class Timeline:
    """When a schedule's work runs, sends being free.

    Attributes:
        length: from the first start to the last end.
        ideal: of one stage's own work.
        in_flight: of each stage, most (micro-batch, chunk) pairs between forward and backward.
    """

    length: float
    ideal: float
    in_flight: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Time a stage waits, as a share of its own work: (S-1) / (v M)."""
        return self.length / self.ideal - 1.0


@cache
def timeline(S: int, M: int, v: int, backward: float = 2.0) -> Timeline:
    """Play the orders: a chunk's forward takes 1/v, its backward `backward`/v."""
    lists = orders(S, M, v)
    done: dict[tuple[str, int, int], float] = {}
    clock, position = [0.0] * S, [0] * S
    live, most = [0] * S, [0] * S
    left = sum(map(len, lists))
    while left:
        before = left
        for s in range(S):
            while position[s] < len(lists[s]):
                kind, m, chunk = lists[s][position[s]]
                place = chunk * S + s
                ready = _ready(done, kind, m, place, S * v)
                if ready is None:
                    break
                cost = (1.0 if kind == FORWARD else backward) / v
                clock[s] = max(clock[s], ready) + cost
                done[kind, m, place] = clock[s]
                live[s] += 1 if kind == FORWARD else -1
                most[s] = max(most[s], live[s])
                position[s] += 1
                left -= 1
        if left == before:
            raise ValueError(f"the orders of {S} stages, {M} micro-batches, {v} chunks deadlock")
    return Timeline(max(clock), M * (1.0 + backward), tuple(most))


def _ready(
    done: dict[tuple[str, int, int], float], kind: str, m: int, place: int, places: int
) -> float | None:
    """When an item's input is there, None if its maker has not run; places are in model order."""
    if kind == FORWARD:
        return 0.0 if place == 0 else done.get((FORWARD, m, place - 1))
    if place == places - 1:
        return done.get((FORWARD, m, place))
    return done.get((BACKWARD, m, place + 1))
