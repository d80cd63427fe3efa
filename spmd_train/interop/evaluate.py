"""Evaluate a saved step of a run: on what the run held out, or on other data.

On any mesh, with any batch size: the loss is that of the tokens, not of the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from spmd_train.build import build_step
from spmd_train.checkpoint.manager import Checkpoints
from spmd_train.config import Config
from spmd_train.data.heldout import Heldout, split
from spmd_train.data.sequences import Samples, Sequences
from spmd_train.data.source import check_vocabulary, holds_ids, open_source
from spmd_train.data.stream import open_stream
from spmd_train.data.tokenizer import ByteTokenizer, load_of_run
from spmd_train.errors import RequestError
from spmd_train.evaluation import Evaluated, Evaluation
from spmd_train.mesh import DATA
from spmd_train.runs import RunDirectory
from spmd_train.start import check_same_data, find_step, load_model, tell_damage


@dataclass(frozen=True)
class Options:
    """Attributes:
    step: which of the run's; None takes the newest sound one.
    data: a text file, prepared corpus or Megatron dataset; None takes what the run held out.
    batch_size: rows at a time; None takes the run's. batches: most that are read, None all.
    """

    step: int | None = None
    data: str | None = None
    batch_size: int | None = None
    batches: int | None = None

    def __post_init__(self) -> None:
        for flag, value in (("--batch-size", self.batch_size), ("--batches", self.batches)):
            if value is not None and value < 1:
                raise RequestError(f"{flag} is {value}; it must be at least 1.")


def evaluate(
    run: RunDirectory,
    config: Config,
    mesh: Mesh,
    options: Options,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[int, Evaluated]:
    """The step that was evaluated, and how well it predicts.

    Raises:
        RequestError: there is no such step or data, or they do not belong together.
        RunError: the step is damaged, or the data have no token to predict.
    """
    with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        found = find_step(checkpoints, run, options.step)
        assert found.step is not None
        meta = checkpoints.meta(found.step)
        heldout, where = _data(run, config, options.data, meta)
        config = with_batch(config, mesh, options.batch_size or config.batch.global_size)
        step, _ = build_step(config, mesh)
        evaluation = Evaluation(step, config, heldout, options.batches, where)
        tell_damage(found)
        say(f"step {found.step} of {run.path}, {evaluation}")
        evaluation.compile()
        evaluated = evaluation(*load_model(checkpoints, found.step, step.spec))
    assert evaluated is not None  # nothing here interrupts it
    return found.step, evaluated


def with_batch(config: Config, mesh: Mesh, rows: int) -> Config:
    """With this global batch size, or the next that the mesh divides into equal shards."""
    precision, batch = config.precision, config.batch
    shards = precision.logical_shards if precision.reproducible else mesh.shape[DATA]
    each = -(-rows // shards)
    most = min(each, batch.microbatches)
    microbatches = next(m for m in range(most, 0, -1) if each % m == 0)
    fitting = {"global_size": each * shards, "microbatches": microbatches}
    return config.model_copy(update={"batch": batch.model_copy(update=fitting)})


def _data(
    run: RunDirectory, config: Config, path: str | None, meta: Mapping[str, Any]
) -> tuple[Heldout, str]:
    """The rows to evaluate on, and what they are."""
    if path is not None:
        return _of_path(run, config, path, meta["data"]["tokenizer"]), path
    if not config.data.eval_fraction:
        raise RequestError(
            f"{run.path} held nothing out (data.eval_fraction=0); give --data, a text or a corpus "
            "that it was not trained on."
        )
    stream = open_stream(config)
    check_same_data(meta, stream.identity, run)
    return stream.heldout, f"what {run.path} held out"


def _of_path(run: RunDirectory, config: Config, path: str, fingerprint: str | None) -> Heldout:
    """Every document of other data, in the ids of the run's tokenizer."""
    name = None
    if fingerprint is not None or not holds_ids(Path(path)):
        known = load_of_run(run.path, fingerprint)
        name = "bytes" if isinstance(known, ByteTokenizer) else str(run.path)
    source = open_source(path, name, "--data")
    check_vocabulary(source, config.model.vocab)
    documents, _ = split(source.offsets, 0.0, config.seed)
    rows = Sequences.of(
        source.tokens,
        documents,
        config.data.packing,
        config.batch.sequence_length,
        source.loss_mask,
        keep_tail=True,
    )
    return Heldout(Samples([rows]), source.tokenizer)
