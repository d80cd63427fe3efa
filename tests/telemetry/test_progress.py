"""What a user sees, written out by hand."""

import io
import math

import pytest

from spmd_train.telemetry.progress import Progress, describe

METRICS = {"loss": 3.21449, "grad_norm": 1.2345, "lr": 3e-3, "tokens_per_second": 12345.4}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run(stream, total, every, **settings):
    clock = iter(range(0, 10_000, 2))  # two seconds a step
    with Progress(
        total, every_steps=every, stream=stream, clock=lambda: next(clock), **settings
    ) as progress:
        for step in range(1, total + 1):
            progress.update({"step": step, **METRICS})
    return stream.getvalue()


def test_plain_lines_first_every_and_last():
    lines = run(io.StringIO(), 105, 20).splitlines()
    assert [int(line.split("/")[0].split()[1]) for line in lines] == [1, 20, 40, 60, 80, 100, 105]
    assert lines[1] == (
        "step  20/105  loss 3.2145  grad_norm 1.23  lr 3.0e-03  12,345 tokens/s  eta 0:02:50"
    )
    assert lines[0].endswith("eta -:--:--")
    assert lines[-1].endswith("eta 0:00:00")


def test_a_resumed_run_counts_its_pace_from_where_it_began():
    clock = iter([100.0, 103.0])
    stream = io.StringIO()
    with Progress(1000, every_steps=1, stream=stream, clock=lambda: next(clock)) as progress:
        progress.update({"step": 501})
        progress.update({"step": 502})
    assert stream.getvalue().splitlines()[1] == "step  502/1000  eta 0:24:54"  # 498 x 3 s


def test_nothing_unmeasured_is_shown():
    metrics = {"step": 1, "loss": math.nan, "mfu": None, "skipped": 1}
    assert describe(metrics) == ["loss nan", "skipped"]
    assert describe({"mfu": 0.4567, "lr": 1e-3}, only={"mfu"}) == ["mfu 45.7%"]


def test_other_processes_are_silent():
    stream = Terminal()
    with Progress(2, enabled=False, stream=stream) as progress:
        progress.update({"step": 1})
        progress.note("hello")
    assert stream.getvalue() == ""


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_brackets_are_text(kind, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = kind()
    with Progress(2, stream=stream) as progress:
        progress.note("[train] saved [/a/b]")
    assert "[train] saved [/a/b]" in stream.getvalue()


def test_a_terminal_gets_one_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(Terminal(), 30, 1)
    for part in ("30/30", "loss 3.2145", "12,345 tokens/s", "eta 0:00:00", "\x1b["):
        assert part in shown
