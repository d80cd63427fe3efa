"""One configuration for several clusters: what fits each of them, ranked by the slowest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spmd_train.config import Config
from spmd_train.errors import RunError, listed
from spmd_train.plan.reasons import largest_parts
from spmd_train.plan.search import (
    POLICY_OF_COMPUTE,
    Candidate,
    Fixed,
    Plan,
    gigabytes,
    search,
)


@dataclass(frozen=True)
class Shared:
    """One configuration file and a mesh for every cluster.

    Attributes:
        settings: keys that are the same everywhere. candidates: the fastest mesh of each cluster.
    """

    settings: dict[str, object]
    candidates: tuple[Candidate, ...]

    @property
    def seconds(self) -> float:
        """Of the slowest."""
        return max(c.seconds for c in self.candidates)


def for_all(plans: Sequence[Plan]) -> tuple[Shared, ...]:
    """Configurations that fit the cluster of every plan, best (by the slowest) first.

    Raises:
        RunError: none does.
    """
    by_settings: list[dict[tuple[tuple[str, object], ...], Candidate]] = []
    for plan in plans:
        fastest: dict[tuple[tuple[str, object], ...], Candidate] = {}
        for candidate in plan.fitting:
            key = tuple(settings(plan.config, candidate).items())
            if key not in fastest or candidate.seconds < fastest[key].seconds:
                fastest[key] = candidate
        by_settings.append(fastest)
    common = set(by_settings[0]).intersection(*by_settings[1:])
    if not common:
        counts = listed(
            f"{len(found)} on {plan.cluster.name}"
            for found, plan in zip(by_settings, plans, strict=True)
        )
        raise RunError(
            f"no configuration fits all of {listed(p.cluster.name for p in plans)} (that fit alone:"
            f" {counts}); another global batch, or a plan for each of them, may."
        )
    shared = [Shared(dict(key), tuple(found[key] for found in by_settings)) for key in common]
    return tuple(sorted(shared, key=lambda s: (s.seconds, str(s.settings))))


def settings(config: Config, candidate: Candidate) -> dict[str, object]:
    """What of a candidate goes into a configuration file: all but the mesh."""
    e = candidate.execution
    return {
        "batch.global_size": config.batch.global_size,
        "batch.microbatches": e.microbatches,
        "parallel.zero": e.zero,
        "pipeline.schedule": e.schedule,
        "pipeline.remat": e.remat,
        "precision.policy": POLICY_OF_COMPUTE[e.compute],
    }


def nothing_fits(plan: Plan, fixed: Fixed) -> str:
    """How much memory is missing where no mesh fits, and the smallest cluster that would do."""
    least = plan.least
    if least is None:
        return "no mesh divides this model and batch; see the reasons above."
    limit = plan.limit
    e = least.execution
    text = (
        f"{plan.config.name} fits {plan.cluster.name} on no mesh: the leanest, {e.mesh} with "
        f"zero={e.zero} and remat={e.remat}, needs {gigabytes(least.memory.total)} per device, "
        f"{gigabytes(least.memory.total - limit)} more than the {gigabytes(limit)} there "
        f"({largest_parts(least.memory)})."
    )
    nodes = smallest(plan, fixed)
    if nodes is None:
        return f"{text} Up to {MOST_NODES} such nodes would not do either."
    return (
        f"{text} The smallest cluster of such nodes that would do has {nodes} "
        f"({nodes * plan.cluster.per_node} accelerators)."
    )


MOST_NODES = 512


def smallest(plan: Plan, fixed: Fixed) -> int | None:
    """Fewest nodes of the plan's cluster on which something fits; None up to `MOST_NODES`."""
    free = replace(fixed, mesh=None)
    nodes = 1
    while nodes <= MOST_NODES:
        if search(plan.config, plan.cluster.resized(nodes), free).candidates:
            break
        nodes *= 2
    else:
        return None
    for count in range(nodes // 2 + 1, nodes):
        if search(plan.config, plan.cluster.resized(count), free).candidates:
            return count
    return nodes
