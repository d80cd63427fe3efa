"""Draw the loss curves of runs over each other: how the pictures in README and docs were made.

pip install matplotlib
python scripts/plot_runs.py runs/a runs/b --out docs/loss.svg
python scripts/plot_runs.py runs/fp32 runs/bf16 --by name --average 20 --out docs/precision.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import yaml

from spmd_train.telemetry.records import read_jsonl

STYLES = ["-", "--", "-.", ":"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--by", choices=["mesh", "name"], default="mesh", help="what runs differ in"
    )
    parser.add_argument("--title", default="One configuration on several meshes")
    parser.add_argument("--average", type=int, default=1, help="steps averaged into one point")
    request = parser.parse_args()
    plt.rcParams.update({"svg.fonttype": "none", "font.size": 11})
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for i, run in enumerate(request.runs):
        records = read_jsonl(run / "metrics.jsonl")
        label = yaml.safe_load((run / "config.yaml").read_text())[request.by]
        steps = [r["step"] for r in records][request.average - 1 :]
        window = np.ones(request.average) / request.average
        losses = np.convolve([float(r["loss"]) for r in records], window, mode="valid")
        # Equal curves lie on each other: widths that shrink keep every one of them visible.
        width = 1.2 + min(2.2, 8 / len(request.runs)) * (len(request.runs) - 1 - i)
        label = f"{label}  (last loss {losses[-1]:.4f})"
        axes.plot(steps, losses, STYLES[i % 4], linewidth=width, label=label)
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=request.title)
    axes.grid(alpha=0.3)
    axes.legend(title="data x model x stage" if request.by == "mesh" else None)
    figure.savefig(request.out)


if __name__ == "__main__":
    main()
