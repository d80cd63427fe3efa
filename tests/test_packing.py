"""Several documents in a row (public case P21): each trains as if it were alone.

The reference is every document by itself in a row of its own, through the plain forward pass on one
device, which knows nothing of packing.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    FAST,
    T0,
    Arrays,
    Run,
    assert_same_bits,
    assert_same_gradients,
    configure,
    learned,
    named,
    parameters,
    plain_loss,
    run,
)
from hypothesis import given
from hypothesis import strategies as st
from test_hlo import Collective, collectives

from spmd_train.build import build_step
from spmd_train.data.batches import IGNORE, Batch, shift
from spmd_train.diagnosis import Diagnosis
from spmd_train.errors import RequestError
from spmd_train.mesh import MeshShape, build_mesh
from spmd_train.model import build_model
from spmd_train.model.model import positions_of
from spmd_train.pipeline.layers import REMAT
from spmd_train.precision.guard import EMPTY

Documents = list[list[int]]  # the tokens of each document of a row

A, B = [5, 6, 7, 2], [9, 8, 7, 6, 2]  # P21; 2 ends a document
ON = "data.packing=documents"
WIDTH = 17  # tokens of a row of T0
PADDING = 3  # what padding holds; a token like any other


def documents() -> list[Documents]:
    """Eight rows of T0's width; the fourth is all padding, the second is P21's."""
    rng = np.random.default_rng(3)
    sizes = [[17], [], [1, 16], [], [3, 3, 3, 3, 5], [8, 9], [2, 1, 1, 6], [5]]
    rows = [[rng.integers(3, 61, n).tolist() for n in row] for row in sizes]
    rows[1] = [A, B]
    return rows


def packed(rows: list[Documents], width: int = WIDTH) -> Batch:
    """Documents one after the other, then padding."""
    tokens = np.full((len(rows), width), PADDING)
    segments = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        start = 0
        for number, document in enumerate(row, 1):
            here = slice(start, start + len(document))
            tokens[i, here], segments[i, here] = document, number
            start += len(document)
    return shift(tokens, segments=segments)


@functools.cache
def differentiated(config: Any) -> Any:
    model = build_model(config)

    def loss(params: Any, batch: Batch) -> jax.Array:
        return plain_loss(model, params, batch)[0]

    return jax.jit(jax.value_and_grad(loss), compiler_options=FAST)


def apart(config: Any, rows: list[Documents]) -> tuple[float, Arrays]:
    """Token-mean loss of the documents, each alone at the start of a row, and its gradients."""
    alone = np.full((20, WIDTH), PADDING)
    lengths = np.zeros(20, int)
    for i, document in enumerate(d for row in rows for d in row):
        alone[i, : len(document)] = document
        lengths[i] = len(document) - 1
    params = parameters(config)
    loss, gradients = differentiated(config)(params, shift(alone, lengths))
    return float(loss), named(gradients)


def of_step(of: Run, batch: Batch) -> tuple[dict[str, Any], Arrays]:
    """Metrics and gradients of a first step."""
    state, metrics = of(of.state(), of.placed(batch))
    return jax.device_get(metrics), of.unpadded(of.gradients(state, metrics))


# ------------------------------------------------------------------------------- P21, on one device


class TestPublicCaseP21:
    row = packed([[A, B]], width=16)

    def test_labels_stay_within_a_document(self) -> None:
        assert self.row.inputs.tolist() == [[5, 6, 7, 2, 9, 8, 7, 6, 2, *[PADDING] * 6]]
        none = IGNORE
        assert self.row.targets.tolist() == [[6, 7, 2, none, 8, 7, 6, 2, none, *[none] * 6]]
        assert np.sum(self.row.targets >= 0) == 3 + 4
        assert self.row.segments.tolist() == [[1] * 4 + [2] * 5 + [0] * 6]

    def test_positions_restart(self) -> None:
        got = positions_of(jnp.asarray(self.row.segments))
        assert got.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]]
        assert got.dtype == jnp.int32

    def test_a_document_does_not_see_another(self) -> None:
        """B's logits to the last bit when A's 6 becomes 11, and those of B alone."""
        config = configure("1x1x1", base=T0).model
        model, params = build_model(config), parameters(config)
        logits = jax.jit(model.logits)
        changed = np.where(self.row.inputs == 6, 11, self.row.inputs)
        changed[0, 4:] = self.row.inputs[0, 4:]
        before = logits(params, self.row.inputs, self.row.segments)
        after = logits(params, changed, self.row.segments)
        np.testing.assert_array_equal(before[0, 4:], after[0, 4:])
        assert not np.array_equal(before[0, 1:4], after[0, 1:4])
        alone = logits(params, np.pad([B], ((0, 0), (0, 10))))
        np.testing.assert_allclose(before[0, 4:9], alone[0, :5], rtol=1e-5, atol=1e-6)
        assert np.isfinite(before).all()


@given(st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=1, max_size=3))
def test_positions_count_from_each_documents_first_token(rows: list[list[int]]) -> None:
    """Against a plain loop, for any axes in front."""
    segments = packed([[[0] * n for n in row] for row in rows], width=22).segments
    want = np.zeros_like(segments)
    for row, positions in zip(segments, want, strict=True):
        for t in range(1, len(row)):
            positions[t] = positions[t - 1] + 1 if row[t] == row[t - 1] else 0
    np.testing.assert_array_equal(positions_of(jnp.asarray(segments)), want)
    np.testing.assert_array_equal(positions_of(jnp.asarray(segments[:, None])), want[:, None])


# ------------------------------------------------------------------------------- the compiled step

PLACED = "model.block=own_model:placed"
CASES = [
    ("1x1x1", ("pipeline.remat=none",)),
    ("2x2x2", ("batch.microbatches=2",)),
    ("1x1x2", ("batch.microbatches=4", "pipeline.schedule=gpipe", "pipeline.remat=dots", PLACED)),
    ("1x2x1", ("pipeline.remat=stage", "model.tied=true", "model.vocab=61")),
    *(
        pytest.param(
            *("1x1x2", ("batch.microbatches=2", f"pipeline.remat={remat}", PLACED, *more)),
            marks=pytest.mark.slow,
        )
        for remat in REMAT
        for more in ((), ("pipeline.schedule=gpipe",), ("pipeline.idle=masked",))
    ),
    pytest.param("2x1x2", ("batch.microbatches=4", "parallel.zero=3"), marks=pytest.mark.slow),
    pytest.param("1x4x2", ("parallel.sequence_parallel=false",), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("mesh", "sets"), CASES)
def test_loss_and_gradients_are_those_of_the_documents_apart(
    mesh: str, sets: tuple[str, ...]
) -> None:
    of = run(mesh, ON, *sets, base=T0)
    metrics, gradients = of_step(of, packed(documents()))
    loss, want = apart(of.config.model, documents())
    assert metrics["tokens"] == sum(len(d) - 1 for row in documents() for d in row)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    assert_same_gradients(gradients, want)


MESH = ("2x2x2", ON, "batch.microbatches=2")


def test_a_step_sees_nothing_of_another_document() -> None:
    """Only the last document of each row is supervised: the others' tokens change no bit."""
    rows = documents()
    for row in rows:
        row[:-1] = [[60 - token for token in document] for document in row[:-1]]
    of, results = run(*MESH, base=T0), []
    for batch in (packed(documents()), packed(rows)):
        last = batch.segments == batch.segments.max(1, keepdims=True)
        supervised = replace(batch, targets=np.where(last, batch.targets, IGNORE))
        results.append((batch.inputs, *of_step(of, supervised)))
    (before, *want), (after, *got) = results
    assert (before != after).sum() > 20
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_micro_batch_of_padding_counts_for_nothing() -> None:
    of, rows = run(*MESH, base=T0), documents()
    for m in (slice(0, 4), slice(4, 8)):
        left = [[] if i in range(8)[m] else row for i, row in enumerate(rows)]
        metrics, gradients = of_step(of, packed(left))
        loss, want = apart(of.config.model, left)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
        assert_same_gradients(gradients, want)


