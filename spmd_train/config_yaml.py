"""YAML as people expect it: 3e-4 is a number, 010 and `on` are text, no key is given twice.

PyYAML speaks YAML 1.1, where 3e-4 is text, 010 is 8, 1:30 is 90 and `on` is true. The plain scalars
here are those of YAML 1.2's core schema (section 10.3.2), plus digits grouped as in 1_000.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from spmd_train.errors import RequestError

_SCALARS = [
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
]
_RESOLVERS: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
for _tag, _pattern, _firsts in _SCALARS:
    for _first in _firsts:
        _entry = (f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"))
        _RESOLVERS.setdefault(_first, []).append(_entry)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _RESOLVERS

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Refuse a key given twice, of which PyYAML silently keeps the last."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else "")
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would otherwise read as something else than text."""

    yaml_implicit_resolvers = _RESOLVERS


def read_yaml(text: str, source: str) -> Any:
    """The plain data in a YAML text; `source` names the text in messages."""
    try:
        return yaml.load(text, Loader=_Loader)  # a subclass of SafeLoader: plain data only
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise RequestError(f"{source}{where}: is not valid YAML ({error.problem}).") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RequestError(f"{source}, line {line}: is not valid YAML ({error.reason}).") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RequestError(f"{source}: is not valid YAML ({error}).") from error


def write_yaml(data: Any) -> str:
    """Plain data as YAML, in its own order; `read_yaml` of it is equal to `data`."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
