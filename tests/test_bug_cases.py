"""Public bug reports of other trainers, as tests of this one (numbers: the P cases they come from).

Each case compares with a number told in the report, with the same work done differently, or with
autodiff on one device. T0 is the cases' own small decoder.
"""

from __future__ import annotations

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    FAST,
    T0,
    T0_LENGTHS,
    Run,
    assert_same_bits,
    assert_same_gradients,
    assert_same_training,
    assert_same_weights,
    autodiff,
    configure,
    learned,
    parameters,
    run,
    token_rows,
    train,
)

from spmd_train.errors import RequestError
from spmd_train.precision.guard import APPLIED, EMPTY
from spmd_train.state import TrainState


def slow(*values: object) -> object:
    """A case that differs from its neighbours in degree only."""
    return pytest.param(*values, marks=pytest.mark.slow)


class TestP01Accumulation:
    """huggingface/transformers#35203: the mean over tokens, not the mean of means."""

    @pytest.mark.parametrize(("mesh", "microbatches"), [("1x1x1", 2), ("2x1x1", 1), ("1x1x1", 1)])
    def test_toy(self, mesh, microbatches):
        """1 token with gradient 8, 7 tokens with 0: SGD(1) goes to -1.0; MultiSteps to -4.0."""
        sets = (
            *("model.block=own_model:scalar", "model.layers=1", "model.width=1", "model.vocab=2"),
            *("model.heads=1", "model.kv_heads=1", "model.head_dim=2", "optim.clip_norm=null"),
            *("batch.global_size=2", "batch.sequence_length=7"),
            f"batch.microbatches={microbatches}",
        )
        toy = run(mesh, *sets, base=T0)
        # Every target is token 0, and at w = 0 its loss has the slope -x/2.
        params = {
            "embed": {"table": np.array([[0.0], [-16.0]], np.float32)},
            "blocks": {},
            "head": {"w": np.zeros(1, np.float32)},
        }
        rows = np.zeros((2, 8), int)
        rows[0, 0] = 1
        state, metrics = toy(toy.state(params), toy.batch(rows, [1, 7]))
        gradient = toy.gradients(state, metrics)["head"]["w"]
        np.testing.assert_allclose(0.0 - 1.0 * gradient, [-1.0], rtol=1e-6)
        np.testing.assert_allclose(metrics["loss"], np.log(2), rtol=1e-6)
        assert metrics["tokens"] == 8

    @pytest.mark.parametrize("ways", [slow("K=2"), "K=4", "K=8", "D=2", slow("D=4")])
    def test_any_split_of_t0_is_one_batch(self, ways):
        """Mask lengths 1, 16, 2, 15, 3, 14, 4, 13; K micro-batches or D data shards."""
        kind, n = ways.split("=")
        one = train("1x1x1", base=T0)
        assert one.tokens[0] == sum(T0_LENGTHS)
        if kind == "K":
            assert_same_training(train("1x1x1", f"batch.microbatches={n}", base=T0), one)
        else:
            assert_same_training(train(f"{n}x1x1", base=T0), one)


class TestP02EmptyBatches:
    """NVIDIA-NeMo/Automodel#3796: no supervised token is no 0/0."""

    SPLIT = ("2x1x2", "batch.microbatches=4")

    @pytest.mark.parametrize(
        "empty",
        [(4, 5), (0, 2, 4, 6), (0, 1, 2, 3, 4, 5, 7)],
        ids=["micro-batch 2", "data shard 0", "all but one row"],
    )
    def test_empty_parts_count_as_absent(self, empty):
        """Against autodiff over the rows that are left, removed from the batch for good."""
        split = run(*self.SPLIT, base=T0)
        rows, left = token_rows(split.config), [i for i in range(8) if i not in empty]
        lengths = np.array([0 if i in empty else T0_LENGTHS[i] for i in range(8)])
        got = split.train(2, rows=rows, lengths=lengths)
        want = autodiff(split.config, rows=rows[left], lengths=lengths[left])
        assert np.isfinite(got.losses).all()
        assert got.tokens[0] == want.tokens[0] == lengths.sum()
        np.testing.assert_allclose(got.losses[0], want.losses[0], rtol=1e-6)
        assert_same_gradients(got.gradients, want.gradients)

    def test_an_empty_step_changes_nothing_but_its_number(self):
        """Parameters, moments, count (so the schedule) bit-identical; 0 tokens, loss 0, no NaN."""
        split = run(*self.SPLIT, base=T0)
        state, _ = split(split.state(), split.batch())
        before = learned(state)
        state, metrics = split(state, split.batch(lengths=np.zeros(8, int)))
        assert state.step == 2
        assert_same_bits(learned(state), before)
        assert metrics["tokens"] == 0
        assert metrics["verdict"] == EMPTY
        assert [float(metrics[name]) for name in ("loss", "z_loss", "grad_norm")] == [0, 0, 0]
        _, metrics = split(state, split.batch())
        assert metrics["verdict"] == APPLIED
        assert metrics["loss"] == train(*self.SPLIT, base=T0).losses[1]  # as if it never was


