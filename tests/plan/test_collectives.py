"""What the parser reads, against texts recorded from real compilers and against a step whose
communication is known from step.py and the schedule."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from helpers import FAST, run

from spmd_train.pipeline.execute import loop_trips
from spmd_train.plan.collectives import Collective, axes_of, collectives, replica_groups

MESH = {"data": 2, "stage": 2, "model": 2}
PAIRS = "{{0,1},{2,3},{4,5},{6,7}}"


@pytest.mark.parametrize(
    ("text", "groups", "axes"),
    [
        (f"{PAIRS}, x", [[0, 1], [2, 3], [4, 5], [6, 7]], ("model",)),
        ("[4,2]<=[8], x", [[0, 1], [2, 3], [4, 5], [6, 7]], ("model",)),
        ("[4,2]<=[2,4]T(1,0), x", [[0, 4], [1, 5], [2, 6], [3, 7]], ("data",)),
        ("[4,2]<=[2,2,2]T(0,2,1), x", [[0, 2], [1, 3], [4, 6], [5, 7]], ("stage",)),
        ("{}, x", [list(range(8))], ("data", "stage", "model")),
        ("mesh['a'=2,'b'=2,'c'=2] {'b'}, x", [[0, 2], [1, 3], [4, 6], [5, 7]], ("stage",)),
        (
            "mesh['a'=2,'b'=2,'c'=2] {'c','a'}, x",
            [[0, 4, 1, 5], [2, 6, 3, 7]],
            ("data", "model"),
        ),
        ("mesh['a'=2,'b'=4] {'b':(2)2}, x", [[0, 1], [2, 3], [4, 5], [6, 7]], ("model",)),
        ("mesh['a'=2,'b'=4] {'b':(1)2}, x", [[0, 2], [1, 3], [4, 6], [5, 7]], ("stage",)),
        (
            "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}, x",
            [[0, 4], [1, 5], [2, 6], [3, 7]],
            ("data",),
        ),
    ],
)
def test_groups_are_read_in_every_notation(text, groups, axes):
    read = replica_groups(text, 8)
    assert read.tolist() == groups
    assert axes_of(read, MESH) == axes


def module(body: str, condition: str = "%c = pred[] parameter(0)") -> str:
    """A loop of 5 trips around `body`; in it the loop of a scope, whose condition is given."""
    return f"""HloModule m

%layer (p: f32[4]) -> f32[4] {{
{body}
}}

%below (p: s32[]) -> pred[] {{
  {condition}
}}

%five (p: (s32[], f32[4])) -> pred[] {{
  %p = (s32[]{{:T(128)}}, f32[4]{{0:T(8,128)}}) parameter(0)
  %n = s32[]{{:T(128)}} constant(5), metadata={{op_name="x"}}
  %i = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{{:T(512)}} compare(%i, %n), direction=LT, metadata={{op_name="a/b"}}
}}

%tick (p: f32[4]) -> f32[4] {{
  %w = (s32[], f32[4]{{0}}) while(%p), condition=%below, body=%layer, metadata={{op_name="jit(f)/while/body/closed_call/forward/while" stack_frame_id=1}}
}}

ENTRY %main (p: f32[4]) -> f32[4] {{
  ROOT %w = (s32[], /*index=1*/f32[4]{{0}}) while(%p), condition=%five, body=%tick
}}
"""  # noqa: E501


# As printed by JAX 0.10.2 (GPU: explicit start and done; TPU: layouts with tiles) and 0.12.1.
RECORDED = [
    (
        "%s = (bf16[1024,6656]{1,0}, bf16[2048,6656]{1,0}) all-gather-start(%b), channel_id=7, "
        "replica_groups=[4,2]<=[8], dimensions={0}, use_global_device_ids=true\n"
        "  %d = bf16[2048,6656]{1,0} all-gather-done(%s)",
        ("all-gather", ("model",), 2048 * 6656 * 2),
    ),
    (
        "%s = ((bf16[1024,6656]{1,0}), bf16[2048,6656]{1,0}) all-gather-start(%b), "
        "replica_groups=mesh['data'=2,'stage'=2,'model'=2] {'data'}, dimensions={0}",
        ("all-gather", ("data",), 2048 * 6656 * 2),
    ),
    (
        "%s = ((bf16[4,8]{1,0}, s32[4]{0}), (bf16[8,8]{1,0}, s32[8]{0})) all-gather-start(%b, %a), "
        "replica_groups=[4,2]<=[8], dimensions={0}",
        ("all-gather", ("model",), 8 * 8 * 2 + 8 * 4),
    ),
    (
        "%s = ((bf16[1,2048,6656]{2,0,1}), bf16[1,1024,6656]{2,0,1}) reduce-scatter-start(%b), "
        "replica_groups=[4,2]<=[8], dimensions={1}, to_apply=%add.1.clone",
        ("reduce-scatter", ("model",), 2048 * 6656 * 2),
    ),
    (
        "%s = f32[15,26,32,6656]{3,2,1,0:T(8,128)} reduce-scatter(%g), channel_id=1, "
        "replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={2}, to_apply=%region",
        ("reduce-scatter", ("data",), 2 * 15 * 26 * 32 * 6656 * 4),
    ),
    (
        "%s = (f32[16]{0}, f32[]) all-reduce-start(%a, %b), replica_groups=[4,2]<=[8]",
        ("all-reduce", ("model",), 17 * 4),
    ),
    (
        "%s = ((f32[1,2048]{1,0}), f32[1,2048]{1,0}) all-reduce-start(%b), replica_groups="
        "{{0,1,2,3},{4,5,6,7}}, output_to_operand_aliasing={{1}: (0, {})}",
        ("all-reduce", ("stage", "model"), 2048 * 4),
    ),
    (
        "%s = (bf16[32,6656]{1,0:T(8,128)(2,1)}, bf16[32,6656]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}, "
        "u32[]{:S(2)}) collective-permute-start(%b), source_target_pairs={{0,2},{2,0},{1,3},{3,1}}",
        ("collective-permute", ("stage",), 32 * 6656 * 2),
    ),
    (
        "%s = (f8e4m3fn[8]{0}, pred[8]{0}) all-to-all(%a, %b), replica_groups=[4,2]<=[8]",
        ("all-to-all", ("model",), 16),
    ),
]


@pytest.mark.parametrize(("instruction", "expected"), RECORDED)
def test_an_instruction_counts_once_and_with_its_bytes(instruction, expected):
    op, axes, size = expected
    found = collectives(module(f"  {instruction}"), MESH, {"forward": 12})
    assert found == [Collective(op, axes, True, 12, 12 * size)]


REDUCE = f"  %r = f32[4]{{0}} all-reduce(%p), replica_groups={PAIRS}, to_apply=%add"


def test_a_loop_with_a_constant_bound_is_multiplied_in():
    """As the TPU's compiler prints it, without a known trip count."""
    seven = (
        "%i = s32[] parameter(0)\n  %n = s32[] constant(7)\n"
        "  ROOT %lt = pred[] compare(%i, %n), direction=LT"
    )
    (found,) = collectives(module(REDUCE, seven), MESH, {})
    assert (found.count, found.bytes_per_step, found.exact) == (35, 35 * 16, True)


