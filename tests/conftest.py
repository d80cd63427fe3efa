"""Eight simulated CPU devices for every test, requested before JAX starts a backend."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers.py, own_model.py

jax.config.update("jax_num_cpu_devices", 8)
jax.devices()  # now, before a command in this process asks for fewer

# Whole runs compile the same few programs again and again, here and in processes of their own.
cache = tempfile.mkdtemp(prefix="spmd_train_tests_")
atexit.register(shutil.rmtree, cache, ignore_errors=True)
os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "1"
jax.config.update("jax_compilation_cache_dir", cache)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)

# No test is timed: a slow machine is not a failure.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="module", autouse=True)
def few_memory_maps() -> Iterator[None]:
    """Forget compiled programs before they take all the memory maps a process may have.

    Linux allows 65,530; every program that XLA compiled for the CPU holds some dozens of them, and
    the one for which none is left aborts the process ("LLVM ERROR", signal 6).
    """
    yield
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") < 20_000:
        return
    here = str(Path(__file__).parent)
    for each in gc.get_objects():
        if isinstance(each, functools._lru_cache_wrapper):
            code = getattr(each.__wrapped__, "__code__", None)
            if code is not None and code.co_filename.startswith(here):
                each.cache_clear()
    jax.clear_caches()
    gc.collect()
