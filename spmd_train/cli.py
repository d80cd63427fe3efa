"""The command line: one thin function a command.

Exit status: 0 done; 1 the run failed; 2 the request was wrong and nothing was started.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TextIO

import tyro

from spmd_train.errors import RequestError, RunError, listed
from spmd_train.requests import (
    Command,
    Compile,
    DataInspect,
    DataPrepare,
    Eval,
    Generate,
    Ls,
    Plan,
    Show,
    Train,
    Verify,
)

if TYPE_CHECKING:
    from spmd_train.mesh import MeshShape
    from spmd_train.preemption import Preemption
    from spmd_train.requests import Platform
    from spmd_train.runs import Launch
    from spmd_train.watchdog import Watchdog


def entry() -> None:
    """The console script: run one command and leave with its status.

    A failed run leaves at once: threads of a failed save, or JAX's barrier with processes that wait
    in a collective, would hold the exit for minutes.
    """
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    wants_help = arguments[:1] in (["-h"], ["--help"])
    if not arguments or (arguments[0].startswith("-") and not wants_help):
        arguments.insert(0, "train")
    command: Any = tyro.cli(
        Command,
        prog="spmd-train",
        description="Train one model on any mesh of devices, with the same result.",
        args=arguments,
        config=(
            tyro.conf.FlagCreatePairsOff,
            tyro.conf.OmitArgPrefixes,
            tyro.conf.OmitSubcommandPrefixes,
        ),
    )
    for talker in ("absl", "asyncio"):  # Orbax narrates, its failures too; we say it once
        logging.getLogger(talker).setLevel(logging.CRITICAL)
    try:
        _FUNCTIONS[type(command)](command)
    except RequestError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


def train(request: Train) -> None:
    """Resolve the request, build the step, run the loop; every check comes before compilation."""
    from spmd_train.mesh import MeshShape, prepare_devices

    launch = _launch(request)
    config = launch.config
    auto = request.mesh == "auto"
    shape = MeshShape.parse(config.mesh) if config.mesh and not auto else None
    if shape is not None:
        from spmd_train.shape_rules import validate_shape

        validate_shape(config, shape)
    prepare_devices(shape, request.platform)
    if config.precision.master == "float64":
        _allow_float64()

    from spmd_train.distributed import join_processes
    from spmd_train.preemption import Preemption
    from spmd_train.watchdog import Watchdog

    board = join_processes(config.watchdog.silent_seconds)
    if board is not None and request.out is None:
        raise RequestError("a run of several processes needs --out, the same for all of them.")
    if auto:
        import jax

        from spmd_train.plan.auto import mesh_for

        shape = mesh_for(config, jax.devices())
    with (
        Watchdog(config.watchdog, launch.run.path, board) as watchdog,
        Preemption(board) as preemption,
    ):
        _train_on(launch, shape, request.platform, watchdog, preemption)


def _launch(request: Train) -> Launch:
    """What the flags ask for: a new run, or the next part of an old one."""
    from spmd_train.config import load
    from spmd_train.runs import Launch, RunDirectory, new_run, resumed_config

    if request.resume and request.out is None:
        raise RequestError("--resume needs --out: the run directory to continue.")
    if request.resume and request.init_from:
        raise RequestError("--resume and --init-from exclude each other; give one of them.")
    if request.stop_after is not None and request.stop_after < 1:
        raise RequestError(f"--stop-after is {request.stop_after}; it must be at least 1.")
    mesh = None if request.mesh == "auto" else request.mesh
    top = {"mesh": mesh, "steps": request.steps}
    if request.resume:
        run = RunDirectory(_path(request.out))
        config = resumed_config(run, request.config, request.set, **top)
        return Launch(config, run, resume=True, stop_after=request.stop_after)
    source = RunDirectory(_path(request.init_from)) if request.init_from else None
    base = source.saved_config() if source is not None else None
    config = load(request.config or base, request.set, **top)
    run = new_run(request.out, config.name)
    return Launch(config, run, init_from=source, stop_after=request.stop_after)


def _train_on(
    launch: Launch,
    shape: MeshShape | None,
    platform: Platform | None,
    watchdog: Watchdog,
    preemption: Preemption,
) -> None:
    """The part of `train` in which this process is one of a run's, and watched."""
    from spmd_train.build import build_step
    from spmd_train.data.stream import open_stream
    from spmd_train.distributed import meet
    from spmd_train.evaluation import Evaluation
    from spmd_train.loop import Session
    from spmd_train.loop import run as run_loop
    from spmd_train.mesh import build_mesh, describe
    from spmd_train.plan.memory import predicted

    mesh, shape = build_mesh(shape, platform)
    meet("joined")
    config = launch.config.model_copy(update={"mesh": str(shape)})
    stream = open_stream(config)
    step, resolved = build_step(config, mesh)
    evaluation = None
    if config.eval.every_steps:
        where = "what is held out"
        evaluation = Evaluation(step, config, stream.heldout, config.eval.batches, where)
    session = Session(
        launch=replace(launch, config=config),
        step=step,
        stream=stream,
        resolved=resolved,
        throughput=_throughput(config, step, mesh),
        watchdog=watchdog,
        preemption=preemption,
        evaluation=evaluation,
        predicted=predicted(config, shape, mesh.devices.flat[0].platform),
    )
    say = _say_on(sys.stdout)
    say(describe(mesh, shape))
    say(_describe_model(config, step, resolved))
    say(f"precision {step.spec.policy}")
    if evaluation is not None:
        say(f"evaluated every {config.eval.every_steps} steps: {evaluation}")
    reached = run_loop(session)
    say(f"step {reached} of {config.steps} saved in {launch.run.path}")
    if reached < config.steps:
        say(f"continue:  spmd-train --resume --out {launch.run.path}")
    say(f'generate:  spmd-train generate --run {launch.run.path} --prompt "It was"')


