"""What is planned: a transformer, a batch, and the way it is executed on a mesh.

The trainer's own runs, and those of others (Megatron-LM, MaxText) whose published measurements the
models are tested against, are described by the same objects.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, cast

import jax.numpy as jnp

from spmd_train.errors import listed
from spmd_train.mesh import MeshShape
from spmd_train.optim import first_moment_decay
from spmd_train.precision import Policy, resolve_policy
from spmd_train.shape_rules import sequence_parallel_on

if TYPE_CHECKING:
    from spmd_train.config import Config
    from spmd_train.config_groups import ModelConfig

Remat = Literal["none", "dots", "selective", "full", "stage"]
ScheduleName = Literal["1f1b", "gpipe", "interleaved"]
Compute = Literal["bfloat16", "float16", "float8", "float32"]


@dataclass(frozen=True)
class Transformer:
    """The sizes that memory and time depend on.

    Attributes:
        layers, width, heads, kv_heads, head_dim, ffn, vocab: L, D, H, N, E, F, V.
        tied: whether the head is the embedding's table.
        gated: whether the feed-forward layer has three matrices (LLaMA) or two (GPT).
        qkv_bias, qk_norm: small extra parameters of the trainer's own decoder.
        biases: every product has a bias, every norm two vectors (GPT).
        positions: learned position embeddings, 0 for none.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    gated: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    biases: bool = False
    positions: int = 0

    @classmethod
    def gpt(cls, layers: int, width: int, heads: int, vocab: int, positions: int) -> Transformer:
        """The shape of GPT-2 and -3, as Megatron-LM trains it."""
        return cls(
            layers, width, heads, heads, width // heads, 4 * width, vocab,
            tied=True, gated=False, biases=True, positions=positions,
        )  # fmt: skip

    @property
    def matrix_parameters(self) -> int:
        """Of one layer, without vectors."""
        attention = 2 * self.width * self.head_dim * (self.heads + self.kv_heads)
        return attention + (3 if self.gated else 2) * self.width * self.ffn

    @property
    def layer_parameters(self) -> int:
        """Of one layer."""
        norms = 2 * self.width
        if self.biases:
            qkv = self.head_dim * (self.heads + 2 * self.kv_heads)
            norms = 4 * self.width + qkv + 2 * self.width + self.ffn
        if self.qkv_bias:
            norms += self.head_dim * (self.heads + 2 * self.kv_heads)
        if self.qk_norm:
            norms += 2 * self.head_dim
        return self.matrix_parameters + norms

    @property
    def parameters(self) -> int:
        """In all."""
        tables = self.vocab * self.width * (1 if self.tied else 2)
        final = self.width * (2 if self.biases else 1)
        return self.layers * self.layer_parameters + tables + final + self.positions * self.width


def unmodelled(config: Config) -> str | None:
    """What of a configuration memory and time have no model of, in a sentence; None if all has."""
    for key, value, known in (
        ("model.block", config.model.block, ("decoder",)),
        ("precision.reproducible", config.precision.reproducible, (False,)),
        ("pipeline.idle", config.pipeline.idle, ("skip",)),
        ("optim.name", config.optim.name, ("adamw", "lion", "adafactor")),
    ):
        if value not in known:
            shown, others = (str(v).lower() for v in (value, listed(known)))
            return (
                f"{key}={shown} is not modelled by the planner, whose figures are for "
                f"{key}={others}; `compile --target` needs no model."
            )
    return None