def test_a_trip_count_that_is_written_down_wins():
    text = module(REDUCE).replace(
        "body=%layer,", 'body=%layer, backend_config={"known_trip_count":{"n":"136"},"x":{}},'
    )
    (found,) = collectives(text, MESH, {"forward": 12})
    assert found.count == 5 * 136


def test_a_loop_of_unknown_length_says_so():
    (found,) = collectives(module(REDUCE), MESH, {"backward": 12})
    assert (found.count, found.exact) == (5, False)


def test_a_loop_inside_one_of_a_scope_is_not_taken_for_it():
    text = module(REDUCE).replace("closed_call/forward/while", "forward/while/body/while")
    (found,) = collectives(text, MESH, {"forward": 12})
    assert (found.count, found.exact) == (5, False)


def test_branches_are_counted_as_taken():
    text = module(REDUCE).replace(
        "ROOT %w = (s32[], /*index=1*/f32[4]{0}) while(%p), condition=%five, body=%tick",
        "ROOT %w = f32[4]{0} conditional(%i, %p, %p), branch_computations={%layer, %layer}",
    )
    (found,) = collectives(text, MESH, {})
    assert (found.count, found.in_loop, found.exact) == (2, False, False)


def test_a_tpus_fused_reduce_scatter_is_called_so():
    fused = (
        "%all-reduce-scatter.1 (i: bf16[2048,64]) -> bf16[1024,64] {\n"
        f"  %a = bf16[2048,64]{{1,0:T(8,128)(2,1)}} all-reduce(%i), replica_groups={PAIRS}\n"
        "  ROOT %s = bf16[1024,64]{1,0:T(8,128)(2,1)} dynamic-slice(%a, %b, %c)\n}\n\n"
    )
    body = "  %f = bf16[1024,64]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1"
    text = module(body).replace("%below (p", fused + "%below (p")
    (found,) = collectives(text, MESH, {"forward": 12})
    assert found == Collective("reduce-scatter", ("model",), True, 12, 12 * 2048 * 64 * 2)


# ----------------------------------------------------------------------------------- a real step

SETS = ("model.kv_heads=2", "model.vocab=512", "batch.microbatches=4")


@pytest.fixture(scope="module")
def step():
    """The step of T1 on 2x2x2 (8 layers, 64 rows of 16 tokens of width 64) and its collectives."""
    of = run("2x2x2", *SETS)
    compiled = of.step.jitted().lower(of.state(), of.batch()).compile(compiler_options=FAST)
    mesh = of.spec.layout.mesh.shape
    return of.step, collectives(compiled.as_text(), mesh, loop_trips(of.step.pipeline))


def select(found, op, *axes):
    return [c for c in found if c.op == op and c.axes == axes]


def local_bytes(step):
    """Float32 bytes of the parameters that ZeRO 1 splits over data, on one (model, stage) shard."""
    layout = step.spec.layout
    return sum(
        4 * math.prod(layout.named(layout.param_spec(leaf)).shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(step.spec.leaves)
        if leaf.data_dim is not None
    )


def test_every_count_of_a_step_is_exact(step):
    assert all(c.exact for c in step[1])


def test_gradients_and_weights_cross_data_once_with_their_bytes(step):
    step, found = step
    for op in ("reduce-scatter", "all-gather"):
        (crossing,) = select(found, op, "data")
        assert not crossing.in_loop
        assert crossing.bytes_per_step == local_bytes(step)


def test_each_tick_sends_two_activations_along_stage(step):
    """B = 64 rows / 2 data shards / 4 micro-batches, T = 16 / 2 model shards, D = 64, float32."""
    step, found = step
    (sends,) = select(found, "collective-permute", "stage")
    assert sends.count == 2 * step.pipeline.schedule.num_ticks
    assert sends.bytes_per_step == sends.count * 8 * 8 * 64 * 4


def test_layers_talk_over_model_for_every_micro_batch(step):
    """Attention and feed-forward each gather their input and scatter their output, 4 layers of a
    stage x 4 micro-batches times; forward, and at least once more in the backward pass."""
    _, found = step
    count = sum(c.count for c in found if c.axes == ("model",) and c.op != "all-reduce")
    assert count >= 2 * 4 * 16
    assert np.all([c.in_loop for c in found if c.axes == ("model",) and c.op != "all-reduce"])
