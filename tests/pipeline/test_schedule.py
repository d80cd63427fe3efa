"""Every schedule's table, played by an independent simulation that knows only the rules of a tick.

A message sent in a tick is there in the next one, and only then: the executor keeps one incoming
activation and one incoming gradient per stage, no queue.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_train.pipeline import SCHEDULES, make_schedule
from spmd_train.pipeline.schedule import IDLE, Schedule

schedules = st.builds(
    make_schedule, st.sampled_from(sorted(SCHEDULES)), st.integers(1, 8), st.integers(1, 16)
)


def play(schedule: Schedule) -> tuple[list[list[int]], list[list[int]]]:
    """Run the table with real (named) values; returns each stage's forwards and backwards.

    Values are tuples that say what they are, so a wrong one cannot pass for the right one:
    ("x", m, s) is the input of stage s for micro-batch m, ("dy", m, s) its output's gradient.
    """
    S = schedule.num_stages
    ring, head = schedule.num_slots, schedule.num_head_slots
    arriving_x: list[object] = [None] * S
    arriving_dy: list[object] = [None] * S
    rings: list[dict[int, object]] = [{} for _ in range(S)]
    head_ring: dict[int, object] = {}
    forwards: list[list[int]] = [[] for _ in range(S)]
    backwards: list[list[int]] = [[] for _ in range(S)]
    forward_slots = schedule.slot(schedule.forward, ring)
    backward_slots = schedule.slot(schedule.backward, ring)
    head_writes = schedule.slot(schedule.forward[:, -1], head)
    head_reads = schedule.slot(schedule.backward[:, -1], head)
    for t in range(schedule.num_ticks):
        next_x: list[object] = [None] * S
        next_dy: list[object] = [None] * S
        for s in range(S):  # all stages run forward ...
            m = int(schedule.forward[t, s])
            if m == IDLE:
                continue
            x = ("x", m, 0) if s == 0 else arriving_x[s]
            assert x == ("x", m, s), f"tick {t}: stage {s} wants micro-batch {m}, has {x}"
            slot = int(forward_slots[t, s])
            assert slot in range(ring)
            assert slot not in rings[s], f"tick {t}: overwrites a live slot"
            rings[s][slot] = x
            forwards[s].append(m)
            next_x[(s + 1) % S] = ("x", m, s + 1)
        m = int(schedule.forward[t, -1])
        if m != IDLE:  # ... then the head, on the last stage's output ...
            slot = int(head_writes[t])
            assert slot in range(head)
            assert slot not in head_ring, f"tick {t}: overwrites a head gradient"
            head_ring[slot] = ("dy", m, S - 1)
        for s in range(S):  # ... then all stages backward
            m = int(schedule.backward[t, s])
            if m == IDLE:
                continue
            dy = head_ring.pop(int(head_reads[t]), None) if s == S - 1 else arriving_dy[s]
            assert dy == ("dy", m, s), f"tick {t}: stage {s} wants gradient {m}, has {dy}"
            kept = rings[s].pop(int(backward_slots[t, s]), None)
            assert kept == ("x", m, s), f"tick {t}: stage {s} kept {kept}, not micro-batch {m}"
            backwards[s].append(m)
            next_dy[s - 1] = ("dy", m, s - 1)
        arriving_x, arriving_dy = next_x, next_dy
    assert not any([*rings, head_ring]), "something was never used"
    return forwards, backwards


def ticks_of(table: np.ndarray) -> dict[tuple[int, int], int]:
    """(micro-batch, stage) -> tick, of a table in which each appears once."""
    return {(int(m), s): t for t, row in enumerate(table) for s, m in enumerate(row) if m != IDLE}


@given(schedules)
def test_simulation_finds_every_value_where_and_when_it_is_needed(schedule):
    forwards, backwards = play(schedule)
    everything = list(range(schedule.num_microbatches))
    for s in range(schedule.num_stages):
        assert forwards[s] == everything  # in order: slots are m modulo the ring
        assert sorted(backwards[s]) == everything


@given(schedules)
def test_each_micro_batch_once_on_each_stage(schedule):
    S, M = schedule.num_stages, schedule.num_microbatches
    for table in (schedule.forward, schedule.backward):
        assert table.shape == (schedule.num_ticks, S)
        assert table.dtype == np.int32
        assert np.count_nonzero(table != IDLE) == S * M
        assert len(ticks_of(table)) == S * M
    # no tick is empty everywhere
    assert ((schedule.forward != IDLE) | (schedule.backward != IDLE)).any(axis=1).all()


@given(schedules)
def test_messages_are_used_exactly_one_tick_later(schedule):
    S, M = schedule.num_stages, schedule.num_microbatches
    forward, backward = ticks_of(schedule.forward), ticks_of(schedule.backward)
    for m in range(M):
        for s in range(1, S):
            assert forward[m, s] == forward[m, s - 1] + 1
            assert backward[m, s - 1] == backward[m, s] + 1
        assert backward[m, S - 1] >= forward[m, S - 1]


@given(st.integers(1, 8), st.integers(1, 16))
def test_in_flight_is_the_closed_form_of_each_schedule(S, M):
    """Lock step holds up to 2(S-1-s)+1 micro-batches at stage s (docs/design.md, fact 4)."""
    one_f_one_b, gpipe = make_schedule("1f1b", S, M), make_schedule("gpipe", S, M)
    assert one_f_one_b.in_flight.tolist() == [min(M, 2 * (S - 1 - s) + 1) for s in range(S)]
    assert gpipe.in_flight.tolist() == [M] * S
    assert one_f_one_b.num_slots == min(M, 2 * S - 1)
    assert (one_f_one_b.num_head_slots, gpipe.num_head_slots) == (1, M)


@given(st.integers(1, 8), st.integers(1, 16))
def test_ticks_are_the_closed_form_of_each_schedule(S, M):
    assert make_schedule("1f1b", S, M).num_ticks == M + 2 * (S - 1)
    # The last forward and the first backward share a tick.
    assert make_schedule("gpipe", S, M).num_ticks == 2 * (M + S - 1) - 1


@given(schedules, st.floats(0.5, 4.0))
def test_bubble_is_that_of_narayanan_et_al(schedule, backward_cost):
    """(S-1)/(M+S-1), whatever a backward costs; and the busy ticks give it by counting."""
    S, M = schedule.num_stages, schedule.num_microbatches
    assert schedule.bubble_fraction(backward_cost) == pytest.approx((S - 1) / (M + S - 1))
    assert schedule.busy_forward == schedule.busy_backward == M + S - 1


@given(schedules)
def test_never_idle_only_where_the_table_is_full(schedule):
    forward, backward = schedule.never_idle
    assert forward == (IDLE not in schedule.forward)
    assert backward == (IDLE not in schedule.backward)
    if schedule.num_stages == 1 and schedule.name == "1f1b":
        assert (forward, backward) == (
            True,
            True,
        )  # plain gradient accumulation: static trip counts


def test_one_f_one_b_is_the_table_drawn_in_the_docstring():
    """The drawing in schedule.py, read as text."""
    import spmd_train.pipeline.schedule as module

    table = make_schedule("1f1b", 4, 4)
    lines = [line for line in str(module.__doc__).splitlines() if line.startswith("stage ")]
    assert len(lines) == 4
    for s, line in enumerate(lines):
        cells = line.split()[2:]
        sign = {IDLE: "."}
        drawn = [
            f"{sign.get(int(f), int(f))}/{sign.get(int(b), int(b))}"
            for f, b in zip(table.forward[:, s], table.backward[:, s], strict=True)
        ]
        assert cells == drawn


def test_impossible_sizes_and_names_are_refused():
    for sizes in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least one stage"):
            make_schedule("1f1b", *sizes)
    with pytest.raises(KeyError):
        make_schedule("1f1c", 2, 2)
