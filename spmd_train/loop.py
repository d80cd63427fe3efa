"""The training loop: restore, then for each step: next batch, step, log, save."""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import jax

from spmd_train.build import Resolved, put_batch
from spmd_train.checkpoint.manager import Checkpoints
from spmd_train.config import Config, dump
from spmd_train.data.batches import Batch, Stream, prefetch, shift
from spmd_train.errors import RequestError
from spmd_train.pipeline.accumulate import partial_sum_bytes
from spmd_train.recovery import Recovery
from spmd_train.runs import RunDirectory
from spmd_train.state import TrainState
from spmd_train.step import Step
from spmd_train.telemetry.memory import compiled_memory, spell
from spmd_train.telemetry.progress import Progress
from spmd_train.telemetry.records import RunLog
from spmd_train.telemetry.throughput import Throughput


@dataclass(frozen=True)
class Session:
    """One process's part in a run.

    Attributes:
        config: fully resolved. step: the compiled program's definition. stream: the data.
        run: where to write. resume: continue from the newest checkpoint there.
        stop_after: save and leave after this step, as a preemption would; None runs to the end.
        resolved: what each `auto` became. throughput: tokens and FLOPs of a step.
    """

    config: Config
    step: Step
    stream: Stream
    run: RunDirectory
    resolved: Resolved
    throughput: Throughput
    resume: bool = False
    stop_after: int | None = None

    @property
    def last_step(self) -> int:
        return min(self.config.steps, self.stop_after or self.config.steps)

    @property
    def data_fingerprint(self) -> str:
        """Changes with anything that changes the order or content of the samples."""
        s = self.stream
        order = f"{s.sequence_length} {s.global_size} {s.seed} ".encode()
        return hashlib.sha256(order + s.tokens.tobytes()).hexdigest()


def run(session: Session) -> int:
    """Train until the last step; returns the number of the step reached.

    Raises:
        RunError: too many bad steps in a row (their updates are never applied), or a save failed.
        RequestError: the checkpoint does not belong to this configuration or data.
    """
    config, last = session.config, session.last_step
    main = jax.process_index() == 0
    with ExitStack() as stack:
        if main:
            session.run.path.mkdir(parents=True, exist_ok=True)
        keep = config.checkpoint.keep_last
        checkpoints = stack.enter_context(Checkpoints(session.run.checkpoints, keep))
        state, done, policy_before = _start(session, checkpoints)
        log = stack.enter_context(RunLog(session.run.path, enabled=main))
        if main:
            session.run.config.write_text(dump(config))
        log.truncate_after(done)
        _log_start(session, log, done, policy_before)
        batches = stack.enter_context(prefetch(_batches(session, done)))
        train_step = _compile(session, log, state)
        progress = stack.enter_context(
            Progress(config.steps, every_steps=config.log.every_steps, enabled=main)
        )
        stopping = stack.enter_context(_stop_on_signals())
        recovery = Recovery(
            config,
            session.step,
            checkpoints,
            log,
            save=lambda state: _save(session, checkpoints, log, state, done),
        )
        saved = done
        while done < last and not stopping.is_set():
            clock = time.perf_counter()
            batch = put_batch(session.step, next(batches))
            waited = time.perf_counter() - clock
            state, metrics = train_step(state, batch)
            metrics = jax.device_get(metrics)
            done += 1
            record = session.throughput.record(done, metrics, time.perf_counter() - clock, waited)
            log.metrics(record)
            progress.update(record)
            state = recovery.after_step(state, batch, metrics)
            if config.guard.replicas_every and done % config.guard.replicas_every == 0:
                recovery.compare_replicas(state)
            if config.checkpoint.every_steps and done % config.checkpoint.every_steps == 0:
                saved = _save(session, checkpoints, log, state, done)
        if saved < done:
            saved = _save(session, checkpoints, log, state, done)
        checkpoints.wait()
        reason = "signal" if stopping.is_set() else "finished" if done == config.steps else "asked"
        log.event("stop", step=done, reason=reason)
    return done


