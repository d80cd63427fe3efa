"""Make, or check, the golden values of tests/golden with transformers and torch.

    pip install torch==2.13.0 transformers==5.24.0        # in an environment of their own
    python scripts/make_golden.py --check tests/golden    # recompute from the stored weights
    python scripts/make_golden.py --out DIR               # new random weights and tokens

Keys and tolerances are in tests/golden/README.md. Neither package is ever a dependency.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama_untied": {"tie_word_embeddings": False, "rms_norm_eps": 1e-6},
    "llama_tied": {"tie_word_embeddings": True, "rms_norm_eps": 1e-6},
    "llama_wide_heads": {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "head_dim": 16},
    "qwen2_bias": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
}
LENGTHS = np.array([16, 3, 11, 7])
CLASSES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}


def build(config: dict[str, Any]) -> torch.nn.Module:
    config_class, model_class = CLASSES[config["model_type"]]
    model = model_class(config_class(**config)).float().eval()
    model.set_attn_implementation("eager")
    return model


def token_mean(model: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
    logits = model(tokens[:, :-1]).logits
    return logits, torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100
    )


def compute(model: torch.nn.Module, tokens: np.ndarray, lengths: np.ndarray) -> dict[str, Any]:
    """Everything a golden file holds besides its inputs."""
    ids = torch.tensor(tokens, dtype=torch.long)
    targets = ids[:, 1:].clone()
    targets[torch.arange(targets.shape[1])[None] >= torch.tensor(lengths)[:, None]] = -100
    named = dict(model.named_parameters())
    values: dict[str, Any] = {f"w:{n}": p.detach().numpy().copy() for n, p in named.items()}
    logits, loss = token_mean(model, ids, targets)
    loss.backward()
    values |= {f"g:{n}": p.grad.numpy().copy() for n, p in named.items()}
    norm = torch.sqrt(sum((p.grad**2).sum() for p in named.values()))
    values |= {"logits": logits.detach().numpy(), "loss": loss.item(), "grad_norm": norm.item()}
    decayed = [p for p in named.values() if p.ndim >= 2]
    vectors = [p for p in named.values() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for _ in range(4):
        adamw.zero_grad()
        _, loss = token_mean(model, ids, targets)
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
    return values | {"adamw_losses": np.array(losses)}


def make(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, changes in MODELS.items():
        torch.manual_seed(0)
        kind = name.split("_")[0]
        config = {**SHAPE, **changes, "model_type": kind}
        model = build(config)
        tokens = np.random.default_rng(0).integers(0, 64, (4, 17)).astype(np.int32)
        values = compute(model, tokens, LENGTHS)
        config_json = json.dumps(model.config.to_diff_dict() | {"model_type": kind})
        np.savez(
            out / f"{name}.npz",
            tokens=tokens,
            target_lengths=LENGTHS,
            config_json=config_json,
            **values,
        )


def check(directory: Path) -> None:
    """Largest differences between the stored values and those computed now."""
    for name in MODELS:
        stored = np.load(directory / f"{name}.npz", allow_pickle=False)
        model = build(json.loads(str(stored["config_json"])))
        weights = {k[2:]: torch.tensor(stored[k]) for k in stored.files if k.startswith("w:")}
        model.load_state_dict(weights, strict=False)
        model.tie_weights()
        values = compute(model, stored["tokens"], stored["target_lengths"])
        worst = {k: float(np.abs(stored[k] - v).max()) for k, v in values.items() if k in stored}
        kinds = {"weights": "w:", "gradients": "g:"}
        row = {label: max(d for k, d in worst.items() if k[:2] == p) for label, p in kinds.items()}
        row |= {k: worst[k] for k in ("logits", "loss", "grad_norm", "adamw_losses")}
        print(name, {k: f"{v:.1e}" for k, v in row.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", type=Path)
    parser.add_argument("--out", type=Path)
    request = parser.parse_args()
    if request.check:
        check(request.check)
    if request.out:
        make(request.out)


if __name__ == "__main__":
    main()
