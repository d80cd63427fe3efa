"""`precision.reproducible`: the same bits on every (data, stage) mesh, against the run on 1x1x1.

The sums themselves are compared with numpy, the gradients with autodiff on one device.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import SMALL, records, sets
from helpers import (
    DEFAULT,
    FAST,
    T0,
    Run,
    Trained,
    assert_same_gradients,
    autodiff,
    configure,
    run,
    train,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from processes import start
from test_hlo import collectives

from spmd_train.config import load
from spmd_train.data.batches import micro_batched, shift
from spmd_train.errors import RequestError
from spmd_train.mesh import DATA, MeshShape, build_mesh
from spmd_train.pipeline.accumulate import partial_sum_bytes
from spmd_train.pipeline.collectives import exchanged_sum
from spmd_train.pipeline.reproducible import (
    isolated,
    push,
    rounded_products,
    stack_depth,
    tree_sum,
)
from spmd_train.shape_rules import validate_shape

ON = "precision.reproducible=true"

# Everything that has its own sums: dropout keys, both ends tied, a padded vocabulary, z-loss.
TIED = (
    *("model.tied=true", "model.vocab=61", "model.kv_heads=2", "model.z_loss=1e-3"),
    *("model.dropout=0.1", "batch.microbatches=2"),
)
UNTIED = ("model.qk_norm=true", "model.qkv_bias=true", "model.logit_softcap=5.0")
MESHES = ["2x1x1", "4x1x1", "8x1x1", "1x1x2", "1x1x4", "1x1x8", "2x1x2", "2x1x4", "4x1x2"]
WITH_MODEL = ["2x2x1", "1x2x2", "2x2x2", "1x2x4"]


def different(got: Trained, want: Trained) -> list[str]:
    """Names of what differs in any bit, the sign of a zero included."""
    series = ("losses", "z_losses", "tokens", "grad_norms")
    pairs = {name: (getattr(got, name), getattr(want, name)) for name in series}
    for part in ("gradients", "params"):
        assert getattr(got, part).keys() == getattr(want, part).keys()
        for name, array in getattr(want, part).items():
            pairs[f"{part}/{name}"] = (getattr(got, part)[name], array)
    return [name for name, (a, b) in pairs.items() if a.tobytes() != b.tobytes()]


# --------------------------------------------------------------------------------------- the sums


def numpy_tree(leaves: list[np.ndarray]) -> np.ndarray:
    while len(leaves) > 1:
        leaves = [a + b for a, b in zip(leaves[::2], leaves[1::2], strict=True)]
    return leaves[0]


def pushed(parts: jax.Array, leaves: int, terms: int) -> jax.Array:
    stack = jnp.full((stack_depth(leaves), *parts.shape[1:]), jnp.nan)  # never read before written
    return jax.lax.fori_loop(
        0, len(parts), lambda i, stack: push(stack, parts[i], i, terms), stack
    )[0]


@given(
    leaves=st.sampled_from([1, 2, 4, 8, 16]),
    terms=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=25)
def test_parts_pushed_in_either_direction_give_numpys_tree(leaves, terms, seed):
    rng = np.random.default_rng(seed)
    parts = (rng.standard_normal((leaves * terms, 5)) * 10.0 ** rng.integers(-6, 6)).astype("f4")
    for ordered in (parts, parts[::-1]):
        sums = [
            sum(ordered[k * terms + 1 : (k + 1) * terms], ordered[k * terms]) for k in range(leaves)
        ]
        got = jax.jit(pushed, static_argnums=(1, 2))(ordered, leaves, terms)
        np.testing.assert_array_equal(got, numpy_tree(sums))
    assert terms > 1 or np.array_equal(got, numpy_tree(list(parts)))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_tree_sum_adds_neighbours_and_moves_an_odd_one_up(n):
    x = np.random.default_rng(n).standard_normal((2, n, 3)).astype(np.float32)
    want = [x[:, i] for i in range(n)]
    while len(want) > 1:
        pairs = [a + b for a, b in zip(want[::2], want[1::2], strict=False)]
        want = pairs + want[2 * len(pairs) :]
    np.testing.assert_array_equal(jax.jit(lambda x: tree_sum(x, 1))(x), want[0])


@pytest.mark.parametrize("data", [1, 2, 4, 8])
def test_the_sum_that_depends_on_its_order_does_not_depend_on_the_mesh(data):
    """1e8 + 1 - 1e8 + 1 in float32 is 1 from left to right and 0 in pairs: here 0 everywhere."""
    values = np.tile(np.array([1e8, 1, -1e8, 1], np.float32), 2)
    assert sum(values[:4], np.float32(0)) == 1
    mesh, _ = build_mesh(MeshShape(data=data))
    total = jax.shard_map(
        lambda x: exchanged_sum(pushed(x, 8 // data, 1), DATA),
        mesh=mesh,
        in_specs=P(DATA),
        out_specs=P(),
        check_vma=False,
    )
    assert float(jax.jit(total)(values)) == 0.0


def test_no_product_is_contracted_with_a_sum():
    """Against numpy, which rounds after every operation; with an FMA some of these differ."""
    a, b, c, d = np.random.default_rng(0).standard_normal((4, 4096)).astype(np.float32)

    def update(tree: dict[str, jax.Array], c: jax.Array) -> dict[str, jax.Array]:
        moment = 0.9 * tree["a"] + jnp.float32(0.1) * tree["b"]
        return {"moment": moment, "square": jax.jit(lambda x: x**2 - c)(moment), "sum": a * b + c}

    got = jax.jit(lambda x, c, zero: rounded_products(update, zero)(x, c))(
        {"a": a, "b": b}, c, jnp.int32(0)
    )
    moment = np.float32(0.9) * a + np.float32(0.1) * b
    np.testing.assert_array_equal(got["moment"], moment)
    np.testing.assert_array_equal(got["square"], moment**2 - c)
    np.testing.assert_array_equal(got["sum"], a * b + c)


def test_what_is_isolated_stays_in_a_loop_of_its_own():
    def fn(x: jax.Array, zero: jax.Array) -> jax.Array:
        return isolated(lambda x: x * x, zero)(x + 1.0) + 1.0

    x = np.arange(64, dtype=np.float32)
    compiled = jax.jit(fn).lower(x, jnp.int32(0)).compile()
    np.testing.assert_array_equal(compiled(x, jnp.int32(0)), (x + 1) ** 2 + 1)
    bodies = [c for c in compiled.as_text().split("\n\n") if "multiply(" in c]
    assert len(bodies) >= 1
    assert not any("f32[64]" in line and " add(" in line for c in bodies for line in c.splitlines())


@pytest.mark.parametrize(("data", "microbatches"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_a_data_shard_takes_a_run_of_rows_whatever_the_mesh(data, microbatches):
    rows = np.arange(16 * 3).reshape(16, 3).astype(np.int32)
    batch = micro_batched(shift(rows), microbatches, data).inputs  # [M, D*b, T]
    assert batch.shape == (microbatches, 16 // microbatches, 2)
    by_shard = [batch[:, 2 * d : 2 * d + 2].reshape(-1, 2) for d in range(data)]
    np.testing.assert_array_equal(np.concatenate(by_shard), rows[:, :2])


# --------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize(
    ("reference", "mesh", "options"),
    [
        ("1x1x1", "8x1x1", UNTIED),
        ("1x1x1", "2x1x4", UNTIED),
        pytest.param(
            *("1x1x1", "2x1x2", (*TIED, "precision.policy=bf16", "pipeline.schedule=gpipe")),
            marks=pytest.mark.slow,
        ),
        ("1x2x1", "2x2x2", ("model.tied=true",)),
        *(
            pytest.param("1x1x1", mesh, (f"precision.policy={policy}",), marks=pytest.mark.slow)
            for policy in ("fp16", "fp8")
            for mesh in ("2x1x2", "8x1x1")
        ),
    ],
)
def test_a_few_steps_have_the_bits_of_fewer_devices(reference, mesh, options):
    want = train(reference, ON, *options, steps=3)
    assert len(set(want.losses.tolist())) == 3, "the steps do something"
    assert not different(train(mesh, ON, *options, steps=3), want)


def test_the_gradients_are_autodiffs():
    options = (ON, *UNTIED)
    got, want = train("1x1x1", *options, steps=3), autodiff(configure("1x1x1", *options))
    assert abs(got.losses[0] - want.losses[0]) <= 1e-6 * want.losses[0]
    assert_same_gradients(got.gradients, want.gradients)
    assert abs(got.grad_norms[0] - want.grad_norms[0]) <= 1e-5 * want.grad_norms[0]


def all_meshes(cases):
    """(reference, mesh, options) for every mesh of both families."""
    return [
        ("1x1x1" if mesh in MESHES else "1x2x1", mesh, options)
        for options in cases
        for mesh in (*MESHES, *WITH_MODEL)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "mesh", "options"),
    all_meshes(
        [
            UNTIED,
            (*TIED, "precision.policy=bf16"),
            (*TIED, "pipeline.schedule=gpipe", "pipeline.remat=none", "parallel.zero=0"),
            (*UNTIED, "precision.policy=bf16", "pipeline.remat=stage"),
        ]
    ),
)
def test_twenty_steps_on_every_mesh(reference, mesh, options):
    assert not different(
        train(mesh, ON, *options, steps=20), train(reference, ON, *options, steps=20)
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", [UNTIED, (*TIED, "precision.policy=bf16")])
def test_with_all_of_the_compilers_optimisations(options):
    """And 8x1x1 has one micro-batch, 1x1x8 one layer: loops of one trip that XLA inlines."""
    runs = {
        mesh: Run(configure(mesh, ON, *options), DEFAULT).train(5)
        for mesh in ("1x1x1", "8x1x1", "1x1x8", "2x1x2")
    }
    assert not any(different(got, runs["1x1x1"]) for got in runs.values())


@pytest.mark.slow
def test_a_users_own_model():
    """Learned positions, a bias in the head, LayerNorms: leaves that no rule of ours knows."""
    options = (ON, "model.block=own_model:bigram", "batch.global_size=16")
    want = train("1x1x1", *options, base=T0, steps=5)
    for mesh in ("2x1x2", "4x1x1", "1x1x4"):
        assert not different(train(mesh, *options, base=T0, steps=5), want), mesh


@pytest.mark.slow
def test_two_processes_have_the_bits_of_one_device(tmp_path: Path) -> None:
    """2x1x2 over Gloo against 1x1x1; the losses and norms of 20 steps, as the log has them."""
    logs = []
    for mesh, count in (("1x1x1", 1), ("2x1x2", 1), ("2x1x2", 2)):
        out = tmp_path / f"{mesh}-{count}"
        started = start(
            [
                *("train", "--mesh", mesh, "--steps", "20", "--out", str(out)),
                *sets(*SMALL, ON, "precision.logical_shards=4", "model.layers=4"),
            ],
            count,
        )
        outputs = [p.communicate(timeout=400) for p in started]
        assert [p.returncode for p in started] == [0] * count, outputs
        assert "reproducible partial sums" in outputs[0][0]
        logs.append([(r["loss"], r["grad_norm"]) for r in records(out)])
    assert len(logs[0]) == 20
    assert logs[1] == logs[0]
    assert logs[2] == logs[0]


# ----------------------------------------------------------------------------- what crosses devices


def test_no_gradient_is_summed_by_the_library():
    """Over data only slices go around, after the loops; sums of floats over it are our own."""
    options = (ON, "model.tied=true")
    program = run("2x2x2", *options)
    train("2x2x2", *options, steps=3)
    over_data = [c for c in collectives(program._compiled.as_text()) if "data" in c.axes]
    summed = [c for c in over_data if c.kind in ("all-reduce", "reduce-scatter")]
    assert {dtype for c in summed for dtype in c.dtypes} <= {"s32"}  # the number of tokens
    assert {c.kind for c in over_data if c not in summed} == {"all-to-all", "all-gather"}
    assert {c.depth for c in over_data} == {0}


@pytest.mark.parametrize(
    "zero", [1, pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_gradients_cross_data_in_the_dtype_asked_for(zero):
    """bfloat16 slices on the way, float32 sums on arrival: within bfloat16's rounding."""
    options = ("parallel.zero=" + str(zero), "batch.microbatches=2")
    half = ("precision.reduce=bfloat16", "precision.allow_unsafe=true")
    program = run("2x2x2", *options, *half, base=T0)
    got = train("2x2x2", *options, *half, base=T0, steps=1)
    want = autodiff(configure("1x1x1", base=T0))
    rounded = 2 * (
        2 if zero == 2 else 1
    )  # slices: of each data shard, with ZeRO 2 each micro-batch
    assert_same_gradients(got.gradients, want.gradients, rounded * 2**-9)
    assert different(got, want), "something was rounded"
    lowered = program.step.jitted().lower(program.spec.abstract(), program.batch()).as_text()
    assert "all_to_all" in lowered
    assert "reduce_scatter" not in lowered
    kinds = {
        (c.kind, c.dtypes) for c in collectives(program._compiled.as_text()) if "data" in c.axes
    }
    assert ("reduce-scatter", ("f32",)) not in kinds


