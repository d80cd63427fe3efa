"""The two ways a command can fail, and the arithmetic of a helpful answer.

Errors are values of the domain: they are raised where the rule lives, say what was given and name
the nearest values that work. Only the command line turns them into an exit status.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable
from typing import NoReturn


class RequestError(Exception):
    """The request was wrong: nothing was started. The command line prints it and exits 2."""


class RunError(Exception):
    """The run failed after it was started. The command line prints it and exits 1."""


def end_process(message: str, status: int) -> NoReturn:
    """Say why and leave at once, from any thread: the main one may hang where no exception reaches.

    Nothing is cleaned up; in particular nobody waits for JAX's barrier with the other processes.
    """
    print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be, or None if none is close."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None


def nearest_divisors(number: int, near: int, count: int = 6) -> list[int]:
    """The up to `count` divisors of `number` closest to `near`, in ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    divisors = {*small, *(number // d for d in small)}
    return sorted(sorted(divisors, key=lambda d: (abs(d - near), d))[:count])


def nearest_multiples(number: int, step: int) -> list[int]:
    """The positive multiples of `step` just below and just above `number` (itself if it is one)."""
    below = number // step * step
    return [m for m in dict.fromkeys((below, -(-number // step) * step)) if m > 0]


def listed(values: Iterable[object]) -> str:
    """Values as they are listed in every message: `1, 2, 4`."""
    return ", ".join(map(str, values))