@dataclass(frozen=True)
class Workload:
    """What a configuration asks for, whatever the mesh.

    Attributes:
        model: of the trainer. policy: number formats. optimizer: `optim.name`.
        sequence_length, global_size: tokens of a sequence, sequences of a step.
        platform: "gpu" or "tpu", what it is planned for.
        packed: whether a row holds several documents, whose numbers are part of the batch.
    """

    model: ModelConfig
    policy: Policy
    optimizer: str
    sequence_length: int
    global_size: int
    platform: str
    packed: bool = False

    @classmethod
    def of(cls, config: Config, platform: str) -> Workload:
        policy = resolve_policy(config.precision, platform, first_moment_decay(config.optim))
        batch = config.batch
        return cls(
            config.model, policy, config.optim.name, batch.sequence_length, batch.global_size,
            platform, config.data.packed,
        )  # fmt: skip

    @cached_property
    def reduce_bytes(self) -> int:
        """Of a gradient element between data shards."""
        return int(jnp.dtype(self.policy.reduce).itemsize)

    @cached_property
    def transformer(self) -> Transformer:
        """Its sizes alone."""
        m = self.model
        return Transformer(
            m.layers, m.width, m.heads, m.kv_heads, m.head_dim, m.ffn, m.vocab, m.tied,
            qkv_bias=m.qkv_bias, qk_norm=m.qk_norm,
        )  # fmt: skip


@dataclass(frozen=True)
class Execution:
    """One way to run a step.

    Attributes:
        mesh: devices along data, model, stage.
        microbatches: M, per data shard and step.
        microbatch_size: rows of a micro-batch on one data shard.
        sequence_length: T.
        zero: what is split over data: 0 nothing, 1 optimizer, 2 gradients too, 3 weights too.
        schedule: its name; `interleaved` is costed, the trainer does not run it.
        virtual_stages: v, chunks of layers a stage has (interleaved).
        remat: what is kept for the backward pass; `selective` (Megatron: attention recomputed) is
            costed, the trainer does not run it.
        compute: dtype of the products.
        sequence_parallel: activations between blocks split by position over model.
        context: devices that split the sequence itself; the trainer runs 1.
        vocabulary: "spread" over all stages (the trainer), or "ends": look-up on the first stage,
            head on the last (Megatron-LM).
        lockstep: stages meet at every tick (the trainer's scan), or run on their own.
        overlap_data: gradient sums and weight gathers of the data axis hide behind compute.
        reduce_bytes: of a gradient element on the wire.
        fused_attention: scores are never written to memory (flash, splash, cuDNN).
        eager: operations are sent one by one by Python, element-wise ones unfused and with dropout
            (Megatron-LM of 2021); else compiled.
        order: axes from the innermost (fastest links) outwards; the default is the trainer's.
    """

    mesh: MeshShape
    microbatches: int
    microbatch_size: int
    sequence_length: int
    zero: int = 1
    schedule: ScheduleName = "1f1b"
    virtual_stages: int = 1
    remat: Remat = "full"
    compute: Compute = "bfloat16"
    sequence_parallel: bool = True
    context: int = 1
    vocabulary: Literal["spread", "ends"] = "spread"
    lockstep: bool = True
    overlap_data: bool = False
    reduce_bytes: int = 4
    fused_attention: bool = True
    eager: bool = False
    order: tuple[str, ...] = ("model", "context", "stage", "data")

    @classmethod
    def of(cls, config: Config, mesh: MeshShape, policy: Policy) -> Execution:
        """How the trainer runs `config` on `mesh`."""
        batch, (schedule, remat) = config.batch, config.pipeline.resolved
        return cls(
            mesh=mesh,
            microbatches=batch.microbatches,
            microbatch_size=batch.global_size // (mesh.data * batch.microbatches),
            sequence_length=batch.sequence_length,
            zero=config.parallel.zero,
            schedule=cast(ScheduleName, schedule),
            remat=cast(Remat, remat),
            compute="float8" if policy.fp8 else policy.described()["compute"],
            sequence_parallel=sequence_parallel_on(config, mesh),
            reduce_bytes=int(jnp.dtype(policy.reduce).itemsize),
        )

    @property
    def devices(self) -> int:
        """JAX devices in all."""
        return self.mesh.size * self.context

    @property
    def global_size(self) -> int:
        """Sequences of a step."""
        return self.mesh.data * self.microbatches * self.microbatch_size

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_size * self.sequence_length

    def with_mesh(self, **sizes: int) -> Execution:
        """The same on another mesh."""
        return replace(self, mesh=replace(self.mesh, **sizes))
