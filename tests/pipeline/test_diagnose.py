"""The diagnosing step: what it measures against one device, and faults put in against the finding.

One compiled pair of programs (the step's own formats, float32) per policy and mesh serves all
faults, since they are parameters and tokens (`own_model.faulty`).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import FAST, T0, Run, lengths_of, named, parameters, plain_loss, run, token_rows

from spmd_train.data.batches import Batch, shift
from spmd_train.diagnosis import Diagnosis
from spmd_train.model import BlockContext, Model
from spmd_train.precision.measurements import Seen, Statistics
from spmd_train.sharding import Layout

FAULTY = ("model.block=own_model:faulty", "batch.microbatches=2")
MARKER = 62  # a token that no row has; its embedding is large
M, L, B = 2, 4, 8  # micro-batches, layers, rows of the step
R = B // M

MESHES = ["2x2x2", pytest.param("1x1x1", marks=pytest.mark.slow)]
POLICIES = ["fp32", "fp16", *(pytest.param(p, marks=pytest.mark.slow) for p in ("bf16", "fp8"))]


@functools.cache
def diagnosed(mesh: str, policy: str) -> tuple[Run, Diagnosis]:
    of = run(mesh, *FAULTY, f"precision.policy={policy}", base=T0)
    return of, Diagnosis(of.step, compiler_options=FAST)


def healthy(of: Run) -> Any:
    """Parameters to damage: `fault` zero, the marker's embedding large but harmless."""
    params = jax.tree.map(np.copy, parameters(of.config.model))
    params["blocks"]["fault"][:] = 0
    params["embed"]["table"][MARKER] = 4e3
    return params


def finding(
    mesh: str,
    policy: str,
    damage: Any = lambda params: None,
    marked: tuple[int, ...] = (),
    scale: float = 1.0,
) -> dict[str, Any]:
    """What is found after `damage(params)` and with the marker in some rows."""
    of, diagnosis = diagnosed(mesh, policy)
    params, rows = healthy(of), token_rows(of.config)
    damage(params)
    rows[list(marked), 0] = MARKER
    full = np.full(B, of.config.batch.sequence_length)
    return diagnosis.attribute(of.state(params), of.batch(rows, full), 0, scale)


