"""Continue a text with the model of a run directory, on one device.

Every token is a forward pass over the last `sequence_length` tokens: right for seeing what a run
learned, not for serving.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_train.build import build_step
from spmd_train.checkpoint.manager import Checkpoints
from spmd_train.config import Config
from spmd_train.data.tokenizer import load_of_run
from spmd_train.errors import RequestError
from spmd_train.mesh import MeshShape, build_mesh
from spmd_train.runs import RunDirectory
from spmd_train.start import load_parameters, sound_step, tell_damage


@dataclass(frozen=True)
class Sampling:
    """Attributes:
    max_tokens: how many to add. temperature: 0 takes the likeliest. seed: of the choice.
    """

    max_tokens: int
    temperature: float
    seed: int

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RequestError(f"--max-tokens is {self.max_tokens}; it must be at least 1.")
        if self.temperature < 0:
            raise RequestError(f"--temperature is {self.temperature}; it must be 0 or more.")


def continue_text(
    run: RunDirectory, config: Config, prompt: str, sampling: Sampling, platform: str | None = None
) -> Iterator[str]:
    """The prompt, then the continuation piece by piece.

    Raises:
        RequestError: the prompt is empty, or the run has no complete checkpoint.
    """
    with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        found = checkpoints.newest_sound()
        newest = sound_step(found, run)
        text = load_of_run(run.path, checkpoints.meta(newest)["data"]["tokenizer"])
        tokens = [int(t) for t in text.encode(prompt)]
        if not tokens:
            raise RequestError("--prompt is empty; give at least one character to continue.")
        mesh, _ = build_mesh(MeshShape(), platform)
        step, _ = build_step(config, mesh)
        params = step.spec.image(load_parameters(checkpoints, newest, step.spec))
    tell_damage(found)
    model, length = step.pipeline.model, config.batch.sequence_length

    @jax.jit
    def choose(params: Any, window: jax.Array, last: jax.Array, key: jax.Array) -> jax.Array:
        logits = model.logits(params, window[None])[0, last]
        logits = jnp.where(jnp.arange(logits.size) < text.vocab_size, logits, -jnp.inf)
        if sampling.temperature == 0:
            return jnp.argmax(logits)
        return jax.random.categorical(key, logits / sampling.temperature)

    yield prompt
    key, shown, start = jax.random.key(sampling.seed), "", len(tokens)
    for i in range(sampling.max_tokens):
        recent = tokens[-length:]
        window = np.zeros(length, np.int32)
        window[: len(recent)] = recent
        token = choose(params, window, len(recent) - 1, jax.random.fold_in(key, i))
        tokens.append(int(token))
        # A character may take several tokens: show only what can no longer change.
        now = text.decode(tokens[start:])
        if not now.endswith("\ufffd") or i == sampling.max_tokens - 1:
            yield now[len(shown) :]
            shown = now
