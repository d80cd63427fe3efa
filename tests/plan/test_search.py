"""The scenarios the planner is for, and the properties of every search."""

from __future__ import annotations

import time

import pytest

from spmd_train.config import Config, load
from spmd_train.errors import RequestError, RunError
from spmd_train.mesh import MeshShape
from spmd_train.pipeline.schedule import make_schedule
from spmd_train.plan.both import for_all, nothing_fits, smallest
from spmd_train.plan.cluster import load_cluster
from spmd_train.plan.reasons import command, why
from spmd_train.plan.search import Fixed, Plan, search
from spmd_train.plan.timing import step_time
from spmd_train.plan.verify import configured
from spmd_train.shape_rules import validate_shape

FREE = Fixed()


def planned(name: str, cluster: str, batch: int, fixed: Fixed = FREE, *sets: str) -> Plan:
    return search(load(name, [f"batch.global_size={batch}", *sets]), load_cluster(cluster), fixed)


def rejection(plan: Plan, mesh: MeshShape, zero: int | None = None) -> str:
    return next(r.reason for r in plan.rejected if (r.mesh, r.zero) == (mesh, zero))


class TestScenarioA:
    """30B on one node of 8 x 80 GB."""

    plan = planned("llama-30b", "8x80gb", 64)

    def test_plain_data_parallelism_is_rejected_with_its_numbers(self) -> None:
        reason = rejection(self.plan, MeshShape(8, 1, 1), 0)
        # 32.5 billion x (2 bf16 + 4 master + 8 moments); a gradient sum of 4 more comes on top.
        assert "zero=0 needs 455 GB of states" in reason
        assert "78.3 GB there" in reason

    def test_the_first_has_microbatches_and_a_float32_master(self) -> None:
        first = self.plan.candidates[0]
        assert first.execution.microbatches > 1
        assert first.memory.master > 0
        assert first.execution.mesh.model * first.execution.mesh.stage > 1

    def test_naive_layer_splitting_idles_three_quarters(self) -> None:
        naive = planned("llama-30b", "8x80gb", 2, Fixed(mesh=MeshShape(2, 1, 4), microbatches=1,
                        zero=3, schedule="1f1b", remat="full", compute="bfloat16"))  # fmt: skip
        (candidate,) = naive.candidates
        table = make_schedule("1f1b", 4, 1)
        assert table.bubble_fraction() == pytest.approx(0.75)
        busy = candidate.time.compute + candidate.time.bubble
        assert candidate.time.bubble / busy == pytest.approx(0.75, abs=0.02)


class TestScenarioB:
    """30B on 32 x 24 GB: data=32 against data 4, model 2, stage 4."""

    plan = planned("llama-30b", "32x24gb", 64)
    proposed = planned("llama-30b", "32x24gb", 64, Fixed(mesh=MeshShape(4, 2, 4)))

    def test_plain_data_parallelism_is_rejected(self) -> None:
        reason = rejection(self.plan, MeshShape(32, 1, 1), 0)
        needs = float(reason.split("needs ")[1].split(" GB")[0].replace(",", ""))
        states = 32.53e9 * (2 + 4 + 8) / 1e9
        assert needs == pytest.approx(states, rel=0.02)
        assert "23.5 GB there" in reason

    def test_the_proposal_is_judged_level_by_level(self) -> None:
        mesh = MeshShape(4, 2, 4)
        for zero in (0, 1):
            assert f"zero={zero} needs" in rejection(self.proposed, mesh, zero)
        (fits,) = self.proposed.candidates
        assert fits.fits
        assert fits.execution.zero == 3
        assert fits.execution.remat == "stage"

    def test_the_number_of_microbatches_that_removes_the_gaps(self) -> None:
        (candidate,) = self.proposed.candidates
        assert "(27 would make it 10 %)" in why(candidate, candidate)
        assert make_schedule("1f1b", 4, 27).bubble_fraction() == pytest.approx(0.1)


def test_scenario_c_one_configuration_for_two_clusters() -> None:
    config = load("llama-30b", ["batch.global_size=64"])
    plans = [search(config, load_cluster(name)) for name in ("cluster-a", "cluster-b")]
    shared = for_all(plans)
    best = shared[0]
    assert all(c.fits for c in best.candidates)
    assert best.seconds == max(c.seconds for c in best.candidates)
    assert [s.seconds for s in shared] == sorted(s.seconds for s in shared)
    for plan, candidate in zip(plans, best.candidates, strict=True):
        alone = configured(plan, candidate)
        assert alone.batch.microbatches == best.settings["batch.microbatches"]
        validate_shape(alone, candidate.execution.mesh)
    small = search(load("llama-70b"), load_cluster("8x40gb"))
    with pytest.raises(RunError, match="no configuration fits all of cluster-a, 8x40gb"):
        for_all([plans[0], small])


class TestScenarioD:
    """From 8 to 32 GPUs over a slow network: efficiency, and where it goes."""

    @pytest.mark.parametrize(("cluster", "low", "high"), [("32x80gb-slow", 0.3, 0.93),
                                                         ("32xh100", 0.85, 1.01)])  # fmt: skip
    def test_scaling(self, cluster: str, low: float, high: float) -> None:
        whole = load_cluster(cluster)
        plan = search(load("llama-7b", ["batch.global_size=64"]), whole.resized(1))
        execution = plan.candidates[0].execution
        one = plan.candidates[0].time
        four = step_time(
            plan.workload.transformer, execution.with_mesh(data=4 * execution.mesh.data), whole
        )
        efficiency = four.tokens_per_second / (4 * one.tokens_per_second)
        assert low < efficiency < high
        if cluster == "32xh100":
            return
        lost = four.total - one.total
        assert four.data_comm_exposed - one.data_comm_exposed == pytest.approx(lost, rel=0.05)


