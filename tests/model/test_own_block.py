"""A user's architecture (tests/own_model.py) on a mesh against one device and against autodiff."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import T1, assert_same_gradients, assert_same_training, autodiff, configure, train

from spmd_train.config import load
from spmd_train.errors import RequestError
from spmd_train.model import Architecture, VocabRows, build_model
from spmd_train.sharding import Layout

OWN = (
    *("model.block=own_model:bigram", "model.layers=4", "model.vocab=61", "model.z_loss=1e-3"),
    "batch.global_size=8",
)


def test_one_device_equals_autodiff():
    got, want = train("1x1x1", *OWN), autodiff(configure("1x1x1", *OWN))
    assert {"embed/positions", "head/bias", "head/norm/shift"} <= got.gradients.keys()
    np.testing.assert_allclose(got.losses[0], want.losses[0], rtol=1e-6)
    np.testing.assert_allclose(got.z_losses[0], want.z_losses[0], rtol=1e-5)
    assert_same_gradients(got.gradients, want.gradients)


@pytest.mark.parametrize(
    ("mesh", "sets"),
    [
        ("2x2x2", ("batch.microbatches=2",)),
        pytest.param(
            *("1x2x4", ("batch.microbatches=4", "pipeline.schedule=gpipe", "parallel.zero=2")),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("4x1x2", ("batch.microbatches=2", "pipeline.remat=none", "parallel.zero=3")),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_mesh_equals_one_device(mesh, sets):
    assert_same_training(train(mesh, *OWN, *sets), train("1x1x1", *OWN))


def test_rows_add_up_to_the_whole_vocabulary():
    """What protocol.py promises a user: shares sum to the embedding, `first` is one shard's."""
    model = build_model(load(None, [*T1, *OWN]).model)
    params = {
        "embed": {"table": jnp.arange(64.0 * 64).reshape(64, 64), "positions": jnp.ones((32, 64))}
    }
    tokens = np.arange(16)[None] * 3
    whole = model.embed(params, tokens, VocabRows(0, 64, 61))
    shares = []
    for start in (0, 16, 32, 48):
        local = {
            "embed": {**params["embed"], "table": params["embed"]["table"][start : start + 16]}
        }
        shares.append(model.embed(local, tokens, VocabRows(start, 16, 61)))
    np.testing.assert_array_equal(sum(shares), whole)
    assert [float(VocabRows(start, 16, 61).first) for start in (0, 16)] == [1.0, 0.0]
    assert VocabRows(48, 16, 61).padding.tolist() == [False] * 13 + [True] * 3


class TestRefusals:
    @pytest.mark.parametrize(
        ("block", "said"),
        [
            ("no_such_package:make", "no_such_package"),
            ("own_model:no_such_function", "no_such_function"),
            ("helpers:configure_nothing", "configure_nothing"),
        ],
    )
    def test_a_function_that_is_not_there_is_named(self, block, said):
        with pytest.raises(RequestError, match=said):
            build_model(load(None, [f"model.block={block}"]).model)

    def test_a_function_that_returns_no_architecture_is_refused(self):
        with pytest.raises(RequestError, match="not an Architecture"):
            build_model(load(None, ["model.block=own_model:not_an_architecture"]).model)

    def test_a_parameter_without_logical_axes_is_named(self):
        class Bare(nnx.Module):
            def __init__(self) -> None:
                self.weight = nnx.Param(jnp.ones((3, 5)))

        model = build_model(load(None, [f"model.block={OWN[0].partition('=')[2]}"]).model)
        bare = Architecture(lambda rngs: Bare(), model.architecture.block, model.architecture.head)
        with pytest.raises(RequestError, match=r"\(3, 5\)"):
            type(model)(model.config, bare).leaves(Layout())
