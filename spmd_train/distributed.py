"""Several processes as one run: JAX's own environment variables, or nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from spmd_train.errors import RequestError

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def join_processes() -> None:
    """Join the other processes of this run, if the environment names any.

    Each process is started with the same command and JAX_COORDINATOR_ADDRESS=host:port,
    JAX_NUM_PROCESSES and its own JAX_PROCESS_ID.

    Raises:
        RequestError: some of the variables are missing or impossible.
    """
    given = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    if not given or given.get("JAX_NUM_PROCESSES") == "1":
        return
    missing = [name for name in VARIABLES if name not in given]
    if missing:
        raise RequestError(
            f"{', '.join(given)} set, but not {', '.join(missing)}; a run of several processes "
            "needs all three, a run of one process needs none."
        )
    address, count, index = (given[name] for name in VARIABLES)
    if not (count.isdigit() and index.isdigit() and int(index) < int(count)):
        raise RequestError(
            f"JAX_PROCESS_ID={index} with JAX_NUM_PROCESSES={count}; the id must be an integer "
            "from 0 to the number of processes - 1."
        )
    import jax

    jax.distributed.initialize(address, int(count), int(index))


def agreed(value: Callable[[], Any]) -> Any:
    """What `value` (plain JSON) is on the first process, on all of them; every process calls it.

    Only the first process evaluates it: what it sees of the disk or the clock holds for the run.
    """
    import jax
    import numpy as np
    from jax.experimental.multihost_utils import broadcast_one_to_all

    if jax.process_count() == 1:
        return value()
    text = json.dumps(value()).encode() if jax.process_index() == 0 else b""
    size = int(broadcast_one_to_all(np.int32(len(text))))
    letters = np.zeros(size, np.uint8)
    letters[: len(text)] = np.frombuffer(text, np.uint8)
    return json.loads(bytes(broadcast_one_to_all(letters).astype(np.uint8)))
