"""How fast one device computes: matrix products by shape, the rest by memory bandwidth.

A product [M, K] x [K, N] is cut into tiles, and the tiles are dealt to the cores in waves; the last
wave is seldom full, and a dimension that is not a multiple of the tile pads the last one:

        seconds = overhead + max( waves x 2 tile_m tile_n (K + K0) / rate of a core,
                                  bytes / memory bandwidth )

The tile is the best of those the libraries have. This is what separates large products (nearly the
measured best rate), skinny ones (padding, partial waves) and small ones (overhead).
A TPU has one matrix unit per core: no waves, tiles of its edge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from spmd_train.plan.cluster import Cluster

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


@dataclass(frozen=True)
class Constants:
    """What the data sheets do not say, one set for each kind of accelerator.

    Attributes:
        matmul_fraction: rate of large products / peak, where `matmul_tflops` is not known.
        sustained: rate that a training step keeps up / `matmul_tflops`, the best of short runs.
        memory_fraction: of the data sheet's memory bandwidth that streaming reaches.
        attention_fraction: rate of fused attention / best rate of large products.
        kernel_seconds: start and end of one kernel that nothing overlaps.
        dispatch_seconds: of the host for one operation, where operations are sent one by one.
        tiles: (rows, columns, relative rate of a core).
        fill: K0, elements of K that filling and emptying a tile's pipeline costs.
        align: elements; a product whose N or K is no multiple of it runs at `unaligned`.
    """

    matmul_fraction: float
    sustained: float
    memory_fraction: float
    attention_fraction: float
    kernel_seconds: float
    dispatch_seconds: float
    tiles: tuple[tuple[int, int, float], ...]
    fill: int
    align: int
    unaligned: float


# Sources. memory_fraction: Calculon's A100 (systems/a100_80g.json) streams 0.75 at 10 MB and above;
# attention_fraction: FlashAttention-2 on A100, 170 to 200 of 271 TFLOP/s; dispatch_seconds: fitted,
# a layer of the smallest vTrain rows takes 3.0 ms for 88 operations, whatever its size; unaligned:
# fitted to the head of vTrain's rows with 50,257 columns; tiles: cuBLAS's, with relative rates that
# are guesses; sustained: chosen so that the mean errors of Narayanan, Korthikanti and vTrain's
# multi-node rows lie on both sides of zero (0.95 to 1.0 and memory_fraction 0.65 to 0.85 move no
# source's mean absolute error by more than 5 points).
GPU = Constants(
    matmul_fraction=0.82,
    sustained=0.95,
    memory_fraction=0.75,
    attention_fraction=0.7,
    kernel_seconds=3e-6,
    dispatch_seconds=34e-6,
    tiles=((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6)),
    fill=64,
    align=8,
    unaligned=0.3,
)
# matmul_fraction, attention_fraction: set before any TPU row was looked at, and left so.
TPU = Constants(
    matmul_fraction=0.9,
    sustained=1.0,
    memory_fraction=0.85,
    attention_fraction=0.6,
    kernel_seconds=1e-6,
    dispatch_seconds=0.0,
    tiles=((128, 128, 1.0),),
    fill=0,
    align=1,
    unaligned=1.0,
)


@dataclass(frozen=True, eq=False)
class Rates:
    """Of one device; hashed by identity, for speed.

    Attributes:
        constants: those of its kind.
        cores: that share a product's tiles.
        flops: best rate of large products, by dtype.
        memory: bytes per second.
    """

    constants: Constants
    cores: int
    flops: dict[str, float]
    memory: float

    @classmethod
    def of(cls, cluster: Cluster) -> Rates:
        """Data-sheet figures by the constants above; what was measured replaces them."""
        a = cluster.accelerator
        constants = GPU if a.kind == "gpu" else TPU
        peak = {str(dtype): tflops * 1e12 / a.devices for dtype, tflops in a.peak_tflops.items()}
        best = constants.matmul_fraction
        if a.matmul_tflops is not None:
            best = constants.sustained * a.matmul_tflops / a.peak_tflops["bfloat16"]
        flops = {dtype: rate * best for dtype, rate in peak.items()}
        for dtype, tflops in cluster.measured.matmul_tflops.items():
            flops[dtype] = tflops * 1e12 / a.devices
        memory = a.memory_gigabytes_per_second * 1e9 * constants.memory_fraction / a.devices
        return cls(constants, a.target.cores if a.target else 1, flops, memory)

    def rate(self, dtype: str) -> float:
        """FLOP/s; a dtype without a rate of its own runs as bfloat16."""
        return self.flops.get(dtype, self.flops["bfloat16"])


@cache
def product(
    r: Rates, M: int, N: int, K: int, dtype: str, count: int = 1, out_bytes: int = 2
) -> float:
    """Seconds of `count` products [M, K] x [K, N] in one kernel."""
    c, size = r.constants, DTYPE_BYTES[dtype]
    rate = r.rate(dtype) / r.cores
    if N % c.align or K % c.align:
        rate *= c.unaligned
    computing = min(
        _waves(math.ceil(M / m) * math.ceil(N / n) * count, r.cores)
        * (2.0 * m * n * (K + c.fill) / (rate * relative))
        for m, n, relative in c.tiles
    )
    moving = count * ((M * K + K * N) * size + M * N * out_bytes) / r.memory
    return c.kernel_seconds + max(computing, moving)


def _waves(tiles: int, cores: int) -> float:
    return math.ceil(tiles / cores)


def streaming(r: Rates, size_bytes: float, kernels: int = 1) -> float:
    """Seconds of operations that read and write so many bytes."""
    return size_bytes / r.memory + kernels * r.constants.kernel_seconds
