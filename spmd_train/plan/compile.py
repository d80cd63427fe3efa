"""Compile the very step that trains, for devices that are not here.

```
this process                       compile_worker.py, the same Python, its own environment
  config, mesh, target  -- JSON line -->  descriptions of devices -> mesh -> build_step
                                          lower, compile: XLA's real GPU or TPU compiler
  Compiled              <-- JSON line --  memory, collectives
```

The backend comes from a wheel of an optional extra, without CUDA libraries or a TPU. It is loaded
by the other process only: JAX loads every plugin it finds, and a training process needs none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Literal

from spmd_train.errors import RequestError, RunError
from spmd_train.plan.collectives import Collective
from spmd_train.plan.targets import Site
from spmd_train.shape_rules import validate_shape
from spmd_train.telemetry.memory import Memory, spell

if TYPE_CHECKING:
    from spmd_train.config import Config
    from spmd_train.mesh import MeshShape

_CUDA = ("jax-cuda13", "jax-cuda12")
_NO_CUDNN = "attention is the blockwise XLA one: cuDNN's cannot be compiled without its library"


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a step on one target.

    Attributes:
        site: what it was compiled for.
        mesh: its shape there.
        backend: the compiler, "libtpu 0.0.42.1" or "jax-cuda13-plugin 0.10.2".
        jax: version of JAX.
        seconds: to lower and compile.
        memory: per device; None where a TPU's compiler gave up since it does not fit.
        needed_bytes: most a device holds at once. For a TPU, whose program places its own buffers,
            by the compiler's schedule, or what it said when it gave up; for a GPU, which allocates
            all temporaries as one block, `memory.peak`.
        collectives: of a step, those with the most bytes first.
        policy, attention, schedule, remat: what `auto` became for this target.
        notes: what a reader must know to read the figures.
    """

    site: Site
    mesh: MeshShape
    backend: str
    jax: str
    seconds: float
    memory: Memory | None
    needed_bytes: int
    collectives: tuple[Collective, ...]
    policy: str
    attention: str
    schedule: str
    remat: str
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether a device has the memory; a TPU's compiler would have given up otherwise."""
        if self.site.platform == "tpu":
            return self.memory is not None
        return self.needed_bytes <= self.site.memory_bytes

    def as_json(self) -> dict[str, Any]:
        """The document of `compile --json`."""
        memory = self.memory
        parts = ("arguments", "outputs", "aliased", "temporaries")
        return {
            "target": self.site.name,
            "platform": self.site.platform,
            "topology": self.site.topology,
            "devices": self.site.devices,
            "hosts": self.site.hosts,
            "mesh": {"data": self.mesh.data, "model": self.mesh.model, "stage": self.mesh.stage},
            "jax": self.jax,
            "backend": self.backend,
            "precision": self.policy,
            "attention": self.attention,
            "schedule": self.schedule,
            "remat": self.remat,
            "compile_seconds": round(self.seconds, 2),
            "fits": self.fits,
            "memory_bytes": {
                **{part: None if memory is None else getattr(memory, part) for part in parts},
                "peak": self.needed_bytes if memory is None else memory.peak,
                "needed": self.needed_bytes,
                "limit": self.site.memory_bytes,
            },
            "collectives": [asdict(each) for each in self.collectives],
            "notes": list(self.notes),
        }


def compile_step(config: Config, shape: MeshShape, site: Site) -> Compiled:
    """The step of `config` on a mesh of `site`'s devices, compiled there.

    Raises:
        RequestError: the configuration does not fit the mesh, or the backend's wheel is absent or
            of another version; nothing was started.
        RunError: the compiler failed for another reason than memory.
    """
    with Compiler(site.platform) as compiler:
        return compiler.compile(config, shape, site)


