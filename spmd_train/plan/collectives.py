"""What a compiled step communicates, read from XLA's own text (HLO), with loops multiplied in.

```
ENTRY %main                       1 time
  while %scan, 22 trips          22 times
    while %layers                known to the schedule's table: 15 layers x 16 micro-batches
      all-gather                240 times a step
```

Every text is read: that of JAX 0.10 and of 0.12, from the CPU, GPU and TPU compilers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby

import numpy as np

OPS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind that a device takes part in during one step.

    Attributes:
        op: its name in HLO; what a TPU runs as one reduce-scatter is called so, though its text
            spells an all-reduce and a slice.
        axes: of the mesh, along which the devices that talk to each other differ.
        in_loop: whether it is repeated within the step.
        count: executions per device.
        bytes_per_step: count x the larger of what goes in and what comes out, on one device: the
            whole of what is reduced or gathered, and not what an algorithm puts on the wire.
        exact: false where a branch may not be taken (it is counted as taken) or the length of a
            loop is not known (it is counted as one trip).
    """

    op: str
    axes: tuple[str, ...]
    in_loop: bool
    count: int
    bytes_per_step: int
    exact: bool = True


@dataclass(frozen=True)
class _Instruction:
    result: str  # type, with layout
    opcode: str
    rest: str  # operands and attributes


@dataclass(frozen=True)
class _Times:
    """How often a computation runs in a step."""

    count: int = 1
    in_loop: bool = False
    exact: bool = True


