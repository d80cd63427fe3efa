"""A plan as people and programs read it: tables on a terminal, one JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from spmd_train.config_yaml import write_yaml
from spmd_train.mesh import MeshShape
from spmd_train.plan.both import Shared
from spmd_train.plan.cluster import Cluster
from spmd_train.plan.compile import Compiled
from spmd_train.plan.reasons import command, why
from spmd_train.plan.search import Candidate, Plan
from spmd_train.telemetry.memory import spell


def as_json(
    plan: Plan, compiled: Sequence[Compiled], top: int, config: str, sets: Sequence[str]
) -> dict[str, Any]:
    """The document of `plan --json`; `compiled` are those of the first candidates."""
    verified = [{"verified": each.as_json()} for each in compiled]
    verified += [{}] * (len(plan.candidates) - len(verified))
    first = plan.candidates[0] if plan.candidates else None
    return {
        "model": {"name": plan.config.name, "params": plan.workload.transformer.parameters},
        "cluster": _cluster(plan.cluster),
        "global_size": plan.config.batch.global_size,
        "evaluated": plan.evaluated,
        "candidates": [
            {
                **_candidate(c),
                "why": why(c, first or c),
                "command": command(plan, c, config, sets),
                **more,
            }
            for c, more in zip(plan.candidates[:top], verified, strict=False)
        ],
        "pareto": [_candidate(c) for c in plan.pareto],
        "rejected": [
            {"mesh": _mesh(r.mesh), **({} if r.zero is None else {"zero": r.zero}),
             "reason": r.reason}
            for r in plan.rejected
        ],
    }  # fmt: skip


def shared_as_json(shared: Sequence[Shared], plans: Sequence[Plan], top: int) -> dict[str, Any]:
    """The document of `plan --json` for several clusters."""
    return {
        "model": {
            "name": plans[0].config.name, "params": plans[0].workload.transformer.parameters,
        },
        "clusters": [_cluster(plan.cluster) for plan in plans],
        "configurations": [
            {"set": s.settings, "on": [_candidate(c) for c in s.candidates]} for s in shared[:top]
        ],
    }  # fmt: skip


def _mesh(mesh: MeshShape) -> dict[str, int]:
    return {"data": mesh.data, "model": mesh.model, "stage": mesh.stage}


def _cluster(cluster: Cluster) -> dict[str, Any]:
    return {
        "name": cluster.name,
        "accelerator": cluster.accelerator_name,
        "nodes": cluster.nodes,
        "per_node": cluster.per_node,
        "devices": cluster.devices,
    }


def _candidate(c: Candidate) -> dict[str, Any]:
    e = c.execution
    return {
        "mesh": _mesh(e.mesh),
        "zero": e.zero,
        "microbatches": e.microbatches,
        "microbatch_size": e.microbatch_size,
        "schedule": e.schedule,
        "remat": e.remat,
        "compute_dtype": e.compute,
        "fits": c.fits,
        "memory_bytes": {**c.memory.itemised(), "limit": c.limit},
        "step_seconds": c.time.itemised(),
        "tokens_per_second": c.time.tokens_per_second,
        "mfu": c.time.mfu,
        "bubble_fraction": c.time.bubble_fraction,
    }


def show(plan: Plan, top: int, config: str, sets: Sequence[str], console: Console) -> None:
    """Print the ranking, the reasons, and the command of the first."""
    console.print(headline(plan))
    if plan.candidates:
        console.print(ranking(plan.candidates[:top]))
        first = plan.candidates[0]
        for number, candidate in enumerate(plan.candidates[:top], start=1):
            console.print(f"{number:3} {candidate.execution.mesh}: {why(candidate, first)}")
    if plan.rejected:
        console.print("rejected:")
        for r in plan.rejected:
            console.print(f"    {r.mesh}: {r.reason}")
    if plan.candidates and plan.candidates[0].fits:
        console.print("train the first:", command(plan, plan.candidates[0], config, sets), sep="\n")


def headline(plan: Plan) -> str:
    """One line: the model, the batch, the cluster, how many ways were costed."""
    batch, cluster = plan.config.batch, plan.cluster
    nodes = f"{cluster.nodes} nodes" if cluster.nodes > 1 else "1 node"
    return (
        f"{plan.config.name}: {plan.workload.transformer.parameters / 1e9:.1f} billion parameters, "
        f"{batch.global_size} sequences of {batch.sequence_length} a step, on {cluster.devices} x "
        f"{cluster.accelerator.title} ({nodes} of {cluster.per_node}); {plan.evaluated:,} "
        f"{'way' if plan.evaluated == 1 else 'ways'} costed"
    )


def ranking(candidates: Sequence[Candidate]) -> Table:
    """The candidates as a table, best first."""
    table = Table(box=None, pad_edge=False)
    for name in ("", "mesh", "zero", "micro-batches", "schedule", "remat", "compute"):
        table.add_column(name, justify="right" if name in ("", "zero", "micro-batches") else "left")
    for name in ("memory", "of", "s/step", "tokens/s", "MFU", "bubble"):
        table.add_column(name, justify="right")
    for number, c in enumerate(candidates, start=1):
        e = c.execution
        table.add_row(
            str(number), str(e.mesh), str(e.zero), f"{e.microbatches} x {e.microbatch_size}",
            e.schedule, e.remat, e.compute, spell(c.memory.total), spell(c.limit),
            f"{c.seconds:.3g}", f"{c.time.tokens_per_second:,.0f}", f"{c.time.mfu:.0%}",
            f"{c.time.bubble_fraction:.0%}",
        )  # fmt: skip
    return table


def show_verified(candidate: Candidate, compiled: Compiled, console: Console) -> None:
    """Print the compiler's memory of one candidate beside the predicted."""
    needed, predicted = compiled.needed_bytes, candidate.memory.total
    fits = "fits" if compiled.fits and needed <= candidate.limit else "does not fit"
    console.print(
        f"    {candidate.execution.mesh}: the compiler says {spell(needed)} ({fits}), predicted "
        f"{spell(predicted)} ({predicted / needed - 1:+.1%}); compiled in {compiled.seconds:.0f} s "
        f"by {compiled.backend}"
    )


def show_shared(
    shared: Sequence[Shared], plans: Sequence[Plan], top: int, console: Console
) -> None:
    """Print configurations that fit every cluster, ranked by the slower of their steps."""
    for plan in plans:
        console.print(headline(plan))
    for number, s in enumerate(shared[:top], start=1):
        console.print(f"{number:3} {' '.join(f'{k}={v}' for k, v in s.settings.items())}")
        for plan, c in zip(plans, s.candidates, strict=True):
            console.print(
                f"      {plan.cluster.name}: --mesh {c.execution.mesh}, {c.seconds:.3g} s a step, "
                f"{spell(c.memory.total)} of {spell(c.limit)}"
            )
    console.print("the configuration of the first, for all of them:", _nested(shared[0]), sep="\n")


def _nested(shared: Shared) -> str:
    """The settings as they stand in a configuration file."""
    groups: dict[str, dict[str, object]] = {}
    for key, value in shared.settings.items():
        group, name = key.split(".")
        groups.setdefault(group, {})[name] = value
    return write_yaml(groups).rstrip()
