"""Seconds of one layer and of both ends of the model, for one micro-batch on one device.

Every product and every pass over memory is listed by name; `rates` says how long each takes. Bytes
of the element-wise passes are counted by hand, per element: what is read, then what is written.

Letters, local to one device: R rows times positions, T keys a query may see, D width, A query width
(heads x head_dim), B key and value width, F ffn, V vocabulary, P parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from spmd_train.plan.rates import Rates, product, streaming
from spmd_train.plan.workload import Execution, Transformer

# Kernels of one layer, forward and backward, sent by the host one by one: Megatron-LM's layer has
# about so many operations, gradient additions among the latter.
EAGER_OPERATIONS = (24, 40)
# Of them, element-wise kernels outside attention; and those a compiler makes of them.
EAGER_PASSES, COMPILED_PASSES = (6, 20), (5, 8)


@dataclass(frozen=True)
class Part:
    """What a layer is computed on.

    Attributes:
        rows: sequences of the micro-batch.
        positions: of a sequence, on this device (context parallelism splits them).
        sequence: all of its positions.
        model: ways that heads, ffn and vocabulary are split.
        compute: dtype of the products.
        sequence_parallel: norms and residual on 1/model of the positions.
        fused_attention: scores stay on chip, and what the causal mask hides is not computed.
        eager: operations sent one by one, element-wise ones unfused, with dropout.
    """

    rows: int
    positions: int
    sequence: int
    model: int
    compute: str
    sequence_parallel: bool
    fused_attention: bool
    eager: bool

    @classmethod
    def of(cls, e: Execution) -> Part:
        return cls(
            e.microbatch_size,
            e.sequence_length // e.context,
            e.sequence_length,
            e.mesh.model,
            e.compute,
            e.sequence_parallel and e.mesh.model > 1,
            e.fused_attention,
            e.eager,
        )

    @property
    def tokens(self) -> int:
        return self.rows * self.positions

    @property
    def residual_tokens(self) -> float:
        """Positions whose residual this device holds between blocks."""
        return self.tokens / (self.model if self.sequence_parallel else 1)


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer, model-axis communication not included.

    Attributes:
        forward, backward: what every remat policy runs.
        attention: of the scores, softmax and values in `forward`.
        elementwise: of the passes over memory in `forward`, those of attention aside.
        last: the product of `forward` whose result no gradient needs.
        waits: (forward, backward) seconds in them that the device waits for the host.
    """

    forward: float
    backward: float
    attention: float
    elementwise: float
    last: float
    waits: tuple[float, float] = (0.0, 0.0)

    def recompute(self, remat: str, eager: bool) -> float:
        """Forward work repeated before the backward (the policies of workload.Remat).

        A compiler drops what the gradients do not need, the layer's last product; eager
        checkpointing runs all of it.
        """
        whole = self.forward if eager else self.forward - self.last
        return {
            "none": 0.0,
            "dots": self.attention + self.elementwise,
            "selective": self.attention,
            "full": whole,
            "stage": self.forward + whole,
        }[remat]


