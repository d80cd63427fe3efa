"""Files read back with the standard library's own JSON."""

import json
import math
from datetime import datetime, timedelta

import jax.numpy as jnp
import numpy as np
import pytest

from spmd_train.errors import RunError
from spmd_train.telemetry.records import RunLog, read_jsonl


def no_constant(name):
    raise AssertionError(f"bare {name} in JSON")


def strict(path):
    return [json.loads(line, parse_constant=no_constant) for line in path.read_text().splitlines()]


def test_values_of_every_kind(tmp_path):
    with RunLog(tmp_path) as log:
        log.metrics(
            {
                "step": np.int64(1),
                "loss": jnp.float32(0.5),
                "lr": np.float32(0.25),
                "half": jnp.bfloat16(1.5),
                "skipped": np.bool_(True),
                "none": None,
                "list": (np.arange(2), {3: tmp_path}),
            }
        )
    assert strict(tmp_path / "metrics.jsonl") == [
        {
            "step": 1,
            "loss": 0.5,
            "lr": 0.25,
            "half": 1.5,
            "skipped": True,
            "none": None,
            "list": [[0, 1], {"3": str(tmp_path)}],
        }
    ]


def test_non_finite_numbers_are_strings_that_float_reads(tmp_path):
    with RunLog(tmp_path) as log:
        log.metrics({"a": math.nan, "b": np.float32("inf"), "c": jnp.array([-jnp.inf, 1.0])})
    (record,) = strict(tmp_path / "metrics.jsonl")
    assert record == {"a": "nan", "b": "inf", "c": ["-inf", 1.0]}
    assert math.isnan(float(record["a"]))


def test_events_carry_name_and_utc_time(tmp_path):
    with RunLog(tmp_path) as log:
        log.event("start", mesh={"data": 4})
    (event,) = strict(tmp_path / "events.jsonl")
    assert list(event)[:2] == ["time", "event"]
    assert event["mesh"] == {"data": 4}
    assert datetime.fromisoformat(event["time"]).utcoffset() == timedelta(0)


def test_each_line_is_on_disk_at_once(tmp_path):
    log = RunLog(tmp_path)
    for step in (1, 2):
        log.metrics({"step": step})
        assert [r["step"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == [*range(1, step + 1)]
    log.close()


def test_a_torn_last_line_is_not_read_and_is_dropped_on_open(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_jsonl(path) == [{"step": 1}]
    with RunLog(tmp_path) as log:
        log.metrics({"step": 2})
    assert strict(path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("before", ["", '{"torn'])
def test_opening_a_file_with_no_complete_line(tmp_path, before):
    (tmp_path / "metrics.jsonl").write_text(before)
    with RunLog(tmp_path) as log:
        log.metrics({"step": 1})
    assert strict(tmp_path / "metrics.jsonl") == [{"step": 1}]


def test_resume_never_repeats_a_step(tmp_path):
    with RunLog(tmp_path) as log:
        for step in range(1, 8):
            log.metrics({"step": step, "loss": math.nan})
            log.event("step", step=step)
    with RunLog(tmp_path) as log:
        log.truncate_after(4)
        log.metrics({"step": 5})
    metrics = strict(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in metrics] == [1, 2, 3, 4, 5]
    assert metrics[0]["loss"] == "nan"
    assert len(strict(tmp_path / "events.jsonl")) == 7  # history is not rewritten
    assert sorted(p.name for p in tmp_path.iterdir()) == ["events.jsonl", "metrics.jsonl"]


def test_disabled_writes_nothing(tmp_path):
    with RunLog(tmp_path / "run", enabled=False) as log:
        log.metrics({"step": 1})
        log.event("start")
        log.truncate_after(0)
    assert not (tmp_path / "run").exists()


def test_read_missing_and_damaged(tmp_path):
    assert read_jsonl(tmp_path / "none.jsonl") == []
    path = tmp_path / "metrics.jsonl"
    for damage in ("{'step': 1}", "[1]"):
        path.write_text(f'{{"step": 1}}\n{damage}\n{{"step": 3}}\n')
        with pytest.raises(RunError, match=r"metrics\.jsonl line 2"):
            read_jsonl(path)


def test_unwritable_directory_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write .*file/run/metrics.jsonl: Not a directory"):
        RunLog(tmp_path / "file" / "run")


def test_a_full_disk_is_a_run_error(tmp_path):
    """And not a second error when the log is closed, which would hide why the run ended."""
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    (tmp_path / "events.jsonl").touch()
    with RunLog(tmp_path) as log:
        with pytest.raises(RunError, match=r"cannot write .*metrics\.jsonl: No space left"):
            log.metrics({"step": 1})
        log.event("stop", step=0)
    assert strict(tmp_path / "events.jsonl")[0]["event"] == "stop"


def test_a_closed_log_says_so(tmp_path):
    log = RunLog(tmp_path)
    log.close()
    with pytest.raises(RunError, match="is closed"):
        log.metrics({"step": 1})
