"""Where two trees of plain values (configurations, manifests, metadata) differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def differences(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The place (`optim.lr`, `inputs[1].bytes`) and both values of all that differs.

    Mappings and lists are compared entry by entry; None stands for an entry that is absent.
    """
    if isinstance(old, list) and isinstance(new, list):
        old, new, named = dict(enumerate(old)), dict(enumerate(new)), f"{name}[{{}}]"
    elif isinstance(old, dict) and isinstance(new, dict):
        named = f"{name}.{{}}" if name else "{}"
    else:
        if old != new:
            yield name, old, new
        return
    for key in dict.fromkeys([*old, *new]):
        yield from differences(old.get(key), new.get(key), named.format(key))


def first_difference(old: Any, new: Any) -> str | None:
    """The first of them as a phrase, or None."""
    for name, there, here in differences(old, new):
        return f"{name} is {_short(there)} there and {_short(here)} here"
    return None


def _short(value: Any) -> str:
    if isinstance(value, dict) and "path" in value:
        value = value["path"]
    return "absent" if value is None else repr(value)
