"""Bytes of one device during a training step, closed-form: what each part takes.

    total = state + batch + gradient sums + activations in flight + the workspace of one phase

State, sums and activations in flight are counted from the rules table, the policy and the
schedule's table: nothing there is estimated. The workspace is what XLA holds besides at the worst
moment, which is in one of three phases; its coefficients (`_COMPILERS`) were read from the buffer
assignments of compiled steps, and `scripts/bench_plan_memory.py` compares the whole with the
compiler (docs/planner-memory.md).

Every device of the SPMD program has the buffers of the most loaded stage: the ring of activations
has as many slots as the first stage needs.

Letters: B rows of a micro-batch, T sequence, D width, H heads, E head_dim, F ffn, V vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from spmd_train.pipeline.schedule import Schedule, make_schedule
from spmd_train.pipeline.vocabulary import LOGITS_BYTES
from spmd_train.plan.placed import Placed, placed
from spmd_train.plan.workload import Execution, Workload, unmodelled

if TYPE_CHECKING:
    from spmd_train.config import Config
    from spmd_train.mesh import MeshShape


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on each device.

    Attributes:
        params: what the forward pass reads. master, moments: of the optimizer.
        batch: token ids of a step.
        grads: sums of gradients over micro-batches.
        activations: kept for backward passes, by schedule and remat policy.
        logits: workspace of look-up and head. communication: weights gathered and gradients
            waiting to be scattered (ZeRO 2 and 3). temporary: the rest of the workspace.
        phase: where most is held at once: "head", "layer" or "update".
    """

    params: int
    master: int
    moments: int
    batch: int
    grads: int
    activations: int
    logits: int
    communication: int
    temporary: int
    phase: str

    @property
    def states(self) -> int:
        """What lives from step to step: the arguments of the compiled step."""
        return self.params + self.master + self.moments + self.batch

    @property
    def total(self) -> int:
        return (
            self.states + self.grads + self.activations + self.logits + self.communication
            + self.temporary
        )  # fmt: skip

    def itemised(self) -> dict[str, int]:
        """By name, `total` last."""
        parts = asdict(self)
        del parts["phase"]
        return {**parts, "total": self.total}


def predicted(config: Config, mesh: MeshShape, platform: str) -> int | None:
    """Bytes per device that a run takes; None where there is no model of it: on a CPU, whose
    compiler was not looked at, or of what is `unmodelled`."""
    if platform not in _COMPILERS or unmodelled(config) is not None:
        return None
    workload = Workload.of(config, platform)
    return memory_use(workload, Execution.of(config, mesh, workload.policy)).total


def memory_use(workload: Workload, execution: Execution) -> MemoryUse:
    """What one device holds at the worst moment of a step.

    `execution` is one that the trainer runs; other kinds have no figure.
    """
    e, policy, mesh = execution, workload.policy, execution.mesh
    held = placed(workload.model, mesh)
    params = _sharded(held, e.zero >= 3)
    optimizer = _sharded(held, e.zero >= 1)
    sums = _sharded(held, e.zero >= 2)
    compute, master = _bytes(policy.compute), _bytes(policy.master)
    first, second = (m[e.zero >= 1] for m in held.moments[workload.optimizer])
    grads = sums * _bytes(policy.accumulate) * (2 if policy.compensated else 1)
    sizes = _Sizes.of(workload, e, held)
    schedule = _schedule(e.schedule, mesh.stage, e.microbatches)
    compiler = _COMPILERS[workload.platform]
    kept = _kept(sizes, e, schedule) + _turned(sizes, e, schedule, compiler)
    if e.zero == 3 and mesh.data > 1:  # shards of weights turned around for their gathers
        kept += 2 * held.largest // mesh.data
    phases = {
        "head": _head(workload, sizes, e, compiler),
        "layer": _layer(sizes, e, compiler),
        "update": _update(held, e, grads, kept, policy.has_master, compiler),
    }
    phase = max(phases, key=lambda name: sum(phases[name]))
    workspace, communication = phases[phase]
    return MemoryUse(
        params=params * compute,
        master=optimizer * master if policy.has_master else 0,
        moments=first * _bytes(policy.moments) + second * max(master, 4),
        batch=(3 if workload.packed else 2)
        * 4
        * e.microbatches
        * e.microbatch_size
        * e.sequence_length,
        grads=grads,
        activations=kept,
        logits=workspace if phase == "head" else 0,
        communication=communication,
        temporary=0 if phase == "head" else workspace,
        phase=phase,
    )


