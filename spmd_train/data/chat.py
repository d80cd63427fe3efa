"""Conversations as texts, and which part of such a text a model is to learn.

    text      <|im_start|>user Hi<|im_end|> <|im_start|>assistant Hello<|im_end|>
    learned                                                       ^^^^^^^^^^^^^^^

An assistant's turn is found by rendering the conversation up to it, with the request to answer
(`add_generation_prompt`), and once more with it: the difference is what a model would have to
write. So what is learned begins exactly where generation begins. The marks `{% generation %}` of
Hugging Face's templates, which say the same in the few templates that have them, are passed over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from spmd_train.data.tokenizer import Tokenizer
from spmd_train.errors import RequestError

Spans = tuple[tuple[int, int], ...]
"""Ranges [start, stop) of characters, or of tokens."""

DEFAULT_TEMPLATE = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""ChatML, as OpenAI named it and Qwen 2.5 uses it (there with a system turn of its own)."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which mark an assistant's text: its contents."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=1)
def compiled(source: str) -> jinja2.Template:
    """A template as `transformers` compiles it, but without the date of today.

    Raises:
        jinja2.TemplateSyntaxError: it is none.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = to_json
    return environment.from_string(source)


def read_template(path: Path) -> str:
    """The text of a chat template.

    Raises:
        RequestError: it cannot be read, or compiled.
    """
    try:
        source = path.read_text("utf-8")
        compiled(source)
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: is not UTF-8 text.") from error
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(
            f"{path}, line {error.lineno}: is no Jinja template ({error.message})."
        ) from error
    return source


def render(
    source: str, messages: Sequence[dict[str, Any]], text: Tokenizer | None
) -> tuple[str, Spans]:
    """A conversation as text, and the characters of its assistant's turns.

    Raises:
        ValueError: the template cannot render it, or turns cannot be told apart; in one phrase.
    """
    marks = {
        "bos_token": _mark(text, text.bos_id if text else None),
        "eos_token": _mark(text, text.eos_id if text else None),
    }

    def rendered(count: int, ask: bool) -> str:
        return compiled(source).render(
            messages=messages[:count], add_generation_prompt=ask, **marks
        )

    try:
        return _with_turns(messages, rendered)
    except (jinja2.TemplateError, TypeError, OverflowError) as error:
        raise ValueError(f"the chat template fails on it ({error})") from None


def _mark(text: Tokenizer | None, mark: int | None) -> str:
    return text.decode([mark]) if text and mark is not None else ""


def _with_turns(
    messages: Sequence[dict[str, Any]], rendered: Callable[[int, bool], str]
) -> tuple[str, Spans]:
    whole = rendered(len(messages), False)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = rendered(number, True), rendered(number + 1, False)
        if not (after.startswith(before) and whole.startswith(after)):
            raise ValueError(
                f"the chat template writes what comes before or in message {number} differently"
                " once more messages follow, so its beginning and end are not known; use a"
                " template that writes each message once and for all"
            )
        spans.append((len(before), len(after)))
    if not spans:
        raise ValueError("has no message of the role 'assistant', so nothing to learn")
    return whole, tuple(spans)


def token_spans(text: str, spans: Spans, tokenizer: Tokenizer) -> Spans:
    """Ranges of characters as ranges of tokens.

    Raises:
        ValueError: a token reaches over the edge of a range; in one phrase. What comes before it
            would have other ids at generation, where the rest is not known yet.
    """
    ids = tokenizer.encode(text)

    def tokens_before(edge: int) -> int:
        prefix = tokenizer.encode(text[:edge])
        if prefix.tolist() != ids[: prefix.size].tolist():
            near = f"{text[max(0, edge - 12) : edge]!r} and {text[edge : edge + 12]!r}"
            raise ValueError(
                f"a token reaches from the context into what is learned, or out of it, between"
                f" {near}; let the template, the prompt or the completion end differently (a space"
                " belongs to the word after it)"
            )
        return prefix.size

    return tuple((tokens_before(start), tokens_before(stop)) for start, stop in spans)
