"""Turn texts into a prepared corpus (`manifest`), in steps that survive being killed.

find, read and hash the inputs          nothing written yet
DIR/partial/plan.json                   what was asked for; asking for anything else is refused
DIR/partial/shard-*                     encoded by the workers, each shard whole or not there
DIR/tokens.bin .idx, tokenizer          the shards one after another
DIR/manifest.json                       done; DIR/partial is removed
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel
from rich.filesize import decimal

from spmd_train.data import shards
from spmd_train.data.documents import (
    BadRecord,
    Source,
    examine,
    find,
    form_for,
    read,
    slices,
)
from spmd_train.data.indexed import IndexedDataset, Writer, dtype_for
from spmd_train.data.manifest import (
    InputFile,
    Manifest,
    Request,
    TokenizerRecord,
    learned_share,
    parse_record,
    read_manifest,
)
from spmd_train.data.meter import Meter
from spmd_train.data.records import Form, Format
from spmd_train.data.shards import Job, Shard, Skipping, Summary
from spmd_train.data.tokenizer import Tokenizer, load_saved, tokenizer, train_bpe
from spmd_train.data.workers import GO_ON, encoded
from spmd_train.differences import first_difference
from spmd_train.disk import sha256, write_whole
from spmd_train.errors import RequestError, RunError

_MIN_SHARD_BYTES = 2**21
_MOST_SHARDS = 4096
_SKIPPED_SHOWN = 10
_LONG_TEXT_BYTES = 2**26


@dataclass(frozen=True)
class Options:
    """What is asked for.

    Attributes:
        inputs: files, directories, globs. tokenizer: its name; None with `train_bpe`, the size of a
        vocabulary to be trained. bos, eos: whether they surround each document; None for eos:
        where the tokenizer has one, and no chat template ends documents itself. format: of the
        records, "auto" for what the first of them is. chat_template: a file, for the format
        `messages`. workers: processes; None: one a core. shard_bytes: of input.
    """

    inputs: Sequence[str]
    out: Path
    tokenizer: str | None = None
    train_bpe: int | None = None
    text_field: str = "text"
    format: Format | Literal["auto"] = "auto"
    chat_template: Path | None = None
    bos: bool = False
    eos: bool | None = None
    workers: int | None = None
    skip_bad: bool = False
    shard_bytes: int | None = None

    @property
    def processes(self) -> int:
        """Processes at most."""
        return self.workers or len(os.sched_getaffinity(0))


class _Plan(BaseModel):
    """What a directory that is not finished was begun for."""

    request: Request
    shard_bytes: int


def prepare(options: Options) -> Manifest:
    """Prepare a corpus, or what is missing of it.

    Raises:
        RequestError: the request or a record of the input is wrong.
        RunError: it could not be finished; the same request goes on from where it was.
    """
    _check(options)
    text = None if options.tokenizer is None else tokenizer(options.tokenizer)
    skipping = Skipping(options.skip_bad)
    sources = _examined(options, skipping)
    form = form_for(sources, options.format, options.text_field, options.chat_template)
    add_bos, add_eos = _surroundings(options, form.format, text)
    chat = form.format == "messages"
    request = Request(
        inputs=[InputFile(path=s.path, bytes=s.bytes, sha256=s.sha256) for s in sources],
        format=form.format,
        chat_template=hashlib.sha256(form.template.encode()).hexdigest() if chat else None,
        text_field=options.text_field,
        tokenizer=text.fingerprint if text else None,
        train_bpe=options.train_bpe,
        add_bos=add_bos,
        add_eos=add_eos,
    )
    try:
        manifest = _finished(options.out, request)
        if manifest:
            print("already prepared, from the same request")
        else:
            manifest = _prepared(options, request, form, text, sources, skipping)
    except OSError as error:
        where = error.filename or options.out
        raise RunError(f"{where}: {error.strerror or error}; {GO_ON}") from error
    except KeyboardInterrupt:
        raise RunError(f"interrupted; {GO_ON}") from None
    _tell(options.out, manifest)
    return manifest


def _check(options: Options) -> None:
    if (options.tokenizer is None) == (options.train_bpe is None):
        raise RequestError("give either --tokenizer or --train-bpe, and not both.")
    if not options.inputs:
        raise RequestError("give at least one INPUT: a file, a directory or a glob.")
    if options.workers is not None and options.workers < 1:
        raise RequestError(f"--workers is {options.workers}; it must be at least 1.")


def _surroundings(options: Options, form: Format, text: Tokenizer | None) -> tuple[bool, bool]:
    """Whether BOS and EOS surround each document; a tokenizer to be trained has an EOS only."""
    has_bos = text is not None and text.bos_id is not None
    has_eos = text is None or text.eos_id is not None
    for flag, wanted, has in (("bos", options.bos, has_bos), ("eos", options.eos, has_eos)):
        if wanted and not has:
            name = options.tokenizer or "trained by --train-bpe"
            raise RequestError(f"--{flag}: the tokenizer {name} has no {flag.upper()} token.")
    by_default = has_eos and form != "messages"
    return options.bos, by_default if options.eos is None else options.eos


def _examined(options: Options, skipping: Skipping) -> list[Source]:
    """Every input, read once; those that cannot be used at all are skipped, or refused."""
    paths = find(options.inputs)
    total = decimal(sum(os.path.getsize(path) for path in paths))
    print(f"{len(paths)} input file{'s' * (len(paths) > 1)}, {total}", flush=True)
    with ThreadPoolExecutor(options.processes) as threads:
        sources = list(threads.map(partial(examine, field=options.text_field), paths))
    for source in sources:
        if source.problem:
            skipping.skip(source.problem)
    return sources


def _prepared(
    options: Options,
    request: Request,
    form: Form,
    text: Tokenizer | None,
    sources: Sequence[Source],
    skipping: Skipping,
) -> Manifest:
    """Do what is not done yet."""
    usable = [source for source in sources if not source.problem]
    total_bytes = sum(source.bytes for source in usable)
    shard_bytes = options.shard_bytes or max(_MIN_SHARD_BYTES, total_bytes // _MOST_SHARDS)
    with _claimed(options.out, _Plan(request=request, shard_bytes=shard_bytes)) as directory:
        text = text or _trained(usable, options, form, directory)
        name = text.save(directory)
        job = Job(
            directory,
            name,
            form.format,
            form.field,
            form.template,
            request.add_bos,
            request.add_eos,
            options.skip_bad,
        )
        if not text.is_local:
            _warn_of_long_texts(usable)
        can_cut = text.can_cut if text.is_local else None
        parts = (part for source in usable for part in slices(source, shard_bytes, can_cut))
        plan = shards.group(parts, shard_bytes)
        summaries = _encode_all(job, plan, options.processes, total_bytes)
        manifest = _assemble(options.out, request, text, job, plan, summaries, skipping)
        shutil.rmtree(directory)
    return manifest


def _warn_of_long_texts(sources: Sequence[Source]) -> None:
    for source in sources:
        if source.kind == ".txt" and source.bytes > _LONG_TEXT_BYTES:
            print(
                f"{source.path} ({decimal(source.bytes)}) is encoded in one piece, which may take"
                " 150 times its memory: this tokenizer's ids may depend on text far away. As a"
                " .jsonl of smaller documents it needs less."
            )


# ------------------------------------------------------------------------------------ the directory


def _finished(out: Path, request: Request) -> Manifest | None:
    """The manifest of a finished directory, if this is one and it was asked for the same."""
    manifest = read_manifest(out)
    if manifest:
        cure = f"prepare into another --out, or remove {out}"
        _refuse_other(out, manifest.request, request, cure)
        shutil.rmtree(out / "partial", ignore_errors=True)  # of a run killed at its very end
    return manifest


@contextmanager
def _claimed(out: Path, plan: _Plan) -> Iterator[Path]:
    """The directory of unfinished work, begun or found, for this process alone."""
    directory = out / "partial"
    path = directory / "plan.json"
    if path.is_file():
        found = parse_record(_Plan, path)
        _refuse_other(out, found, plan, f"repeat the request that began it, or remove {directory}")
    elif out.is_dir() and any(entry != directory for entry in out.iterdir()):
        raise RequestError(f"{out} holds other files; give --out a directory that is new or empty.")
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError(f"{out} is being prepared by another process.") from None
        for left_by_a_killed_run in [*out.glob("*.tmp"), *directory.glob("*.tmp")]:
            left_by_a_killed_run.unlink()
        write_whole(path, plan.model_dump_json(indent=2).encode())
        try:
            yield directory
        except RequestError:
            if not any(directory.glob("shard-*.json")):  # nothing that a repetition would save
                shutil.rmtree(directory)
            raise


def _refuse_other(out: Path, old: BaseModel, new: BaseModel, cure: str) -> None:
    difference = first_difference(old.model_dump(), new.model_dump())
    if difference:
        raise RequestError(f"{out} was begun for another request: {difference}; {cure}.")


def _trained(sources: Sequence[Source], options: Options, form: Form, directory: Path) -> Tokenizer:
    """The tokenizer trained on the input, which a run before may have done."""
    if (directory / "tokenizer.json").is_file():
        return load_saved(directory, "tokenizer.json")
    assert options.train_bpe is not None
    print(f"training a BPE of {options.train_bpe} ids", flush=True)
    skipping = Skipping(options.skip_bad)

    def texts() -> Iterator[str]:
        for source in sources:
            for part in slices(source, _MIN_SHARD_BYTES, lambda left, right: True):
                yield from (p.text for p in skipping.documents(read(part, form)))

    return train_bpe(texts(), options.train_bpe, directory)


# -------------------------------------------------------------------------------------- the workers


def _encode_all(job: Job, plan: Sequence[Shard], processes: int, total_bytes: int) -> list[Summary]:
    """Encode the shards that are not finished; the summaries of all, in order."""
    known = {shard.number: shards.finished(job, shard) for shard in plan}
    waiting = [shard for shard in plan if known[shard.number] is None]
    if len(waiting) < len(plan):
        print(f"going on: {len(plan) - len(waiting)} of {len(plan)} shards are finished")
    with Meter(total_bytes) as meter:
        for shard in plan:
            if summary := known[shard.number]:
                meter.advance(shard.bytes, summary.documents, summary.tokens, new=False)
        for shard, summary in zip(waiting, encoded(job, waiting, processes), strict=True):
            known[shard.number] = summary
            meter.advance(shard.bytes, summary.documents, summary.tokens)
    return [summary for summary in known.values() if summary]


# ------------------------------------------------------------------------------------------ the end


def _assemble(
    out: Path,
    request: Request,
    text: Tokenizer,
    job: Job,
    plan: Sequence[Shard],
    summaries: Sequence[Summary],
    skipping: Skipping,
) -> Manifest:
    """Join the shards and, last of all, write the manifest."""
    documents = sum(summary.documents for summary in summaries)
    if documents == 0:
        raise RequestError(
            f"nothing to prepare: the input holds no text ({skipping.count} skipped)."
        )
    dtype = dtype_for(text.vocab_size)
    with Writer(out / "tokens", dtype) as writer:
        for shard in plan:
            part = IndexedDataset.open(shard.prefix(job.directory))
            lengths = part.document_offsets()
            writer.extend(part.tokens, lengths[1:] - lengths[:-1], continues=shard.continues)
    names = ["tokens.bin", "tokens.idx"]
    if job.format != "text":
        names += ["loss_mask.bin", "loss_mask.idx"]
        with Writer(out / "loss_mask", shards.MASK) as writer:
            for shard in plan:
                part = IndexedDataset.open(shard.mask_prefix(job.directory))
                writer.extend(part.tokens, np.diff(part.document_offsets()))
    if job.format == "messages":
        write_whole(out / "chat_template.jinja", job.template.encode())
    learned = sum(summary.learned_tokens for summary in summaries)
    for summary in summaries:
        skipping.add(summary.skipped, summary.skipped_records)
    manifest = Manifest(
        request=request,
        tokenizer=TokenizerRecord(
            name=text.save(out),
            fingerprint=text.fingerprint,
            vocab_size=text.vocab_size,
            bos_id=text.bos_id,
            eos_id=text.eos_id,
        ),
        documents=documents,
        tokens=sum(summary.tokens for summary in summaries),
        learned_tokens=None if job.format == "text" else learned,
        dtype=dtype.name,
        empty_documents=sum(summary.empty_documents for summary in summaries),
        skipped=skipping.count,
        skipped_records=skipping.listed,
        files={name: sha256(out / name) for name in names},
    )
    manifest.write(out)
    return manifest


def _tell(out: Path, manifest: Manifest) -> None:
    size = decimal((out / "tokens.bin").stat().st_size)
    print(
        f"{out}: {manifest.documents:,} documents, {manifest.tokens:,} tokens"
        f" in {size} of {manifest.dtype}"
    )
    if manifest.learned_tokens is not None:
        print(f"to learn: {learned_share(manifest)}")
    if manifest.skipped:
        print(f"skipped {manifest.skipped:,} that could not be used:")
        for record in manifest.skipped_records[:_SKIPPED_SHOWN]:
            print(f"  {BadRecord(**record.model_dump())}")
        if manifest.skipped > _SKIPPED_SHOWN:
            print(f"  and {manifest.skipped - _SKIPPED_SHOWN:,} more; manifest.json lists them")
