"""Eight simulated CPU devices for every test, requested before JAX starts a backend."""

from __future__ import annotations

import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parent))  # helpers.py, own_model.py

jax.config.update("jax_num_cpu_devices", 8)
