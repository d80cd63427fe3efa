"""What the compiled step really communicates, read from XLA's own text.

Mesh 2x2x2, devices laid out as (data, stage, model). Rules checked: docs/design.md, facts 1
(gradients cross data once), 5, 8 and 9 (sends outside the layer loops, sums in float32).
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import FAST, T0, Run, configure, run

from spmd_train.diagnosis import Diagnosis

AXES = ("data", "stage", "model")  # as mesh.py lays devices out
MESH = "2x2x2"
# As in earnest, weights are larger than a micro-batch's activations: XLA gathers what is smaller.
SETS = ("model.kv_heads=2", "model.vocab=512", "batch.microbatches=16")
ACTIVATION = 2 * 16 * 64  # elements, [B, T, D] of one micro-batch on one data shard
METRICS = 2  # elements of the largest array that is no parameter's: the step's two losses


# --------------------------------------------------------------------------- reading HLO's text


@dataclass(frozen=True)
class Collective:
    """One collective operation.

    Attributes:
        kind: all-reduce, reduce-scatter, all-gather, all-to-all or collective-permute.
        dtypes, shapes: of its results; combined ones have several.
        axes: mesh axes along which the devices of one group differ.
        computation, depth: where it stands, and inside how many loops.
    """

    kind: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    axes: frozenset[str]
    computation: str
    depth: int


def replica_groups(text: str) -> np.ndarray:
    """[groups, devices] from any of the three ways in which XLA writes them."""
    if listed := re.match(r"\{(\{[\d,]*\}(?:,\{[\d,]*\})*)\}", text):
        rows = re.findall(r"\{([\d,]*)\}", listed[1])
        return np.array([_numbers(row) for row in rows])
    if iota := re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text):
        return _iota(iota[2]).reshape(_numbers(iota[1]))
    named = re.match(
        r"mesh\[([^]]*)\](?:, device_ids=\((\[[\d,]+\](?:T\([\d,]+\))?)\))? \{([^}]*)\}", text
    )
    if named and re.fullmatch(r"('\w+',?)*", named[3]):  # and no part of an axis
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", named[1])}
        inside = re.findall(r"'(\w+)'", named[3])
        order = [*(a for a in sizes if a not in inside), *inside]
        devices = _iota(named[2] or f"[{math.prod(sizes.values())}]")
        devices = devices.reshape(list(sizes.values()))
        devices = devices.transpose([list(sizes).index(a) for a in order])
        return devices.reshape(-1, math.prod(sizes[a] for a in inside))
    raise ValueError(f"cannot read replica groups: {text[:80]}")


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _iota(text: str) -> np.ndarray:
    """`[2,4]T(1,0)`: 0 to 7 as [2, 4], transposed."""
    parts = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    assert parts
    dims = _numbers(parts[1])
    devices = np.arange(math.prod(dims)).reshape(dims)
    return devices.transpose(_numbers(parts[2])) if parts[2] else devices


def axes_of(groups: np.ndarray) -> frozenset[str]:
    """The mesh axes along which the devices of a group differ."""
    coordinates = np.array(np.unravel_index(groups, (2, 2, 2)))  # [axis, group, device]
    differs = (coordinates != coordinates[..., :1]).any(axis=(1, 2))
    return frozenset(axis for axis, varies in zip(AXES, differs, strict=True) if varies)


KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (\(?.*?\)?) ([\w-]+)\((.*)$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(body|condition|calls|to_apply|branch_computations)=(\{[^}]*\}|%?[\w.-]+)")


def collectives(text: str) -> list[Collective]:
    """Every collective of an HLO module with the number of loops around it."""
    found: list[tuple[str, str, str, str]] = []
    calls: dict[str, set[tuple[str, bool]]] = {}
    entry = current = ""
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            current = start[2]
            entry = current if start[1] else entry
            calls.setdefault(current, set())
        elif (instruction := _INSTRUCTION.match(line)) and current:
            result, opcode, rest = instruction.groups()
            for attribute, names in _CALLED.findall(rest):
                looped = opcode == "while" and attribute in ("body", "condition")
                calls[current] |= {(n, looped) for n in re.findall(r"[\w.-]+", names)}
            kind = opcode.removesuffix("-start")
            if kind in KINDS:
                found.append((kind, result, rest, current))
    depths = {entry: 0}
    waiting = [entry]
    while waiting:
        caller = waiting.pop()
        for callee, looped in calls.get(caller, ()):
            depth = depths[caller] + looped
            if depths.get(callee, -1) < depth:
                depths[callee] = depth
                waiting.append(callee)
    return [_collective(*parts, depths) for parts in found]


def _collective(
    kind: str, result: str, rest: str, computation: str, depths: dict[str, int]
) -> Collective:
    arrays = _SHAPE.findall(result)
    shapes = tuple(tuple(int(n) for n in dims.split(",") if n) for _, dims in arrays)
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=(\{\{.*?\}\})", rest)
        assert pairs
        groups = replica_groups(pairs[1])
    else:
        written = rest.partition("replica_groups=")[2]
        groups = replica_groups(written)
    return Collective(
        kind, tuple(t for t, _ in arrays), shapes, axes_of(groups), computation, depths[computation]
    )


@functools.cache
def compiled(*sets: str) -> tuple[Run, list[Collective]]:
    of = run(MESH, *SETS, *sets)
    lowered = of.step.jitted().lower(of.state(), of.batch())
    return of, collectives(lowered.compile(compiler_options=FAST).as_text())


# ------------------------------------------------------------------------------------ the parser


@pytest.mark.parametrize(
    ("text", "groups", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}, x", [[0, 1], [2, 3], [4, 5], [6, 7]], {"model"}),
        ("{{0,4},{1,5},{2,6},{3,7}}, x", [[0, 4], [1, 5], [2, 6], [3, 7]], {"data"}),
        ("[4,2]<=[8], x", [[0, 1], [2, 3], [4, 5], [6, 7]], {"model"}),
        ("[4,2]<=[2,4]T(1,0), x", [[0, 4], [1, 5], [2, 6], [3, 7]], {"data"}),
        ("[4,2]<=[2,2,2]T(0,2,1), x", [[0, 2], [1, 3], [4, 6], [5, 7]], {"stage"}),
        ("[1,8]<=[8], x", [list(range(8))], {"data", "stage", "model"}),
        ("mesh['a'=2,'b'=2,'c'=2] {'b'}, x", [[0, 2], [1, 3], [4, 6], [5, 7]], {"stage"}),
        ("mesh['a'=2,'b'=2,'c'=2] {'c','a'}, x", [[0, 4, 1, 5], [2, 6, 3, 7]], {"data", "model"}),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, x", [[0, 4], [1, 5], [2, 6], [3, 7]], {"data"}),
        (
            "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}, x",
            [[0, 4], [1, 5], [2, 6], [3, 7]],
            {"data"},
        ),
    ],
)
def test_replica_groups_are_read_in_every_notation(text, groups, axes):
    """JAX 0.10.2 writes the first two kinds, 0.12 also the third."""
    read = replica_groups(text)
    assert read.tolist() == groups
    assert axes_of(read) == axes


def test_loops_are_counted():
    """A hand-written module: one all-reduce in a loop in a loop, one outside."""
    found = collectives("""HloModule m

