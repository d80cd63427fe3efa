"""What MFU is made of: the floating-point work of a token, and the peak of a device.

MFU = tokens/s x `model_flops_per_token` / (devices x `peak_flops`): PaLM, appendix B. The work is
the model's, whatever the run recomputes, and the peak is dense bf16 whatever the run computes in.
"""

from __future__ import annotations

import re
from typing import Protocol


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


_PEAKS: tuple[tuple[str, float | None], ...] = (
    ("A100", 312e12),
    ("H100 PCIe", 756e12),  # torchtitan tools/utils.py, as the NVL
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200 NVL", None),
    ("H200", 989e12),
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("B300", 2250e12),
    ("RTX 4090 D", None),
    ("RTX 4090 Laptop", None),
    ("RTX 4090", 165.2e12),
    ("A10G", 70e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("TPU v4 lite", None),
    ("TPU v4", 275e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5e", 197e12),
    ("TPU v5p", 459e12),
    ("TPU v5", 459e12),
    ("TPU v6 lite", 918e12),
    ("TPU v6e", 918e12),
    ("TPU7x", 2307e12 / 2),  # a chip is two JAX devices
)
"""Part of JAX's `device_kind` -> dense bf16 FLOP/s of one JAX device; the first match counts.

None marks a relative of other speed. Sources: torchtitan's `get_peak_flops`, ml-engineering's
accelerator tables, Google Cloud's TPU pages and the scaling book.
"""


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of one JAX device of this kind; None where unknown (CPUs among them)."""
    for name, peak in _PEAKS:
        if re.search(rf"\b{re.escape(name)}\b", device_kind, re.IGNORECASE):
            return peak
    return None
