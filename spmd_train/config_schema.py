"""What the configuration's models say about themselves: reference lines and error messages.

Nothing here names a key, except the table of names that other trainers use for ours. Everything
else is read from the pydantic models, so a new key has its reference line, its error messages and
its "did you mean" the moment it is declared.
"""

from __future__ import annotations

import difflib
import functools
import reprlib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from spmd_train.errors import listed


class Key(NamedTuple):
    """One line of the configuration reference."""

    name: str
    type: str
    default: Any
    description: str


@dataclass(frozen=True)
class Schema:
    """Every dotted key of a configuration, and the sections they stand in."""

    keys: Mapping[str, Key]
    sections: tuple[str, ...]

    @classmethod
    def of(cls, config: type[BaseModel]) -> Schema:
        keys: list[Key] = []
        sections: list[str] = []

        def collect(model: type[BaseModel], prefix: str) -> None:
            for leaf, info in model.model_fields.items():
                name, section = prefix + leaf, info.annotation
                if isinstance(section, type) and issubclass(section, BaseModel):
                    sections.append(name)
                    collect(section, f"{name}.")
                else:
                    keys.append(_key(name, info))

        collect(config, "")
        return cls({key.name: key for key in keys}, tuple(sections))

    def section_of(self, name: str) -> str:
        """The innermost section that a dotted name stands in; "" for the top level."""
        section = name.rpartition(".")[0]
        while section and section not in self.sections:
            section = section.rpartition(".")[0]
        return section

    def names_in(self, section: str) -> str:
        """The keys and groups of a section, listed; of no section, those of the top level."""
        prefix = f"{section}." if section in self.sections else ""
        names = (*self.keys, *self.sections)
        inside = (n.removeprefix(prefix) for n in names if n.startswith(prefix))
        return listed(n for n in inside if "." not in n)


def _key(name: str, info: FieldInfo) -> Key:
    return Key(
        name, _type_text(info.annotation, info.metadata), info.default, info.description or ""
    )


