"""The groups of the configuration: keys with type, default, range and one sentence of help.

The reference page, the error messages and the "did you mean" answers are read from these models.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from spmd_train.errors import listed, nearest_divisors, nearest_multiples


class Section(BaseModel):
    """Strict: `true` is no integer and `"3"` no number, but an integer is a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The architecture; the defaults are those of the bundled `tiny`."""

    layers: int = Field(default=4, ge=1, description="Number of transformer blocks.")
    width: int = Field(default=128, ge=1, description="Width of the residual stream.")
    heads: int = Field(default=4, ge=1, description="Number of query heads.")
    kv_heads: int = Field(
        default=2, ge=1, description="Number of key and value heads; divides heads."
    )
    head_dim: int = Field(
        default=None,
        ge=2,
        validate_default=True,
        description="Width of one head, an even number; null means width / heads.",
    )
    ffn: int = Field(default=352, ge=1, description="Hidden width of the gated feed-forward layer.")
    vocab: int = Field(default=256, ge=1, description="Number of token ids the model knows.")
    rope_theta: float = Field(
        default=10000.0, gt=0, description="Base of the rotary position encoding."
    )
    norm_eps: float = Field(
        default=1e-5, gt=0, description="Constant added to the variance in RMSNorm."
    )
    tied: bool = Field(default=True, description="Whether the head shares the embedding's weights.")
    qkv_bias: bool = Field(default=False, description="Whether query, key and value have a bias.")
    qk_norm: bool = Field(
        default=False, description="Whether queries and keys are normalised per head."
    )
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Dropout rate on the embedding and the residual branches.",
    )
    logit_softcap: float | None = Field(
        default=None,
        gt=0,
        description="Bound c of the logits, c * tanh(logits / c); null means none.",
    )
    z_loss: float = Field(
        default=0.0, ge=0, description="Weight of the squared log-partition added to the loss."
    )
    attention: Literal["auto", "xla", "cudnn", "splash"] = Field(
        default="auto", description="Attention implementation; auto chooses by platform."
    )
    block: str = Field(
        default="decoder",
        description="Architecture: decoder, or package.module:function returning your own.",
    )

    @field_validator("head_dim", mode="before")
    @classmethod
    def _derive_head_dim(cls, value: Any, info: ValidationInfo) -> Any:
        """Resolve null here, so that everybody else reads an integer."""
        width, heads = info.data.get("width"), info.data.get("heads")
        if value is not None:
            return value
        if width is None or heads is None:
            return 2  # they are reported themselves; nothing to add
        if width % heads:
            raise ValueError(
                f"model.width={width} is not divisible by model.heads={heads}; nearest widths that "
                f"are: {listed(nearest_multiples(width, heads))}, or set model.head_dim."
            )
        return width // heads

    @field_validator("block")
    @classmethod
    def _check_block(cls, value: str) -> str:
        if value != "decoder" and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
            raise ValueError(
                f"model.block is {value!r}; it must be decoder or package.module:function."
            )
        return value

    @model_validator(mode="after")
    def _check_heads(self) -> ModelConfig:
        problems = []
        if self.heads % self.kv_heads:
            problems.append(
                f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}; "
                f"values that do: {listed(nearest_divisors(self.heads, self.kv_heads))}."
            )
        if self.head_dim % 2:
            even = [d for d in (self.head_dim - 1, self.head_dim + 1) if d > 0]
            problems.append(
                f"model.head_dim={self.head_dim} is odd, but RoPE rotates pairs; nearest even "
                f"values: {listed(even)} (model.width {listed(d * self.heads for d in even)})."
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self


class BatchConfig(Section):
    """How many tokens a step sees, and in how many pieces."""

    global_size: int = Field(default=32, ge=1, description="Sequences per step, over all devices.")
    microbatches: int = Field(default=4, ge=1, description="Micro-batches per data shard and step.")
    sequence_length: int = Field(default=128, ge=1, description="Tokens per sequence.")


class ParallelConfig(Section):
    """What the mesh axes split besides the obvious."""

    zero: int = Field(
        default=1,
        ge=0,
        le=3,
        description="Split over data: 0 nothing, 1 the optimizer, 2 gradients too, 3 weights too.",
    )
    sequence_parallel: Literal["auto"] | bool = Field(
        default="auto",
        description="Split activations by position over model; auto: where model > 1.",
    )


class PipelineConfig(Section):
    """How micro-batches travel through the stages."""

    schedule: Literal["auto", "gpipe", "1f1b"] = Field(
        default="auto", description="Order of forward and backward passes; auto means 1f1b."
    )
    remat: Literal["auto", "none", "dots", "full", "stage"] = Field(
        default="auto",
        description="What is kept for the backward pass: all residuals (none), matmul outputs "
        "(dots), layer inputs (full) or only the stage's input (stage).",
    )
    idle: Literal["skip", "masked"] = Field(
        default="skip", description="Whether idle ticks skip their work or compute on zeros."
    )

    @property
    def resolved(self) -> tuple[str, str]:
        """Schedule and remat policy, `auto` resolved."""
        schedule = "1f1b" if self.schedule == "auto" else self.schedule
        return schedule, "full" if self.remat == "auto" else self.remat


class LossScaleConfig(Section):
    """How far the loss is scaled up, so that small fp16 gradients do not vanish."""

    rule: Literal["auto", "none", "static", "dynamic"] = Field(
        default="auto", description="auto: dynamic for fp16 compute, none for the others."
    )
    initial: float = Field(
        default=65536.0, gt=0, description="Scale at the start; a static scale stays there."
    )
    growth_interval: int = Field(
        default=2000, ge=1, description="Clean steps, none of them skipped, before it grows."
    )
    factor: float = Field(default=2.0, gt=1, description="What it grows by.")
    backoff: float = Field(
        default=0.5, gt=0, lt=1, description="What an overflow multiplies it by."
    )
    hysteresis: int = Field(
        default=1, ge=1, description="Overflows before it backs off; refilled only when it grows."
    )
    min: float = Field(default=1.0, gt=0, description="Lowest scale.")
    max: float = Field(default=2.0**24, gt=0, le=2.0**126, description="Highest scale.")

    @model_validator(mode="after")
    def _check_order(self) -> LossScaleConfig:
        if not self.min <= self.initial <= self.max:
            raise ValueError(
                f"precision.loss_scale.initial={self.initial:g} is not between "
                f"precision.loss_scale.min={self.min:g} and precision.loss_scale.max={self.max:g}; "
                f"nearest value that is: {min(max(self.initial, self.min), self.max):g}."
            )
        return self


class PrecisionConfig(Section):
    """In which number formats the step computes, sums and stores."""

    policy: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = Field(
        default="auto", description="Precision recipe; auto chooses by platform."
    )
    compute: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type of the forward and backward pass; auto means the policy's.",
    )
    accumulate: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Type in which micro-batches' gradients add up."
    )
    compensated: bool = Field(
        default=False, description="Whether gradients add up with Kahan's compensation."
    )
    reduce: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type in which gradients cross data; they are summed in float32.",
    )
    master: Literal["auto", "float32", "float64", "bfloat16"] = Field(
        default="auto", description="Type of the parameters the optimizer updates."
    )
    logits: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Type of the logits; the softmax is float32."
    )
    moments: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Type of the optimizer's first moment; the second is float32."
    )
    loss_scale: LossScaleConfig = LossScaleConfig()
    fp8_scaling: Literal["current", "delayed"] = Field(
        default="current",
        description="Whether fp8 scales come from the tensor itself, or from the steps before.",
    )
    fp8_history: int = Field(
        default=16,
        ge=1,
        le=1024,
        description="Steps whose largest values delayed scaling looks at.",
    )
    reproducible: bool = Field(
        default=False,
        description="Whether every (data, stage) mesh of one model size gives the same bits.",
    )
    logical_shards: int = Field(
        default=8,
        ge=1,
        description="Parts of a reproducible sum, whatever the mesh: a power of two.",
    )
    allow_unsafe: bool = Field(
        default=False, description="Whether combinations that lose information are accepted."
    )


class OptimConfig(Section):
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "adafactor", "lion", "muon"] = Field(
        default="adamw", description="The optimizer."
    )
    lr: float = Field(default=3e-4, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(default=10, ge=0, description="Steps of linear warm-up.")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        default="cosine",
        description="Shape of the learning rate after the warm-up; wsd: stable, then a decay.",
    )
    decay_fraction: float = Field(
        default=0.1, gt=0, le=1, description="Share of all steps in which wsd decays, at the end."
    )
    final_lr_fraction: float = Field(
        default=0.1, ge=0, le=1, description="Learning rate at the last step, as a fraction of lr."
    )
    betas: tuple[
        Annotated[float, Field(ge=0, lt=1)],
        Annotated[float, Field(ge=0, lt=1)],
    ] = Field(default=(0.9, 0.95), strict=False, description="Decay rates of Adam's two moments.")
    eps: float = Field(
        default=1e-8, ge=1e-30, description="Constant added to Adam's denominator, in float32."
    )
    weight_decay: float = Field(default=0.1, ge=0, description="Decoupled weight decay.")
    decay_exclude: tuple[Literal["norms", "biases", "embeddings"], ...] = Field(
        default=("norms", "biases", "embeddings"),
        strict=False,
        description="Parameters that are not decayed.",
    )
    clip_norm: float | None = Field(
        default=1.0, gt=0, description="Largest global gradient norm; null means no clipping."
    )


class GuardConfig(Section):
    """What is done about a step that would damage the run."""

    max_consecutive_skips: int = Field(
        default=50, ge=1, description="Bad steps in a row after which the run stops."
    )
    diagnoses: int = Field(
        default=8, ge=0, description="Bad steps of a run that are run again to find the cause."
    )
    spike_sigma: float | None = Field(
        default=None,
        gt=0,
        description="Skip a loss or gradient norm this many deviations above the window's mean "
        "(OLMo: 6); null means never.",
    )
    spike_window: int = Field(
        default=128, ge=4, description="Steps in the window; it acts once half full."
    )
    rollback_after: int | None = Field(
        default=None,
        ge=1,
        description="Bad steps in a row after which the last checkpoint is restored and the data "
        "since then left out; null means never.",
    )
    replicas_every: int = Field(
        default=0,
        ge=0,
        description="Steps between two comparisons of the replicas over data; 0 means never.",
    )


class DataConfig(Section):
    """What is trained on."""

    source: str | None = Field(
        default=None,
        description="A text file, a directory of `data prepare`, or a Megatron .bin; null means "
        "the bundled sample.",
    )
    mixing: dict[str, float] | None = Field(
        default=None,
        description="Several of these instead, each with its share of the rows: {a: 0.7, b: 0.3}.",
    )
    tokenizer: str | None = Field(
        default=None,
        description="bytes, or the path of a tokenizer; null: a prepared corpus's own, bytes for a "
        "text file.",
    )
    packing: Literal["windows", "documents", "padded"] = Field(
        default="windows",
        description="Rows of a text without end (windows), with every document on its own in them "
        "(documents), or of one document each (padded).",
    )
    eval_fraction: float = Field(
        default=0.0, ge=0, lt=0.5, description="Share of the documents that are not trained on."
    )

    @property
    def packed(self) -> bool:
        """Whether a row holds documents that must be kept apart.

        One document with padding after it needs no more than the causal mask.
        """
        return self.packing == "documents"

    @field_validator("mixing")
    @classmethod
    def _check_weights(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value is not None and not value:
            raise ValueError("data.mixing is empty; name at least one corpus, or leave it out.")
        for path, weight in (value or {}).items():
            if weight <= 0:
                raise ValueError(
                    f"data.mixing gives {path!r} the weight {weight:g}; a weight is above 0: give a"
                    " small one such as 0.01, or leave the corpus out."
                )
        return value

    @model_validator(mode="after")
    def _check_one_origin(self) -> DataConfig:
        if self.source is not None and self.mixing is not None:
            raise ValueError(
                f"data.source={self.source} and data.mixing are both given; leave one out, or give "
                "the source a weight in data.mixing."
            )
        return self


class EvalConfig(Section):
    """When the model is evaluated on what `data.eval_fraction` holds out."""

    every_steps: int = Field(
        default=0, ge=0, description="Steps between evaluations, and after the last; 0 means never."
    )
    batches: int | None = Field(
        default=None,
        ge=1,
        description="Batches of each, their rows evenly spread over the held-out ones; null means "
        "all of them.",
    )


class CheckpointConfig(Section):
    """When the state is saved."""

    every_steps: int = Field(
        default=0, ge=0, description="Steps between saves; 0 means only at the end."
    )
    every_seconds: float | None = Field(
        default=None, gt=0, description="Save also once this long has passed since the last save."
    )
    keep_last: int = Field(default=3, ge=1, description="Number of newest checkpoints kept.")
    keep_every: int = Field(
        default=0, ge=0, description="Keep each step that is a multiple of this; 0 keeps none."
    )


class WatchdogConfig(Section):
    """When a run that hangs, or has lost a process, is ended."""

    silent_seconds: float = Field(
        default=60.0,
        ge=0,
        description="Time without a sign of life from a process after which the others end; "
        "0 means never.",
    )
    stalled_seconds: float = Field(
        default=600.0,
        ge=0,
        description="Time without progress, compilation apart, after which the run ends; 0 means "
        "never, and 5 times what saves and steps usually take is always allowed.",
    )


class LogConfig(Section):
    """What is printed."""

    every_steps: int = Field(default=10, ge=1, description="Steps between two printed lines.")
    sample_ids: bool = Field(
        default=False, description="Write the ids of each step's samples to metrics.jsonl."
    )
