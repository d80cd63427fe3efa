"""The published measurements as the planner sees them: a model, an execution, a cluster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import published_tables as tables
from published_tables import Row

from spmd_train.mesh import MeshShape
from spmd_train.plan.cluster import Cluster, Network, torus
from spmd_train.plan.hardware import accelerator
from spmd_train.plan.timing import step_time
from spmd_train.plan.workload import Execution, Transformer


@dataclass(frozen=True)
class Case:
    """One measurement and what the planner is asked."""

    row: Row
    transformer: Transformer
    execution: Execution
    cluster: Cluster

    @property
    def predicted(self) -> float:
        return step_time(self.transformer, self.execution, self.cluster).total

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.row.seconds - 1


def gpu_cluster(name: str, devices: int, network_gigabytes: float) -> Cluster:
    a = accelerator(name)
    nodes = -(-devices // 8)
    network = Network(gigabytes_per_second=network_gigabytes) if nodes > 1 else None
    return Cluster(
        name=name, accelerator_name=name, accelerator=a, nodes=nodes, per_node=min(devices, 8),
        topology=None, link=a.link, network=network,
    )  # fmt: skip


def megatron(row: Row, network_gigabytes: float) -> Case:
    """Megatron-LM of 2021 and 2022: fp16, scores in memory, full recomputation unless it says
    otherwise, tensor then data parallelism innermost, 1F1B on stages that run on their own."""
    f = row.facts
    v = f.get("interleave", 1)
    selective = f.get("remat") == "selective"
    execution = Execution(
        mesh=MeshShape(data=row.data, model=row.model, stage=row.stage),
        microbatches=row.batch // row.data // row.micro_batch,
        microbatch_size=row.micro_batch,
        sequence_length=row.sequence,
        zero=f.get("zero", 0),
        schedule="interleaved" if v > 1 else "1f1b",
        virtual_stages=v,
        remat="selective" if selective else "full",
        compute="float16",
        sequence_parallel=selective,
        vocabulary="ends",
        lockstep=False,
        overlap_data=f.get("zero", 0) == 3,
        reduce_bytes=2,
        fused_attention=False,
        eager=True,
        order=("model", "context", "data", "stage"),
    )
    shape = Transformer.gpt(row.layers, row.hidden, row.heads, row.vocab, row.sequence)
    devices = row.model * row.stage * row.data
    return Case(row, shape, execution, gpu_cluster("a100-80gb", devices, network_gigabytes))


def llama_3(row: Row) -> Case:
    """FSDP without resharding, FP32 gradients, one layer a chunk (126 layers in 16 x 8 places)."""
    execution = Execution(
        mesh=MeshShape(data=row.data, model=row.model, stage=row.stage),
        microbatches=row.batch // row.data,
        microbatch_size=1,
        sequence_length=row.sequence,
        zero=1,
        schedule="interleaved",
        virtual_stages=8,
        remat="none",
        sequence_parallel=True,
        context=row.context,
        vocabulary="ends",
        lockstep=False,
        overlap_data=True,
    )
    shape = Transformer(126, 16384, 128, 8, 128, 53248, 128256)
    devices = row.model * row.stage * row.data * row.context
    return Case(row, shape, execution, gpu_cluster("h100-80gb", devices, 400))


# Gb/s of one chip between slices: hardware_specs.csv, DCN.
DCN = {"v5e": 25, "v5p": 50, "v6e": 100}


def maxtext(row: Row) -> Case:
    """FSDP over the chips that tensor parallelism leaves, one micro-batch, all overlapped."""
    f = row.facts
    if "model" in f:
        width, heads, kv_heads, head_dim, ffn, layers, vocab, gated = tables.MODELS[f["model"]]
    else:
        width, heads, kv_heads, head_dim = row.hidden, row.heads, row.heads, 128
        ffn, layers, vocab, gated = f["ffn"], row.layers, row.vocab, True
    a = accelerator(f["chip"])
    per_node = f["chips"] // f["slices"]
    cluster = Cluster(
        name=f["chip"], accelerator_name=f["chip"], accelerator=a, nodes=f["slices"],
        per_node=per_node, topology=torus(per_node, a.link.dimensions), link=a.link,
        network=Network(gigabytes_per_second=DCN[f["chip"]] / 8 * per_node)
        if f["slices"] > 1 else None,
    )  # fmt: skip
    execution = Execution(
        mesh=MeshShape(data=row.data, model=row.model),
        microbatches=1,
        microbatch_size=row.micro_batch,
        sequence_length=row.sequence,
        zero=3,
        remat=f["remat"],
        compute=f["compute"],
        sequence_parallel=False,
        overlap_data=True,
        reduce_bytes=2,
    )
    shape = Transformer(layers, width, heads, kv_heads, head_dim, ffn, vocab, gated=gated)
    return Case(row, shape, execution, cluster)


def every_case() -> list[Case]:
    """All rows that count, source by source."""
    return [
        *(megatron(row, 200) for row in tables.narayanan_1()),
        *(megatron(row, 200) for row in tables.narayanan_2() if not row.facts["zero"]),
        *(megatron(row, 200) for row in tables.korthikanti()),
        *(llama_3(row) for row in tables.llama_3()),
        *(megatron(row, 100) for row in tables.vtrain("multi")),
        *(megatron(row, 100) for row in tables.vtrain("single")),
        *(maxtext(row) for row in (*tables.tpu_recipes(), *tables.maxtext())),
    ]


def by_source(cases: Iterable[Case]) -> dict[str, list[Case]]:
    found = defaultdict(list)
    for case in cases:
        found[case.row.source].append(case)
    return dict(found)


def mean_absolute_error(cases: Iterable[Case]) -> float:
    errors = [abs(case.error) for case in cases]
    return sum(errors) / len(errors)


def regrets(cases: Iterable[Case]) -> dict[str, float]:
    """Of each sweep: measured seconds of the planner's first choice over the true best's, - 1."""
    sweeps = defaultdict(list)
    for case in cases:
        if case.row.sweep:
            sweeps[case.row.sweep].append(case)
    return {
        sweep: min(rows, key=lambda case: case.predicted).row.seconds
        / min(case.row.seconds for case in rows)
        - 1
        for sweep, rows in sweeps.items()
        if len(rows) > 1
    }
