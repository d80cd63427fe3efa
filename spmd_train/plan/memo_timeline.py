"""A schedule drawn to scale: what each stage does, and when it waits.

One column is the time of a forward of one micro-batch; a backward takes two. A digit is a forward,
a letter the backward of the micro-batch of the same place (a is 0), a dot is waiting. A tick in
which no stage has a forward, or a backward, has no columns for it. 1f1b with 2 stages and 3
micro-batches:

```
stage 0   01..2aa.bbcc
stage 1   .0aa1bb2cc..
```
"""

from __future__ import annotations

from spmd_train.pipeline.schedule import IDLE, Schedule

WAITING = "."
BACKWARD_COLUMNS = 2
_FORWARD, _BACKWARD = "0123456789", "abcdefghij"


def rows(schedule: Schedule) -> list[str]:
    """One string for each stage, all of one length.

    The stages meet at every tick, so a forward (or backward) of any stage takes its columns from
    all of them: dots over characters is `Schedule.bubble_fraction(BACKWARD_COLUMNS)`.
    """
    drawn: list[list[str]] = [[] for _ in range(schedule.num_stages)]
    for forward, backward in zip(schedule.forward, schedule.backward, strict=True):
        for table, letters, columns in (
            (forward, _FORWARD, 1),
            (backward, _BACKWARD, BACKWARD_COLUMNS),
        ):
            if (table == IDLE).all():
                continue
            for line, microbatch in zip(drawn, table, strict=True):
                line.append((WAITING if microbatch == IDLE else letters[microbatch % 10]) * columns)
    return ["".join(line) for line in drawn]


def draw(schedule: Schedule, width: int = 84, stages: int = 8) -> str:
    """The rows with their names; the middle left out where there are more columns or stages."""
    lines, S = rows(schedule), schedule.num_stages
    columns = len(lines[0])
    if columns > width:
        half = (width - 5) // 2
        lines = [f"{line[:half]} ... {line[-half:]}" for line in lines]
    named = [f"stage {stage:<3d} {line}" for stage, line in enumerate(lines)]
    if stages < S:
        named = [*named[: stages - 2], "...", *named[-2:]]
    return "\n".join(named)
