"""Step times against published measurements, one set of constants for all of them."""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "published"))
import published_cases as published
from published_cases import Case

# Mean absolute errors as scripts/bench_plan_time.py prints them, rounded up.
LIMITS = {
    "Narayanan 2021, table 1": (10, 0.06),
    "Narayanan 2021, table 2": (6, 0.03),
    "Korthikanti 2022, table 5": (8, 0.06),
    "Llama 3, table 4": (3, 0.09),
    "vTrain, multi node": (109, 0.10),
    "vTrain, single node": (1440, 0.12),
    "tpu-recipes": (16, 0.06),
    "MaxText v5p": (8, 0.06),
    "MaxText v5e": (3, 0.09),
}


@cache
def cases() -> dict[str, list[Case]]:
    return published.by_source(published.every_case())


def test_no_source_is_forgotten() -> None:
    assert {source: len(rows) for source, rows in cases().items()} == {
        source: count for source, (count, _) in LIMITS.items()
    }


@pytest.mark.parametrize("source", LIMITS)
def test_mean_errors_stay_where_they_are(source: str) -> None:
    assert published.mean_absolute_error(cases()[source]) < LIMITS[source][1]


def test_first_choices_are_within_5_percent_of_the_best() -> None:
    """Of 39 B, 175 B and so on on 64 to 512 GPUs all; of the small models on one node, whose times
    the host decides, most."""
    several = published.regrets(cases()["vTrain, multi node"]).values()
    assert len(several) == 4
    assert max(several) < 0.05
    single = published.regrets(cases()["vTrain, single node"]).values()
    assert sum(regret < 0.05 for regret in single) / len(single) > 0.7


def test_every_part_of_a_step_is_there() -> None:
    for rows in cases().values():
        for case in rows[:: max(1, len(rows) // 20)]:
            step = published.step_time(case.transformer, case.execution, case.cluster)
            parts = step.itemised()
            assert sum(parts.values()) == pytest.approx(2 * parts["total"])
            assert min(parts.values()) >= 0
            assert 0 < step.mfu < 0.8
            assert 0 <= step.recompute < step.compute


def test_the_page_is_what_the_script_writes() -> None:
    root = Path(__file__).resolve().parent.parent.parent
    spec = spec_from_file_location("bench_plan_time", root / "scripts/bench_plan_time.py")
    assert spec is not None
    assert spec.loader is not None
    script = module_from_spec(spec)
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    assert script.page() == (root / "docs/planner-time.md").read_text()
