"""The planner's step times against published measurements; writes docs/planner-time.md.

From the root of the repository (`PYTHONPATH=.` where the package is not installed):

    python scripts/bench_plan_time.py            # the tables, and docs/planner-time.md
    python scripts/bench_plan_time.py --check    # says whether the page is up to date

The measurements are the CSV files of tests/plan/published; what is assumed where they say nothing
is in published_cases.py beside them.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/plan/published"))

import published_cases as published  # noqa: E402
from published_cases import Case  # noqa: E402

from spmd_train.plan.timing import step_time  # noqa: E402

PAGE = ROOT / "docs/planner-time.md"

HEAD = """# The planner's step time

Written by `scripts/bench_plan_time.py`; do not edit.

`plan` computes what a step takes, it looks nothing up:

```
step = compute + bubble + exposed communication (data, model, stage) + optimizer
```

- **compute**: every product by its shape (tiles, waves over the cores, alignment), every pass over
  memory by its bytes: `plan/rates.py`, `plan/layer_time.py`.
- **communication**: algorithm, bytes, participants, link, latency, and the time a ring needs to get
  up to speed: `plan/links.py`.
- **bubble**: the schedule's own table: `pipeline/schedule.py`, `plan/interleaved.py`.
- **what hides what**: the trainer's collectives over `data` come after the scan and are exposed;
  FSDP elsewhere hides them behind compute: `plan/crossings.py`.

One set of constants for each kind of accelerator, and one number of one accelerator (v6e, whose
matrix rate nobody has published); no row, model or paper has its own. Where each is from, and which
are fitted to what, is written where it stands: `plan/rates.py`, `plan/links.py`,
`plan/hardware.yaml`. `plan --calibrate` replaces them by what a cluster itself does.

"""

ASSUMED = """## What is assumed

- **Narayanan 2021, Korthikanti 2022, vTrain**: Megatron-LM, fp16, operations sent one by one,
  attention scores in memory, dropout, gradients summed in fp16 after the backward pass, full
  recomputation of every layer (`selective` with sequence parallelism where the row says so), tensor
  parallelism innermost, then data, then pipeline. 8 A100-80GB a node; 8 x 200 Gb/s between nodes on
  Selene, 4 x 200 for vTrain. TFLOP/s become seconds by Narayanan's equation 3, which counts
  recomputation.
- **vTrain**'s vocabulary: 50,257, the default of its configurations, in shards of 50,257 / t
  columns. With t = 1 that is odd, and the head's products run at a third of the rate.
- **Llama 3**: seconds from model FLOPs of 6 N + 6 L D T a token (the causal half of attention);
  interleaved with one layer a chunk (126 layers in 16 x 8 places), no recomputation, FP32 gradients
  reduced once a step.
- **tpu-recipes, MaxText**: FSDP over all chips of a slice that tensor parallelism leaves,
  everything over `data` overlapped; MaxText's batch, tensor parallelism and remat policy are those
  of its configs/tpu scripts, its TFLOP/s count attention whole.

## Rows left out

- Narayanan table 2, ZeRO-3: DeepSpeed of 2021 gathered weights at about the speed of one network
  card a node. With all eight the planner says {zero_3}; with one (25 GB/s a node), {zero_3_one}.
- tpu-recipes: mixtures of experts (DeepSeek 3, Llama 4, Mixtral); Gemma 3 (layers with sliding
  windows); v5p GPT3-175B at 86.5 % of the bf16 peak (an int8 run, by the look of it).