class Sizes(NamedTuple):
    """Local sizes, by the letters above, and the (N, K) of each product with weights."""

    R: int
    D: int
    A: int
    B: int
    F: int
    P: float
    dots: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, t: Transformer, on: Part) -> Sizes:
        D, F, A = t.width, t.ffn // on.model, t.heads * t.head_dim // on.model
        B = max(t.kv_heads // on.model, 1) * t.head_dim
        dots = ((A + 2 * B, D), (D, A), ((2 if t.gated else 1) * F, D), (D, F))
        return cls(on.tokens, D, A, B, F, t.matrix_parameters / on.model, dots)


@cache
def layer_time(r: Rates, t: Transformer, on: Part) -> LayerTime:
    """One transformer layer."""
    z = Sizes.of(t, on)
    products = [product(r, z.R, N, K, on.compute) for N, K in z.dots]
    transposed = sum(
        product(r, z.R, K, N, on.compute) + product(r, K, N, z.R, on.compute) for N, K in z.dots
    )
    scores, scores_backward = _attention(r, t, on)
    forward_bytes, backward_bytes = _passes(t, on, z)
    kernels = EAGER_PASSES if on.eager else COMPILED_PASSES
    elementwise = streaming(r, forward_bytes, kernels[0])
    forward = sum(products) + scores + elementwise
    backward = transposed + scores_backward + streaming(r, backward_bytes, kernels[1])
    waits = (0.0, 0.0)
    if on.eager:
        collectives = 2 if on.model > 1 else 0
        sent = [(n + collectives) * r.constants.dispatch_seconds for n in EAGER_OPERATIONS]
        waits = max(0.0, sent[0] - forward), max(0.0, sent[1] - backward)
    return LayerTime(
        forward + waits[0], backward + waits[1], scores, elementwise, products[-1], waits
    )


def _passes(t: Transformer, on: Part, z: Sizes) -> tuple[float, float]:
    """Bytes that element-wise operations move, forward and backward, attention's scores aside.

    Two norms and two residual additions on the residual, what lies around attention on A (and B),
    the activation function on F, the additions to the gradient accumulators on P.
    """
    residual = on.residual_tokens * z.D
    width = 4 if on.compute == "float32" else 2  # of an activation
    act = (3 if t.gated else 2) * width
    if on.eager:
        # Forward: a norm 4; bias, dropout with its mask and residual in one kernel 7. Backward: a
        # norm 10 (its parameters' gradients read again), dropout 5, residual 6, bias gradient 2.
        forward = (2 * 4 + 2 * 7) * residual + 4 * z.R * z.A + act * z.R * z.F
        backward = (2 * 10 + 2 * 13) * residual + 16 * z.R * z.A + (act + 4) * z.R * z.F
        return forward, backward + 6 * z.P
    rotated = 2 * width * z.R * (z.A + z.B)
    forward = 4 * width * residual + rotated + act * z.R * z.F
    backward = 10 * width * residual + rotated + (2 * act - width) * z.R * z.F
    if on.compute == "float8":  # each operand read (2) and written (1); its largest value is known
        forward += 3 * (z.R * sum(K for _, K in z.dots) + z.P)
        backward += 3 * z.R * sum(N for N, _ in z.dots)
    return forward, backward + 10 * z.P


def _attention(r: Rates, t: Transformer, on: Part) -> tuple[float, float]:
    """Scores, softmax, values: forward and backward.

    Fused kernels compute the half that a causal mask leaves, and in the backward pass the scores
    once more (5 products for the 2 of the forward: FlashAttention-2, section 3.1.2).
    """
    heads, E = max(t.heads // on.model, 1), t.head_dim
    if on.fused_attention:
        flops = 0.5 * 4.0 * on.rows * heads * on.positions * on.sequence * E
        rate = r.rate(on.compute if on.compute != "float8" else "bfloat16")
        forward = flops / (rate * r.constants.attention_fraction) + r.constants.kernel_seconds
        return forward, 2.5 * forward
    count, Q, T = on.rows * heads, on.positions, on.sequence
    elements = count * Q * T
    scores = product(r, Q, T, E, on.compute, count)
    values = product(r, Q, E, T, on.compute, count)
    forward = scores + values + streaming(r, 8.0 * elements, 2)
    backward = 2 * scores + 2 * values + streaming(r, 9.0 * elements, 2)
    return forward, backward


class EndsTime(NamedTuple):
    """Seconds of the head (logits, loss, their gradients) and of the look-up, both directions."""

    head: float
    lookup: float


@cache
def ends_time(r: Rates, t: Transformer, on: Part, shards: int) -> EndsTime:
    """Both ends with the vocabulary split `shards` ways."""
    R, D, V = on.tokens, t.width, max(t.vocab // shards, 1)
    dtype = "bfloat16" if on.compute == "float8" else on.compute
    products = (
        product(r, R, V, D, dtype, out_bytes=4)
        + product(r, R, D, V, dtype)
        + product(r, V, D, R, dtype)
    )
    # Megatron's cross-entropy reads and writes FP32 logits in ten passes; a compiler needs four.
    passes = streaming(r, (64 if on.eager else 24) * R * V, 12 if on.eager else 5)
    table = (6 if on.eager else 10) * V * D  # the gradient, added up
    head = products + passes + streaming(r, table)
    lookup = streaming(r, 2 * table + 20 * R * D, 6)
    return EndsTime(head, lookup)
