"""What the real compiler says of a plan's candidates."""

from __future__ import annotations

from collections.abc import Iterator

from spmd_train.config import Config
from spmd_train.plan.compile import Compiled, Compiler
from spmd_train.plan.search import POLICY_OF_COMPUTE, Candidate, Plan
from spmd_train.plan.targets import cluster_site


def configured(plan: Plan, candidate: Candidate) -> Config:
    """The configuration that trains this candidate."""
    config, e = plan.config, candidate.execution
    groups = {
        "batch": {"microbatches": e.microbatches},
        "parallel": {"zero": e.zero},
        "pipeline": {"schedule": e.schedule, "remat": e.remat},
        "precision": {"policy": POLICY_OF_COMPUTE[e.compute]},
    }
    changed = {
        name: getattr(config, name).model_copy(update=values) for name, values in groups.items()
    }
    return config.model_copy(update={**changed, "mesh": str(e.mesh)})


def verified(plan: Plan, count: int) -> Iterator[tuple[Candidate, Compiled]]:
    """The first candidates, each compiled for the plan's cluster, one after another.

    Raises:
        RequestError: the backend's wheel is absent. RunError: the compiler failed.
    """
    chosen = plan.candidates[:count]
    with Compiler(plan.cluster.accelerator.kind) as compiler:
        for candidate in chosen:
            mesh = candidate.execution.mesh
            site = cluster_site(plan.cluster, mesh.size)
            yield candidate, compiler.compile(configured(plan, candidate), mesh, site)