def _bytes(dtype: Any) -> int:
    return int(jnp.dtype(dtype).itemsize)


@cache
def _schedule(name: str, stages: int, microbatches: int) -> Schedule:
    return make_schedule(name, stages, microbatches)


def _sharded(held: Placed, split: bool) -> int:
    return held.split if split else held.whole


@dataclass(frozen=True)
class _Sizes:
    """Bytes of the arrays that workspaces consist of, on one device, in the compute dtype.

    Attributes:
        residual: [B, T, D] as it lies between blocks. whole: the same, of the whole sequence.
        query, key: [B, T, H E] and [B, T, N E]. hidden: [B, T, F].
        layer: weights of one block. table: those of the head's matrix.
        layers: blocks of a stage. model: shards of one block.
    """

    residual: int
    whole: int
    query: int
    key: int
    hidden: int
    layer: int
    table: int
    layers: int
    model: int
    compute: int

    @classmethod
    def of(cls, workload: Workload, e: Execution, held: Placed) -> _Sizes:
        m, tp = workload.model, e.mesh.model
        compute = _bytes(workload.policy.compute)
        column = e.microbatch_size * e.sequence_length * compute
        kv = m.kv_heads if m.kv_heads % tp else m.kv_heads // tp
        split = tp if e.sequence_parallel and tp > 1 else 1
        return cls(
            residual=column * m.width // split,
            whole=column * m.width,
            query=column * m.heads // tp * m.head_dim,
            key=column * kv * m.head_dim,
            hidden=column * m.ffn // tp,
            layer=held.layer * compute,
            table=(held.embed if m.tied else held.head) * compute,
            layers=m.layers // e.mesh.stage,
            model=tp,
            compute=compute,
        )


def _kept(s: _Sizes, e: Execution, schedule: Schedule) -> int:
    """Rings over the micro-batches in flight, of residuals and of the head's gradients."""
    if e.remat == "stage":
        idle_slot = not schedule.never_idle[0]
        ring = (schedule.num_slots + idle_slot) * s.residual
    else:
        ring = schedule.num_slots * s.layers * _kept_by_a_layer(s, e.remat)
    return ring + schedule.num_head_slots * s.residual


def _kept_by_a_layer(s: _Sizes, remat: str) -> int:
    """Residuals of one block and micro-batch (pipeline/layers.py)."""
    if remat == "full":
        return s.residual
    float32 = 4 * s.residual // s.compute
    if remat == "dots":  # x; query, key, value; out; gate, up
        return 2 * s.residual + s.query + 2 * s.key + 2 * s.hidden
    # none: two norms (x and its square root twice in float32, the gathered result), attention's
    # inputs, result and its input to `out`, and six arrays around the gate.
    return 4 * float32 + 2 * s.whole + 3 * s.query + 2 * s.key + 6 * s.hidden


@dataclass(frozen=True)
class _Compiler:
    """How a backend's XLA plans buffers, as read from its buffer assignments (JAX 0.10.2).

    Attributes:
        weights, weights_sharded: copies of a block's weights and gradients in a backward pass, with
            one model shard and with several (where collectives overlap with products).
        gathered: more of them at ZeRO 3.
        tables: float32 gradients of the head's matrix. chunks: of logits.
        turned: share of the largest array that an update turns around, or holds twice (ZeRO 1).
        second_sums: of the gradients' size, arrays that an update holds besides (ZeRO 2).
        keeps_order: whether rings stay as they were written.
    """

    weights: float
    weights_sharded: float
    gathered: float
    tables: int
    chunks: int
    turned: float
    second_sums: float
    keeps_order: bool


