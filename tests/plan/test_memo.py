"""The memo: every section, and its numbers against those of the models it quotes."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from spmd_train.config import load
from spmd_train.mesh import MeshShape
from spmd_train.pipeline.schedule import SCHEDULES, make_schedule
from spmd_train.plan import memo as memo_module
from spmd_train.plan import memo_growth, memo_memory, memo_timeline, memo_traffic
from spmd_train.plan.cluster import load_cluster
from spmd_train.plan.memo import memo
from spmd_train.plan.memory import memory_use
from spmd_train.plan.search import Candidate, Fixed, Plan, search, workload_for
from spmd_train.plan.timing import step_time
from spmd_train.plan.workload import Workload

SCENARIOS = {
    "32x24gb": ("llama-30b", Fixed()),  # ZeRO 3, no stages
    "8x80gb": ("llama-30b", Fixed()),  # stages, data=1, one node
    "v5p-128": ("llama-70b", Fixed()),  # one slice, a torus
    "32x80gb-slow": ("llama-30b", Fixed()),  # all three axes, over a network
    "8x40gb": (  # does not fit
        "llama-30b",
        Fixed(MeshShape(2, 2, 2), 1, 1, None, "gpipe", "full", "bfloat16"),
    ),
}


@pytest.fixture(scope="module", params=SCENARIOS)
def plan(request: pytest.FixtureRequest) -> Plan:
    config, fixed = SCENARIOS[request.param]
    return search(load(config, ["batch.global_size=64"]), load_cluster(request.param), fixed)


@pytest.fixture(scope="module")
def chosen(plan: Plan) -> Candidate:
    return plan.candidates[0]


@pytest.fixture(scope="module")
def workload(plan: Plan, chosen: Candidate) -> Workload:
    return workload_for(plan.config, plan.cluster, chosen.execution.compute)


@pytest.fixture(scope="module")
def text(plan: Plan, chosen: Candidate) -> str:
    return memo(plan, chosen)


def section(text: str, number: int) -> str:
    return text.split(f"\n## {number}. ")[1].split("\n## ")[0]


def table_rows(text: str, first: str) -> list[list[str]]:
    """Cells of the rows of the tables whose head begins with `first`."""
    found: list[list[str]] = []
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        cells = [[c.strip() for c in row.strip("|").split(" | ")] for row in table.splitlines()]
        if cells[0][0].strip().startswith(first):
            found += cells[2:]
    return found


UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3}


def in_bytes(shown: str) -> float:
    number, _, unit = shown.replace(",", "").partition(" ")
    return float(number) * UNITS.get(unit, 1)


def in_seconds(shown: str) -> float:
    number, _, unit = shown.replace(",", "").partition(" ")
    return float(number) * (1e-3 if unit == "ms" else 1)


def test_every_question_is_answered(text: str) -> None:
    assert re.findall(r"^## (\d)\. .*\?$", text, re.MULTILINE) == list("1234567")
    for broken in ("nan", "inf ", "None", "{{", "{%", "Undefined", "-0.0", "\n\n\n\n"):
        assert broken not in text, broken
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({row.count("|") for row in table.splitlines()}) == 1, table


def test_the_decision_is_the_candidate(text: str, plan: Plan, chosen: Candidate) -> None:
    answer = section(text, 1)
    assert f"mesh `{chosen.execution.mesh}`" in answer
    assert (chosen.memory.total <= chosen.limit) == chosen.fits
    assert ("it fits:" in answer) == chosen.fits == ("DOES NOT FIT" not in answer)
    assert f"{chosen.time.tokens_per_second:,.0f} tokens/s" in answer
    days = 1e9 / (chosen.time.tokens / chosen.time.total) / 86400
    assert f"{days:.3g} days for every 10^9" in answer


def test_parts_of_memory_add_up(text: str, workload: Workload, chosen: Candidate) -> None:
    """Against `memory_use`, and the sums of the columns themselves."""
    rows = {row[0]: row[1:] for row in table_rows(section(text, 2), "bytes")}
    totals, _ = rows.pop("**total**"), rows.pop("what a step may take")
    plain = memory_use(workload, memo_memory.plain(chosen.execution))
    for column, use in enumerate((plain, memory_use(workload, chosen.execution))):
        assert in_bytes(totals[column]) == pytest.approx(use.total, abs=6e6)
        shown = sum(in_bytes(row[column]) for row in rows.values())
        assert shown == pytest.approx(use.total, abs=5e7)


def test_changes_lead_from_plain_data_parallelism_to_the_chosen(
    workload: Workload, chosen: Candidate
) -> None:
    e = chosen.execution
    rows = memo_memory.changes(workload, e)
    first, last = rows[0].execution, rows[-1]
    assert first.mesh == MeshShape(e.devices, 1, 1)
    assert (first.zero, first.remat) == (0, "none")
    assert last.execution == (replace(e, zero=0) if e.mesh.data == 1 else e)
    assert last.memory.total == chosen.memory.total
    assert rows[0].memory.total - sum(row.saved for row in rows) == chosen.memory.total
    for before, after in itertools.pairwise(rows):
        changed = {
            name
            for name in ("zero", "schedule", "remat", "microbatch_size")
            if getattr(before.execution, name) != getattr(after.execution, name)
        }
        changed |= {
            axis
            for axis in ("model", "stage")
            if getattr(before.execution.mesh, axis) != getattr(after.execution.mesh, axis)
        }
        assert len(changed) == 1, after.what


def test_traffic_adds_up_to_the_time_of_a_step(
    workload: Workload, chosen: Candidate, plan: Plan
) -> None:
    flows = memo_traffic.flows(workload.transformer, chosen.execution, plan.cluster)
    time = chosen.time
    for axis in ("data", "model", "stage"):
        of_axis = [f for f in flows if f.axis == axis]
        assert bool(of_axis) == (getattr(chosen.execution.mesh, axis) > 1)
        assert sum(f.sent for f in of_axis) == pytest.approx(time.comm_bytes[axis])
        exposed = getattr(time, f"{axis}_comm_exposed")
        assert sum(f.exposed for f in of_axis) == pytest.approx(exposed)


def test_links_are_those_that_the_axes_lie_along(plan: Plan, text: str) -> None:
    over = {row[0]: row[3] for row in table_rows(section(text, 3), "axis")}
    if plan.cluster.topology:
        assert all(link.startswith("torus") for link in over.values())
    else:
        assert all(link.startswith("links in the node") for a, link in over.items() if a == "model")
        crosses = plan.cluster.nodes > 1 and "data" in over
        assert not crosses or over["data"].startswith("network between")


def test_larger_clusters_are_those_of_the_time_model(
    text: str, workload: Workload, chosen: Candidate, plan: Plan
) -> None:
    """Step and tokens per second of each row, computed here from a cluster built by hand."""
    e, cluster = chosen.execution, plan.cluster
    rows = table_rows(section(text, 3), "devices")
    assert len(rows) == 6
    for row, times in zip(rows[:3], (1, 2, 4), strict=True):
        if cluster.topology:
            topology = {1: (4, 4, 4), 2: (4, 4, 8), 4: (4, 8, 8)}[times]
            size = cluster.per_node * times
            bigger = cluster.model_copy(update={"per_node": size, "topology": topology})
        else:
            bigger = cluster.resized(cluster.nodes * times)
        time = step_time(workload.transformer, e.with_mesh(data=e.mesh.data * times), bigger)
        assert int(row[0]) == e.devices * times
        assert int(row[2]) == e.global_size * times
        assert in_seconds(row[7]) == pytest.approx(time.total, abs=6e-3)
        assert row[8] == f"{time.tokens_per_second:,.0f}"
    for row, times in zip(rows[3:], (1, 2, 4), strict=True):
        assert int(row[2]) == e.global_size
        after = memo_growth.same_batch(e, times)
        assert (after is None) == (row[3] == "its rows cannot be divided so far")
        assert after is None or after.global_size == e.global_size


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("S", "M"), [(1, 1), (2, 1), (2, 3), (4, 16), (4, 1), (10, 7), (3, 200)])
def test_a_timeline_is_idle_as_its_schedule_says(name: str, S: int, M: int) -> None:
    schedule = make_schedule(name, S, M)
    rows = memo_timeline.rows(schedule)
    characters = "".join(rows)
    assert len(rows) == S
    assert len(set(map(len, rows))) == 1
    assert characters.count(".") / len(characters) == pytest.approx(schedule.bubble_fraction(2.0))
    assert all(len(line) <= 100 for line in memo_timeline.draw(schedule).splitlines())


def test_what_is_drawn_is_in_the_memo(text: str, plan: Plan, chosen: Candidate) -> None:
    answer = section(text, 4)
    found = memo_module.split(plan, chosen)
    if found is None:
        assert "No candidate splits the layers" in answer
        return
    S, M = found.chosen.execution.mesh.stage, found.chosen.execution.microbatches
    assert f"idle {100 * (S - 1) / S:.1f} %" in answer  # naive: one of S works
    assert f"idle {100 * (S - 1) / (M + S - 1):.1f} %" in answer
    assert found.timeline in answer
    assert found.naive_timeline in answer
    if chosen.execution.mesh.stage == 1:
        assert "no device waits for another" in answer


def test_the_mitigation_is_what_the_models_say(
    text: str, workload: Workload, chosen: Candidate, plan: Plan
) -> None:
    far = memo_growth.growth(workload, chosen.execution, plan.cluster, keep_batch=False)[-1]
    assert far is not None
    part, lost = memo_growth.bottleneck(far.time)
    others = {k: v for k, v in far.time.itemised().items() if k not in ("compute", "total")}
    assert lost == max(others.values()) == others[part]
    found = memo_growth.mitigations(workload, plan.config, far, chosen.limit)
    for m in found:
        assert memory_use(workload, m.execution).total <= chosen.limit
        assert m.execution.devices == far.execution.devices
        time = step_time(workload.transformer, m.execution, far.cluster)
        gain = time.tokens_per_second / far.time.tokens_per_second - 1
        assert m.gain == pytest.approx(gain)
    first, _ = memo_growth.first_to_try(found, far)
    if first is not None:
        assert f"**Try first: {first.what}.**" in section(text, 6)
        after = first.time.itemised()[part] / first.time.tokens
        assert first.gain > 0
        assert after < lost / far.time.tokens


def test_one_device_has_nothing_to_cross() -> None:
    cluster = load_cluster("8x80gb").model_copy(update={"per_node": 1})
    plan = search(load("tiny"), cluster)
    text = memo(plan, plan.candidates[0])
    assert "Nothing: the mesh has one device." in section(text, 3)
    assert "Plain data parallelism would fit" in section(text, 2)


def test_formats_are_those_of_the_policy() -> None:
    config = load("llama-7b", ["precision.policy=fp16", "optim.name=lion"])
    plan = search(config, load_cluster("8x80gb"))
    shown = {row[0]: row[1] for row in table_rows(memo(plan, plan.candidates[0]), "quantity")}
    assert shown["weights that the layers read, activations"] == "float16"
    assert shown["master weights, which the optimizer updates"] == "float32"
    assert shown["first moment of lion"] == "float32"
    assert not any(name.startswith("second moment") for name in shown)


def test_the_error_it_admits_is_that_of_the_page() -> None:
    page = Path(__file__).parents[2] / "docs" / "planner-time.md"
    means = page.read_text().split("## Mean errors")[1].split("##")[0]
    errors = [float(row.split("|")[3].strip(" %")) for row in means.splitlines() if " % |" in row]
    assert len(errors) > 5
    assert (min(errors), max(errors)) == memo_module.TIME_ERROR_PERCENT


def test_the_docstring_shows_what_is_drawn() -> None:
    assert memo_timeline.draw(make_schedule("1f1b", 2, 3)) in (memo_timeline.__doc__ or "")
