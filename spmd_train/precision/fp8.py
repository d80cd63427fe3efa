"""The matrix products of a block with its weights, in 8-bit floating point.

```
forward    y  = x w     e4m3 x e4m3     8 bits: 4 of exponent, 3 of mantissa, up to 448
backward   dx = g w^T   e5m2 x e4m3     gradients spread further: 5 and 2, up to 57344
           dw = x^T g   e4m3 x e5m2
```

(Micikevicius et al. 2022, "FP8 formats for deep learning", section 4.) Operands really are fp8
arrays, so that hardware with fp8 units uses them; a CPU multiplies the same rounded values in
float32. Sums, and the scales multiplied in afterwards, are float32.

Scales are powers of two, so that a value rounds the same way whatever its scale (short of the
subnormals): x alike in y and dw; and dw, whose rows are the tokens of a micro-batch on one data
shard, alike on every mesh.

Where a scale comes from:
- current: each row of an operand (all that one entry of the result sums over) is scaled by its own
  largest value.
- delayed: one scale a tensor, from its largest values in the steps before (Transformer Engine,
  `DelayedScaling` with margin 0 and `amax_compute_algo="max"`), so that it is cast as it is made.
  A tensor without a history has scale 1: in step 1 most gradients of a block round to zero.
  The backward pass returns the largest values it saw as the "gradient" of the scales (the idea of
  Flax's `_overwrite_with_gradient`): that way they leave any remat, loop and `shard_map`.

Not Flax's, which are linen modules that own their scales; not Qwix, which replaces a model's calls
by interception, out of sight of our layer loops, and would need its state carried through them.

Axes: L layers; x, w, g, y are a product's input, weights, output gradient and output.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from spmd_train.errors import RequestError, listed
from spmd_train.model.protocol import BlockContext, Product, plain_product
from spmd_train.sharding import Layout, Leaf, tree_map_leaves

if TYPE_CHECKING:
    from spmd_train.model import Model
    from spmd_train.precision.policy import Policy

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
PRODUCT = "fp8_product"
"""`checkpoint_name` of a product's result, for remat policies that keep products."""

_OPERANDS = (E4M3, E4M3, E5M2)  # x, w, g
_EXPONENT = 0x7F800000  # of a float32
_SMALLEST = 2.0**-100  # below it the largest value counts as 0: the scale must stay finite


def scale_of(peak: jax.Array, dtype: Any) -> jax.Array:
    """The power of two that maps the largest value of a tensor just within `dtype`; 1 for 0s."""
    scale = jnp.where(peak > _SMALLEST, float(jnp.finfo(dtype).max) / peak, 1.0)
    bits = jax.lax.bitcast_convert_type(scale, jnp.int32) & _EXPONENT
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def amax(a: jax.Array, axis: tuple[int, ...] | None = None) -> jax.Array:
    """Largest absolute value, float32, over `axis` (kept as 1) or all."""
    return jnp.max(jnp.abs(a.astype(jnp.float32)), axis=axis, keepdims=axis is not None)


