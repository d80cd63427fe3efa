"""The page of a plan: its numbers are the plan's, its drawings to scale, its HTML well-formed."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from spmd_train.config import load
from spmd_train.mesh import MeshShape
from spmd_train.pipeline.schedule import make_schedule
from spmd_train.plan.cluster import load_cluster
from spmd_train.plan.page import page
from spmd_train.plan.search import Fixed, Plan, search

VOID = {"meta", "br", "link", "img"}
SVG = "{http://www.w3.org/2000/svg}"


class Reader(HTMLParser):
    """Tags that open and close in order, and the cells of every table."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.tags: set[str] = set()
        self.heading = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data
        if "h1" in self.open:
            self.heading += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    assert not re.search(r"(src|href)=|@import|url\(|<script", text)
    for svg in re.findall(r"<svg.*?</svg>", text, re.S):
        ElementTree.fromstring(svg)
    return reader


def drawings(text: str, kind: str) -> list[ElementTree.Element]:
    found = re.findall(rf'<svg class="{kind}".*?</svg>', text, re.S)
    return [ElementTree.fromstring(svg) for svg in found]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return search(load("llama-30b", ["batch.global_size=256"]), load_cluster("32xh100"))


@pytest.fixture(scope="module")
def text(plan: Plan) -> str:
    return page(plan, 5)


def test_the_table_says_what_the_plan_says(plan: Plan, text: str) -> None:
    reader = read(text)
    rows = reader.tables[0][1:]
    assert len(rows) == 5
    for cells, c in zip(rows, plan.candidates, strict=False):
        e = c.execution
        assert cells[1] == str(e.mesh)
        assert cells[2:7] == [
            str(e.zero), f"{e.microbatches} x {e.microbatch_size}", e.schedule, e.remat, e.compute,
        ]  # fmt: skip
        used, limit = (float(part) for part in cells[7].split(" of "))
        assert used == pytest.approx(c.memory.total / 1e9, abs=0.051)
        assert limit == pytest.approx(c.limit / 1e9, abs=0.051)
        step, tokens, mfu, bubble = (float(cell.replace(",", "")) for cell in cells[8:])
        assert step == pytest.approx(c.seconds, rel=0.005)
        assert tokens == pytest.approx(e.tokens / c.seconds, abs=0.6)
        assert mfu == pytest.approx(100 * c.time.mfu, abs=0.051)
        assert bubble == pytest.approx(100 * c.time.bubble / c.seconds, abs=0.051)
    assert len(reader.tables[1]) == 1 + len(plan.pareto)
    assert reader.tables[2][1:] == [[str(r.mesh), r.reason] for r in plan.rejected]
    assert "mesh 32x1x1 takes 6." in reader.heading


def test_bars_are_to_scale(plan: Plan, text: str) -> None:
    """Widths are as bytes, and seconds, are; the limit stands where it would fill."""
    memory, time = drawings(text, "bars")
    for svg, whole in (
        (memory, [c.memory.itemised() for c in plan.candidates]),
        (time, [c.time.itemised() for c in plan.candidates]),
    ):
        scales = []
        for bar, parts in zip(svg.findall(f"{SVG}g"), whole, strict=False):
            drawn = {rect.get("class").split()[0]: rect for rect in bar.findall(f"{SVG}rect")}
            assert set(drawn) == {name for name, amount in parts.items() if amount} - {"total"}
            end = None
            for name, rect in drawn.items():
                x, width = float(rect.get("x")), float(rect.get("width"))
                assert float(rect.get("data-amount")) == pytest.approx(parts[name])
                if width > 1:
                    scales.append(width / parts[name])
                assert end is None or x == pytest.approx(end, abs=0.01)
                end = x + width
            length = end - float(bar.find(f"{SVG}rect").get("x"))
            assert length == pytest.approx(parts["total"] * scales[0], rel=0.001)
        assert max(scales) / min(scales) < 1.001
        if svg is memory:
            left = float(memory.find(f".//{SVG}rect").get("x"))
            limit = float(memory.find(f"{SVG}line").get("x1"))
            assert limit - left == pytest.approx(plan.candidates[0].limit * scales[0], rel=0.001)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_idle_area_is_the_bubble(schedule: str) -> None:
    """Of the timeline's area, what is idle is the schedule's own bubble fraction."""
    fixed = Fixed(MeshShape(2, 1, 4), 1, None, 8, schedule, "full", "bfloat16")
    one = search(load("llama-7b", ["batch.global_size=64"]), load_cluster("8x80gb"), fixed)
    (svg,) = drawings(page(one, 3), "timeline")
    area: dict[str, float] = {"idle": 0.0, "forward": 0.0, "backward": 0.0}
    for rect in svg.findall(f"{SVG}rect"):
        area[rect.get("class").split()[0]] += float(rect.get("width"))
    bubble = make_schedule(schedule, 4, 8).bubble_fraction()
    assert area["idle"] / sum(area.values()) == pytest.approx(bubble, abs=1e-3)
    assert area["backward"] == pytest.approx(2 * area["forward"], rel=1e-3)


