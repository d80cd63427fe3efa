"""The command line called from within a test, and what its runs leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spmd_train.cli import main
from spmd_train.telemetry.records import read_jsonl

SMALL = [
    "model.layers=2", "model.width=32", "model.heads=4", "model.kv_heads=2", "model.ffn=64",
    "batch.global_size=8", "batch.microbatches=2", "batch.sequence_length=32",
    "optim.warmup_steps=2", "optim.lr=1e-2", "log.sample_ids=true",
]  # fmt: skip


def sets(*items: str) -> list[str]:
    return [word for item in items for word in ("--set", item)]


def run(*arguments: object) -> int:
    return main([str(a) for a in arguments])


def records(out: Path) -> list[dict[str, Any]]:
    return read_jsonl(out / "metrics.jsonl")


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in records(out)]


def events(out: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_jsonl(out / "events.jsonl") if event["event"] == name]