def test_scenario_e_more_replicas_and_microbatches() -> None:
    """Doubling replicas at a fixed batch halves the micro-batches and grows the bubble; doubling
    both keeps it, with twice the batch."""
    fixed = dict(zero=1, schedule="1f1b", remat="full", compute="bfloat16", microbatch_size=1)
    bubbles = {}
    for data, batch in ((4, 64), (8, 64), (8, 128)):
        cluster = load_cluster("64x80gb").resized(data)
        plan = search(
            load("llama-30b", [f"batch.global_size={batch}"]), cluster,
            Fixed(mesh=MeshShape(data, 2, 4), **fixed),
        )  # fmt: skip
        bubbles[data, batch] = plan.candidates[0].time.bubble_fraction
    assert bubbles[8, 64] > bubbles[4, 64]
    assert bubbles[8, 128] == pytest.approx(bubbles[4, 64], rel=0.05)


def test_scenario_f_fine_tuning_on_eight_40_gb() -> None:
    plan = planned("llama-7b", "8x40gb", 32, Fixed(mesh=MeshShape(2, 1, 4)))
    (candidate,) = plan.candidates
    assert candidate.fits
    assert candidate.time.bubble_fraction < 0.25


class TestScenarioG:
    def test_70b_on_eight_80_gb_says_what_is_missing(self) -> None:
        plan = planned("llama-70b", "8x80gb", 128)
        assert not plan.candidates
        message = nothing_fits(plan, FREE)
        assert "more than the 78.3 GB there" in message
        nodes = smallest(plan, FREE)
        assert nodes is not None
        assert f"has {nodes} ({8 * nodes} accelerators)" in message
        assert search(plan.config, plan.cluster.resized(nodes)).candidates
        assert not search(plan.config, plan.cluster.resized(nodes - 1)).candidates

    def test_30b_on_eight_40_gb_does_not_fit(self) -> None:
        assert not planned("llama-30b", "8x40gb", 64).candidates

    def test_405b_on_16384_h100(self) -> None:
        plan = planned("llama-405b", "16384xh100", 2048)
        assert plan.candidates[0].execution.mesh.model == 8

    def test_70b_on_v5p_128(self) -> None:
        plan = planned("llama-70b", "v5p-128", 256)
        assert plan.candidates[0].time.mfu > 0.5


def test_every_candidate_is_one_the_trainer_takes_and_the_order_is_by_time() -> None:
    plan = planned("llama-7b", "64x80gb", 256)
    seconds = [c.seconds for c in plan.candidates]
    assert seconds == sorted(seconds)
    for candidate in plan.candidates:
        assert candidate.memory.total <= candidate.limit
        config = configured(plan, candidate)
        validate_shape(config, candidate.execution.mesh)
        e = candidate.execution
        assert e.microbatches * e.microbatch_size * e.mesh.data == 256
        assert e.mesh.model <= 8, "inside a node"
    everything = {c.execution.mesh for c in plan.candidates} | {r.mesh for r in plan.rejected}
    assert len(everything) == 28, "every factorisation of 64 is a candidate or has a reason"


def test_the_pareto_is_what_no_other_beats() -> None:
    plan = planned("llama-7b", "8x80gb", 64)
    for one in plan.pareto:
        assert not any(
            o.seconds < one.seconds and o.memory.total < one.memory.total for o in plan.fitting
        )
    totals = [c.memory.total for c in plan.pareto]
    assert totals == sorted(totals, reverse=True)


def test_a_search_of_64_devices_is_closed_form() -> None:
    """Structure, not time: each candidate is costed once; the command of it repeats it."""
    clock = time.perf_counter()
    plan = planned("llama-30b", "64x80gb", 512)
    assert plan.evaluated > 2000
    assert time.perf_counter() - clock < 60, "it hangs"
    first = plan.candidates[0]
    line = command(plan, first, "llama-30b", ["optim.lr=1e-4", "batch.microbatches=3"])
    assert line.startswith(
        "XLA_PYTHON_CLIENT_MEM_FRACTION=0.94 spmd-train train --config llama-30b"
    )
    assert "optim.lr=1e-4" in line
    assert "batch.microbatches=3 " not in line
    words = line.split()
    sets = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    again: Config = load("llama-30b", sets, mesh=str(first.execution.mesh))
    assert again == configured(plan, first).model_copy(
        update={"optim": again.optim}
    )  # the learning rate was set by hand


@pytest.mark.parametrize(
    ("fixed", "sets", "message"),
    [
        (Fixed(mesh=MeshShape(2, 2, 1)), (), "mesh 2x2x1 is for 4 devices, but 8x80gb has 8"),
        (Fixed(mesh=MeshShape(1, 8, 1)), (), "model=8 does not divide 52 heads"),
        (
            Fixed(mesh=MeshShape(8, 1, 1)),
            ("batch.global_size=12",),
            "data=8 does not divide the 12",
        ),
        (Fixed(compute="float8"), (), "A100-SXM4-80GB does not compute in float8; it does in"),
        (Fixed(), ("model.block=a:b",), "model.block=a:b is not modelled by the planner"),
        (Fixed(), ("precision.reproducible=true",), "precision.reproducible=true is not modelled"),
    ],
)
def test_what_cannot_be_planned_is_said(fixed: Fixed, sets: tuple[str, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        planned("llama-30b", "8x80gb", 64, fixed, *sets)