- MaxText: several slices (data parallelism between slices, FSDP within them: two data axes; and no
  bandwidth is given for v5e); v4 (the scripts have changed since: today's give another model); v5e
  64B (so has its batch); 1160B and 900B (no script); rows without a batch; mixtures of experts; the
  two inconsistent rows; rows that appear twice.
"""

ERRORS = """
Errors are predicted / measured - 1; even and odd rows apart, since constants that fit rows by
accident would fit one half better. The GPU constants were chosen with these means in view, so they
are no blind prediction; those of v5p and v5e were set before a TPU row was looked at.

## First choice

A sweep is one model, batch and number of GPUs. How much longer the mesh and micro-batch that the
planner ranks first really takes than the fastest of the sweep:

"""

SWEEPS = """
Where single-node sweeps go wrong, a layer takes about 3 ms whatever its size, since the host cannot
send work faster, and the measured times are not monotonic: at width 2048 and micro-batches of 2, a
layer takes 4.8 ms on one GPU, 4.6 ms split over two and 2.7 ms over four.

"""


@dataclass(frozen=True)
class Arguments:
    """The planner's step times against published measurements."""

    check: bool = False
    """Write nothing; exit 1 if docs/planner-time.md is not what would be written."""


def percent(x: float) -> str:
    return f"{100 * x:.1f} %"


def signed(x: float) -> str:
    return f"{100 * x:+.1f} %"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def summary(cases: list[Case]) -> str:
    rows = []
    for source, some in published.by_source(cases).items():
        errors = [case.error for case in some]
        halves = [published.mean_absolute_error(some[k::2]) for k in (0, 1)]
        row = [source, str(len(some)), percent(published.mean_absolute_error(some))]
        row += [signed(statistics.mean(errors)), percent(max(map(abs, errors)))]
        rows.append([*row, " / ".join(map(percent, halves))])
    head = ["source", "rows", "mean absolute error", "mean error", "worst", "even / odd rows"]
    return table(head, rows)


def sweeps(cases: list[Case]) -> str:
    """How much slower the planner's first choice really is than the true best."""
    rows = []
    for source, some in published.by_source(cases).items():
        found = published.regrets(some)
        if found:
            good = sum(regret <= 0.05 for regret in found.values())
            row = [source, str(len(found)), str(good), percent(statistics.median(found.values()))]
            rows.append([*row, percent(max(found.values()))])
    return table(["source", "sweeps", "within 5 %", "median", "worst"], rows)


def every_row(cases: list[Case]) -> str:
    rows = []
    for case in cases:
        step = step_time(case.transformer, case.execution, case.cluster)
        shares = [
            step.compute,
            step.bubble,
            step.data_comm_exposed,
            step.model_comm_exposed,
            step.stage_comm_exposed,
            step.optimizer,
        ]
        seconds = [f"{case.row.seconds:.3f}", f"{step.total:.3f}", signed(case.error)]
        rows.append(
            [case.row.name, *seconds, *(f"{100 * share / step.total:.0f}" for share in shares)]
        )
    head = ["row", "measured s", "predicted s", "error", "compute %", "bubble %", "data %"]
    return table([*head, "model %", "stage %", "optimizer %"], rows)


def grouped(cases: list[Case], name: Callable[[Case], str]) -> str:
    """Too many rows to show: mean errors of groups."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        groups[name(case)].append(case)
    rows = []
    for group, some in sorted(groups.items()):
        errors = [case.error for case in some]
        rows.append(
            [
                group,
                str(len(some)),
                percent(published.mean_absolute_error(some)),
                signed(statistics.mean(errors)),
            ]
        )
    return table(["rows with", "rows", "mean absolute error", "mean error"], rows)


def of_shape(case: Case) -> str:
    return f"width {case.row.hidden}, model {case.row.model}"


def page() -> str:
    cases = published.every_case()
    zero_3 = [row for row in published.tables.narayanan_2() if row.facts["zero"]]
    errors = {
        network: published.mean_absolute_error(published.megatron(row, network) for row in zero_3)
        for network in (200, 25)
    }
    parts = [HEAD, "## Mean errors\n\n", summary(cases)]
    zero_3_errors = {
        "zero_3": f"{percent(errors[200])} mean absolute error",
        "zero_3_one": percent(errors[25]),
    }
    parts += [ERRORS, sweeps(cases), SWEEPS, ASSUMED.format(**zero_3_errors)]
    for source, some in published.by_source(cases).items():
        parts += [f"\n## {source}\n\n"]
        parts += [every_row(some) if len(some) < 200 else grouped(some, of_shape)]
    return "".join(parts)


def main(arguments: Arguments) -> int:
    start = time.perf_counter()
    text = page()
    cases = published.every_case()
    print(summary(cases), sweeps(cases), sep="\n")
    print(f"{len(cases)} rows in {time.perf_counter() - start:.1f} s")
    if arguments.check:
        return int(PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
