"""The terminal's pictures against the plan's own numbers and the schedule's table."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from spmd_train.config import load
from spmd_train.mesh import MeshShape
from spmd_train.pipeline.schedule import make_schedule
from spmd_train.plan import draw
from spmd_train.plan.cluster import load_cluster
from spmd_train.plan.search import Fixed, Plan, search
from spmd_train.plan.view import brief, memory_parts, shown_ticks, tick_costs, time_parts
from spmd_train.plan.workload import Execution


@pytest.fixture(scope="module")
def plan() -> Plan:
    return search(load("llama-30b", ["batch.global_size=256"]), load_cluster("32xh100"))


def printed(what: object, width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(what)
    return console.file.getvalue().splitlines()


def test_parts_are_the_whole(plan: Plan) -> None:
    for c in plan.candidates:
        assert sum(part.amount for part in memory_parts(c.memory)) == c.memory.total
        assert sum(part.amount for part in time_parts(c.time)) == pytest.approx(c.seconds)


@pytest.mark.parametrize("width", [70, 100, 160])
def test_a_bar_is_as_long_as_its_bytes(plan: Plan, width: int) -> None:
    """To a column, the limit's mark being the scale."""
    lines = printed(draw.memory_bars(plan, 9, width), width)
    bars = [line for line in lines if re.match(r"\d+x\d+x\d+ .*\|", line)]
    assert len(bars) == len(plan.candidates)
    left = 2 + max(len(brief(c.execution)) for c in plan.candidates)
    for line, candidate in zip(bars, plan.candidates, strict=True):
        assert len(line) <= width
        bar = line[left : line.index("|")]
        per_byte = len(bar) / candidate.limit
        assert len(bar.rstrip()) == pytest.approx(candidate.memory.total * per_byte, abs=1)
        assert bar.count("a") == pytest.approx(candidate.memory.activations * per_byte, abs=1)
        assert f"{candidate.memory.total / 1e9:.1f} of {candidate.limit / 1e9:.1f} GB" in line


def test_what_does_not_fit_goes_beyond_the_limit() -> None:
    everything = Fixed(MeshShape(32, 1, 1), 0, None, 8, "1f1b", "full", "bfloat16")
    config = load("llama-30b", ["batch.global_size=256"])
    plan = search(config, load_cluster("32xh100"), everything)
    assert not plan.candidates[0].fits
    line = next(line for line in printed(draw.memory_bars(plan, 1, 100)) if "|" in line)
    assert re.search(r"[a-z]\|[a-z]", line)
    assert "Nothing fits" in printed(draw.pareto(plan, 100))[-1]
    assert printed(draw.pictures(plan, 1, 100))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_timeline_is_the_table(schedule: str) -> None:
    """Read back from the text, whole at 400 columns."""
    table = make_schedule(schedule, 4, 12)
    e = Execution(MeshShape(1, 1, 4), 12, 1, 64, schedule=schedule)
    lines = printed(draw.timeline(e, 400), 400)
    for stage in range(4):
        cells = next(line for line in lines if line.startswith(f"stage {stage}")).split()[2:]
        read = [tuple(-1 if h == "." else int(h) for h in cell.split("/")) for cell in cells]
        assert read == list(zip(table.forward[:, stage], table.backward[:, stage], strict=True))


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_long_timeline_keeps_its_ends(width: int) -> None:
    e = Execution(MeshShape(1, 1, 8), 128, 1, 64)
    lines = printed(draw.timeline(e, width), width)
    assert max(map(len, lines)) <= width
    stages = [line.split() for line in lines if line.startswith("stage")]
    assert len(stages) == 8
    assert stages[0][2] == "0/."
    assert stages[0][-1] == "./127"
    assert all("..." in cells for cells in stages)


@given(st.integers(1, 9), st.integers(1, 60), st.integers(8, 200))
def test_ticks_left_out_are_in_the_middle(S: int, M: int, budget: int) -> None:
    costs = tick_costs(make_schedule("1f1b", S, M))
    first, last = shown_ticks(costs, budget)
    assert first[0] == 0
    if sum(costs) <= budget:
        assert first == list(range(len(costs)))
        return
    assert last[-1] == len(costs) - 1
    assert first[-1] < last[0]
    assert sum(costs[tick] for tick in (*first, *last)) <= budget


def test_the_pareto_shows_every_point(plan: Plan) -> None:
    lines = printed(draw.pareto(plan, 120), 120)
    grid = "".join(line.split("|", 1)[1] for line in lines if "|" in line)
    assert grid.count("1") == 1
    assert "o" in grid
    for c in plan.pareto:
        assert any(
            f"{c.memory.total / 1e9:.1f} GB" in line and str(c.execution.mesh) in line
            for line in lines
        )


def test_small_plans(plan: Plan) -> None:
    """One candidate, one point, one stage; and none at all."""
    one = search(load("tiny"), load_cluster("8x80gb").resized(1), Fixed(mesh=MeshShape(8, 1, 1)))
    assert len(one.candidates) == 1
    text = "\n".join(printed(draw.pictures(one, 5, 80), 80))
    assert "no stage waits" in text
    none = search(load("llama-70b", ["batch.global_size=8"]), load_cluster("8x40gb"))
    assert not none.candidates
    assert "".join(printed(draw.pictures(none, 5, 80), 80)).strip() == ""
