"""Losses, logits, gradients and AdamW steps against transformers and torch (tests/golden)."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import DEFAULT, FAST, Run, Trained, assert_same_gradients, named

from spmd_train.config import Config, load
from spmd_train.model import build_model

GOLDEN = Path(__file__).parent / "golden"
NAMES = ["llama_untied", "llama_tied", "llama_wide_heads", "qwen2_bias"]
MESHES = {"1x1x1": 1, "2x2x2": 2}  # mesh -> micro-batches


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as archive:
        return dict(archive)


@functools.cache
def config(name: str, mesh: str) -> Config:
    hf = json.loads(str(golden(name)["config_json"]))
    width, heads = hf["hidden_size"], hf["num_attention_heads"]
    settings = {
        "model.layers": hf["num_hidden_layers"],
        "model.width": width,
        "model.heads": heads,
        "model.kv_heads": hf["num_key_value_heads"],
        "model.head_dim": hf.get("head_dim", width // heads),
        "model.ffn": hf["intermediate_size"],
        "model.vocab": hf["vocab_size"],
        "model.norm_eps": format(hf["rms_norm_eps"], "f"),
        "model.rope_theta": hf["rope_parameters"]["rope_theta"],
        "model.tied": str(hf["tie_word_embeddings"]).lower(),
        "model.qkv_bias": str(hf["model_type"] == "qwen2").lower(),
        "batch.global_size": 4,
        "batch.sequence_length": 16,
        "batch.microbatches": MESHES[mesh],
        "optim.lr": 0.01,
        "optim.warmup_steps": 0,
        "optim.schedule": "constant",
        "optim.betas": [0.9, 0.95],
        "optim.weight_decay": 0.1,
        "optim.decay_exclude": "[norms, biases]",
        "optim.clip_norm": 1.0,
    }
    return load(None, [f"{key}={value}" for key, value in settings.items()], mesh=mesh)


def ours(name: str, kind: str) -> Any:
    """Hugging Face's weights ("w:") or gradients ("g:") as our tree: [in, out], heads split."""
    theirs, model = golden(name), config(name, "1x1x1").model
    D, H, N, E = model.width, model.heads, model.kv_heads, model.head_dim

    def stacked(hf_name: str, *shape: int) -> np.ndarray:
        """Layers stacked; matrices transposed from [out, in], vectors as they are."""
        layers = [theirs[f"{kind}:model.layers.{i}.{hf_name}"] for i in range(model.layers)]
        return np.stack([layer.T.reshape(shape) for layer in layers])

    attention = {
        "query": stacked("self_attn.q_proj.weight", D, H, E),
        "key": stacked("self_attn.k_proj.weight", D, N, E),
        "value": stacked("self_attn.v_proj.weight", D, N, E),
        "out": stacked("self_attn.o_proj.weight", H, E, D),
    }
    if model.qkv_bias:
        attention["query_bias"] = stacked("self_attn.q_proj.bias", H, E)
        attention["key_bias"] = stacked("self_attn.k_proj.bias", N, E)
        attention["value_bias"] = stacked("self_attn.v_proj.bias", N, E)
    head: dict[str, Any] = {"norm": {"scale": theirs[f"{kind}:model.norm.weight"]}}
    if not model.tied:
        head["matrix"] = theirs[f"{kind}:lm_head.weight"].T
    return {
        "embed": {"table": theirs[f"{kind}:model.embed_tokens.weight"]},
        "blocks": {
            "attention_norm": {"scale": stacked("input_layernorm.weight", D)},
            "attention": attention,
            "mlp_norm": {"scale": stacked("post_attention_layernorm.weight", D)},
            "mlp": {
                "gate": stacked("mlp.gate_proj.weight", D, model.ffn),
                "up": stacked("mlp.up_proj.weight", D, model.ffn),
                "down": stacked("mlp.down_proj.weight", model.ffn, D),
            },
        },
        "head": head,
    }


@functools.cache
def trained(name: str, mesh: str) -> Trained:
    theirs = golden(name)
    # One with all of the compiler's optimisations, as a run has them.
    options = DEFAULT if (name, mesh) == ("llama_untied", "2x2x2") else FAST
    return Run(config(name, mesh), options).train(
        4, ours(name, "w"), theirs["tokens"], theirs["target_lengths"]
    )


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name):
    model, params = build_model(config(name, "1x1x1").model), ours(name, "w")
    inputs = golden(name)["tokens"][:, :-1]
    logits = jax.jit(model.logits).lower(params, inputs).compile(compiler_options=FAST)
    np.testing.assert_allclose(logits(params, inputs), golden(name)["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", NAMES)
class TestTraining:
    def test_loss_is_torchs_token_mean(self, name, mesh):
        assert trained(name, mesh).tokens[0] == 37
        np.testing.assert_allclose(
            trained(name, mesh).losses[0], golden(name)["loss"], rtol=0, atol=1e-5
        )

    def test_every_gradient_equals_torchs(self, name, mesh):
        assert_same_gradients(trained(name, mesh).gradients, named(ours(name, "g")), 1e-4)

    def test_gradient_norm_equals_torchs(self, name, mesh):
        np.testing.assert_allclose(
            trained(name, mesh).grad_norms[0], golden(name)["grad_norm"], rtol=1e-5
        )

    def test_adamw_losses_equal_torchs(self, name, mesh):
        np.testing.assert_allclose(
            trained(name, mesh).losses, golden(name)["adamw_losses"], rtol=1e-4
        )