@pytest.mark.parametrize(
    ("mesh", "levels", "tied"), [("1x1x1", 3, 0), ("2x1x4", 2, 3), ("8x1x1", 0, 1)]
)
def test_the_memory_of_partial_sums(mesh, levels, tied):
    """log2(8 / data) more accumulators of every parameter; a tied embedding has its own for the
    head."""
    of = Run(configure(mesh, ON, f"model.tied={str(tied > 0).lower()}"), FAST)
    stages = MeshShape.parse(mesh).stage
    blocks = 4 * 8 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) // stages
    embed, norm = 4 * 64 * 64 // stages, 4 * 64
    head = norm if tied else embed + norm
    pipeline = of.step.pipeline
    got = partial_sum_bytes(pipeline.leaves, pipeline.layout, pipeline.policy, tied > 0)
    assert got == levels * (blocks + embed + head) + tied * embed


# --------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("mesh", "overrides", "expected"),
    [
        ("1x1x1", ["precision.logical_shards=6"], "not a power of two, as reproducible sums need"),
        ("1x1x1", ["precision.logical_shards=6"], "nearest that are: 4, 8."),
        ("3x1x1", ["batch.global_size=48"], "data=3 does not divide precision.logical_shards=8"),
        ("16x1x1", ["batch.global_size=128"], "sizes that do: 1, 2, 4, 8, or 16 logical shards."),
        ("1x4x4", [], "stage=4 x model=4 does not divide precision.logical_shards=8"),
        (
            "2x1x1",
            ["batch.global_size=40", "batch.microbatches=2"],
            "precision.logical_shards=8 x batch.microbatches=2 = 16 (micro-batches are those of a "
            "logical shard); nearest sizes that are: 32, 48; batch.microbatches that work for 40: "
            "1, 5.",
        ),
        (
            "2x1x1",
            ["parallel.zero=2"],
            "parallel.zero=2 makes sums follow the mesh, against precision.reproducible=true; "
            "values that do not: 0, 1.",
        ),
        ("2x1x1", ["optim.name=muon"], "values that do not: adamw, lion."),
        ("2x1x1", ["pipeline.idle=masked"], "pipeline.idle=masked"),
        ("2x1x1", ["precision.reduce=bfloat16"], "precision.reduce=bfloat16"),
        ("2x1x1", ["precision.accumulate=bfloat16"], "precision.accumulate=bfloat16"),
        ("2x1x1", ["precision.compensated=true"], "precision.compensated=true"),
    ],
)
def test_what_would_break_the_promise_is_refused(mesh, overrides, expected):
    config = load(None, [ON, "batch.microbatches=1", *overrides])
    with pytest.raises(RequestError) as caught:
        validate_shape(config, MeshShape.parse(mesh))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
