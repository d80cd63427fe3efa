"""Eight simulated CPU devices for every test, requested before JAX starts a backend."""

from __future__ import annotations

import sys
from pathlib import Path

import hypothesis
import jax

sys.path.insert(0, str(Path(__file__).parent))  # helpers.py, own_model.py

jax.config.update("jax_num_cpu_devices", 8)
jax.devices()  # now, before a command in this process asks for fewer

# No test is timed: a slow machine is not a failure.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
