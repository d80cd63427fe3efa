"""A line of JSON as a document: a text, a conversation, or a prompt and its completion."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from spmd_train.data.chat import DEFAULT_TEMPLATE, Spans, render, token_spans
from spmd_train.data.tokenizer import Tokenizer
from spmd_train.errors import listed

Format = Literal["text", "messages", "prompt-completion"]


@dataclass(frozen=True)
class Piece:
    """A document, or a part of one that may be encoded on its own.

    Attributes:
        learned: ranges of its tokens that a model is to learn; None: all of them.
    """

    text: str
    opens: bool = True
    closes: bool = True
    learned: Spans | None = None


@dataclass(frozen=True)
class Form:
    """How records are documents.

    Attributes:
        field: of the text; a.b is a field in a field. template: of conversations, in Jinja.
        tokenizer: None while it is being trained; what is learned is not found then.
    """

    format: Format = "text"
    field: str = "text"
    template: str = DEFAULT_TEMPLATE
    tokenizer: Tokenizer | None = None

    def piece(self, line: bytes) -> Piece:
        """The document in a line of JSON.

        Raises:
            ValueError: there is none; in one phrase.
        """
        record = _parsed(line)
        if self.format == "text":
            return Piece(_string(record, self.field, "; name it with --text-field"))
        if self.format == "messages":
            text, spans = render(self.template, _messages(record), self.tokenizer)
        else:
            prompt, completion = _string(record, "prompt"), _string(record, "completion")
            text, spans = prompt + completion, ((len(prompt), len(prompt + completion)),)
        if self.tokenizer is None:
            return Piece(text)
        return Piece(text, learned=token_spans(text, spans, self.tokenizer))


def format_of(line: bytes) -> Format:
    """The format that a record has, as `--format auto` sees it; `text` of what cannot be read."""
    try:
        record = _parsed(line)
    except ValueError:
        return "text"
    if isinstance(record, dict) and "messages" in record:
        return "messages"
    if isinstance(record, dict) and {"prompt", "completion"} <= record.keys():
        return "prompt-completion"
    return "text"


def not_utf8(error: UnicodeDecodeError) -> str:
    """What is wrong with bytes that are no text."""
    return f"is not UTF-8 text (byte 0x{error.object[error.start]:02x}); convert it with iconv"


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(error)) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise ValueError("is JSON nested too deeply to be read") from None


def _string(record: Any, field: str, cure: str = "") -> str:
    value = _value(record, field, cure)
    if not isinstance(value, str):
        raise ValueError(f"field {field!r} is {_kind(value)}, not a string")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"field {field!r} holds half a surrogate pair ({error.reason})"
            ) from None
    return value


def _value(record: Any, field: str, cure: str = "") -> Any:
    value = record
    for key in field.split("."):
        if not isinstance(value, dict):
            raise ValueError(f"is {_kind(value)} where an object with {key!r} is expected")
        if key not in value:
            raise ValueError(f"has no field {field!r} (it has {listed(value) or 'none'}){cure}")
        value = value[key]
    return value


def _messages(record: Any) -> list[dict[str, Any]]:
    messages = _value(record, "messages")
    if not isinstance(messages, list) or not messages:
        found = "empty" if messages == [] else _kind(messages)
        raise ValueError(f"field 'messages' is {found}, not a list of messages")
    for number, message in enumerate(messages):
        try:
            _string(message, "role")
            _string(message, "content")
        except ValueError as error:
            raise ValueError(f"message {number}: {error}") from None
    return messages


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