class TestP10PaddedVocabulary:
    """NVIDIA/Megatron-LM#1754: padding rows are in no sum, no gradient, no answer."""

    @staticmethod
    def zero_head(mesh: str, vocab: int) -> tuple[Run, dict, dict]:
        padded = run(mesh, f"model.vocab={vocab}", base=T0)
        params = dict(parameters(padded.config.model))
        params["head"] = {**params["head"], "matrix": np.zeros((32, vocab), np.float32)}
        rows = np.random.default_rng(0).integers(0, vocab, (8, 17))
        state, metrics = padded(padded.state(params), padded.batch(rows))
        return padded, padded.gradients(state, metrics), metrics

    @pytest.mark.parametrize("mesh", ["1x1x1", slow("1x2x1"), "1x4x1", "1x2x2"])
    def test_ten_rows_on_any_mesh(self, mesh):
        """ln 10 = 2.302585, not ln 12 = 2.484907; padded rows have a gradient of exactly 0."""
        padded, gradients, metrics = self.zero_head(mesh, 10)
        np.testing.assert_allclose(metrics["loss"], 2.302585, rtol=0, atol=1e-6)
        shards = 4 if mesh in ("1x4x1", "1x2x2") else 1
        rows = 12 if shards == 4 else 10
        assert gradients["head"]["matrix"].shape == (32, rows)
        assert gradients["embed"]["table"].shape == (rows, 32)
        assert not gradients["head"]["matrix"][:, 10:].any()
        assert not gradients["embed"]["table"][10:].any()
        assert gradients["head"]["matrix"][:, :10].any(axis=0).all()
        # what a checkpoint or an export sees
        canonical = padded.spec.abstract_canonical()["params"]
        assert canonical["head"]["matrix"].shape == (32, 10)
        assert canonical["embed"]["table"].shape == (10, 32)

    def test_gpt2s_vocabulary(self):
        _, _, metrics = self.zero_head("1x4x1", 50257)
        np.testing.assert_allclose(metrics["loss"], 10.824905, rtol=0, atol=5e-6)

    def test_argmax_is_a_real_token(self):
        """The logits of a padded run's parameters, as generation reads them, have V rows."""
        padded = run("1x4x1", "model.vocab=10", base=T0)
        params = jax.device_get(padded.spec.canonical(padded.state())["params"])
        logits = padded.spec.model.logits(params, np.zeros((1, 16), np.int32))
        assert logits.shape == (1, 16, 10)
        assert int(jnp.argmax(logits, -1).max()) < 10


class TestP11KVHeads:
    """pytorch/torchtitan#2577: fewer KV heads than model shards."""

    HEADS = ("model.heads=8", "model.kv_heads=2")

    @pytest.mark.parametrize("mesh", ["1x4x1", "1x8x1"])
    def test_replicated_and_their_gradients_summed_once(self, mesh):
        one = train("1x1x1", *self.HEADS, base=T0)
        assert_same_training(train(mesh, *self.HEADS, base=T0), one)

    def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_do(self):
        with pytest.raises(RequestError, match=r"model=4 .* 6 heads; sizes that do: 1, 2, 3, 6"):
            run("1x4x1", "model.heads=6", base=T0)


class TestP12Layers:
    """NVIDIA/Megatron-LM#1304: no layer and no row is dropped to make a number divide."""

    def test_six_layers_on_four_stages_are_refused(self):
        with pytest.raises(RequestError, match=r"stage=4 .* 6 layers; sizes that do: 1, 2, 3, 6"):
            run("1x1x4", "model.layers=6", base=T0)

    def test_thirty_layers_on_four_stages_are_refused(self):
        with pytest.raises(RequestError, match="stage=4 does not divide 30 layers"):
            run("1x1x4", "model.layers=30", base=T0)

    @pytest.mark.parametrize("stages", [slow(2), 3])
    def test_six_layers_on_stages_that_divide_are_six(self, stages):
        six = ("model.layers=6", "batch.microbatches=2")
        got = train(f"1x1x{stages}", *six, base=T0)
        assert got.params["blocks/mlp/gate"].shape == (6, 32, 64)
        assert_same_training(got, train("1x1x1", *six, base=T0))

    @pytest.mark.parametrize(
        ("mesh", "sets"), [("4x1x1", ()), ("1x1x1", ("batch.microbatches=4",))]
    )
    def test_six_rows_in_four_parts_are_refused(self, mesh, sets):
        with pytest.raises(RequestError, match=r"batch\.global_size=6 is not divisible"):
            run(mesh, "batch.global_size=6", *sets, base=T0)