def test_the_scatter_has_every_point(plan: Plan, text: str) -> None:
    (svg,) = drawings(text, "scatter")
    circles = svg.findall(f"{SVG}circle")
    filled = [c for c in circles if c.get("class") == "pareto"]
    assert len(filled) == len(plan.pareto)
    assert {c.find(f"{SVG}title").text.split()[0] for c in circles} >= {
        str(c.execution.mesh) for c in plan.candidates
    }
    xs, ys = ([float(c.get(axis)) for c in filled] for axis in ("cx", "cy"))
    assert xs == sorted(xs)  # slower to the right
    assert ys == sorted(ys)  # leaner further down


def test_legends_name_every_part_that_is_drawn(text: str) -> None:
    """Also those that the first bar lacks."""
    charts = re.findall(r'<svg class="bars".*?</ul>', text, re.S)
    assert len(charts) == 2
    for chart in charts:
        bars, legend = chart.split('<ul class="legend">')
        drawn = set(re.findall(r'<rect class="(\w+) seam"', bars))
        assert drawn == set(re.findall(r'<rect class="(\w+)"', legend))
        assert drawn > {"bubble"} or drawn > {"params"}


def test_hostile_names_are_text(plan: Plan) -> None:
    name = "<script>alert('1')</script>"
    hostile = replace(
        plan,
        config=plan.config.model_copy(update={"name": name}),
        cluster=plan.cluster.model_copy(update={"name": name}),
        rejected=(replace(plan.rejected[0], reason=name),),
    )
    reader = read(page(hostile, 5))
    assert "script" not in reader.tags
    assert reader.heading.startswith(name)
    assert reader.tables[2][1][1] == name


def test_small_plans() -> None:
    """One stage, one candidate, one point; nothing that fits; nothing at all."""
    node = load_cluster("8x80gb")
    one = search(load("tiny"), node, Fixed(mesh=MeshShape(8, 1, 1)))
    assert len(one.candidates) == 1
    assert "no stage waits" in page(one, 10)
    point = replace(one, candidates=one.candidates[:1], pareto=one.candidates[:1])
    (svg,) = drawings(page(point, 10), "scatter")
    assert len(svg.findall(f"{SVG}circle")) == 1
    everything = Fixed(MeshShape(8, 1, 1), 0, None, 1, "1f1b", "full", "bfloat16")
    beyond = search(load("llama-30b", ["batch.global_size=8"]), node, everything)
    assert "does not fit" in read(page(beyond, 10)).heading
    none = search(load("llama-70b", ["batch.global_size=8"]), load_cluster("8x40gb"))
    assert not none.candidates
    assert "no mesh fits" in read(page(none, 10)).heading
    for each in (one, point):
        read(page(each, 10))
