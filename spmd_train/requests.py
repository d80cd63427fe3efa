"""What can be asked on the command line: one dataclass a command, its flags and their help."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

Platform = Literal["cpu", "gpu", "tpu"]


@dataclass(frozen=True)
class Train:
    """Train a model on a mesh of devices (the default command).

    Example: python -m spmd_train --mesh 4x2x4

    Example: python -m spmd_train train --config small --mesh data=2,stage=2 --set optim.lr=1e-3
    """

    mesh: str | None = None
    """Mesh as DATAxMODELxSTAGE (4x2x4) or data=4,model=2,stage=4; auto: the planner's fastest that
    fits the accelerators here. Default: all devices on data."""
    config: str | None = None
    """Configuration file, or the name of a bundled one. Default: tiny."""
    set: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    """Change one key of the configuration, as in optim.lr=3e-4; any number of times."""
    steps: int | None = None
    """Length of the run and of its learning-rate schedule."""
    stop_after: int | None = None
    """Save and leave after this step, as a preemption would; --resume goes on."""
    out: str | None = None
    """Run directory. Default: runs/NAME-TIME."""
    resume: bool = False
    """Continue the run in --out from its newest sound checkpoint."""
    init_from: str | None = None
    """Start a new run from the parameters (without --config: and configuration) of this one."""
    platform: Platform | None = None
    """Refuse to run on anything else. Default: what JAX finds."""


@dataclass(frozen=True)
class Plan:
    """Which mesh for this model on this cluster: memory and time of every legal one, best first.

    Example: python -m spmd_train plan --config llama-30b --cluster 32x24gb

    Example: python -m spmd_train plan --config llama-30b --cluster 32x24gb --mesh 4x2x4 --zero 1
    --microbatch-size 1 --schedule 1f1b --remat stage --compute bfloat16

    Example: python -m spmd_train plan --config llama-30b --cluster cluster-a --cluster cluster-b
    """

    cluster: tyro.conf.UseAppendAction[list[str]]
    """Cluster file, or the name of a bundled one. Given several times: one configuration for all
    of them, ranked by the slowest."""
    config: str | None = None
    """Configuration file, or the name of a bundled one. Default: tiny."""
    set: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    """Change one key of the configuration, as in model.layers=64; any number of times."""
    global_batch: int | None = None
    """Sequences per step. Default: the configuration's."""
    top: int = 10
    """Number of candidates shown."""
    mesh: str | None = None
    """Only this mesh, and what of it does not fit."""
    zero: Literal[0, 1, 2, 3] | None = None
    """Only this ZeRO level."""
    microbatch_size: int | None = None
    """Only micro-batches of so many rows."""
    schedule: Literal["1f1b", "gpipe"] | None = None
    """Only this schedule."""
    remat: Literal["none", "dots", "full", "stage"] | None = None
    """Only this rematerialisation."""
    compute: Literal["bfloat16", "float16", "float8", "float32"] | None = None
    """Only this compute dtype. Default: the configuration's; bfloat16 or float32 where it is
    auto."""
    verify: int = 0
    """Compile the first so many with the real compiler (spmd-train[compile-gpu] or [compile-tpu])
    and show its memory beside the predicted."""
    memo: str | None = None
    """Write a decision memo on the first candidate here (Markdown)."""
    html: str | None = None
    """Write the plan as one self-contained page here."""
    pictures: bool = False
    """Draw memory, schedule, and memory against time in the terminal too."""
    calibrate: bool = False
    """First measure the devices here for about two minutes and write what they do into the cluster
    file, from then on used instead of the tables."""
    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True)
class Eval:
    """Loss and bits per byte of a trained model on text it was not trained on.

    Example: python -m spmd_train eval --run runs/a

    Example: python -m spmd_train eval --run runs/a --data other.txt --step 400 --mesh 1x1x1 --json
    """

    run: str
    """Run directory."""
    step: int | None = None
    """Saved step. Default: the newest sound one."""
    data: str | None = None
    """Text file, prepared corpus or Megatron dataset, read with the run's tokenizer. Default: what
    the run held out (data.eval_fraction)."""
    mesh: str | None = None
    """Mesh to evaluate on. Default: the run's."""
    set: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    """Change a key that a resume may change, as in precision.policy=fp32; any number of times."""
    batch_size: int | None = None
    """Rows at a time, rounded up to what the mesh divides. Default: the run's. The result does not
    depend on it."""
    batches: int | None = None
    """Read at most so many batches, their rows evenly spread. Default: all."""
    platform: Platform | None = None
    """Refuse to run on anything else. Default: what JAX finds."""
    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True)
class Generate:
    """Continue a text with a trained model.

    Example: python -m spmd_train generate --run runs/a --prompt "It is a truth"
    """

    run: str
    """Run directory."""
    prompt: str
    """Text to continue."""
    max_tokens: int = 200
    """Number of tokens to add."""
    temperature: float = 0.8
    """Randomness of the choice; 0 always takes the likeliest token."""
    seed: int = 0
    """Seed of the choice."""
    platform: Platform | None = None
    """Refuse to run on anything else. Default: what JAX finds."""


