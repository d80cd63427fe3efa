"""The planner's bytes per device against the real compiler; writes docs/planner-memory.md.

From the root of the repository (`PYTHONPATH=.` where the package is not installed):

    python scripts/bench_plan_memory.py                    # the page, from the recorded figures
    python scripts/bench_plan_memory.py --compile gpu      # compile again: spmd-train[compile-gpu]
    python scripts/bench_plan_memory.py --compile tpu      # or spmd-train[compile-tpu]

Recorded figures are in tests/plan/compiled_memory.csv; compiling all takes some 8 minutes for each
backend on two cores. Cases of a target that is not compiled are kept as they were.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from spmd_train.config import load
from spmd_train.mesh import MeshShape
from spmd_train.plan.compile import Compiler
from spmd_train.plan.hardware import accelerator
from spmd_train.plan.memory import MemoryUse, memory_use
from spmd_train.plan.targets import site
from spmd_train.plan.workload import Execution, Workload

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "tests/plan/compiled_memory.csv"
PAGE = ROOT / "docs/planner-memory.md"
COLUMNS = (
    "target", "config", "mesh", "microbatches", "size", "length", "more", "seen", "jax",
    "arguments", "temporaries",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One step to compile.

    Attributes:
        size, length: rows of a micro-batch on one data shard, tokens of a row.
        more: further settings, `key=value` separated by spaces.
        seen: whether it was looked at when the coefficients were chosen.
        arguments, temporaries: bytes per device, as recorded. jax: by which version.
    """

    target: str
    config: str
    mesh: str
    microbatches: int
    size: int
    length: int
    more: str
    seen: bool
    jax: str
    arguments: int
    temporaries: int

    @property
    def compiled(self) -> int:
        return self.arguments + self.temporaries

    @property
    def settings(self) -> list[str]:
        rows = self.microbatches * self.size * MeshShape.parse(self.mesh).data
        return [
            f"batch.microbatches={self.microbatches}",
            f"batch.global_size={rows}",
            f"batch.sequence_length={self.length}",
            *self.more.split(),
        ]

    def predicted(self) -> MemoryUse:
        config, shape = load(self.config, self.settings), MeshShape.parse(self.mesh)
        workload = Workload.of(config, accelerator(self.target).kind)
        return memory_use(workload, Execution.of(config, shape, workload.policy))

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what the compiler says."""
        return self.predicted().total / self.compiled - 1


def recorded() -> list[Case]:
    """The cases of the recorded file."""
    with RECORDED.open(newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return [
            Case(
                row["target"], row["config"], row["mesh"], int(row["microbatches"]),
                int(row["size"]), int(row["length"]), row["more"], row["seen"] == "yes",
                row["jax"], int(row["arguments"]), int(row["temporaries"]),
            )
            for row in rows
        ]  # fmt: skip


def write(cases: list[Case]) -> None:
    """Replace the recorded file."""
    with RECORDED.open("w", newline="") as file:
        file.write("# Bytes per device that XLA gives to a step; scripts/bench_plan_memory.py.\n")
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for case in cases:
            fields = {name: getattr(case, name) for name in COLUMNS}
            writer.writerow({**fields, "seen": "yes" if case.seen else "no"})


def compiled_again(
    cases: list[Case], platform: Literal["gpu", "tpu"], only_new: bool
) -> Iterator[Case]:
    """The cases, those of the platform compiled by what is installed here."""
    with Compiler(platform) as compiler:
        for case in cases:
            kind, shape = accelerator(case.target), MeshShape.parse(case.mesh)
            if kind.kind != platform or (only_new and case.jax):
                yield case
                continue
            found = compiler.compile(
                load(case.config, case.settings), shape, site(case.target, kind, shape.size)
            )
            assert found.memory is not None, f"{case} does not fit a TPU"
            fields = {name: getattr(case, name) for name in COLUMNS}
            now = Case(**{
                **fields, "jax": found.jax, "arguments": found.memory.arguments,
                "temporaries": found.memory.temporaries,
            })  # fmt: skip
            print(f"{describe(now)}: {now.compiled / 2**30:.2f} GiB, {now.error:+.1%}", flush=True)
            yield now


def describe(case: Case) -> str:
    return f"{case.target} {case.config} {case.mesh} {case.more}"


HEAD = """# The planner's memory

Written by `scripts/bench_plan_memory.py`; do not edit.

`plan` computes what a device holds at the worst moment of a step (`plan/memory.py`):

```
total = state + batch + gradient sums + activations in flight + the workspace of one phase
```

State, sums and rings of activations are counted from the rules table, the policy and the
schedule's table. The workspace is what XLA holds besides in the worst of three phases (head, one
layer's backward pass, update); its few coefficients, one set for GPUs and one for TPUs, were read
from buffer assignments of JAX 0.10.2. Another version of XLA plans otherwise: `compile --target`
and `plan --verify` ask the one that is installed.

"""


ABOUT = """{all}. Of these, not looked at when the coefficients were chosen: {unseen}.

GPU figures are for blockwise attention (cuDNN's cannot be compiled without its library). XLA plans
with less where a step would otherwise not fit the device: such a step is predicted too high (LLaMA
30B at 2x4x4 with zero=2 on the RTX 4090).

"""

TABLE = """\
| target | model | mesh | micro-batches | length | settings | phase | compiled GiB | predicted | error |
| --- | --- | --- | ---: | ---: | --- | --- | ---: | ---: | ---: |
"""  # noqa: E501


def page(cases: list[Case]) -> str:
    """The page, as Markdown."""
    errors = [case.error for case in cases]
    unseen = [case.error for case in cases if not case.seen]

    def summary(of: list[float]) -> str:
        return (
            f"{len(of)} steps: median error {statistics.median(map(abs, of)):.1%}, from "
            f"{min(of):+.1%} to {max(of):+.1%}; {sum(e < -0.03 for e in of)} more than 3 % below, "
            f"{sum(abs(e) > 0.08 for e in of)} more than 8 % off"
        )

    lines = [HEAD, ABOUT.format(all=summary(errors), unseen=summary(unseen)), TABLE]
    for case in cases:
        use = case.predicted()
        lines.append(
            f"| {case.target} | {case.config} | {case.mesh} | {case.microbatches} x {case.size} | "
            f"{case.length} | {case.more} | {use.phase} | {case.compiled / 2**30:.2f} | "
            f"{use.total / 2**30:.2f} | {case.error:+.1%} |\n"
        )
    return "".join(lines)


def main(compile: Literal["gpu", "tpu"] | None = None, only_new: bool = False) -> None:
    """Write the page; with `compile`, compile that backend's cases first (of those, with
    `only_new`, the ones without a figure)."""
    cases = recorded()
    if compile is not None:
        cases = list(compiled_again(cases, compile, only_new))
        write(cases)
    PAGE.write_text(page(cases), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    tyro.cli(main)
