"""The training loop: restore, then for each step: next batch, step, evaluate, log, save."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from spmd_train.build import Resolved, put_batch
from spmd_train.checkpoint.cadence import Cadence
from spmd_train.checkpoint.contents import describe
from spmd_train.checkpoint.files import Keep
from spmd_train.checkpoint.manager import Checkpoints, Saved
from spmd_train.config import Config
from spmd_train.data.batches import Batch, prefetch
from spmd_train.data.stream import Stream, repetition
from spmd_train.distributed import meet
from spmd_train.errors import RunError
from spmd_train.evaluation import Evaluated, Evaluation
from spmd_train.pipeline.accumulate import partial_sum_bytes
from spmd_train.preemption import Preemption
from spmd_train.recovery import Recovery
from spmd_train.runs import Launch, RunDirectory
from spmd_train.start import Start, init_from, resume, tell_damage
from spmd_train.state import TrainState
from spmd_train.step import Step
from spmd_train.telemetry.memory import compiled_memory, spell
from spmd_train.telemetry.progress import Progress
from spmd_train.telemetry.records import RunLog
from spmd_train.telemetry.throughput import Throughput
from spmd_train.watchdog import Watchdog


@dataclass(frozen=True)
class Session:
    """One process's part in a run.

    Attributes:
        launch: what is to be done, the configuration fully resolved.
        step: the compiled program's definition. stream: the data.
        resolved: what each `auto` became. throughput: tokens and FLOPs of a step.
        watchdog: is told what is done. preemption: says when to leave.
        evaluation: of held-out rows, where the run has any.
        predicted: bytes per device by the planner's model; None where it has none.
    """

    launch: Launch
    step: Step
    stream: Stream
    resolved: Resolved
    throughput: Throughput
    watchdog: Watchdog
    preemption: Preemption
    evaluation: Evaluation | None = None
    predicted: int | None = None

    @property
    def config(self) -> Config:
        return self.launch.config

    @property
    def run(self) -> RunDirectory:
        return self.launch.run


def run(session: Session) -> int:
    """Train until the last step; returns the number of the step reached.

    Raises:
        RunError: too many bad steps in a row (their updates are never applied), or a save failed.
        RequestError: the checkpoint does not belong to this configuration or data.
    """
    config, last = session.config, session.launch.last_step
    watchdog, preemption = session.watchdog, session.preemption
    main = jax.process_index() == 0
    with ExitStack() as stack:
        log = stack.enter_context(RunLog(session.run.path, enabled=main))
        keep = Keep(config.checkpoint.keep_last, config.checkpoint.keep_every)
        checkpoints = stack.enter_context(
            Checkpoints(session.run.checkpoints, keep, on_saved=partial(_log_saved, log))
        )
        resumes = session.launch.resume
        watchdog.mark("restoring" if resumes else "initialising", timed=resumes)
        start = _start(session, checkpoints)
        state, done = start.state, start.step
        if main:
            _write_down(session)
        log.truncate_after(done)
        _log_start(session, log, start)
        batches = stack.enter_context(prefetch(_batches(session, done)))
        train_step = _compile(session, log, state)
        progress = stack.enter_context(
            Progress(config.steps, every_steps=config.log.every_steps, enabled=main)
        )
        recovery = Recovery(
            config,
            session.step,
            checkpoints,
            log,
            save=lambda state: _save(session, checkpoints, state, done),
        )
        cadence = Cadence(config.checkpoint)
        saved = done
        while done < last and not preemption.reached():
            clock = time.perf_counter()
            watchdog.mark(f"reading data for step {done + 1}")
            sample_ids, rows = next(batches)
            batch = put_batch(session.step, rows)
            waited = time.perf_counter() - clock
            watchdog.mark(f"running step {done + 1}")
            state, metrics = train_step(state, batch)
            metrics = jax.device_get(metrics)
            done += 1
            watchdog.mark(f"checking step {done}", timed=False)  # which may compile a diagnosis
            record = session.throughput.record(done, metrics, time.perf_counter() - clock, waited)
            if config.log.sample_ids:
                record["sample_ids"] = sample_ids
            evaluated = _evaluate(session, state, done)
            log.metrics(record | _recorded(evaluated))
            progress.update(record)
            if evaluated is not None:
                progress.note(f"step {done} held out: {evaluated}")
            state = recovery.after_step(state, batch, metrics)
            if config.guard.replicas_every and done % config.guard.replicas_every == 0:
                recovery.compare_replicas(state)
            checkpoints.check()
            if cadence.due(done):
                saved = _save(session, checkpoints, state, done)
        if saved < done:
            saved = _save(session, checkpoints, state, done)
        checkpoints.wait()
        if done < last:
            log.event("preemption", step=done, **preemption.described())
        reason = "signal" if done < last else "finished" if done == config.steps else "asked"
        log.event("stop", step=done, reason=reason)
    return done


def _start(session: Session, checkpoints: Checkpoints) -> Start:
    spec, config, launch = session.step.spec, session.config, session.launch
    if launch.resume:
        return resume(session.run, checkpoints, config, spec, session.stream.identity)
    if launch.init_from is not None:
        return init_from(launch.init_from, config, spec)
    return Start(spec.init(config.seed))


def _write_down(session: Session) -> None:
    """What the run is, in its directory, wherever its corpus and configuration go."""
    try:
        session.run.write_config(session.config)
        if session.stream.tokenizer is not None:
            session.stream.tokenizer.save(session.run.path)
    except OSError as error:
        raise RunError(f"cannot write to {session.run.path} ({error.strerror}).") from error


def _batches(session: Session, first: int) -> Iterator[tuple[np.ndarray, Batch]]:
    """Sample ids [B] and host batches [M, B/M, T] from step `first` on."""
    step = first
    while True:
        ids = session.stream.sample_ids(step)
        yield ids, session.step.micro_batched(session.stream.batch(ids))
        step += 1


def _compile(session: Session, log: RunLog, state: TrainState) -> Any:
    """Compile the step ahead of the first one, so that its memory is known before it runs.

    An evaluation, which needs less, is compiled here too: later a run would seem to hang.
    """
    session.watchdog.mark("compiling", timed=False)
    clock = time.perf_counter()
    batch = session.config.batch
    batch_spec = session.step.abstract_batch(batch.global_size, batch.sequence_length)
    compiled = session.step.jitted().lower(session.step.spec.abstract(), batch_spec).compile()
    if session.evaluation is not None:
        session.evaluation.compile()
    meet("compiled")
    memory = compiled_memory(compiled)
    seconds = time.perf_counter() - clock
    log.event(
        "compile",
        seconds=round(seconds, 3),
        bytes_per_device=asdict(memory),
        predicted_bytes=session.predicted,
    )
    pipeline = session.step.pipeline
    partial_sums = partial_sum_bytes(
        pipeline.leaves, pipeline.layout, pipeline.policy, pipeline.model.architecture.tied
    )
    if jax.process_index() == 0:
        share = (
            f", of which reproducible partial sums {spell(partial_sums)}" if partial_sums else ""
        )
        known = session.predicted
        model = f"; the planner predicted {spell(known)}" if known is not None else ""
        print(f"memory  {memory}{share}{model} (compiled in {seconds:.1f} s)", flush=True)
    return compiled


def _log_start(session: Session, log: RunLog, start: Start) -> None:
    import jaxlib

    tell_damage(start.found, log)
    epochs = session.stream.epochs(session.config.steps)
    if jax.process_index() == 0:
        for line in repetition(epochs):
            print(line, file=sys.stderr)
    policy = session.step.spec.policy
    log.event(
        "restored" if session.launch.resume else "start",
        step=start.step,
        mesh=session.config.mesh,
        device=jax.devices()[0].device_kind,
        devices=jax.device_count(),
        processes=jax.process_count(),
        versions={"jax": jax.__version__, "jaxlib": jaxlib.__version__},
        resolved=asdict(session.resolved),
        precision=policy.described(),
        epochs={name: round(float(count), 4) for name, count in epochs.items()},
        **({"parameters_from": start.source} if start.source else {}),
    )
    if session.launch.resume and start.found.step is None:
        log.event("no_checkpoint", path=str(session.run.checkpoints))
        if jax.process_index() == 0:
            print(f"no complete checkpoint in {session.run.checkpoints}: starting at step 0")
    if start.policy not in (None, policy.name):
        log.event("policy", step=start.step, before=start.policy, after=policy.name)


def _evaluate(session: Session, state: TrainState, done: int) -> Evaluated | None:
    """The model after this step on what is held out; None if it is not due, or asked to leave."""
    config, evaluation = session.config, session.evaluation
    if evaluation is None or not (done % config.eval.every_steps == 0 or done == config.steps):
        return None

    def goes_on(batch: int, batches: int) -> bool:
        session.watchdog.mark(f"evaluating step {done}, batch {batch} of {batches}")
        return not session.preemption.reached()

    return evaluation(state.params, state.fp8, goes_on)


def _recorded(evaluated: Evaluated | None) -> dict[str, Any]:
    """What the line of a step in `metrics.jsonl` has besides, where it was evaluated."""
    if evaluated is None:
        return {}
    record = {
        "eval_loss": evaluated.loss,
        "eval_tokens": evaluated.tokens,
        "eval_seconds": round(evaluated.seconds, 6),
    }
    if evaluated.bits_per_byte is not None:
        record["eval_bits_per_byte"] = evaluated.bits_per_byte
    return record


def _save(session: Session, checkpoints: Checkpoints, state: TrainState, step: int) -> int:
    """Save in the background; the loop stands still only while arrays are copied to the host."""
    session.watchdog.mark(f"saving step {step}")
    spec = session.step.spec
    canonical = spec.canonical(state)
    meta = describe(step, canonical, session.config, spec, session.stream.identity)
    checkpoints.save(step, canonical, meta)
    return step


def _log_saved(log: RunLog, saved: Saved) -> None:
    log.event(
        "checkpoint",
        step=saved.step,
        path=saved.path,
        blocked_seconds=round(saved.blocked_seconds, 6),
        seconds=round(saved.seconds, 6),
    )
