"""A step's record in `metrics.jsonl`: what the step reported, and how fast it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spmd_train.precision.guard import APPLIED


@dataclass(frozen=True)
class Throughput:
    """Attributes:
    tokens_per_step: input positions of a step, supervised or not.
    flops_per_token: model FLOPs, see flops.py.
    peak_flops: of all devices together; None where the device's peak is not known.
    """

    tokens_per_step: int
    flops_per_token: float
    peak_flops: float | None

    def record(
        self, step: int, metrics: Mapping[str, Any], seconds: float, waited: float
    ) -> dict[str, Any]:
        """One line of `metrics.jsonl`, in this order."""
        speed = self.tokens_per_step / seconds
        record: dict[str, Any] = {
            "step": step,
            "loss": float(metrics["loss"]),
            "tokens": int(metrics["tokens"]),
            "grad_norm": float(metrics["grad_norm"]),
            "lr": float(metrics["lr"]),
            "loss_scale": float(metrics["loss_scale"]),
            "skipped": int(metrics["verdict"]) != APPLIED,
            "step_seconds": round(seconds, 6),
            "tokens_per_second": round(speed, 2),
            "data_wait_seconds": round(waited, 6),
        }
        if float(metrics["z_loss"]):
            record["z_loss"] = float(metrics["z_loss"])
        if self.peak_flops is not None:
            record["mfu"] = round(speed * self.flops_per_token / self.peak_flops, 5)
        return record
