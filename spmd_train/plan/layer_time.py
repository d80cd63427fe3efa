"""Seconds of one layer and of both ends of the model, for one micro-batch on one device.

Every product and every pass over memory is listed by name; `rates` says how long each takes. Bytes
of the element-wise passes are counted by hand, per element: what is read, then what is written.

Letters, local to one device: R rows times positions, T keys a query may see, D width, A query width
(heads x head_dim), B key and value width, F ffn, V vocabulary, P parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from spmd_train.plan.rates import DTYPE_BYTES, Rates, product, streaming
from spmd_train.plan.workload import Transformer

# Kernels of one layer, forward and backward, sent by the host one by one: Megatron-LM's layer has
# about so many operations, gradient additions among the latter.
EAGER_OPERATIONS = (24, 40)


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


@cache
def layer_time(r: Rates, t: Transformer, on: Part) -> LayerTime:
    """One transformer layer."""
    R, D, F, size = on.tokens, t.width, t.ffn // on.model, DTYPE_BYTES[on.compute]
    A = t.heads * t.head_dim // on.model
    B = max(t.kv_heads // on.model, 1) * t.head_dim
    gates = 2 if t.gated else 1
    dots = [(A + 2 * B, D), (D, A), (gates * F, D), (D, F)]  # (N, K) of each product with weights
    forward_dots = [product(r, R, N, K, on.compute) for N, K in dots]
    backward_dots = sum(
        product(r, R, K, N, on.compute) + product(r, K, N, R, on.compute) for N, K in dots
    )
    scores_forward, scores_backward = _attention(r, t, on)
    residual = on.residual_tokens * D
    activations = 16 // 8
    norm, act = 2 * activations, (gates + 1) * activations
    if on.eager:  # with bias and dropout (one byte of mask) as separate passes
        forward_bytes = (2 * norm + 2 * 7) * residual + 4 * R * A + act * R * F
        backward_bytes = (2 * 10 + 2 * 13) * residual + 16 * R * A + (act + 4) * R * F
        kernels = (6, 20)
    else:
        forward_bytes = 2 * norm * residual + 2 * activations * R * (A + B) + act * R * F
        backward_bytes = 2 * 10 * residual + 2 * activations * R * (A + B) + (2 * act - 2) * R * F
        kernels = (5, 8)
    P = t.matrix_parameters / on.model
    gradients = (6 if on.eager else 10) * P  # added to 16-bit, or FP32, accumulators
    elementwise = streaming(r, forward_bytes, kernels[0])
    forward = sum(forward_dots) + scores_forward + elementwise
    backward = (
        backward_dots + scores_backward + streaming(r, backward_bytes + gradients, kernels[1])
    )
    waits = (0.0, 0.0)
    if on.eager:
        forward_host, backward_host = (
            (n + (2 if on.model > 1 else 0)) * r.constants.dispatch_seconds
            for n in EAGER_OPERATIONS
        )
        waits = max(0.0, forward_host - forward), max(0.0, backward_host - backward)
    return LayerTime(
        forward + waits[0],
        backward + waits[1],
        scores_forward,
        elementwise,
        forward_dots[-1],
        waits,
    )


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


@dataclass(frozen=True)
class EndsTime:
    """Seconds of the head (logits, loss, their gradients) and of the look-up, both directions."""

    head: float
    lookup: float


@cache
def ends_time(r: Rates, t: Transformer, on: Part, shards: int) -> EndsTime:
    """Both ends with the vocabulary split `shards` ways."""
    R, D, V = on.tokens, t.width, max(t.vocab // shards, 1)
    products = (
        product(r, R, V, D, on.compute, out_bytes=4)
        + product(r, R, D, V, on.compute)
        + product(r, V, D, R, on.compute)
    )
    # Megatron's cross-entropy reads and writes FP32 logits in ten passes; a compiler needs four.
    passes = streaming(r, (64 if on.eager else 24) * R * V, 12 if on.eager else 5)
    table = (6 if on.eager else 10) * V * D  # the gradient, added up
    head = products + passes + streaming(r, table)
    lookup = streaming(r, 2 * table + 20 * R * D, 6)
    return EndsTime(head, lookup)
