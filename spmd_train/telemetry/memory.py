"""What a compiled program needs on each device, as its compiler says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Memory:
    """Bytes per device.

    Attributes:
        arguments: the state and the batch.
        outputs: results, most of which reuse arguments.
        aliased: outputs that do.
        temporaries: gradients, activations, buffers of collectives.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int

    @property
    def peak(self) -> int:
        """Most held at once: arguments + outputs - aliased + temporaries."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    def __str__(self) -> str:
        return (
            f"{spell(self.peak)} per device: state and batch {spell(self.arguments)}, "
            f"temporaries {spell(self.temporaries)}"
        )


def compiled_memory(compiled: Any) -> Memory:
    """Memory of a `jax.stages.Compiled`. On CPU XLA's own peak leaves temporaries out: summed."""
    a = compiled.memory_analysis()
    return Memory(
        a.argument_size_in_bytes,
        a.output_size_in_bytes,
        a.alias_size_in_bytes,
        a.temp_size_in_bytes,
    )


def spell(count: int) -> str:
    """Bytes for people: `1.5 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
