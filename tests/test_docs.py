"""What the documentation shows, run: the block of docs/own-model.md trains alike on two meshes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from helpers import train

ROOT = Path(__file__).parent.parent


def test_the_block_of_the_documentation_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (program,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/own-model.md").read_text(), re.DOTALL
    )
    (tmp_path / "documented.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    sets = ("model.block=documented:architecture", "model.layers=2", "batch.global_size=8")
    one = train("1x1x1", *sets)
    several = train("1x2x2", *sets, "batch.microbatches=2")
    assert one.losses[-1] < one.losses[0]
    np.testing.assert_allclose(several.losses, one.losses, rtol=1e-5)


def test_every_file_the_readme_names_is_there() -> None:
    text = (ROOT / "README.md").read_text()
    named = re.findall(r"\]\(([\w./-]+)\)|`(scripts/[\w.]+|\.ci/run)`", text)
    assert named
    for path in (a or b for a, b in named):
        assert (ROOT / path).exists(), path