def test_a_step_of_padding_changes_nothing() -> None:
    of = run(*MESH, base=T0)
    before = learned(of.state())
    state, metrics = of(of.state(), of.placed(packed([[]] * 8)))
    assert (int(metrics["tokens"]), float(metrics["loss"])) == (0, 0.0)
    assert int(metrics["verdict"]) == EMPTY
    assert_same_bits(learned(state), before)


def crossing(of: Run) -> list[Collective]:
    batch = of.step.abstract_batch(8, 16)
    lowered = of.step.jitted().lower(of.spec.abstract(), batch)
    return collectives(lowered.compile(compiler_options=FAST).as_text())


def test_the_only_permutes_are_the_two_sends_of_a_tick() -> None:
    sends = [c for c in crossing(run(*MESH, base=T0)) if c.kind == "collective-permute"]
    assert [(c.depth, set(c.axes)) for c in sends] == [(1, {"stage"})] * 2


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "stage"])
def test_documents_cross_nothing_between_devices(remat: str) -> None:
    """The same collectives as of plain windows: the partitioner adds none for their sake."""
    mesh, on, *sets = (*MESH, f"pipeline.remat={remat}")
    kinds = [
        Counter((c.kind, c.dtypes, c.shapes, c.axes, c.depth) for c in crossing(of))
        for of in (run(mesh, on, *sets, base=T0), run(mesh, *sets, base=T0))
    ]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("mesh", ["1x1x2", pytest.param("2x2x2", marks=pytest.mark.slow)])