@dataclass(frozen=True)
class Compile:
    """Compile the training step for GPUs or TPUs that need not be here: memory and collectives.

    Example: python -m spmd_train compile --config llama-30b --mesh 4x2x4 --target h100-80gb
    --hosts 4

    Example: python -m spmd_train compile --config llama-30b --mesh 4x2x4 --target v5p --json
    """

    mesh: str
    """Mesh as DATAxMODELxSTAGE (4x2x4) or data=4,model=2,stage=4."""
    target: str | None = None
    """Accelerator, by its name in hardware.yaml: h100-80gb, rtx4090-24gb, v5p. Default: that of
    --cluster."""
    config: str | None = None
    """Configuration file, or the name of a bundled one. Default: tiny."""
    set: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    """Change one key of the configuration, as in pipeline.remat=stage; any number of times."""
    hosts: int | None = None
    """Machines that the GPUs are spread over; a TPU slice has its own. Default: 8 GPUs each."""
    cluster: str | None = None
    """Cluster file, or the name of a bundled one: its accelerator, hosts and topology."""
    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True)
class _Steps:
    run: tyro.conf.Positional[str]
    """Run directory."""
    step: int | None = None
    """This step alone."""
    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True)
class Ls(_Steps):
    """List the steps of a run, without reading their contents.

    Example: python -m spmd_train checkpoint ls runs/a
    """


@dataclass(frozen=True)
class Verify(_Steps):
    """Read every file of a run's steps and compare it with its checksum; 1 if any is damaged.

    Example: python -m spmd_train checkpoint verify runs/a
    """


@dataclass(frozen=True)
class Show(_Steps):
    """Say what a step (the newest, unless --step is given) holds: arrays, counters, configuration.

    Example: python -m spmd_train checkpoint show runs/a --step 40
    """


@dataclass(frozen=True)
class DataPrepare:
    """Turn texts into token ids to train on; killed and repeated, it goes on where it was.

    Example: python -m spmd_train data prepare books/ --train-bpe 8192 --out data/books

    Example: python -m spmd_train data prepare chats.jsonl --tokenizer llama/tokenizer.json
    --chat-template llama/chat_template.jinja --out data/chats

    Example: python -m spmd_train data prepare "web/*.jsonl.zst" --tokenizer llama/tokenizer.json
    --out data/web --workers 16 --skip-bad
    """

    inputs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="INPUT...")]
    """Files, directories, globs: .txt (one document), .jsonl, .jsonl.gz, .jsonl.zst, .parquet."""
    out: str
    """Directory to make."""
    tokenizer: str | None = None
    """bytes, or the path of a tokenizer.json, a SentencePiece .model, or a directory with one."""
    train_bpe: int | None = None
    """Train a byte-level BPE of so many ids on the input instead."""
    text_field: str = "text"
    """Field (.jsonl) or column (.parquet) that holds the text; a.b is a field in a field."""
    format: Literal["auto", "text", "messages", "prompt-completion"] = "auto"
    """What a line of a .jsonl is: a text, or a conversation or a prompt with its completion, of
    which only the assistant's turns or the completion are learned. Default: what the first is."""
    chat_template: str | None = None
    """Jinja file that makes texts of conversations. Default: ChatML."""
    bos: bool = False
    """Begin each document with the tokenizer's BOS."""
    eos: bool = False
    """End each document with its EOS, or fail if it has none. Default: if it has one, but for
    conversations, which their template ends."""
    no_eos: bool = False
    """Do not end documents with an EOS."""
    workers: int | None = None
    """Processes. Default: one a core. The result does not depend on it."""
    skip_bad: bool = False
    """Leave out, count and list records that cannot be used, instead of stopping at the first."""


@dataclass(frozen=True)
class DataInspect:
    """Show what a prepared corpus, or a Megatron .bin and .idx, holds.

    Example: python -m spmd_train data inspect data/books --samples 5
    """

    path: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    """Directory of `data prepare`, or the path of a .bin or .idx."""
    samples: int = 3
    """Number of documents shown."""
    json: bool = False
    """Print one JSON document."""


Steps = (
    Annotated[Ls, tyro.conf.subcommand("ls")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Show, tyro.conf.subcommand("show")]
)
Data = (
    Annotated[DataPrepare, tyro.conf.subcommand("prepare")]
    | Annotated[DataInspect, tyro.conf.subcommand("inspect")]
)
Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Plan, tyro.conf.subcommand("plan")]
    | Annotated[Eval, tyro.conf.subcommand("eval")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Compile, tyro.conf.subcommand("compile")]
    | Annotated[
        Steps,
        tyro.conf.subcommand(
            "checkpoint", description="List, verify or show the checkpoints of a run."
        ),
    ]
    | Annotated[
        Data, tyro.conf.subcommand("data", description="Prepare and inspect what is trained on.")
    ]
)
