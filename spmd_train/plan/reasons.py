"""Why a candidate stands where it stands, in one sentence with its numbers."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from spmd_train.plan.memory import MemoryUse
from spmd_train.plan.search import POLICY_OF_COMPUTE, USABLE, Candidate, Plan, gigabytes
from spmd_train.plan.timing import StepTime

_PARTS = {
    "compute": "compute",
    "bubble": "waiting for other stages",
    "data_comm_exposed": "gradients and weights over data",
    "model_comm_exposed": "activations over model",
    "stage_comm_exposed": "activations over stage",
    "optimizer": "the optimizer",
}


def why(candidate: Candidate, first: Candidate) -> str:
    """What the step's time goes into; of one that is not the first, what makes it slower."""
    if not candidate.fits:
        return _does_not_fit(candidate)
    if candidate is first:
        return f"{_shares(candidate.time)}; {_bubble(candidate)}{_room(candidate)}."
    slower = candidate.seconds / first.seconds - 1
    parts, theirs = candidate.time.itemised(), first.time.itemised()
    name = max(_PARTS, key=lambda part: parts[part] - theirs[part])
    most = f"{_PARTS[name]} {parts[name]:.2g} s against {theirs[name]:.2g}"
    if name == "compute":
        most += (
            f" (remat={candidate.execution.remat}, rows of {candidate.execution.microbatch_size})"
        )
    return f"{slower:.0%} slower: {most}; {_bubble(candidate)}{_room(candidate)}."


def _does_not_fit(candidate: Candidate) -> str:
    memory = candidate.memory
    return (
        f"does not fit: needs {gigabytes(memory.total)} per device, "
        f"{gigabytes(memory.total - candidate.limit)} more than the {gigabytes(candidate.limit)} "
        f"there; {largest_parts(memory)}."
    )


def largest_parts(memory: MemoryUse, count: int = 3) -> str:
    """The largest parts of the memory, `grads 16.3 GB, master 4.1 GB`."""
    parts = {name: size for name, size in memory.itemised().items() if name != "total"}
    largest = sorted(parts, key=lambda name: -parts[name])[:count]
    return ", ".join(f"{name} {gigabytes(parts[name])}" for name in largest)


def _shares(time: StepTime) -> str:
    parts = time.itemised()
    shares = {name: parts[name] / time.total for name in _PARTS}
    shown = sorted((n for n in shares if shares[n] >= 0.01), key=lambda n: -shares[n])
    return ", ".join(f"{_PARTS[name]} {shares[name]:.0%}" for name in shown)


def _bubble(candidate: Candidate) -> str:
    """Of a pipeline, its bubble and how many micro-batches would make it 10 %."""
    e, bubble = candidate.execution, candidate.time.bubble_fraction
    S, M = e.mesh.stage, e.microbatches
    count = f"{M} micro-batch{'es' if M > 1 else ''}"
    if S == 1:
        return f"{count} of {e.microbatch_size}, no pipeline; "
    text = f"bubble {bubble:.0%} at {count}"
    enough = 9 * (S - 1)  # (S-1)/(M+S-1) = 10 %: Narayanan et al. 2021, section 2.2
    return f"{text} ({enough} would make it 10 %); " if enough > M else f"{text}; "


def _room(candidate: Candidate) -> str:
    return f"{gigabytes(candidate.memory.total)} of {gigabytes(candidate.limit)}"


def command(plan: Plan, candidate: Candidate, config: str, sets: Sequence[str]) -> str:
    """The exact command that trains this candidate; `config` and `sets` as they were given."""
    e = candidate.execution
    chosen = {
        "batch.global_size": plan.config.batch.global_size,
        "batch.microbatches": e.microbatches,
        "parallel.zero": e.zero,
        "pipeline.schedule": e.schedule,
        "pipeline.remat": e.remat,
        "precision.policy": POLICY_OF_COMPUTE[e.compute],
    }
    kept = [text for text in sets if text.partition("=")[0].strip() not in chosen]
    flags = [*kept, *(f"{key}={value}" for key, value in chosen.items())]
    words = ["spmd-train", "train", "--config", config, "--mesh", str(e.mesh)]
    line = shlex.join([*words, *(word for text in flags for word in ("--set", text))])
    kind = plan.cluster.accelerator.kind
    return f"XLA_PYTHON_CLIENT_MEM_FRACTION={USABLE[kind]} {line}" if kind == "gpu" else line
