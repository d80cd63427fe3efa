"""scripts/kill_test.py, shortened: a run killed at a random moment against the one never killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from processes import ROOT, environment


def test_a_run_killed_at_a_random_moment_ends_with_the_same_bits(tmp_path: Path) -> None:
    script = [sys.executable, ROOT / "scripts" / "kill_test.py", "--reproducible"]
    options = ["--kills", "1", "--steps", "10", "--seed", "3", "--keep", str(tmp_path)]
    ended = subprocess.run(
        [*map(str, script), *options], env=environment(), capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 kills in" in ended.stdout
    assert "nothing lost, nothing repeated, no bad step accepted" in ended.stdout