class TestP13OneNorm:
    """pytorch/torchtitan#596: one gradient norm over all stages."""

    @pytest.mark.parametrize("mesh", ["1x1x1", "1x1x2", "2x2x2"])
    def test_toy(self, mesh):
        """(3, 0) on stage 0 and (0, 4) on stage 1: norm 5, both times 0.2, not 1/3 and 1/4."""
        sets = (
            *("model.block=own_model:two_layers", "model.layers=2", "model.width=2"),
            *("model.heads=2", "model.kv_heads=1", "model.head_dim=2", "model.vocab=2"),
            "optim.clip_norm=1.0",
        )
        toy = run(mesh, *sets, base=T0)
        zeros = jax.tree.map(np.zeros_like, parameters(toy.config.model))
        rows = np.ones((8, 17), np.int32)
        state, metrics = toy(toy.state(zeros), toy.batch(rows, [16] * 8))
        norm = float(metrics["grad_norm"])
        np.testing.assert_allclose(norm, 5.0, rtol=1e-6)
        clipped = toy.gradients(state, metrics)["blocks"]["p"] / norm
        np.testing.assert_allclose(clipped, [[0.6, 0.0], [0.0, 0.8]], rtol=1e-6)

    TIGHT = ("model.tied=true", "optim.clip_norm=0.1", "batch.microbatches=2")

    @pytest.mark.parametrize("stages", [slow(2), 4])
    def test_norm_and_weights_of_t0(self, stages):
        """Clipping at 0.1 on every step; the tied matrix counts once (also P14)."""
        got = train(f"1x1x{stages}", *self.TIGHT, base=T0)
        want = train("1x1x1", *self.TIGHT, base=T0)
        assert (want.grad_norms > 0.1).all()
        np.testing.assert_allclose(got.grad_norms, want.grad_norms, rtol=1e-5)
        assert_same_weights(got, want, lr=1e-3)

    def test_the_norm_is_that_of_the_whole_gradient(self):
        got = train("1x1x4", *self.TIGHT, base=T0)
        whole = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in got.gradients.values()))
        np.testing.assert_allclose(got.grad_norms[0], whole, rtol=1e-5)


class TestP14TiedEmbedding:
    """uw-syfi/piper#13: one matrix, one gradient, on however many stages."""

    TIED = TestP13OneNorm.TIGHT

    @pytest.mark.parametrize("stages", [slow(2), 4])
    def test_five_steps_equal_one_stage(self, stages):
        got = train(f"1x1x{stages}", *self.TIED, base=T0)
        assert "head/matrix" not in got.params  # stored once
        assert_same_training(got, train("1x1x1", *self.TIED, base=T0))

    def test_gradient_is_both_sides(self):
        """Input side plus output side, from an untied model with equal matrices, by autodiff."""
        got = train("1x1x4", *self.TIED, base=T0)
        config = configure("1x1x1", base=T0)
        tied = parameters(configure("1x1x1", "model.tied=true", base=T0).model)
        table = tied["embed"]["table"]
        untied = {**tied, "head": {**tied["head"], "matrix": table.T}}
        sides = autodiff(config, untied).gradients
        both = sides["embed/table"] + sides["head/matrix"].T
        assert_same_gradients({"table": got.gradients["embed/table"]}, {"table": both})

    def test_gradient_by_finite_differences(self):
        """Along the gradient itself, everything but the embedding frozen."""
        tied = run("1x1x4", *self.TIED, base=T0)
        params, batch = parameters(tied.config.model), tied.batch()
        gradient = train("1x1x4", *self.TIED, base=T0).gradients["embed/table"]
        length = np.linalg.norm(gradient)

        def loss(distance: float) -> float:
            table = params["embed"]["table"] + distance * gradient / length
            state = tied.state({**params, "embed": {"table": table.astype(np.float32)}})
            return float(tied(state, batch)[1]["loss"])

        h = 0.004
        slope = (loss(h) - loss(-h)) / (2 * h)
        np.testing.assert_allclose(slope, length, rtol=1e-3)


