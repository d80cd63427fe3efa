"""The run configuration: typed, validated, unknown keys refused, every error one sentence.

    bundled or own YAML file  <-  --set key=value  <-  explicit flags (steps, mesh, ...)  ->  Config

The models here and in `config_groups` are the single source: the reference page (`fields`), the
error messages and the "did you mean" answers are read from them.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator

from spmd_train.config_groups import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    GuardConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    Section,
    WatchdogConfig,
)
from spmd_train.config_schema import Key, Schema, explain, unknown_key
from spmd_train.config_yaml import read_yaml, write_yaml
from spmd_train.errors import RequestError, listed, nearest
from spmd_train.mesh import MeshShape

# ------------------------------------------------------------------------------------- the schema


class Config(Section):
    """One run, complete: enough to repeat it."""

    name: str = Field(default="tiny", description="Name of the run, for people.")
    seed: int = Field(
        default=0, ge=0, le=2**32 - 1, description="Seed of initialisation, dropout and data order."
    )
    steps: int = Field(default=80, ge=1, description="Length of the run and of its lr schedule.")
    mesh: str | None = Field(
        default=None,
        description="Mesh as 4x2x4 or data=4,model=2; null: all devices on data.",
    )
    model: ModelConfig = ModelConfig()
    batch: BatchConfig = BatchConfig()
    parallel: ParallelConfig = ParallelConfig()
    pipeline: PipelineConfig = PipelineConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optim: OptimConfig = OptimConfig()
    guard: GuardConfig = GuardConfig()
    data: DataConfig = DataConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    log: LogConfig = LogConfig()

    @field_validator("mesh")
    @classmethod
    def _check_mesh(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                MeshShape.parse(value)
            except RequestError as error:  # pydantic collects ValueError only
                raise ValueError(str(error)) from error
        return value

    @model_validator(mode="after")
    def _check_eval(self) -> Config:
        if self.eval.every_steps and not self.data.eval_fraction:
            raise ValueError(
                f"eval.every_steps={self.eval.every_steps} has nothing to evaluate on, since "
                "data.eval_fraction=0 holds out no document; set data.eval_fraction=0.01, or "
                "eval.every_steps=0."
            )
        return self


_SCHEMA = Schema.of(Config)


def fields() -> Iterator[Key]:
    """Every key with its type and range, its default and its sentence of help."""
    yield from _SCHEMA.keys.values()


# ----------------------------------------------------------------------------- reading and writing


def load(
    path: str | PathLike[str] | None = None, overrides: Sequence[str] = (), **top: Any
) -> Config:
    """Read a configuration file; without a path, the bundled `tiny`.

    `overrides` are `key=value` texts; `top` are explicit flags, of which None means not given. A
    later source wins: file, overrides, flags.
    """
    source = _find(path)
    try:
        text = source.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{source}: cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise RequestError(f"{source}, line {line}: is not UTF-8 text.") from error
    return parse(text, str(source), overrides, **top)


def parse(
    text: str, source: str = "configuration", overrides: Sequence[str] = (), **top: Any
) -> Config:
    """The configuration in a YAML text; `source` names the text in messages."""
    tree = read_yaml(text, source)
    if not isinstance(tree, dict):
        raise RequestError(f"{source}, line 1: must be a mapping of keys such as `steps: 100`.")
    problems: list[str] = []
    for override in overrides:
        try:
            tree = _override(tree, override)
        except RequestError as error:
            problems.append(str(error))
    tree |= {key: value for key, value in top.items() if value is not None}
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        sentences = (sentence for e in error.errors() for sentence in explain(_SCHEMA, e, tree))
        problems.extend(dict.fromkeys(sentences))
    if problems:
        raise RequestError("\n".join(problems))
    return config


def dump(config: Config) -> str:
    """The configuration as YAML; `parse` of it is equal to `config`."""
    return write_yaml(config.model_dump(mode="json"))


def bundled_configs() -> dict[str, Path]:
    """The configurations that come with the package, by name."""
    folder = importlib.resources.files("spmd_train") / "configs"
    paths = (Path(str(entry)) for entry in folder.iterdir())
    return {path.stem: path for path in sorted(paths) if path.suffix == ".yaml"}


def _find(path: str | PathLike[str] | None) -> Path:
    """The file itself, or the bundled one of that name: `configs/tiny.yaml` works from anywhere."""
    bundled = bundled_configs()
    if path is None:
        return bundled["tiny"]
    path = Path(path)
    if path.is_file():
        return path
    name = path.name.removesuffix(".yaml")
    if name in bundled:
        return bundled[name]
    if path.exists():
        return path  # not a plain file: reading it tells why not, or it is a pipe
    guess = nearest(name, bundled)
    hint = f"; did you mean {guess!r}?" if guess else ""
    raise RequestError(f"{path}: no such file{hint} (bundled are {listed(bundled)}).")


def _override(tree: dict[str, Any], text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals:
        raise RequestError(f"--set {text}: has no '='; write --set key=value, as in steps=100.")
    if key in _SCHEMA.sections:
        raise RequestError(f"--set {text}: {key} is a group; set one of {_SCHEMA.names_in(key)}.")
    if key not in _SCHEMA.keys:
        raise RequestError(unknown_key(_SCHEMA, key))
    return _with(tree, key.split("."), read_yaml(value, f"--set {text}"))


def _with(tree: dict[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    """`tree` with one value replaced; a group that is no mapping is left for validation."""
    if len(path) == 1:
        return {**tree, path[0]: value}
    inner = tree.get(path[0], {})
    return {**tree, path[0]: _with(inner, path[1:], value)} if isinstance(inner, dict) else tree