def plan(request: Plan) -> None:
    """Rank every legal mesh; nothing that fits is a failure."""
    from spmd_train.plan.command import plan as planned

    planned(request)


def evaluate(request: Eval) -> None:
    """Print how well a saved step predicts."""
    from spmd_train.distributed import join_processes, meet
    from spmd_train.interop import evaluate as evaluating
    from spmd_train.mesh import MeshShape, build_mesh, describe, prepare_devices
    from spmd_train.runs import RunDirectory, resumed_config

    options = evaluating.Options(request.step, request.data, request.batch_size, request.batches)
    run = RunDirectory(_path(request.run))
    config = resumed_config(run, None, request.set, mesh=request.mesh)
    shape = MeshShape.parse(config.mesh) if config.mesh else None
    prepare_devices(shape, request.platform)
    if config.precision.master == "float64":
        _allow_float64()
    join_processes(config.watchdog.silent_seconds)
    mesh, shape = build_mesh(shape, request.platform)
    meet("joined")
    say = _say_on(sys.stderr if request.json else sys.stdout)
    say(describe(mesh, shape))
    step, evaluated = evaluating.evaluate(run, config, mesh, options, say)
    say(f"{evaluated} ({evaluated.seconds:.1f} s)")
    if request.json:
        asked = {"run": str(run.path), "step": step, "data": request.data, "mesh": str(shape)}
        _say_on(sys.stdout)(json.dumps(asked | asdict(evaluated), indent=2))


def generate(request: Generate) -> None:
    """Print the prompt and its continuation."""
    from spmd_train.interop.generate import Sampling, continue_text
    from spmd_train.mesh import MeshShape, prepare_devices
    from spmd_train.runs import RunDirectory

    run = RunDirectory(_path(request.run))
    config = run.read_config()
    prepare_devices(MeshShape(), request.platform)
    if config.precision.master == "float64":
        _allow_float64()
    sampling = Sampling(request.max_tokens, request.temperature, request.seed)
    for piece in continue_text(run, config, request.prompt, sampling, request.platform):
        print(piece, end="", flush=True)
    print()


def compile_for(request: Compile) -> None:
    """Print what the target's compiler makes of the step; one that does not fit is an answer."""
    from spmd_train.config import load
    from spmd_train.mesh import MeshShape
    from spmd_train.plan.compile import compile_step, print_compiled
    from spmd_train.plan.targets import requested_site

    shape = MeshShape.parse(request.mesh)
    site = requested_site(shape.size, request.target, request.hosts, request.cluster)
    config = load(request.config, request.set, mesh=request.mesh)
    compiled = compile_step(config, shape, site)
    if request.json:
        print(json.dumps(compiled.as_json(), indent=2))
    else:
        print_compiled(compiled)


