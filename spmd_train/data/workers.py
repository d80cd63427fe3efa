"""The processes that encode shards; none outlives the one that started them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context, parent_process

from spmd_train.data import shards
from spmd_train.data.shards import Job, Shard, Summary
from spmd_train.errors import RunError

GO_ON = "what is finished is kept, and the same command goes on from there."


def encoded(job: Job, waiting: Sequence[Shard], processes: int) -> Iterator[Summary]:
    """The summaries of shards, in order, as they are finished."""
    count = max(1, min(processes, len(waiting)))
    threads = max(1, processes // max(1, len(waiting)))  # one compressed file is one shard
    if count == 1:
        _set_threads(threads)
        yield from (shards.encode(job, shard) for shard in waiting)
        return
    # Spawned, not forked: a fork of a process with the tokenizer library's threads may deadlock.
    pool = ProcessPoolExecutor(count, get_context("spawn"), _start_worker, (threads,))
    try:
        yield from pool.map(partial(shards.encode, job), waiting)
    except BrokenProcessPool as error:
        raise RunError(
            "a worker process was killed, most likely for want of memory: try fewer --workers;"
            f" {GO_ON}"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(threads: int) -> None:
    _set_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: the parent says what it means
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """A pool's workers wait for ever on the queue of a parent that was killed."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _set_threads(threads: int) -> None:
    """How many threads the `tokenizers` library uses in this process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(threads)
