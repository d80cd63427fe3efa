"""From measurements of a bad step to a sentence: what went wrong first, and why.

```
run again in the step's formats     and in float32    cause
finite                              -                 vanished; overflow or diverged by a sum
parameters not finite               -                 parameters; overflow where float32 has them
not finite                          finite            overflow; rounding
not finite                          not finite        data (some rows); bug (most); diverged
not finite                          did not run       overflow, or unknown
```

NumPy only. Letters: M micro-batches, L layers, S stages, D data shards, R rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

FLOAT32_LIMIT = float(np.finfo(np.float32).max)
NORM_LIMIT = FLOAT32_LIMIT**0.5  # a larger gradient has an infinite square
LISTED = 16  # how many rows or parameters a finding lists


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
class Conditions:
    """How the step computed.

    Attributes:
        compute: dtype of the forward and backward pass; `limit`, its largest number.
        reduce_limit: largest number of the dtype in which gradients cross data.
        narrow_products: matrix products have a format of their own (fp8), of a smaller range.
        loss_scale: of this step; `lowest_scale`, what it may fall to.
    """

    compute: str
    limit: float
    reduce_limit: float = FLOAT32_LIMIT
    narrow_products: bool = False
    loss_scale: float = 1.0
    lowest_scale: float = 1.0

    @property
    def is_narrow(self) -> bool:
        """Whether numbers that float32 holds overflow here."""
        return self.limit < FLOAT32_LIMIT / 2 or self.narrow_products

    @property
    def can_back_off(self) -> bool:
        return self.loss_scale > self.lowest_scale


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
        return f"{of}{_name(self.tensor, self.layer)} (micro-batch {self.microbatch})"


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


def attribute(seen: Statistics, float32: Statistics | None, on: Conditions) -> dict[str, Any]:
    """The finding of one bad step, as `events.jsonl` records it.

    Args:
        seen: measured in the step's own number formats, at its loss scale.
        float32: the same batch with float32 compute and no loss scale; None where that did not
            run, `seen` itself where it would be the same.
        on: how the step computed.

    Returns:
        cause, one of the table above; says, what a person should know and do; first, where it
        went wrong; largest, the magnitudes on the way there by layer; rows, how many are affected
        and which (numbered through the step's batch); parameters, those that are not finite;
        compute, loss_scale and float32_finite (None: did not run).
    """
    first, damaged = first_bad(seen), bad_parameters(seen)
    finite = None if float32 is None else is_finite(float32)
    if damaged:
        cause, says = _damaged(damaged, finite, on)
    elif first is None:
        cause, says = _nothing(seen, on)
    elif float32 is None:
        cause, says = _without_float32(seen, first, on)
    elif finite:
        cause, says = _only_in_compute(seen, first, on)
    else:
        cause, says = _in_float32_too(float32)
    return {
        "cause": cause,
        "says": says,
        "first": {"kind": "parameter", **damaged[0]} if damaged else first and _place(seen, first),
        "largest": first and _largest(seen, first),
        "rows": first and _rows(seen),
        "parameters": damaged[:LISTED],
        "compute": on.compute,
        "loss_scale": on.loss_scale,
        "float32_finite": finite,
    }


# ------------------------------------------------------------------------------------ the causes


def _damaged(damaged: list[dict[str, Any]], finite: bool | None, on: Conditions) -> tuple[str, str]:
    names = _names(damaged)
    if finite and on.is_narrow and all(d["value"] == "inf" for d in damaged):
        return "overflow", (
            f"{names}: beyond {on.limit:.3g}, the largest {on.compute} number; the float32 master "
            "is finite, and so is the step in float32. Compute in bfloat16."
        )
    if finite:
        return "parameters", (
            f"{names}: not finite, though the float32 master it is made from is. The memory that "
            "holds it was damaged: note the host, and restore the last checkpoint."
        )
    return "parameters", (
        f"{names}: not finite, so every step from here on is lost. Restore the last checkpoint; "
        "an update before this step did the damage, or the memory that holds the parameters."
    )


def _nothing(seen: Statistics, on: Conditions) -> tuple[str, str]:
    # A bound on the sum over micro-batches and data shards, which the re-run does not take.
    sums = {p: float(g.largest.astype(float).sum((0, 2)).max()) for p, g in seen.gradients.items()}
    path, total = max(sums.items(), key=lambda item: item[1])
    if total > on.reduce_limit:
        return "overflow", (
            f"The gradient of {path} is finite in every micro-batch, but its sum may reach "
            f"{total:.3g} at loss scale {on.loss_scale:g}, more than the format in which gradients "
            "cross data holds. If it happens again, set precision.reduce=float32."
        )
    if total / on.loss_scale > NORM_LIMIT:
        return "diverged", (
            f"The gradient of {path} is finite but reaches {total / on.loss_scale:.3g}, whose "
            "square float32 does not hold: the gradient has exploded. Restore an earlier "
            "checkpoint with a lower optim.lr."
        )
    peak = max(float(x.seen.largest.max()) for x in sightings(seen))
    if peak > on.limit / 2:
        return "overflow", (
            f"Run again, everything is finite, but the largest number, {peak:.3g}, is close to the "
            f"largest that {on.compute} holds ({on.limit:.3g}): an overflow that rounding decides."
        )
    return "vanished", (
        "Run again, the same batch with the same parameters is finite everywhere, so neither of "
        "them explains it, nor the code. Suspect the hardware: note the host, and if it happens "
        "there again, take that host out."
    )


def _only_in_compute(seen: Statistics, first: Sighting, on: Conditions) -> tuple[str, str]:
    if first.is_gradient and on.can_back_off:
        return "overflow", (
            f"Overflow of the {first} at loss scale {on.loss_scale:g}: expected now and then, the "
            "scale backs off. Nothing to do unless every step is skipped."
        )
    peak = max(float(x.seen.largest.max()) for x in _way(seen, first))
    if not on.is_narrow and peak < on.limit / 2**16:
        return "rounding", (
            f"{first.seen.value} in the {first}: finite in float32, and no overflow of "
            f"{on.compute}, since the largest number up to there is {peak:.3g}. Suspect a "
            f"difference that rounds to 0 and is divided by, or that tensor's {on.compute} kernel."
        )
    scale = f" at loss scale {on.loss_scale:g}, the lowest" if first.is_gradient else ""
    advice = (
        "compute in bfloat16 (precision.policy=bf16), which has float32's range"
        if on.compute == "float16"
        else "compute in float32 and look at why the magnitudes grow"
    )
    return "overflow", (
        f"Overflow of {'an fp8 product or of ' if on.narrow_products else ''}{on.compute}: "
        f"{first.seen.value} in the {first}{scale}. The largest finite number up to there is "
        f"{peak:.3g}; {on.compute} holds {on.limit:.3g}. If it happens again, {advice}."
    )


def _without_float32(seen: Statistics, first: Sighting, on: Conditions) -> tuple[str, str]:
    unsure = "Judged without float32, which did not run: "
    scaled = first.is_gradient and on.can_back_off
    if on.is_narrow and (scaled or first.seen.value == "inf"):
        cause, says = _only_in_compute(seen, first, on)
        return cause, unsure + says
    return "unknown", (
        f"{unsure}{first.seen.value} in the {first} at loss scale {on.loss_scale:g}; "
        f"{_affected(seen)}."
    )


def _in_float32_too(float32: Statistics) -> tuple[str, str]:
    first = first_bad(float32)
    if first is None:  # of the parameters the step read, an image, none was damaged
        return "parameters", (
            f"{_names(bad_parameters(float32))}: the float32 master is not finite. Restore the "
            "last checkpoint."
        )
    peak = max(float(x.largest.max()) for x in float32.parameters.values())
    for x in sightings(float32):
        peak = max(peak, float(x.seen.largest.max()))
        if x.seen.bad.any():
            break
    if peak > NORM_LIMIT:  # its square is infinite, and NaN where a norm divides by that
        return "diverged", (
            f"float32 itself overflows in the {first}, with numbers up to {peak:.3g}: the model "
            "has diverged. Restore an earlier checkpoint with a lower optim.lr, or set "
            "guard.spike_sigma."
        )
    found = f"{first.seen.value} in the {first}, in float32 at scale 1 too, so no overflow"
    if bad_rows(float32).mean() <= 0.5:
        return "data", f"{found}; {_affected(float32)}: look at the tokens of these rows."
    return "bug", (
        f"{found}; {_affected(float32)}, so look not at the data but at the code that makes this "
        "tensor, and at the parameters it reads."
    )


# ------------------------------------------------------------------------------------ the places


def _way(s: Statistics, first: Sighting) -> list[Sighting]:
    """What `first`'s micro-batch made in the same pass, forward or backward, up to it."""
    way = []
    for x in sightings(s):
        if x.microbatch == first.microbatch and x.is_gradient == first.is_gradient:
            way.append(x)
            if (x.kind, x.tensor, x.layer) == (first.kind, first.tensor, first.layer):
                break
    return way


def _largest(s: Statistics, first: Sighting) -> dict[str, Any]:
    """Magnitudes by layer, on the way to `first`, of its tensor; of a block's ends outside them."""
    ends = "input" if first.is_gradient else "output"
    tensor = first.tensor if first.layer is not None else ends
    way = [x for x in _way(s, first) if x.layer is not None and x.tensor == tensor]
    return {
        "tensor": tensor,
        "layers": [x.layer for x in way],
        "values": [float(x.seen.largest.max()) for x in way],
    }


def _place(s: Statistics, x: Sighting) -> dict[str, Any]:
    _, L, S, D, R = s.sizes
    bad = np.flatnonzero(x.seen.bad)
    return {
        "kind": x.kind,
        "tensor": x.tensor,
        "layer": x.layer,
        "stage": None if x.layer is None else x.layer * S // L,  # both ends are on all stages
        "microbatch": x.microbatch,
        "data_shards": np.unique(bad * D // R if x.by_row else bad).tolist(),
        "rows": (x.microbatch * R + bad)[:LISTED].tolist() if x.by_row else None,
        "value": x.seen.value,
    }


def _rows(s: Statistics) -> dict[str, Any]:
    bad = bad_rows(s)
    return {
        "affected": int(bad.sum()),
        "of": bad.size,
        "listed": np.flatnonzero(bad)[:LISTED].tolist(),
        "microbatches": np.flatnonzero(bad.any(1)).tolist(),
        "data_shards": _shards(s, bad),
    }


def _shards(s: Statistics, bad: np.ndarray) -> list[int]:
    *_, D, R = s.sizes
    shards: list[int] = np.flatnonzero(bad.reshape(-1, D, R // D).any((0, 2))).tolist()
    return shards


def _affected(s: Statistics) -> str:
    bad = bad_rows(s)
    *_, D, R = s.sizes
    if bad.all():
        return f"all {bad.size} rows are affected"
    rows, shards = np.flatnonzero(bad), _shards(s, bad)
    shown = ", ".join(map(str, rows[:LISTED])) + (", ..." if len(rows) > LISTED else "")
    if D > 1 and len(shards) == 1 and len(rows) > 1:
        shown += f"; all on data shard {shards[0]}, whose device may be at fault"
    return f"{len(rows)} of {bad.size} rows are affected ({shown})"


def _name(tensor: str, layer: int | None) -> str:
    return tensor if layer is None else f"{tensor} of layer {layer}"


def _names(damaged: list[dict[str, Any]]) -> str:
    more = f" and {len(damaged) - 4} more" if len(damaged) > 4 else ""
    return ", ".join(_name(d["tensor"], d["layer"]) for d in damaged[:4]) + more