class TestP15Dropout:
    """huggingface/transformers#31412: masks are functions of the row, never of the mesh."""

    TOY = (
        *("model.block=own_model:mask", "model.layers=2", "model.width=8", "model.vocab=128"),
        *("model.heads=8", "model.kv_heads=8", "model.head_dim=2", "model.dropout=0.5"),
    )

    @staticmethod
    @functools.cache
    def masks(mesh: str, microbatches: int, first_step: int = 0, seed: int = 0) -> np.ndarray:
        """[row, position, feature], both layers' masks on one another.

        Every token is used once, so its embedding's gradient is zero where it was dropped.
        """
        sets = (*TestP15Dropout.TOY, f"batch.microbatches={microbatches}", f"seed={seed}")
        toy = run(mesh, *sets, base=T0)
        tokens = np.arange(128).reshape(8, 16)
        rows = np.concatenate([tokens, np.ones((8, 1), int)], axis=1)
        state = toy.state()
        state = type(state)(state.step + first_step, state.params, state.opt_state)
        state = jax.device_put(state, toy.spec.shardings())
        state, metrics = toy(state, toy.batch(rows, [16] * 8))
        return toy.gradients(state, metrics)["embed"]["table"].reshape(8, 16, 8) != 0

    @pytest.mark.parametrize(
        ("mesh", "microbatches"),
        [("1x1x1", 2), ("2x1x1", 2), ("8x1x1", 1), ("1x4x1", 1), ("2x2x2", 2)],
    )
    def test_masks_are_bit_for_bit_those_of_one_device(self, mesh, microbatches):
        np.testing.assert_array_equal(self.masks(mesh, microbatches), self.masks("1x1x1", 1))

    def test_masks_differ_by_row_position_layer_step_and_seed(self):
        mask = self.masks("1x1x1", 1)
        flat = mask.reshape(8, -1)
        assert len(np.unique(flat, axis=0)) == 8  # data shards and micro-batches among them
        assert len(np.unique(mask.reshape(128, 8), axis=0)) > 32
        # Two layers with one mask would keep half, two independent ones a quarter.
        np.testing.assert_allclose(mask.mean(), 0.25, rtol=0, atol=0.05)
        for other in (self.masks("1x1x1", 1, first_step=1), self.masks("1x1x1", 1, seed=1)):
            assert 0.2 < np.mean(other != mask) < 0.6

    DROPPED = ("model.dropout=0.5", "model.tied=true")

    @pytest.mark.parametrize(
        ("mesh", "sets"),
        [
            ("2x2x2", ("batch.microbatches=2",)),
            ("1x1x1", ("pipeline.remat=none", "batch.microbatches=4")),
            slow("1x1x2", ("pipeline.remat=stage", "batch.microbatches=4")),
        ],
        ids=["mesh", "kept", "recomputed from the stage's input"],
    )
    def test_t0_trains_alike_with_dropout(self, mesh, sets):
        """Loss and gradients with masks on mesh, K and recomputation, against 1x1x1 and K=1."""
        assert_same_training(
            train(mesh, *self.DROPPED, *sets, base=T0), train("1x1x1", *self.DROPPED, base=T0)
        )


class TestP16Initialisation:
    """jax-ml/jax#40232: the same seed gives the same weights on every mesh."""

    SETS = ("model.vocab=496", "model.layers=8", "model.width=64")

    @staticmethod
    def digests(mesh: str, *sets: str) -> dict[str, str]:
        made = run(mesh, *TestP16Initialisation.SETS, *sets)
        params = made.unpadded(initialised(made).params)
        return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in params.items()}

    @pytest.mark.parametrize(
        ("mesh", "zero"),
        [("8x1x1", 1), slow("1x8x1", 1), ("2x2x2", 3), ("1x2x4", 0), slow("8x1x1", 3)],
    )
    def test_hashes_are_those_of_one_device(self, mesh, zero):
        assert self.digests(mesh, f"parallel.zero={zero}") == one_device_digests()

    def test_another_seed_has_other_hashes(self):
        other = self.digests("1x1x1", "seed=1")
        same = {name for name, digest in one_device_digests().items() if digest == other[name]}
        assert all(name.endswith("scale") for name in same)  # norms start at one

    def test_padding_is_drawn_for_nobody(self):
        """61 rows padded to 64: the 61 are those of one device, the others zero."""
        meshes = ("1x2x4", "1x1x1")
        states = [initialised(run(mesh, "model.vocab=61", base=T0)) for mesh in meshes]
        table, alone = (np.asarray(state.params["embed"]["table"]) for state in states)
        np.testing.assert_array_equal(table[:61], alone)
        assert not table[61:].any()


@functools.cache
def one_device_digests() -> dict[str, str]:
    return TestP16Initialisation.digests("1x1x1")


def initialised(made: Run) -> TrainState:
    """`StateSpec.init` as a run calls it, compiled faster."""
    spec = made.spec
    init = jax.jit(spec.init, static_argnums=0, out_shardings=spec.shardings())
    return init.lower(made.config.seed).compile(compiler_options=FAST)()
