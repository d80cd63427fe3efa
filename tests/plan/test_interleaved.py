"""The interleaved schedule's table, played, against the papers' formulas and the 1F1B table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_train.pipeline.schedule import make_schedule
from spmd_train.plan.interleaved import BACKWARD, FORWARD, orders, timeline


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Stages, micro-batches (a multiple of them), chunks."""
    S = draw(st.integers(1, 8))
    return S, S * draw(st.integers(1, 6)), draw(st.integers(1, 5))


@given(shapes(), st.sampled_from([1.0, 2.0, 3.0]))
def test_the_bubble_is_that_of_the_paper(shape: tuple[int, int, int], backward: float) -> None:
    """(S - 1) / (v M) of the ideal time: Narayanan et al. 2021, section 2.2."""
    S, M, v = shape
    assert timeline(S, M, v, backward).bubble == pytest.approx((S - 1) / (v * M), abs=1e-9)


@given(shapes())
def test_what_is_in_flight_is_what_megatron_counts(shape: tuple[int, int, int]) -> None:
    """The first stage holds S (1 + (S-1)/(S v)) micro-batches' activations with v > 1
    (theoretical_memory_usage.py), each stage's warm-up and one more, and never more than all."""
    S, M, v = shape
    found = timeline(S, M, v).in_flight
    if v > 1:
        assert found[0] == min(M * v, round(v * S * (1 + (S - 1) / (S * v))))
        assert found == tuple(min(M * v, 2 * (S - 1 - s) + (v - 1) * S + 1) for s in range(S))


@given(st.integers(1, 8), st.integers(1, 24))
def test_with_one_chunk_it_is_1f1b(S: int, M: int) -> None:
    table = make_schedule("1f1b", S, M)
    played = timeline(S, M, 1)
    share = table.bubble_fraction(2.0)
    assert played.bubble == pytest.approx(share / (1 - share))
    assert played.in_flight == tuple(min(S - s, M) for s in range(S))  # stages on their own


@given(shapes())
def test_every_stage_runs_every_chunk_once(shape: tuple[int, int, int]) -> None:
    S, M, v = shape
    every = {(m, c) for m in range(M) for c in range(v)}
    for order in orders(S, M, v):
        for kind in (FORWARD, BACKWARD):
            ran = [(m, c) for k, m, c in order if k == kind]
            assert len(ran) == len(every)
            assert set(ran) == every


@pytest.mark.parametrize(("S", "M", "v"), [(4, 6, 2), (0, 4, 1), (4, 0, 1), (2, 2, 0)])
def test_what_cannot_be_interleaved_is_refused(S: int, M: int, v: int) -> None:
    with pytest.raises(ValueError, match="interleaving needs"):
        orders(S, M, v)


def test_tables_of_large_runs_are_made_at_once() -> None:
    """`make_schedule` is called for every pair a search meets."""
    table = make_schedule("1f1b", 64, 1024)
    assert table.busy_forward == 1024 + 63
    assert (np.sort(table.forward[:, 5])[-1024:] == np.arange(1024)).all()