def quantize(
    a: jax.Array, dtype: Any, axis: tuple[int, ...], scale: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Round `a` to fp8; with a `scale`, or else one for each row along `axis`.

    Returns:
        The fp8 values and what 1 of them is worth, float32 of as many dimensions as `a`.
    """
    scale = scale_of(amax(a, axis), dtype) if scale is None else scale.reshape((1,) * a.ndim)
    top = float(jnp.finfo(dtype).max)
    # A cast to fp8 does not saturate, so clip; but infinity must not come out as a number.
    scaled = jnp.clip(a.astype(jnp.float32) * scale, -top, top)
    return jnp.where(jnp.isfinite(a), scaled, jnp.nan).astype(dtype), 1.0 / scale


def _scaled_einsum(
    subscripts: tuple[str, str, str], operands: Any, dtypes: Any, scales: Any
) -> jax.Array:
    """Float32 einsum of two operands rounded to fp8."""
    *labels, out = subscripts
    rounded, units = [], []
    for letters, a, dtype, scale in zip(labels, operands, dtypes, scales, strict=True):
        summed = tuple(i for i, letter in enumerate(letters) if letter not in out)
        values, unit = quantize(a, dtype, summed, scale)
        rounded.append(values)
        # The unit's axes to where the result has them.
        unit = jnp.einsum(f"{letters}->{''.join(c for c in out if c in letters)}", unit)
        units.append(jnp.expand_dims(unit, [i for i, c in enumerate(out) if c not in letters]))
    subscript = f"{labels[0]},{labels[1]}->{out}"
    total = jnp.einsum(subscript, *rounded, preferred_element_type=jnp.float32)
    return total * units[0] * units[1]


def _letters(subscripts: str) -> tuple[str, str, str]:
    """`x,w->y` taken apart. Every letter must be in two of them, or dx and dw are no einsums."""
    inputs, _, y = subscripts.replace(" ", "").partition("->")
    x, _, w = inputs.partition(",")
    letters = x + w + y
    once_each = all(len(set(part)) == len(part) for part in (x, w, y))
    if not (letters.isalpha() and once_each and all(letters.count(c) > 1 for c in letters)):
        raise ValueError(f"fp8 needs a product of two operands like 'btd,df->btf': {subscripts!r}")
    return x, w, y


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fp8_einsum(subscripts: str, x: jax.Array, w: jax.Array, scales: jax.Array | None) -> jax.Array:
    """einsum of x and w in fp8, in their common dtype, and so are its gradients.

    Args:
        scales: [3] float32 of x, w and g, whose "gradient" is the largest values of x, w and g;
            None scales by row.
    """
    sx, sw, _ = (None,) * 3 if scales is None else scales
    total = _scaled_einsum(_letters(subscripts), (x, w), (E4M3, E4M3), (sx, sw))
    return total.astype(jnp.result_type(x, w))


def _forward(
    subscripts: str, x: jax.Array, w: jax.Array, scales: jax.Array | None
) -> tuple[jax.Array, Any]:
    """Keeps x and w as they came: another product may keep the same x, and w is kept anyway."""
    return fp8_einsum(subscripts, x, w, scales), (x, w, scales)


def _backward(
    subscripts: str, saved: Any, g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    x, w, scales = saved
    sx, sw, sg = (None,) * 3 if scales is None else scales
    xs, ws, ys = _letters(subscripts)
    dx = _scaled_einsum((ys, ws, xs), (g, w), (E5M2, E4M3), (sg, sw))
    dw = _scaled_einsum((xs, ys, ws), (x, g), (E4M3, E5M2), (sx, sg))
    seen = None if scales is None else jnp.stack([amax(a) for a in (x, w, g)])
    return dx.astype(x.dtype), dw.astype(w.dtype), seen


fp8_einsum.defvjp(_forward, _backward)


def product_with(scales: Mapping[str, jax.Array]) -> Product:
    """`BlockContext.product` in fp8: scales [3] by product name (delayed), or none (current)."""

    def product(name: str, subscripts: str, x: jax.Array, w: jax.Array) -> jax.Array:
        y = fp8_einsum(subscripts, x, w, scales[name] if scales else None)
        return checkpoint_name(y, PRODUCT)

    return product


def product_names(model: Model, length: int, dtype: Any) -> tuple[str, ...]:
    """Names of a block's products with its weights, found by tracing it on [1, length, D].

    Raises:
        RequestError: there is none, so that nothing would run in fp8; or two have one name.
    """
    names: list[str] = []

    def record(name: str, subscripts: str, x: jax.Array, w: jax.Array) -> jax.Array:
        names.append(name)
        return plain_product(name, subscripts, x, w)

    def trace(params: Any, x: jax.Array) -> jax.Array:
        context = BlockContext(model.shared(length), 0, None, Layout(), "xla", record)
        return model.block(params, x, context)

    params = tree_map_leaves(
        lambda leaf: jax.ShapeDtypeStruct(leaf.logical_shape[1:], dtype),
        model.leaves(Layout())["blocks"],
    )
    jax.eval_shape(trace, params, jax.ShapeDtypeStruct((1, length, model.config.width), dtype))
    block = model.config.block
    if not names:
        raise RequestError(
            f"precision.policy=fp8: model.block={block} multiplies nothing through "
            "context.einsum, so nothing would run in fp8; write its products with weights as "
            'context.einsum("up", "btd,df->btf", x, w), or use precision.policy=bf16.'
        )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise RequestError(
            f"model.block={block}: two products of context.einsum are named {listed(twice)}; "
            "give each its own name, under which its fp8 scales are kept."
        )
    return tuple(names)


ByProduct = dict[str, Any]
"""A float32 array for each product of a block: scales or largest values [L, 3] of its x, w and g,
or the history of the latter [history, L, 3], newest first. Empty unless scaling is delayed."""


def history_leaves(
    policy: Policy, model: Model, layout: Layout, length: int, history: int
) -> ByProduct:
    """Shape and placement of the history; layers are sharded like the parameters they belong to.

    Args:
        length: of a sequence. history: number of steps that are looked at.

    Raises:
        RequestError: the block has no product that could run in fp8.
    """
    names = product_names(model, length, policy.compute) if policy.fp8 else ()
    if policy.fp8 != "delayed":
        return {}
    leaf: Leaf = layout.leaf((None, "layers", None), (history, model.config.layers, 3))
    return dict.fromkeys(names, leaf)


def scales_from(history: ByProduct) -> ByProduct:
    """Scales for the next step, from the largest value that each operand had in the history."""

    def scales(seen: jax.Array) -> jax.Array:
        peaks = jnp.moveaxis(seen.max(axis=0), -1, 0)
        return jnp.stack([scale_of(p, d) for p, d in zip(peaks, _OPERANDS, strict=True)], axis=-1)

    return jax.tree.map(scales, history)


def remember(history: ByProduct, seen: ByProduct) -> ByProduct:
    """The history with one more step, whose largest values were `seen`; the oldest is forgotten."""
    return jax.tree.map(lambda h, s: jnp.concatenate([s[None], h[:-1]]), history, seen)