def places(mesh: str, rows: list[int], layer: int) -> tuple[list[int], int]:
    """Data shards of rows (of one micro-batch) and stage of a layer."""
    data, _, stages = map(int, mesh.split("x"))
    return sorted({row % R * data // R for row in rows}), layer * stages // L


# ------------------------------------------------------------------------- what it measures


@functools.cache
def measured(mesh: str) -> tuple[Run, Any, Statistics]:
    """The fixture's own batch in float32, without a fault."""
    of, diagnosis = diagnosed(mesh, "fp32")
    params = healthy(of)
    inputs = (of.state(params).params, {}, of.batch(), jnp.int32(0), jnp.float32(1))
    return of, params, jax.device_get(diagnosis._as_trained(*inputs))


@functools.cache
def single_device(model: Model) -> tuple[Any, Any]:
    """Compiled (params, tokens) -> {tensor: [L][B] largest magnitudes}, and
    (params, batch, tokens of the step) -> gradients."""

    def forward(params: Any, tokens: jax.Array) -> dict[str, list[jax.Array]]:
        found: dict[str, list[jax.Array]] = {}

        def tap(name: str, x: jax.Array) -> jax.Array:
            found.setdefault(name, []).append(jnp.abs(x).max(tuple(range(1, x.ndim))))
            return x

        x, shared = params["embed"]["table"][tokens], model.shared(tokens.shape[1])
        tap("embedding", x)
        for layer in range(L):
            context = BlockContext(shared, layer, None, Layout(), "xla", tap=tap)
            of_layer = jax.tree.map(lambda a, layer=layer: a[layer], params["blocks"])
            x = tap("output", model.block(of_layer, x, context))
        tap("logits", model.logits(params, tokens))
        return found

    def gradients(params: Any, batch: Batch, tokens: Any) -> Any:
        share = jnp.sum(batch.targets >= 0) / tokens
        return jax.grad(lambda p: plain_loss(model, p, batch)[0] * share)(params)

    return jax.jit(forward, compiler_options=FAST), jax.jit(gradients, compiler_options=FAST)


@pytest.mark.parametrize("mesh", MESHES)
class TestMeasurements:
    def test_activations_are_those_of_one_device(self, mesh: str) -> None:
        of, params, got = measured(mesh)
        found = single_device(of.spec.model)[0](params, token_rows(of.config)[:, :-1])
        (embedding,), (logits,) = found.pop("embedding"), found.pop("logits")
        np.testing.assert_array_equal(got.embedding.largest.reshape(B), embedding)
        np.testing.assert_allclose(got.logits.largest.max(1).reshape(B), logits, rtol=1e-4)
        for name, by_layer in found.items():
            want = np.stack(by_layer).reshape(L, M, R).swapaxes(0, 1)
            np.testing.assert_allclose(got.activations[name].largest, want, rtol=1e-4)
        assert [name for name in got.activations if not name.endswith("product")] == [
            *("probe", "attention_norm", "query", "key", "value", "attention", "out"),
            *("mlp_norm", "hidden", "down", "output"),
        ]

    def test_gradients_are_those_of_autodiff_shard_by_shard(self, mesh: str) -> None:
        of, params, got = measured(mesh)
        _, _, S, D, _ = got.sizes
        gradients = single_device(of.spec.model)[1]
        batch = shift(token_rows(of.config), lengths_of(of.config))
        for m in range(M):
            for shard in range(D):
                mine = (np.arange(B) // (R // D) == m * D + shard)[:, None]
                part = Batch(batch.inputs, np.where(mine, batch.targets, -1))
                for path, g in named(gradients(params, part, np.sum(batch.targets >= 0))).items():
                    if path == "head/norm/scale" and S > 1:
                        continue  # every stage has the share of its rows of the vocabulary
                    seen, size = got.gradients[path].largest[m, :, shard], np.abs(g)
                    if path.startswith("blocks/"):
                        want = size.reshape(L, -1).max(1)
                    else:
                        seen, want = seen.max(), size.max()
                    np.testing.assert_allclose(seen, want, rtol=1e-4, atol=1e-9, err_msg=path)

    def test_the_gradient_of_a_tensor_is_its_own(self, mesh: str) -> None:
        """The first block's input: its row of the embedding, where every token is used once."""
        of, diagnosis = diagnosed(mesh, "fp32")
        params, rows = healthy(of), np.zeros((B, 17), np.int32)
        rows[:, 0] = 1 + np.arange(B)
        batch = of.batch(rows, np.ones(B))
        inputs = (of.state(params).params, {}, batch, jnp.int32(0), jnp.float32(1))
        got = jax.device_get(diagnosis._as_trained(*inputs)).activation_gradients["input"]
        gradients = single_device(of.spec.model)[1](params, shift(rows, np.ones(B)), B)
        want = np.abs(gradients["embed"]["table"][1 : 1 + B]).max(1)
        np.testing.assert_allclose(got.largest[:, 0].reshape(B), want, rtol=1e-4)

    def test_nothing_is_bad(self, mesh: str) -> None:
        _, _, got = measured(mesh)
        seen = jax.tree.leaves(got, is_leaf=lambda x: isinstance(x, Seen))
        assert len(seen) > 40
        assert not any(s.bad.any() for s in seen)


# ------------------------------------------------------------------------------ faults put in


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("policy", POLICIES)
class TestFaults:
    def test_a_clean_batch_is_not_explained(self, mesh: str, policy: str) -> None:
        found = finding(mesh, policy, marked=(3,))
        assert found["cause"] == "vanished"
        assert found["first"] is None
        assert "hardware" in found["says"]

    def test_nan_in_a_block_weight(self, mesh: str, policy: str) -> None:
        def damage(params: Any) -> None:
            params["blocks"]["mlp"]["gate"][2, 3, 5] = np.nan

        found = finding(mesh, policy, damage)
        shards, stage = places(mesh, list(range(R)), 2)
        assert found["cause"] == "parameters"
        assert found["float32_finite"] is False
        assert found["first"] == {
            "kind": "parameter",
            "tensor": "blocks/mlp/gate",
            "layer": 2,
            "stage": stage,
            "entries": 1,
            "value": "nan",
            "data_shards": shards,
        }
        assert "blocks/mlp/gate of layer 2" in found["says"]

    @pytest.mark.parametrize("path", ["embed/table", "head/norm/scale"])
    def test_inf_at_the_ends(self, mesh: str, policy: str, path: str) -> None:
        def damage(params: Any) -> None:
            leaf = functools.reduce(lambda tree, key: tree[key], path.split("/"), params)
            leaf[7] = np.inf

        found = finding(mesh, policy, damage)
        assert found["cause"] == "parameters"
        assert (found["first"]["tensor"], found["first"]["layer"]) == (path, None)
        assert found["first"]["entries"] == (1 if path.endswith("scale") else 32)
        assert found["first"]["value"] == "inf"

    def test_nan_that_a_layer_makes_in_all_rows(self, mesh: str, policy: str) -> None:
        def damage(params: Any) -> None:
            params["blocks"]["fault"][3, 0] = 1

        found = finding(mesh, policy, damage)
        shards, stage = places(mesh, list(range(R)), 3)
        assert found["cause"] == "bug"
        assert found["first"] == {
            "kind": "activation",
            "tensor": "probe",
            "layer": 3,
            "stage": stage,
            "microbatch": 0,
            "data_shards": shards,
            "rows": [0, 1, 2, 3],
            "value": "nan",
        }
        assert found["rows"]["affected"] == B
        assert found["largest"]["layers"] == [0, 1, 2, 3]
        assert found["largest"]["values"][2] > 0 == found["largest"]["values"][3]

    @pytest.mark.parametrize(("rows", "first"), [((6,), [6]), ((1,), [1]), ((2, 3, 6, 7), [2, 3])])
    def test_nan_in_marked_rows(
        self, mesh: str, policy: str, rows: tuple[int, ...], first: list[int]
    ) -> None:
        def damage(params: Any) -> None:
            params["blocks"]["fault"][1:, 1] = 1

        found = finding(mesh, policy, damage, marked=rows)
        shards, stage = places(mesh, first, 1)
        assert found["cause"] == "data"
        assert found["first"] == {
            "kind": "activation",
            "tensor": "probe",
            "layer": 1,
            "stage": stage,
            "microbatch": first[0] // R,
            "data_shards": shards,
            "rows": first,
            "value": "nan",
        }
        assert found["rows"]["listed"] == list(rows)
        one_of_several = mesh != "1x1x1" and len(rows) > 1
        assert ("all on data shard 1" in found["says"]) == one_of_several

    def test_too_large_for_float16_only(self, mesh: str, policy: str) -> None:
        def damage(params: Any) -> None:
            params["blocks"]["fault"][2, 2] = 6e4

        found = finding(mesh, policy, damage)
        if policy != "fp16":
            assert found["cause"] == "vanished"
            return
        first = found["first"]
        assert found["cause"] == "overflow"
        assert found["float32_finite"] is True
        assert (first["kind"], first["tensor"], first["layer"]) == ("activation", "probe", 2)
        assert (first["microbatch"], first["value"]) == (0, "inf")
        assert "bfloat16" in found["says"]

    def test_too_large_a_loss_scale(self, mesh: str, policy: str) -> None:
        found = finding(mesh, policy, scale=2.0**24)
        if policy != "fp16":
            assert found["cause"] == "vanished"
            return
        assert found["cause"] == "overflow"
        assert found["first"]["kind"] == "activation gradient"
        assert found["first"]["microbatch"] == 0
        assert "loss scale 1.67772e+07: expected now and then" in found["says"]


# ------------------------------------------------------------------------------------ damage


def test_one_damaged_replica_is_found() -> None:
    """Of a weight that both data shards hold a copy of, one copy has a NaN."""
    of, diagnosis = diagnosed("2x2x2", "fp32")
    state = of.state(healthy(of))
    scale = state.params["head"]["norm"]["scale"]
    on_shard_1 = {d for d in of.spec.layout.mesh.devices[1].flat}
    copies = []
    for shard in scale.addressable_shards:
        value = np.array(shard.data)
        value[4] = np.nan if shard.device in on_shard_1 else value[4]
        copies.append(jax.device_put(value, shard.device))
    state.params["head"]["norm"]["scale"] = jax.make_array_from_single_device_arrays(
        scale.shape, scale.sharding, copies
    )
    found = diagnosis.attribute(state, of.batch(), 0, 1.0)
    assert found["cause"] == "parameters"
    assert found["first"]["tensor"] == "head/norm/scale"
    assert found["first"]["data_shards"] == [1]


def test_a_damaged_image_of_a_sound_master_is_told_from_lost_parameters() -> None:
    of, diagnosis = diagnosed("2x2x2", "fp16")
    state = of.state(healthy(of))
    state.params["embed"]["table"] = state.params["embed"]["table"].at[9, 1].set(jnp.nan)
    found = diagnosis.attribute(state, of.batch(), 0, 1.0)
    assert (found["cause"], found["float32_finite"]) == ("parameters", True)
    assert "master it is made from is" in found["says"]


def test_no_memory_for_float32_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: Any) -> Statistics:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory allocating 1 byte")

    of, diagnosis = diagnosed("2x2x2", "fp16")
    monkeypatch.setitem(diagnosis.__dict__, "_in_float32", too_large)
    state = of.state(healthy(of))
    found = diagnosis.attribute(state, of.batch(), 0, 2.0**24)
    assert (found["cause"], found["float32_finite"]) == ("overflow", None)
    assert "RESOURCE_EXHAUSTED" in found["float32_not_run"]
    monkeypatch.setitem(diagnosis.__dict__, "_as_trained", too_large)
    assert diagnosis.attribute(state, of.batch(), 0, 1.0)["cause"] == "unknown"


@pytest.mark.slow
def test_delayed_fp8_is_run_again_with_its_history():
    """A weight that is not finite, after a step that filled the history."""
    of = run("2x2x2", *FAULTY, "precision.policy=fp8", "precision.fp8_scaling=delayed", base=T0)
    state, _ = of(of.state(healthy(of)), of.batch())
    diagnosis = Diagnosis(of.step, compiler_options=FAST)
    assert diagnosis.attribute(state, of.batch(), 1, 1.0)["cause"] == "vanished"
    gate = state.params["blocks"]["mlp"]["gate"]
    state.params["blocks"]["mlp"]["gate"] = jax.device_put(
        gate.at[2, 3, 5].set(jnp.nan), gate.sharding
    )
    found = diagnosis.attribute(state, of.batch(), 1, 1.0)
    assert found["cause"] == "parameters"
    assert found["first"]["layer"] == 2
