"""What MFU is made of: the floating-point work of a token, and the peak of a device.

MFU = tokens/s x `model_flops_per_token` / (devices x `peak_flops`): PaLM, appendix B. The work is
the model's, whatever the run recomputes, and the peak is dense bf16 whatever the run computes in.
"""

from __future__ import annotations

import re
from typing import Protocol

from spmd_train.plan.hardware import of_device


class ModelShape(Protocol):
    """The sizes of a model configuration that its floating-point work depends on."""

    @property
    def layers(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def tied(self) -> bool: ...


def model_flops_per_token(model_config: ModelShape, sequence_length: int, parameters: int) -> float:
    """Forward and backward FLOPs per token: 6N + 12 L H E T (PaLM, arXiv:2204.02311, appendix B).

    N leaves out the embedding table, whose look-up multiplies nothing, unless it is tied and so is
    the head's matrix too (as torchtitan counts). Attention is not halved for the causal mask, as
    in the paper: figures stay comparable with published ones. `parameters` are the model's own,
    without padding.
    """
    c = model_config
    looked_up = 0 if c.tied else c.vocab * c.width
    attention = 12 * c.layers * c.heads * c.head_dim * sequence_length
    return float(6 * (parameters - looked_up) + attention)


_OTHERS: tuple[tuple[str, float], ...] = (
    ("H100 PCIe", 756e12),  # torchtitan tools/utils.py, as the NVL
    ("H100 NVL", 835e12),
    ("B300", 2250e12),
)
"""Part of JAX's `device_kind` -> dense bf16 FLOP/s, of kinds that the planner has no entry for."""


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of one JAX device of this kind (plan/hardware.yaml); None where unknown
    (CPUs among them)."""
    found = of_device(device_kind)
    if found is not None:
        _, accelerator = found
        return accelerator.peak_tflops["bfloat16"] * 1e12 / accelerator.devices
    for name, peak in _OTHERS:
        if re.search(rf"\b{re.escape(name)}\b", device_kind, re.IGNORECASE):
            return peak
    return None