_TYPE_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def _type_text(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type and its range as they are read in a sentence: `a number > 0 or null`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _type_text(args[0], args[1].metadata)
    if origin is Literal:
        return str(args[0]) if len(args) == 1 else f"one of {listed(args)}"
    if origin in (Union, types.UnionType):
        return " or ".join(_type_text(arg, metadata) for arg in args)
    if origin is dict:
        return f"a mapping from {_type_text(args[0])} to {_type_text(args[1])}"
    if origin is tuple:
        length = "" if args[-1] is Ellipsis else f" of {len(args)}"
        return f"a list{length}, each {_type_text(args[0])}"
    bounds = (
        f"{sign} {getattr(bound, name)}"
        for name, sign in _SIGNS.items()
        for bound in metadata
        if annotation in (int, float) and hasattr(bound, name)
    )
    return f"{_TYPE_NAMES[annotation]} {' and '.join(bounds)}".rstrip()


_REPR = reprlib.Repr()  # given values may be long; messages may not
_REPR.maxstring = _REPR.maxother = 80


def _shown(value: Any) -> str:
    """A given value as its author wrote it: YAML says `true` and `null`."""
    yaml_words = {True: "true", False: "false", None: "null"}
    return yaml_words[value] if value is None or isinstance(value, bool) else _REPR.repr(value)


def explain(schema: Schema, error: ErrorDetails, tree: Mapping[str, Any]) -> Iterator[str]:
    """One of pydantic's errors about `tree`, in sentences of ours."""
    parts = [str(part) for part in error["loc"]]
    given, name = error["input"], ".".join(parts)
    section = schema.section_of(name)
    if error["type"] in ("extra_forbidden", "invalid_key"):
        inside = given if isinstance(given, dict) and not section else {}
        names = [f"{name}.{leaf}" for leaf in inside] or [name]
        yield from (unknown_key(schema, name) for name in names)
    elif error["type"] == "value_error":
        yield str(error["ctx"]["error"])
    elif name in schema.sections:
        keys = schema.names_in(name)
        yield f"{name} is {_shown(given)}; it must be a group of keys: {keys}."
    else:
        # The location may go on into a list or a union, of which the whole is shown.
        path = parts[: 1 + len(section.split(".")) if section else 1]
        name = ".".join(path)
        value = functools.reduce(lambda node, part: node[part], path, tree)
        yield f"{name} is {_shown(value)}; it must be {schema.keys[name].type}."


def unknown_key(schema: Schema, name: str) -> str:
    """The answer to a key that does not exist: the ones probably meant, and their neighbours."""
    guesses = _suggest(schema, name)
    section = schema.section_of(name)
    if not section and guesses:
        section = schema.section_of(guesses[0])
    hint = f"; did you mean {' or '.join(map(repr, guesses))}?" if guesses else ""
    group = f"the keys of {section}" if section in schema.sections else "the top-level keys"
    return f"unknown key {name!r}{hint} ({group} are {schema.names_in(section)})."


def _suggest(schema: Schema, name: str) -> list[str]:
    """The keys equally likely meant: alike in their last part (or an alias), then in section."""
    section, _, leaf = name.lower().replace("-", "_").rpartition(".")
    known = [(key.rpartition(".")[2], key) for key in (*schema.keys, *schema.sections)]

    def alike(mine: str, theirs: str) -> float:
        begun = 0.9 if mine and theirs.startswith(mine) else 0.0
        return max(begun, difflib.SequenceMatcher(None, mine, theirs).ratio())

    scores = [
        (alike(leaf, word), alike(section, key.rpartition(".")[0]), key)
        for word, key in (*known, *_ALIASES.items())
    ]
    best = max(scores)
    likely = (key for *score, key in scores if tuple(score) == best[:2])
    return list(dict.fromkeys(likely)) if best[0] >= 0.6 else []


# Names that other trainers give to our keys, for "did you mean".
_ALIASES = {
    "learning_rate": "optim.lr",
    "peak_lr": "optim.lr",
    "warmup": "optim.warmup_steps",
    "lr_schedule": "optim.schedule",
    "lr_scheduler_type": "optim.schedule",
    "min_lr_ratio": "optim.final_lr_fraction",
    "adam_epsilon": "optim.eps",
    "grad_clip": "optim.clip_norm",
    "max_grad_norm": "optim.clip_norm",
    "gradient_clipping": "optim.clip_norm",
    "batch_size": "batch.global_size",
    "global_batch_size": "batch.global_size",
    "gradient_accumulation_steps": "batch.microbatches",
    "num_microbatches": "batch.microbatches",
    "seq_len": "batch.sequence_length",
    "seq_length": "batch.sequence_length",
    "max_seq_len": "batch.sequence_length",
    "context_length": "batch.sequence_length",
    "num_layers": "model.layers",
    "n_layers": "model.layers",
    "num_hidden_layers": "model.layers",
    "hidden_size": "model.width",
    "d_model": "model.width",
    "embed_dim": "model.width",
    "num_heads": "model.heads",
    "n_heads": "model.heads",
    "num_attention_heads": "model.heads",
    "num_kv_heads": "model.kv_heads",
    "num_key_value_heads": "model.kv_heads",
    "head_size": "model.head_dim",
    "intermediate_size": "model.ffn",
    "d_ff": "model.ffn",
    "mlp_dim": "model.ffn",
    "vocab_size": "model.vocab",
    "rms_norm_eps": "model.norm_eps",
    "tie_word_embeddings": "model.tied",
    "attention_bias": "model.qkv_bias",
    "zero_stage": "parallel.zero",
    "pipeline_schedule": "pipeline.schedule",
    "gradient_checkpointing": "pipeline.remat",
    "init_scale": "precision.loss_scale.initial",
    "growth_factor": "precision.loss_scale.factor",
    "backoff_factor": "precision.loss_scale.backoff",
    "min_loss_scale": "precision.loss_scale.min",
    "max_loss_scale": "precision.loss_scale.max",
    "loss_scale_window": "precision.loss_scale.growth_interval",
    "deterministic": "precision.reproducible",
    "skip_step_sigma": "guard.spike_sigma",
    "dtype": "precision.compute",
    "compute_dtype": "precision.compute",
    "dataset": "data.source",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "logging_steps": "log.every_steps",
    "num_steps": "steps",
    "max_steps": "steps",
    "train_steps": "steps",
    "random_seed": "seed",
}
