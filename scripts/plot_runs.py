"""Draw the loss curves of runs over each other: how the picture in the README was made.

pip install matplotlib
python scripts/plot_runs.py runs/a runs/b --out docs/loss.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import yaml

from spmd_train.telemetry.records import read_jsonl

STYLES = ["-", "--", "-.", ":"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    request = parser.parse_args()
    plt.rcParams.update({"svg.fonttype": "none", "font.size": 11})
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for i, run in enumerate(request.runs):
        records = read_jsonl(run / "metrics.jsonl")
        mesh = yaml.safe_load((run / "config.yaml").read_text())["mesh"]
        steps, losses = [r["step"] for r in records], [r["loss"] for r in records]
        # Equal curves lie on each other: widths that shrink keep every one of them visible.
        width = 1.2 + 2.2 * (len(request.runs) - 1 - i)
        label = f"{mesh}  (last loss {losses[-1]:.4f})"
        axes.plot(steps, losses, STYLES[i % 4], linewidth=width, label=label)
    axes.set(
        xlabel="step", ylabel="loss, nats per byte", title="One configuration on several meshes"
    )
    axes.grid(alpha=0.3)
    axes.legend(title="data x model x stage")
    figure.savefig(request.out)


if __name__ == "__main__":
    main()