def test_the_diagnosing_step_keeps_documents_apart(mesh: str) -> None:
    of, batch = run(mesh, *MESH[1:], base=T0), packed(documents())
    inputs = (of.state().params, {}, of.placed(batch), jnp.int32(0), jnp.float32(1))
    program = Diagnosis(of.step)._as_trained.lower(*inputs).compile(compiler_options=FAST)
    assert not [c for c in collectives(program.as_text()) if c.kind == "collective-permute"]
    got = jax.device_get(program(*inputs))
    model, params = of.spec.model, parameters(of.config.model)
    logits = jax.jit(model.logits)(params, batch.inputs, batch.segments)
    largest = np.abs(logits).max((1, 2))
    np.testing.assert_allclose(got.logits.largest.max(1).reshape(8), largest, rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        ("pipeline.remat=none",),
        pytest.param(("precision.policy=bf16", "model.dropout=0.1"), marks=pytest.mark.slow),
    ],
)
def test_reproducible_sums_have_the_same_bits_on_another_mesh(options: tuple[str, ...]) -> None:
    sets = ("precision.reproducible=true", "precision.logical_shards=2", "model.layers=2", *options)
    want, got = (
        of.train_on(of.placed(packed(documents())), 2)
        for of in (run(mesh, ON, *sets, base=T0) for mesh in ("1x1x1", "2x1x2"))
    )
    assert want.losses[0] != want.losses[1]
    assert_same_bits(got.losses, want.losses)
    assert_same_bits(got.params, want.params)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["bf16", "fp8"])
def test_narrow_formats_are_close(policy: str) -> None:
    of = run("1x1x2", ON, f"precision.policy={policy}", "precision.fp8_scaling=delayed", base=T0)
    metrics, _ = of_step(of, packed(documents()))
    loss, _ = apart(of.config.model, documents())
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-2)


# ------------------------------------------------------------------------- what is not packed


def primitives(jaxpr: Any) -> set[str]:
    """Names of all primitives in a jaxpr and the jaxprs inside it."""
    found = {e.primitive.name for e in jaxpr.eqns}
    for value in (v for e in jaxpr.eqns for v in e.params.values()):
        for inner in value if isinstance(value, (list, tuple)) else [value]:
            inner = getattr(inner, "jaxpr", inner)
            found |= primitives(inner) if hasattr(inner, "eqns") else set()
    return found


def test_plain_windows_pay_nothing() -> None:
    """Their step takes two arrays of tokens and has none of what documents need.

    One document and padding after it needs no more than the causal mask: the same program.
    """
    programs = {}
    for packing in ("windows", "padded", "documents"):
        config = configure("2x2x2", f"data.packing={packing}", "batch.microbatches=2", base=T0)
        step = Run(config).step
        traced = step.jitted().trace(step.spec.abstract(), step.abstract_batch(8, 16))
        tokens = [x for x in jax.tree.leaves(traced.in_avals) if x.shape == (2, 4, 16)]
        programs[packing] = str(traced.jaxpr), len(tokens), primitives(traced.jaxpr.jaxpr)
    assert programs["windows"] == programs["padded"]
    assert programs["windows"][1] == 2
    assert "cummax" not in programs["windows"][2]
    assert programs["documents"][1] == 3
    assert "cummax" in programs["documents"][2]


def test_a_model_that_does_not_keep_documents_apart_is_refused() -> None:
    """Nobody would notice the leak."""
    mesh, _ = build_mesh(MeshShape())
    own = "model.block=own_model:bigram"
    with pytest.raises(RequestError, match=r"own_model:bigram does not say .*packed=True"):
        build_step(configure("1x1x1", ON, own, base=T0), mesh)
    build_step(configure("1x1x1", "data.packing=padded", own, base=T0), mesh)