%inner (p: f32[4]) -> f32[4] {
  %a = f32[4]{0} all-reduce(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
}

%outer (p: f32[4]) -> f32[4] {
  %w = (s32[], f32[4]{0}) while(%p), condition=%c, body=%inner
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %w = (s32[], f32[4]{0}) while(%p), condition=%c, body=%outer
  %b = (f32[4]{0}, f32[]) all-reduce-start(%w, %s), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
}
""")
    assert [(c.depth, set(c.axes)) for c in found] == [(2, {"model"}), (0, {"data"})]
    assert [c.shapes for c in found] == [((4,),), ((4,), ())]


# -------------------------------------------------------------------------------------- the rules


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_each_gradient_crosses_data_once_and_after_the_loops(zero):
    of, found = compiled(f"parallel.zero={zero}")
    reductions = [
        (c, shape)
        for c in found
        if c.kind in ("all-reduce", "reduce-scatter") and "data" in c.axes
        for shape in c.shapes
        if math.prod(shape) > METRICS
    ]
    assert len(reductions) <= len(jax.tree.leaves(of.spec.leaves))
    assert {c.depth for c, _ in reductions} == {0}
    if zero == 1:  # reduce-scatters, none of them also over another axis
        assert {(c.kind, c.axes) for c, _ in reductions} == {
            ("reduce-scatter", frozenset(["data"]))
        }


def test_nothing_crosses_data_inside_the_loops_at_zero_1():
    """Not even a scalar: the count of tokens is summed before them, the losses after."""
    _, found = compiled("parallel.zero=1")
    assert not [c for c in found if "data" in c.axes and c.depth > 0]


def test_parameters_come_back_over_data_once():
    """The other half of ZeRO 1: one all-gather for each leaf that is sharded over data."""
    of, found = compiled("parallel.zero=1")
    sharded = [leaf for leaf in jax.tree.leaves(of.spec.leaves) if leaf.data_dim is not None]
    gathers = [c for c in found if c.kind == "all-gather" and "data" in c.axes]
    assert sum(len(c.shapes) for c in gathers) == len(sharded)
    assert {c.axes for c in gathers} == {frozenset(["data"])}


def test_no_gradient_is_gathered_over_model():
    """After the loops only scalars (of the norm) cross model; inside them only activations, whole
    or the parts that one of them is summed from: never a weight or its gradient."""
    _, found = compiled("parallel.zero=1")
    crossing = [c for c in found if "model" in c.axes]
    after, inside = ([c for c in crossing if (c.depth > 0) is loop] for loop in (False, True))
    assert {c.kind for c in after} <= {"all-reduce"}
    assert all(math.prod(shape) <= METRICS for c in after for shape in c.shapes)
    assert max(math.prod(shape) for c in inside for shape in c.shapes) == ACTIVATION


def test_every_sum_is_float32_or_of_integers():
    _, found = compiled("parallel.zero=1")
    sums = [c for c in found if c.kind in ("all-reduce", "reduce-scatter")]
    assert {dtype for c in sums for dtype in c.dtypes} <= {"f32", "s32"}


@pytest.mark.parametrize("zero", [1, 3])
def test_sums_are_float32_in_bfloat16_too(zero):
    """As handed to XLA, since its CPU compiler promotes 16-bit sums by itself (or aborts)."""
    half = run(MESH, *SETS, "precision.policy=bf16", f"parallel.zero={zero}")
    text = half.step.jitted().lower(half.spec.abstract(), half.batch()).as_text()
    assert "bf16" in text
    ends = re.findall(
        r'"stablehlo\.(all_reduce|reduce_scatter)".*?\}\) : \(tensor<([\w]+)>\)', text, re.DOTALL
    )
    assert len(ends) > 10
    assert {shape.rpartition("x")[2] for _, shape in ends} <= {"f32", "i32"}


def test_the_only_permutes_are_the_two_sends_of_a_tick():
    """Along stage, in the tick's own computation: a permute in a layer loop would hang."""
    _, found = compiled("parallel.zero=1")
    sends = [c for c in found if c.kind == "collective-permute"]
    assert [(c.depth, set(c.axes)) for c in sends] == [(1, {"stage"})] * 2
    assert len({c.computation for c in sends}) == 1


@pytest.mark.parametrize("zero", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_diagnosing_step_permutes_nothing(zero):
    """Its layer loops differ in length too; over data they gather weights at ZeRO 3, no more."""
    of = run(MESH, "batch.microbatches=2", f"parallel.zero={zero}", base=T0)
    inputs = (of.state().params, {}, of.batch(), jnp.int32(0), jnp.float32(1))
    program = Diagnosis(of.step)._as_trained.lower(*inputs)
    found = collectives(program.compile(compiler_options=FAST).as_text())
    assert len(found) > 10
    assert not [c for c in found if c.kind == "collective-permute"]
    kinds = {c.kind for c in found if "data" in c.axes and c.depth > 0}
    assert kinds == ({"all-gather"} if zero == 3 else set())


def test_the_second_step_does_not_recompile():
    """The state comes back with the placement it went in with (a small model, `jax.jit` itself)."""
    small = run(MESH, "model.block=own_model:bigram", "batch.microbatches=2", base=T0)
    step = small.step.jitted()
    state, batch = small.state(), small.batch()
    for _ in range(2):
        state, _ = step(state, batch)
    assert step._cache_size() == 1
    assert jax.tree.map(lambda x: x.sharding, state) == small.spec.shardings()


def test_the_program_does_not_grow_with_depth():
    """32 layers against 8, as handed to XLA: within 2 %."""

    def size(layers: int) -> int:
        of = Run(configure(MESH, *SETS, f"model.layers={layers}"))
        return len(of.step.jitted().lower(of.spec.abstract(), of.batch()).as_text())

    assert size(32) == pytest.approx(size(8), rel=0.02)