_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (\(?.*?\)?) ([\w-]+)\((.*)$")
_CALLED = re.compile(
    r"\b(body|calls|to_apply|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.-]+)"
)
_BRANCHES = ("branch_computations", "true_computation", "false_computation")
_ARRAY = re.compile(r"\b(pred|bf16|[a-z]\d+\w*)\[([\d,]*)\]")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def collectives(
    text: str, mesh: Mapping[str, int], loop_trips: Mapping[str, int]
) -> list[Collective]:
    """The collectives of an HLO module, those with the most bytes first.

    Args:
        text: of a compiled module (`Compiled.as_text()`).
        mesh: axes and sizes in the order of the device array.
        loop_trips: trips per step of the loops whose length only the schedule's table knows, by the
            named scope they stand in (`pipeline.execute.loop_trips`).
    """
    module = _Module(text, loop_trips)
    found = [
        _collective(instruction, computation, times, mesh)
        for computation, times in module.runs()
        for instruction in module.computations[computation].values()
        if _op(instruction) in OPS
    ]
    return sorted(_summed(found), key=lambda c: -c.bytes_per_step)


def _summed(found: list[Collective]) -> list[Collective]:
    def kind(c: Collective) -> tuple[str, tuple[str, ...], bool]:
        return c.op, c.axes, c.in_loop

    groups = [(key, list(each)) for key, each in groupby(sorted(found, key=kind), kind)]
    return [
        Collective(
            *key,
            count=sum(c.count for c in each),
            bytes_per_step=sum(c.bytes_per_step for c in each),
            exact=all(c.exact for c in each),
        )
        for key, each in groups
    ]


# -------------------------------------------------------------------------------------- the module


class _Module:
    """Computations of an HLO module, and how often each runs."""

    def __init__(self, text: str, loop_trips: Mapping[str, int]) -> None:
        self.computations: dict[str, dict[str, _Instruction]] = {}
        self.entry = current = ""
        for line in text.splitlines():
            if start := _COMPUTATION.match(line):
                current = start[2]
                self.entry = current if start[1] else self.entry
                self.computations[current] = {}
            elif (found := _INSTRUCTION.match(line)) and current:
                self.computations[current][found[1]] = _Instruction(found[2], found[3], found[4])
        scopes = "|".join(map(re.escape, loop_trips)) or "(?!)"
        self._scoped = re.compile(rf"/({scopes})(?:/(?!while/|body/)[^/]+)*/while$")
        self._loop_trips = loop_trips
        self._talks = cache(self._any_talks)

    def runs(self) -> list[tuple[str, _Times]]:
        """Every computation with a collective in it or below it, once for each of its callers."""
        found: list[tuple[str, _Times]] = []
        waiting = [(self.entry, _Times())]
        while waiting:
            computation, times = waiting.pop()
            if computation not in self.computations or not self._talks(computation):
                continue
            found.append((computation, times))
            for instruction in self.computations[computation].values():
                inside = self._inside(instruction, times)
                waiting += [(name, inside) for name in _called(instruction)]
        return found

    def _any_talks(self, computation: str) -> bool:
        return any(
            _op(instruction) in OPS or any(map(self._talks, _called(instruction)))
            for instruction in self.computations.get(computation, {}).values()
        )

    def _inside(self, instruction: _Instruction, times: _Times) -> _Times:
        """How often what an instruction calls runs."""
        if instruction.opcode == "conditional":
            return _Times(times.count, times.in_loop, False)
        if instruction.opcode != "while":
            return times
        trips = self._known_trips(instruction)
        if trips is not None:
            return _Times(times.count * trips, times.in_loop or trips > 1, times.exact)
        scope = self._scoped.search(_first(_OP_NAME, instruction.rest))
        if scope:
            return _Times(self._loop_trips[scope[1]], True, times.exact)
        return _Times(times.count, True, False)

    def _known_trips(self, loop: _Instruction) -> int | None:
        """Trips that the compiler wrote down, or the constant that the loop counts up to from 0."""
        if known := _TRIPS.search(loop.rest):
            return int(known[1])
        condition = self.computations.get(_first(r"condition=%?([\w.-]+)", loop.rest), {})
        compared = [i for i in condition.values() if i.opcode == "compare"]
        if len(compared) != 1 or "direction=LT" not in compared[0].rest:
            return None
        operands = re.findall(r"%([\w.-]+)", compared[0].rest.partition(")")[0])
        limits = [condition[o].rest for o in operands if condition[o].opcode == "constant"]
        return int(limits[0].partition(")")[0]) if len(limits) == 1 else None


def _called(instruction: _Instruction) -> list[str]:
    """Computations that an instruction runs; not those that say how two numbers are added."""
    if instruction.opcode.endswith(("-update", "-done")):  # counted where it starts
        return []
    return [
        name
        for attribute, names in _CALLED.findall(instruction.rest)
        if attribute != "to_apply" or instruction.opcode == "call"
        for name in re.findall(r"[\w.-]+", names)
    ]


def _op(instruction: _Instruction) -> str:
    return instruction.opcode.removesuffix("-start")


def _first(pattern: str | re.Pattern[str], text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


# ---------------------------------------------------------------------------------- one collective


def _collective(
    instruction: _Instruction, computation: str, times: _Times, mesh: Mapping[str, int]
) -> Collective:
    op, rest = _op(instruction), instruction.rest
    if op == "collective-permute":
        groups = replica_groups(rest.partition("source_target_pairs=")[2])
    else:
        groups = replica_groups(rest.partition("replica_groups=")[2], math.prod(mesh.values()))
    size = _bytes(instruction)
    if op == "reduce-scatter":
        size *= groups.shape[1]  # of what goes in
    if computation.startswith("all-reduce-scatter"):
        op = "reduce-scatter"
    return Collective(
        op,
        axes_of(groups, mesh),
        times.in_loop,
        times.count,
        times.count * size,
        times.exact,
    )


def _bytes(instruction: _Instruction) -> int:
    """Bytes of what comes out on a device.

    The result of a `-start` is a tuple of what goes in, what comes out, and perhaps more; that of
    an `all-reduce-start` is in JAX 0.10 what comes out alone.
    """
    result = instruction.result
    if instruction.opcode.endswith("-start"):
        parts = _top_level(result)
        if parts[0].startswith("(") or not instruction.opcode.startswith("all-reduce"):
            result = parts[1]
    return sum(_array_bytes(*array) for array in _ARRAY.findall(result))


def _top_level(result: str) -> list[str]:
    """The elements of a tuple's type, a type that is none as the only one."""
    text = re.sub(r"\{[^{}]*\}|/\*.*?\*/", "", result)  # layouts have commas and parentheses too
    if not text.startswith("("):
        return [text]
    parts, depth = [""], 0
    for letter in text[1:-1]:
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _array_bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(_first(r"(\d+)", dtype))
    return math.prod(int(n) for n in dims.split(",") if n) * bits // 8


def replica_groups(text: str, devices: int = 0) -> np.ndarray:
    """[groups, devices] from any of the ways in which XLA writes them.

    - `{{0,1},{2,3}}`: listed.
    - `[4,2]<=[2,4]T(1,0)`: 0 to 7 as [2, 4], transposed, as 4 groups of 2.
    - `mesh['data'=2,'model'=4] {'data'}`: those that differ along data alone (JAX 0.12);
      `'model':(2)2` is the part of size 2 of model below an outer part of size 2.
    - `{}`: one group of all `devices`.
    """
    if text.startswith("{}"):
        return np.arange(devices)[None]
    if listed := re.match(r"\{(\{[\d,]*\}(?:,\{[\d,]*\})*)\}", text):
        return np.array([_numbers(row) for row in re.findall(r"\{([\d,]*)\}", listed[1])])
    if iota := re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text):
        return _iota(iota[2]).reshape(_numbers(iota[1]))
    named = re.match(
        r"mesh\[([^]]*)\](?:, device_ids=\((\[[\d,]+\](?:T\([\d,]+\))?)\))? \{([^}]*)\}", text
    )
    if named:
        return _within_mesh(named[1], named[2], named[3])
    raise ValueError(f"cannot read replica groups: {text[:80]}")


def _within_mesh(axes: str, ids: str | None, inside: str) -> np.ndarray:
    sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", axes)}
    chosen = {
        name: (int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", inside)
    }
    dims: list[int] = []  # of the mesh, each axis as what is before the chosen part, it, and after
    for name, size in sizes.items():
        before, part = chosen.get(name, (size, 1))
        dims += [before, part, size // before // part]
    devices = _iota(ids or f"[{math.prod(dims)}]").reshape(dims)
    parts = [3 * list(sizes).index(name) + 1 for name in chosen]
    others = [i for i in range(len(dims)) if i not in parts]
    return devices.transpose(others + parts).reshape(-1, math.prod(dims[i] for i in parts))


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _iota(text: str) -> np.ndarray:
    parts = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    assert parts
    dims = _numbers(parts[1])
    ids = np.arange(math.prod(dims)).reshape(dims)
    return ids.transpose(_numbers(parts[2])) if parts[2] else ids


def axes_of(groups: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ."""
    coordinates = np.array(np.unravel_index(groups, tuple(mesh.values())))  # [axis, group, device]
    differs = (coordinates != coordinates[..., :1]).any(axis=(1, 2))
    return tuple(axis for axis, varies in zip(mesh, differs, strict=True) if varies)