class Compiler:
    """A process that compiles for GPUs or for TPUs, one step after another."""

    def __init__(self, platform: Literal["gpu", "tpu"]) -> None:
        """Start nothing yet.

        Raises:
            RequestError: as `backend` does.
        """
        self.platform = platform
        self.backend, self._note = backend(platform)
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[str] | None = None

    def __enter__(self) -> Compiler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def compile(self, config: Config, shape: MeshShape, site: Site) -> Compiled:
        """As `compile_step`."""
        notes = [self._note] if self._note else []
        if self.platform == "gpu" and config.model.attention != "xla":
            if config.model.attention != "auto":
                raise RequestError(
                    f"model.attention={config.model.attention} cannot be compiled for a GPU that "
                    "is not here, since its kernels' library is not either; use "
                    "model.attention=auto or xla."
                )
            config = _with_attention(config, "xla")
            notes.append(_NO_CUDNN)
        validate_shape(config, shape)
        request = {
            "config": config.model_dump(mode="json"),
            "mesh": str(shape),
            "site": asdict(site),
        }
        answer = self._ask(request)
        if "request_error" in answer:
            raise RequestError(answer["request_error"])
        if "failure" in answer:
            raise RunError(f"compiling for {site.topology} failed: {answer['failure']}")
        if "out_of_memory" in answer:
            notes.append("the compiler gave up early: what is needed is its estimate, and high")
        memory = Memory(**answer["memory"]) if "memory" in answer else None
        found = tuple(
            Collective(**{**each, "axes": tuple(each["axes"])})
            for each in answer.get("collectives", ())
        )
        if not all(each.exact for each in found):
            notes.append("~: a branch counted as taken, or a loop of unknown length as one trip")
        resolved = answer["resolved"]
        return Compiled(
            site=site,
            mesh=shape,
            backend=self.backend,
            jax=metadata.version("jax"),
            seconds=answer["seconds"],
            memory=memory,
            needed_bytes=_needed(site, memory, answer),
            collectives=found,
            policy=resolved["policy"],
            attention=resolved["attention"],
            schedule=resolved["schedule"],
            remat=resolved["remat"],
            notes=tuple(notes),
        )

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The worker's answer; one that died (compilers abort) is started anew the next time."""
        if self._process is None:
            self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
            self._process = subprocess.Popen(
                [sys.executable, "-m", "spmd_train.plan.compile_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env={**os.environ, **environment(self.platform)},
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        last = self._last_lines()
        self._stop()
        raise RunError(
            f"the compiler's process ended with status {process.returncode}; it said last:\n{last}"
        )

    def _last_lines(self, count: int = 5) -> str:
        assert self._log is not None
        self._log.seek(0)
        return "\n".join(self._log.read().splitlines()[-count:])

    def _stop(self) -> None:
        if self._process is None:
            return
        self._process.kill()  # it holds nothing that must be put away
        self._process.communicate()
        assert self._log is not None
        self._log.close()
        self._process = self._log = None


def environment(platform: Literal["gpu", "tpu"]) -> dict[str, str]:
    """What the worker's environment has besides that of this process.

    The only backend that it starts is the CPU's: compiling needs a plugin to be there, not to run.
    """
    common = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    if platform == "gpu":
        return common
    # No query for a TPU machine's metadata; and libtpu is no device here that one process owns.
    return {**common, "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def backend(platform: Literal["gpu", "tpu"]) -> tuple[str, str]:
    """Name and version of the installed compiler, and a warning about it, if any.

    Raises:
        RequestError: none is installed, or one of another version of JAX; says what to install.
    """
    jax = metadata.version("jax")
    if platform == "tpu":
        version = _version("libtpu")
        if version is None:
            raise RequestError(_absent("libtpu", "a TPU", "compile-tpu"))
        wanted = _libtpu_wanted()
        if wanted and not _matches(version, wanted):
            return f"libtpu {version}", f"JAX {jax} names libtpu {wanted}, {version} is installed"
        return f"libtpu {version}", ""
    for family in _CUDA:
        plugin, pjrt = _version(f"{family}-plugin"), _version(f"{family}-pjrt")
        if plugin is None:
            continue
        if {plugin, pjrt} != {jax}:
            found = f"{family}-plugin {plugin} with {family}-pjrt {pjrt or '(absent)'}"
            raise RequestError(
                f"{found} does not belong to JAX {jax}; install those that do with: "
                f"pip install {family}-plugin=={jax} {family}-pjrt=={jax}"
            )
        return f"{family}-plugin {plugin}", ""
    raise RequestError(_absent("jax-cuda13-plugin", "a GPU", "compile-gpu"))


def _absent(wheel: str, what: str, extra: str) -> str:
    return (
        f"compiling for {what} needs {wheel}, which is not installed (it needs no such device); "
        f"install it with: pip install 'spmd-train[{extra}]'"
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _libtpu_wanted() -> str:
    """The version that the installed JAX itself asks for with `jax[tpu]`, such as `0.0.42.*`."""
    for requirement in metadata.requires("jax") or ():
        name, _, condition = requirement.partition(";")
        if name.startswith("libtpu==") and "tpu" in condition:
            return name.removeprefix("libtpu==").strip()
    return ""


def _matches(version: str, wanted: str) -> bool:
    prefix = wanted.removesuffix("*")
    return version == wanted or (prefix != wanted and f"{version}.".startswith(prefix))


def _needed(site: Site, memory: Memory | None, answer: dict[str, Any]) -> int:
    if memory is None:
        return int(answer["out_of_memory"])
    return (site.platform == "tpu" and int(answer["scheduled_peak"])) or memory.peak


def _with_attention(config: Config, attention: str) -> Config:
    model = config.model.model_copy(update={"attention": attention})
    return config.model_copy(update={"model": model})


# ------------------------------------------------------------------------------------- for people


def print_compiled(compiled: Compiled) -> None:
    """The memory and the collectives of a step, as a table."""
    from rich.console import Console
    from rich.table import Table

    site, memory = compiled.site, compiled.memory
    say = Console(highlight=False, soft_wrap=True).print
    say(
        f"{site.devices} {site.name} ({site.topology}), mesh {compiled.mesh}: {compiled.policy}, "
        f"attention {compiled.attention}, {compiled.schedule}, remat {compiled.remat}; "
        f"compiled in {compiled.seconds:.1f} s by JAX {compiled.jax}, {compiled.backend}"
    )
    limit = spell(site.memory_bytes)
    if memory is None:
        say(f"does not fit: needs {spell(compiled.needed_bytes)} per device, which has {limit}")
    else:
        verdict = "fits" if compiled.fits else "does not fit"
        at_once = ""
        if compiled.needed_bytes < memory.peak:
            at_once = f", {spell(compiled.needed_bytes)} of it at once"
        say(f"{verdict}: {memory}{at_once}; the device has {limit}")
    if compiled.collectives:
        table = Table(box=None, pad_edge=False)
        for column in ("collective", "over", "in loop"):
            table.add_column(column, no_wrap=True)
        for column in ("times a step", "bytes a step"):
            table.add_column(column, justify="right", no_wrap=True)
        for each in compiled.collectives:
            table.add_row(*_row(each))
        Console(highlight=False).print(table)
    for note in compiled.notes:
        say(f"note: {note}")


def _row(each: Collective) -> Sequence[str]:
    return (
        each.op,
        ", ".join(each.axes) or "-",
        "yes" if each.in_loop else "no",
        ("" if each.exact else "~") + f"{each.count:,}",
        spell(each.bytes_per_step),
    )
