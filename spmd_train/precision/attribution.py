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

from dataclasses import dataclass
from typing import Any

import numpy as np

from spmd_train.precision.measurements import (
    Sighting,
    Statistics,
    bad_parameters,
    bad_rows,
    first_bad,
    is_finite,
    name_of,
    sightings,
)

FLOAT32_LIMIT = float(np.finfo(np.float32).max)
NORM_LIMIT = FLOAT32_LIMIT**0.5  # a larger gradient has an infinite square
LISTED = 16  # how many rows or parameters a finding lists


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


def _names(damaged: list[dict[str, Any]]) -> str:
    more = f" and {len(damaged) - 4} more" if len(damaged) > 4 else ""
    return ", ".join(name_of(d["tensor"], d["layer"]) for d in damaged[:4]) + more