def list_steps(request: Ls | Verify) -> None:
    """Print the steps of a run; damage found by `verify` is a failure."""
    from spmd_train.checkpoint import report
    from spmd_train.runs import RunDirectory

    run = RunDirectory(_path(request.run))
    run.saved_config()
    read = isinstance(request, Verify)
    found = report.steps(run.checkpoints, request.step, read=read)
    listing = found if request.step is not None else found + report.aside(run.checkpoints)
    if request.json:
        print(report.as_json(run.checkpoints, listing))
    else:
        report.print_table(run.checkpoints, listing)
    damaged = [each.step for each in found if each.state == report.DAMAGED]
    if read and damaged:
        raise RunError(f"damaged: step {listed(damaged)}; a resume uses the newest sound step.")


def show(request: Show) -> None:
    """Print what one step holds."""
    from spmd_train.checkpoint import files, report
    from spmd_train.runs import RunDirectory

    run = RunDirectory(_path(request.run))
    run.saved_config()
    have = files.steps(run.checkpoints)
    step = request.step if request.step is not None else max(have, default=None)
    if step not in have:
        wanted = "" if step is None else f" of step {step}"
        raise RequestError(
            f"no complete checkpoint{wanted} in {run.checkpoints}: it has {listed(have) or 'none'}."
        )
    path = files.step_path(run.checkpoints, step)
    try:
        meta = files.read_meta(path)
    except ValueError as error:
        raise RunError(f"step {step} at {path} is damaged: {error}.") from error
    if request.json:
        print(json.dumps(meta, indent=2))
    else:
        report.print_meta(meta, path)


def data_prepare(request: DataPrepare) -> None:
    """Prepare a corpus and say what came of it."""
    from spmd_train.data.prepare import Options, prepare

    if request.eos and request.no_eos:
        raise RequestError("--eos and --no-eos exclude each other.")
    prepare(
        Options(
            inputs=request.inputs,
            out=_path(request.out),
            tokenizer=request.tokenizer,
            train_bpe=request.train_bpe,
            text_field=request.text_field,
            format=request.format,
            chat_template=_path(request.chat_template) if request.chat_template else None,
            bos=request.bos,
            eos=request.eos or (False if request.no_eos else None),
            workers=request.workers,
            skip_bad=request.skip_bad,
        )
    )
    print(f"inspect:  spmd-train data inspect {request.out}")


def data_inspect(request: DataInspect) -> None:
    """Print the report on a corpus."""
    from rich.console import Console

    from spmd_train.data.inspect import inspect, show

    report = inspect(_path(request.path), request.samples)
    if request.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        show(report, Console())


_FUNCTIONS: dict[type, Any] = {
    Train: train,
    Plan: plan,
    Eval: evaluate,
    Generate: generate,
    Compile: compile_for,
    Ls: list_steps,
    Verify: list_steps,
    Show: show,
    DataPrepare: data_prepare,
    DataInspect: data_inspect,
}


def _allow_float64() -> None:
    """JAX makes float64 of nothing unless asked to; everything else names its own dtype."""
    import jax

    jax.config.update("jax_enable_x64", True)


def _path(text: str | None) -> Any:
    from pathlib import Path

    return Path(text or ".")


def _say_on(stream: TextIO) -> Callable[[str], None]:
    """Prints lines in the first process of a run, and nothing in the others."""
    import jax

    is_first = jax.process_index() == 0
    return lambda line: print(line, file=stream, flush=True) if is_first else None


def _throughput(config: Any, step: Any, mesh: Any) -> Any:
    from spmd_train.model.model import parameter_count
    from spmd_train.telemetry.flops import model_flops_per_token, peak_flops
    from spmd_train.telemetry.throughput import Throughput

    length = config.batch.sequence_length
    parameters = parameter_count(step.spec.leaves)
    peak = peak_flops(mesh.devices.flat[0].device_kind)
    return Throughput(
        tokens_per_step=config.batch.global_size * length,
        flops_per_token=model_flops_per_token(config.model, length, parameters),
        peak_flops=None if peak is None else peak * mesh.size,
    )


def _describe_model(config: Any, step: Any, resolved: Any) -> str:
    from spmd_train.model.model import parameter_count

    schedule = step.pipeline.schedule
    tokens = config.batch.global_size * config.batch.sequence_length
    return (
        f"model {config.name}: {parameter_count(step.spec.leaves):,} parameters, "
        f"{tokens:,} tokens per step; {resolved.policy}, attention {resolved.attention}, "
        f"zero {config.parallel.zero}, {resolved.schedule} with {schedule.num_microbatches} "
        f"micro-batches (bubble {schedule.bubble_fraction():.0%}), remat {resolved.remat}"
    )