def _start(session: Session, checkpoints: Checkpoints) -> tuple[TrainState, int, str | None]:
    """The state to go on from, the steps it has taken, and under which policy it was saved."""
    spec = session.step.spec
    if not session.resume:
        return spec.init(session.config.seed), 0, None
    latest = checkpoints.latest()
    if latest is None:
        raise RequestError(
            f"--resume: {session.run.checkpoints} holds no complete checkpoint; "
            "start the run again in another directory."
        )
    if latest > session.config.steps:
        raise RequestError(
            f"--steps {session.config.steps} is less than the {latest} steps that "
            f"{session.run.path} has taken; give {latest} or more."
        )
    saved, meta = checkpoints.restore(latest, spec.abstract_canonical())
    if meta["data"] != session.data_fingerprint:
        raise RequestError(
            f"--resume: the text or its windows differ from those {session.run.path} was trained "
            "on; give the same data.source, sequence length, global size and seed."
        )
    return spec.from_canonical(saved), latest, meta["policy"]["name"]


def _batches(session: Session, first: int) -> Iterator[Batch]:
    """Host batches [M, B/M, T] from step `first` on."""
    step = first
    while True:
        yield session.step.micro_batched(shift(session.stream.rows(step)))
        step += 1


def _compile(session: Session, log: RunLog, state: TrainState) -> Any:
    """Compile the step ahead of the first one, so that its memory is known before it runs."""
    clock = time.perf_counter()
    batch = session.config.batch
    batch_spec = session.step.abstract_batch(batch.global_size, batch.sequence_length)
    compiled = session.step.jitted().lower(session.step.spec.abstract(), batch_spec).compile()
    memory = compiled_memory(compiled)
    seconds = time.perf_counter() - clock
    log.event("compile", seconds=round(seconds, 3), bytes_per_device=asdict(memory))
    pipeline = session.step.pipeline
    partial_sums = partial_sum_bytes(
        pipeline.leaves, pipeline.layout, pipeline.policy, pipeline.model.architecture.tied
    )
    if jax.process_index() == 0:
        share = (
            f", of which reproducible partial sums {spell(partial_sums)}" if partial_sums else ""
        )
        print(f"memory  {memory}{share} (compiled in {seconds:.1f} s)", flush=True)
    return compiled


def _log_start(session: Session, log: RunLog, done: int, policy_before: str | None) -> None:
    import jaxlib

    policy = session.step.spec.policy
    log.event(
        "start" if done == 0 else "restored",
        step=done,
        mesh=session.config.mesh,
        device=jax.devices()[0].device_kind,
        devices=jax.device_count(),
        processes=jax.process_count(),
        versions={"jax": jax.__version__, "jaxlib": jaxlib.__version__},
        resolved=asdict(session.resolved),
        precision=policy.described(),
    )
    if policy_before not in (None, policy.name):
        log.event("policy", step=done, before=policy_before, after=policy.name)


def _save(
    session: Session, checkpoints: Checkpoints, log: RunLog, state: TrainState, step: int
) -> int:
    meta = {
        "contents": "params: FP32 parameters; optimizer: optax state; both in the model's own "
        "shapes, layers stacked first; step: steps taken, which is the position in the data; "
        "loss_scale: 0 where the loss is not scaled; guard: bad steps in a row and in all",
        "step": step,
        "policy": session.step.spec.policy.described(),
        "config": session.config.model_dump(mode="json"),
        "data": session.data_fingerprint,
    }
    checkpoints.save(step, session.step.spec.canonical(state), meta)
    log.event("checkpoint", step=step, path=str(session.run.checkpoints / str(step)))
    return step


@contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """Set an event on Ctrl-C or SIGTERM, so that the loop saves and leaves; again, at once.

    With several processes a signal is not intercepted: they would not stop at the same step.
    """
    stopping = threading.Event()
    catchable = threading.current_thread() is threading.main_thread() and jax.process_count() == 1
    if not catchable:
        yield stopping
        return

    def stop(number: int, frame: Any) -> None:
        stopping.set()
        signal.signal(number, previous[signal.Signals(number)])

    previous = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
