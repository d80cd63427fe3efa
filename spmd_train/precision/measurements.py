"""What a re-run of a bad step measured, tensor by tensor in the order in which it made them.

NumPy only. Letters: M micro-batches, L layers, S stages, D data shards, R rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class Seen(NamedTuple):
    """Measurements of tensors, one entry each.

    Attributes:
        largest: largest finite magnitude, float32.
        infs, nans: number of entries that are infinite, and that are not a number, int32.
    """

    largest: Any
    infs: Any
    nans: Any

    @property
    def bad(self) -> np.ndarray:
        """Whether any entry is not finite."""
        return np.asarray((self.infs > 0) | (self.nans > 0))

    @property
    def value(self) -> str:
        return "nan" if np.any(self.nans) else "inf"

    def __call__(self, *index: Any) -> Seen:
        return Seen(self.largest[index], self.infs[index], self.nans[index])

    def over_first(self) -> Seen:
        """The first axis reduced."""
        return Seen(self.largest.max(0), self.infs.sum(0), self.nans.sum(0))


class Statistics(NamedTuple):
    """What `pipeline.diagnose` measures.

    Attributes:
        parameters: by path; [L, D] of the blocks', [S, D] of the others.
        embedding: [M, R], the first block's input.
        activations: by name, in the order in which a block makes them; [M, L, R].
        logits: [M, S, R]; stages share out the vocabulary.
        loss: [M, D].
        output_gradient: [M, R], of the last block's output.
        activation_gradients: by name, in the forward pass's order; [M, L, R].
        gradients: of parameters, by path; [M, L, D] of the blocks', [M, S, D] of the others (of
            one that all stages hold, a final norm, each stage's share).
    """

    parameters: dict[str, Seen]
    embedding: Seen
    activations: dict[str, Seen]
    logits: Seen
    loss: Seen
    output_gradient: Seen
    activation_gradients: dict[str, Seen]
    gradients: dict[str, Seen]

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """M, L, S, D, R."""
        M, S, R = self.logits.largest.shape
        L = next(iter(self.activations.values())).largest.shape[1]
        return M, L, S, self.loss.largest.shape[1], R


@dataclass(frozen=True)
class Sighting:
    """One tensor of one layer and micro-batch.

    Attributes:
        kind: "activation", "loss", "activation gradient" or "parameter gradient".
        tensor, layer, microbatch: which one; layer None outside the blocks.
        seen: [R] of activations and their gradients, else [D].
    """

    kind: str
    tensor: str
    layer: int | None
    microbatch: int
    seen: Seen

    @property
    def is_gradient(self) -> bool:
        return self.kind.endswith("gradient")

    @property
    def by_row(self) -> bool:
        return self.kind.startswith("activation")

    def __str__(self) -> str:
        of = "gradient of " if self.is_gradient else ""
        return f"{of}{name_of(self.tensor, self.layer)} (micro-batch {self.microbatch})"


def sightings(s: Statistics) -> Iterator[Sighting]:
    """Every tensor but the parameters, in the order in which the re-run made it."""

    def gradients(group: str, m: int, layer: int | None = None) -> Iterator[Sighting]:
        for path, seen in s.gradients.items():
            if path.startswith(group):
                at = seen(m).over_first() if layer is None else seen(m, layer)
                yield Sighting("parameter gradient", path, layer, m, at)

    M, L, *_ = s.sizes
    for m in range(M):
        yield Sighting("activation", "embedding", None, m, s.embedding(m))
        for layer in range(L):
            for name, seen in s.activations.items():
                yield Sighting("activation", name, layer, m, seen(m, layer))
        yield Sighting("activation", "logits", None, m, s.logits(m).over_first())
        yield Sighting("loss", "loss", None, m, s.loss(m))
        yield Sighting("activation gradient", "output", None, m, s.output_gradient(m))
        yield from gradients("head/", m)
        for layer in reversed(range(L)):
            *tensors, (block_input, dx) = reversed(s.activation_gradients.items())
            for name, seen in tensors:
                yield Sighting("activation gradient", name, layer, m, seen(m, layer))
            yield from gradients("blocks/", m, layer)
            yield Sighting("activation gradient", block_input, layer, m, dx(m, layer))
        yield from gradients("embed/", m)


def first_bad(s: Statistics) -> Sighting | None:
    """The earliest tensor that is not finite, parameters aside."""
    return next((x for x in sightings(s) if x.seen.bad.any()), None)


def bad_parameters(s: Statistics) -> list[dict[str, Any]]:
    """Which parameters are not finite, and where; entries as one device group counts them."""
    _, L, S, *_ = s.sizes
    found = []
    for path, seen in s.parameters.items():
        layers: list[int | None] = list(range(L)) if path.startswith("blocks/") else [None]
        for layer in layers:
            at = seen() if layer is None else seen([layer])  # [stages or 1, D]
            if at.bad.any():
                found.append(
                    {
                        "tensor": path,
                        "layer": layer,
                        "stage": None if layer is None else layer * S // L,
                        "entries": int((at.infs + at.nans).max()),
                        "value": at.value,
                        "data_shards": np.flatnonzero(at.bad.any(0)).tolist(),
                    }
                )
    return found


def is_finite(s: Statistics) -> bool:
    """Whether everything is, parameters too."""
    return not bad_parameters(s) and first_bad(s) is None


def bad_rows(s: Statistics) -> np.ndarray:
    """[M, R] bool: rows with anything not finite forward, or, if there are none, backward."""
    forward = [s.embedding.bad, np.any(s.logits.bad, axis=1)]
    forward += [np.any(seen.bad, axis=1) for seen in s.activations.values()]
    backward = [s.output_gradient.bad]
    backward += [np.any(seen.bad, axis=1) for seen in s.activation_gradients.values()]
    rows = np.any(forward, axis=0)
    return np.asarray(rows if rows.any() else np.any(backward, axis=0))


def name_of(tensor: str, layer: int | None) -> str:
    return tensor if layer is None else f"{tensor} of layer {layer}"
