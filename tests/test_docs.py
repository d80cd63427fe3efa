"""What the documentation shows, run: the block of docs/own-model.md trains alike on two meshes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import assert_same_bits, train

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))


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


def test_the_wrappers_train_in_somebody_elses_program() -> None:
    """fp16 regression as docs/precision.md has it: it learns, and one bad batch does not matter."""
    (program,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/precision.md").read_text(), re.DOTALL
    )
    names: dict[str, Any] = {}
    exec(program, names)
    params, state, step = names["params"], names["opt_state"], names["step"]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 4)).astype(np.float16)
    y = x @ np.array([1, -2, 0.5, 0], np.float16)
    for k in range(400):
        before = params
        params, state, loss = step(params, state, x, y * np.inf if k == 200 else y)
        if k == 200:
            assert_same_bits(params, before)
        assert np.isfinite(loss) == (k != 200)
    assert loss < 1e-3


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in DOCS)])
def test_every_file_a_page_names_is_there(page: str) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(r"\]\(([\w./-]+)\)|`(scripts/[\w.]+|\.ci/run|tests/[\w./]+py)`", text)
    for link, path in named:
        found = (ROOT / page).parent / link if link else ROOT / path
        assert found.exists(), found
