"""Several processes as one run: JAX's own environment variables, or nothing."""

from __future__ import annotations

import os

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
