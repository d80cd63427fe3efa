"""The wheel, built and installed elsewhere, brings its configurations and its text along."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

CHECK = """
import importlib.resources
import sys
import spmd_train
from spmd_train.config import bundled_configs, load
from spmd_train.data.source import open_source
assert spmd_train.__file__.startswith(sys.argv[1]), spmd_train.__file__
assert {"tiny", "small", "llama-1b", "llama-7b", "llama-30b", "llama-70b"} <= set(bundled_configs())
assert importlib.resources.files("spmd_train.plan").joinpath("page.html.j2").is_file()
assert load().data.source is None
print(open_source(None, None, "data.source").tokens.size)
"""


def test_the_wheel_works_elsewhere(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    there = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", there, wheel], check=True)
    seen = subprocess.run(
        [sys.executable, "-c", CHECK, there],
        cwd=tmp_path,
        env={"PYTHONPATH": str(there), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert seen.returncode == 0, seen.stderr
    assert int(seen.stdout) == 2**20