_COMPILERS = {
    "gpu": _Compiler(2.0, 2.0, 0.7, 1, 1, 1.0, 1.75, False),
    "tpu": _Compiler(2.8, 4.4, 5.0, 2, 6, 0.5, 1.25, True),
}


def _turned(s: _Sizes, e: Execution, schedule: Schedule, compiler: _Compiler) -> int:
    """Rings that XLA turns around as a whole, once a tick (layers.py, `ring_in_order`); about half
    of that was seen where there is one micro-batch, and so no loop over ticks."""
    if compiler.keeps_order or s.model == 1:
        return 0
    several_rows = e.microbatch_size > 1
    a_layer = {
        "dots": s.query + 2 * s.key,
        "none": 2 * (s.query + s.key) if several_rows else s.query,
        "full": s.residual if several_rows or s.residual == s.whole else 0,
    }
    if e.remat == "stage":  # the ring of one micro-batch, filled just before its backward
        return s.layers * a_layer["full"]
    whole = schedule.num_slots * s.layers * a_layer[e.remat]
    return whole // 2 if e.microbatches == 1 else whole


def _head(workload: Workload, s: _Sizes, e: Execution, compiler: _Compiler) -> tuple[int, int]:
    """(workspace, communication) of look-up and head: a float32 gradient of the table, chunks of
    logits; a tied table turned around; under ZeRO 2 and 3 a second gradient on its way."""
    rows = s.table // s.compute // workload.model.width
    chunk = min(LOGITS_BYTES, 4 * e.microbatch_size * e.sequence_length * rows)
    table32, tied = 4 * s.table // s.compute, workload.model.tied
    work = compiler.tables * table32 + compiler.chunks * chunk
    if e.zero >= 2 and e.mesh.data > 1:
        gathered = s.table if e.zero == 3 and (compiler.keeps_order or not tied) else 0
        return work, table32 + table32 // e.mesh.data + gathered
    return work + (s.table if tied else 0), 0


def _layer(s: _Sizes, e: Execution, compiler: _Compiler) -> tuple[int, int]:
    """(workspace, communication) of one block's backward pass: weights, their gradients, and what
    is computed again."""
    weights = compiler.weights if s.model == 1 else compiler.weights_sharded
    work = int(weights * s.layer) + 4 * s.hidden + 4 * s.whole + 3 * s.query
    if e.remat == "stage" and e.mesh.stage > 1:
        work += s.layers * s.residual
    gathers = e.zero >= 2 and e.mesh.data > 1
    return work, int(compiler.gathered * s.layer) if gathers else 0


def _update(
    held: Placed, e: Execution, grads: int, free: int, has_master: bool, compiler: _Compiler
) -> tuple[int, int]:
    """(workspace, communication) of the update, less the rings, which are `free` by then: a scatter
    or gather along another dimension than the first turns the largest array around."""
    if e.mesh.data == 1 or e.zero == 0:
        return 0, 0
    if e.zero == 1 and not has_master:  # the old parameters are read until the new are whole
        extra = 0.85 * grads
    elif e.zero == 1 and compiler.keeps_order:
        extra = compiler.turned * 4 * held.largest
    elif e.zero == 1:  # leaves are scattered one by one, and freed
        extra = 4 * (held.large + compiler.turned * held.largest + held.rest_split) - grads
    elif e.zero == 2:  # no more than the weights that come back, and a little
        extra = min(compiler.second_sums, 0.3 + e.mesh.data / 2) * grads
    else:
        extra = 2 * 4 * held.largest / e.mesh.data
    return max(0, int(extra) - free), 0
