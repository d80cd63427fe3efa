"""The step's time: the papers' formulas, the schedules' tables, and what must be monotonic."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent / "published"))
import published_tables

from spmd_train.errors import RequestError
from spmd_train.mesh import MeshShape
from spmd_train.pipeline.schedule import make_schedule
from spmd_train.plan import rates
from spmd_train.plan.cluster import Cluster, load_cluster
from spmd_train.plan.timing import step_time
from spmd_train.plan.workload import Execution, Transformer
from spmd_train.telemetry.flops import model_flops_per_token

LLAMA_30B = Transformer(60, 6656, 52, 52, 128, 17920, 32000)
STEP = Execution(MeshShape(4, 2, 4), microbatches=16, microbatch_size=1, sequence_length=2048)


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return load_cluster("32xh100")


def formula_rows(check: str) -> list[dict]:
    return [r for r in published_tables.read("formula_unit_tests.csv") if r["check"] == check]


def test_parameters_are_those_of_the_paper() -> None:
    """F1: Narayanan et al. 2021, equation 2."""
    for row in formula_rows("narayanan_params_eq2"):
        shape = Transformer.gpt(row["layers"], row["hidden"], row["heads"], 51200, row["seq"])
        assert shape.parameters / 1e9 == pytest.approx(row["formula_value"], abs=6e-4)


def test_model_flops_are_those_of_the_paper() -> None:
    """F3: Korthikanti et al. 2022; the MFU their table 5 prints, from its seconds."""
    measured = {row.name: row for row in published_tables.korthikanti()}
    for row in formula_rows("table5_mfu_pct"):
        h, L, s = row["hidden"], row["layers"], row["seq"]
        f3 = 72 * L * s * h**2 * (1 + s / (6 * h) + 51200 / (12 * h * L))
        shape = Transformer.gpt(L, h, row["heads"], 51200, s)
        assert s * model_flops_per_token(shape, s, shape.parameters) == pytest.approx(f3, rel=2e-3)
        run = measured[f"{row['model']} selective"]
        devices = run.model * run.stage * run.data
        mfu = run.batch * f3 / (run.seconds * devices * 312e12)
        assert 100 * mfu == pytest.approx(row["reference"], rel=0.004)


def test_without_overheads_compute_is_the_papers_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """F2: Narayanan et al. 2021, equation 3, everything recomputed, on an ideal device."""
    ideal = dataclasses.replace(
        rates.GPU, matmul_fraction=1.0, sustained=1.0, memory_fraction=1e12, kernel_seconds=0.0,
        dispatch_seconds=0.0, tiles=((1, 1, 1.0),), fill=0, align=1,
    )  # fmt: skip
    monkeypatch.setattr(rates, "GPU", ideal)
    node = load_cluster("8x80gb")
    device = node.accelerator.model_copy(update={"matmul_tflops": None, "target": None})
    node = node.model_copy(update={"accelerator": device})
    for row in published_tables.narayanan_1()[:4]:
        s, h, L, V = row.sequence, row.hidden, row.layers, row.vocab
        step = Execution(
            MeshShape(), microbatches=2, microbatch_size=3, sequence_length=s, remat="full",
            compute="float16", vocabulary="ends", fused_attention=False, eager=True,
        )  # fmt: skip
        flops = published_tables.narayanan_flops(6, s, L, h, V)
        found = step_time(Transformer.gpt(L, h, row.heads, V, s), step, node)
        assert found.compute * 312e12 == pytest.approx(flops, rel=1e-6)
        assert found.bubble == found.model_comm_exposed == found.data_comm_exposed == 0


@settings(max_examples=50)
@given(st.sampled_from([1, 2, 4, 5, 6]), st.integers(1, 64), st.sampled_from(["1f1b", "gpipe"]))
def test_the_bubble_is_the_tables(stages: int, microbatches: int, schedule: str) -> None:
    """Layers alone wait; the head, spread over the stages, keeps all of them busy."""
    cluster = load_cluster("32xh100")
    table = make_schedule(schedule, stages, microbatches)
    step = dataclasses.replace(
        STEP, mesh=MeshShape(1, 1, stages), microbatches=microbatches, schedule=schedule
    )
    shape = dataclasses.replace(LLAMA_30B, vocab=1)
    found = step_time(shape, step, cluster)
    share = table.bubble_fraction()  # with any cost of a backward, these tables agree
    assert found.bubble == pytest.approx(found.compute * share / (1 - share), rel=0.02, abs=1e-9)


def test_more_microbatches_make_a_smaller_bubble(cluster: Cluster) -> None:
    found = [
        step_time(LLAMA_30B, dataclasses.replace(STEP, microbatches=M), cluster).bubble_fraction
        for M in (1, 2, 4, 8, 16, 32, 64)
    ]
    assert found == sorted(found, reverse=True)
    assert found[0] > 4 * found[-1]


executions = st.builds(
    Execution,
    mesh=st.sampled_from([MeshShape(*m) for m in ((4, 2, 4), (32, 1, 1), (2, 16, 1), (1, 4, 4))]),
    microbatches=st.sampled_from([4, 8, 16]),
    microbatch_size=st.integers(1, 4),
    sequence_length=st.sampled_from([1024, 4096]),
    zero=st.integers(0, 3),
    schedule=st.sampled_from(["1f1b", "gpipe", "interleaved"]),
    remat=st.sampled_from(["none", "dots", "selective", "full", "stage"]),
    compute=st.sampled_from(["bfloat16", "float8", "float32"]),
    sequence_parallel=st.booleans(),
    vocabulary=st.sampled_from(["spread", "ends"]),
    lockstep=st.booleans(),
    overlap_data=st.booleans(),
    fused_attention=st.booleans(),
    eager=st.booleans(),
)


@settings(max_examples=200)
@given(executions, st.sampled_from(["network", "link", "memory", "matmul"]))
def test_faster_hardware_is_never_slower(e: Execution, what: str) -> None:
    cluster = load_cluster("32x80gb-slow")
    assert cluster.network is not None
    device, network, link = cluster.accelerator, cluster.network, cluster.link
    double = {
        "network": {
            "network": network.model_copy(
                update={"gigabytes_per_second": 2 * network.gigabytes_per_second}
            )
        },
        "link": {
            "link": link.model_copy(update={"gigabytes_per_second": 2 * link.gigabytes_per_second})
        },
        "memory": {
            "accelerator": device.model_copy(
                update={"memory_gigabytes_per_second": 2 * device.memory_gigabytes_per_second}
            )
        },
        "matmul": {"accelerator": device.model_copy(update={"matmul_tflops": 500.0})},
    }[what]
    before = step_time(LLAMA_30B, e, cluster)
    after = step_time(LLAMA_30B, e, cluster.model_copy(update=double))
    assert after.total <= before.total * (1 + 1e-12)
    assert min(before.itemised().values()) >= 0


def test_remat_costs_in_order(cluster: Cluster) -> None:
    found = [
        step_time(LLAMA_30B, dataclasses.replace(STEP, remat=remat), cluster)
        for remat in ("none", "selective", "dots", "full", "stage")
    ]
    recompute = [step.recompute for step in found]
    assert recompute == sorted(recompute)
    assert recompute[0] == 0
    assert found[4].compute - found[0].compute == pytest.approx(recompute[4])


def test_bytes_over_data_are_those_of_the_zero_paper(cluster: Cluster) -> None:
    """F12: gradients of 4 bytes and weights of 2, M micro-batches, (n-1)/n of each crossing."""
    mesh, M = MeshShape(8, 1, 1), 4
    sent = [
        step_time(
            LLAMA_30B, dataclasses.replace(STEP, mesh=mesh, microbatches=M, zero=zero), cluster
        ).data_bytes
        for zero in (0, 1, 2, 3)
    ]
    P = LLAMA_30B.parameters * 7 / 8
    assert sent == pytest.approx([8 * P, 6 * P, (4 * M + 2) * P, (4 + 2 * 2) * M * P], rel=0.01)


def test_bytes_over_model_are_those_of_the_compiled_step(cluster: Cluster) -> None:
    """Counted in the HLO of this step for 32 H100 (JAX 0.10.2, full remat): in the layer loops 8
    all-gathers and 5 reduce-scatters of an activation under sequence parallelism, 5 all-reduces
    without, each of which is two of them; `none` has 10 of the former, `stage` 17. Both ends of
    the model add 5, or 4, a micro-batch."""
    activation = 2048 * LLAMA_30B.width * 2
    halves = {("full", True): 13, ("full", False): 10, ("none", True): 10, ("stage", True): 17}
    for (remat, sequence_parallel), count in halves.items():
        step = dataclasses.replace(STEP, remat=remat, sequence_parallel=sequence_parallel)
        sent = step_time(LLAMA_30B, step, cluster).model_bytes
        ends = 5 if sequence_parallel else 4
        assert sent == pytest.approx(16 * (15 * count + ends) * activation / 2)


def test_the_trainer_pays_for_its_stages(cluster: Cluster) -> None:
    """Two sends of an activation a tick, four FP32 sums a micro-batch (pipeline/execute.py)."""
    mesh = MeshShape(1, 1, 4)
    step = dataclasses.replace(STEP, mesh=mesh)
    spread = step_time(LLAMA_30B, step, cluster)
    activation = 2048 * LLAMA_30B.width * 2
    ticks = make_schedule("1f1b", 4, 16).num_ticks
    sums = 4 * 16 * 2 * 3 / 4 * 2 * activation
    assert spread.stage_bytes == pytest.approx(2 * ticks * activation + sums)
    ends = step_time(LLAMA_30B, dataclasses.replace(step, vocabulary="ends"), cluster)
    assert ends.stage_bytes == pytest.approx(2 * ticks * activation)
    assert ends.bubble > spread.bubble  # the head makes its stage the slowest


def test_what_overlaps_is_hidden(cluster: Cluster) -> None:
    fsdp = dataclasses.replace(STEP, mesh=MeshShape(32, 1, 1), zero=3, microbatches=1)
    shown = step_time(LLAMA_30B, fsdp, cluster)
    hidden = step_time(LLAMA_30B, dataclasses.replace(fsdp, overlap_data=True), cluster)
    assert hidden.data_comm_exposed < shown.data_comm_exposed
    assert hidden.data_comm_exposed + hidden.data_comm_hidden == pytest.approx(
        shown.data_comm_exposed
    )


def test_what_cannot_run_is_refused(cluster: Cluster) -> None:
    with pytest.raises(RequestError, match=r"8x2x4 needs 64 devices, but 32xh100 has 32"):
        step_time(LLAMA_30B, STEP.with_mesh(data=8), cluster)
    odd = dataclasses.replace(STEP, schedule="interleaved", virtual_stages=2, microbatches=6)
    with pytest.raises(RequestError, match="micro-batches by the 4 stages, not 6"):
        step_time(LLAMA_30B, odd, cluster)


def test_what_was_measured_replaces_the_matmul_rate(cluster: Cluster) -> None:
    slow = cluster.measured.model_copy(update={"matmul_tflops": {"bfloat16": 100.0}})
    found = step_time(LLAMA_30B, STEP, cluster.model_copy(update={"measured": slow}))
    assert found.compute > 5 * step_time(LLAMA_30B, STEP, cluster).compute
