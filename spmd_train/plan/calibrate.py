"""What a cluster's devices really do: products and all-reduces, timed, into its file (`measured`).

All devices work at once, as in a training step: each multiplies matrices of its own, every node
sums within itself, and then all nodes sum together. What is written is not the raw time but the
rate or latency with which the planner's own formula (`links.all_reduce`) gives that time, so the
planner predicts what was measured.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd_train.config_yaml import read_yaml
from spmd_train.disk import write_whole
from spmd_train.errors import RequestError
from spmd_train.plan.cluster import Cluster, Measured, bundled_clusters, load_cluster
from spmd_train.plan.hardware import ComputeType
from spmd_train.plan.links import Links, all_reduce, group

KIB, MIB = 2**10, 2**20
NODES, INSIDE = "nodes", "inside"
TIMINGS = 5
TIMED: tuple[ComputeType, ...] = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Effort:
    """What is timed, and how long.

    Attributes:
        edges: N of products [N, N] x [N, N].
        seconds: of products for each dtype and size, at the data sheet's rate.
        small_bytes, large_bytes: of all-reduces; the small gives the latency, the large the
            bandwidth. counts: how many follow one another in one timing, of each.
    """

    edges: tuple[int, ...] = (4096, 8192, 16384)
    seconds: float = 2.0
    small_bytes: int = 32 * KIB
    large_bytes: int = 256 * MIB
    counts: tuple[int, int] = (100, 5)


def calibrate_file(
    path: str | PathLike[str], devices: Sequence[jax.Device], effort: Effort = Effort()
) -> Measured:
    """Measure the cluster of a file on its devices, and write it there (the first process does).

    Raises:
        RequestError: as `writable`, `check_devices` and `write` do; the first two before anything
            is measured.
    """
    file = writable(path)
    measured = calibrate(load_cluster(file), devices, effort)
    if jax.process_index() == 0:
        write(file, measured)
    return measured


def calibrate(
    cluster: Cluster, devices: Sequence[jax.Device], effort: Effort = Effort()
) -> Measured:
    """Time products and all-reduces on all devices; every process of the cluster calls this.

    `devices` are in the order of the mesh: those of a node follow one another.

    Raises:
        RequestError: these are not the cluster's devices.
    """
    check_devices(cluster, devices)
    a = cluster.accelerator
    inside = cluster.per_node * a.devices
    mesh = Mesh(np.array(devices).reshape(cluster.nodes, inside), (NODES, INSIDE))
    matmul = {
        dtype: a.devices * product_flops(mesh, dtype, peak * 1e12 / a.devices, effort) / 1e12
        for dtype, peak in a.peak_tflops.items()
        if dtype in TIMED
    }
    measured = Measured(matmul_tflops=matmul)
    if inside > 1:
        measured = with_link(cluster, measured, _all_reduces(mesh, (INSIDE,), effort), False)
    if cluster.nodes > 1:
        measured = with_link(cluster, measured, _all_reduces(mesh, (NODES, INSIDE), effort), True)
    return measured


def check_devices(cluster: Cluster, devices: Sequence[jax.Device]) -> None:
    """Refuse devices that are not the cluster's.

    Raises:
        RequestError: another kind or number; names both.
    """
    kinds = sorted({device.device_kind for device in devices})
    here = f"{len(devices)} x {' and '.join(kinds)}" if devices else "none"
    right = all(cluster.accelerator.is_called(kind) for kind in kinds)
    if not right or len(devices) != cluster.devices:
        raise RequestError(
            f"{cluster.name} is {cluster.devices} x {cluster.accelerator.title} "
            f"({cluster.accelerator.device_kind}), but the devices here are {here}; calibrate on "
            "the cluster itself, or describe these in a cluster file of their own."
        )


# ---------------------------------------------------------------------------------------- timing

EVERYWHERE = PartitionSpec((NODES, INSIDE))


def seconds_of_one(
    once: Callable[..., jax.Array], count: int, mesh: Mesh, x: jax.Array, *whole: jax.Array
) -> float:
    """Median seconds of one `once(shard of x, *whole)`, on all devices at once.

    `count` of them follow one another in a compiled loop, so that sending them to the devices does
    not count; so does neither the first call, which compiles, nor the second, which warms up.
    """

    def repeated(shard: jax.Array, *whole: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda _, y: once(y, *whole), shard)

    specs = (EVERYWHERE, *(PartitionSpec() for _ in whole))
    loop = jax.jit(
        jax.shard_map(repeated, mesh=mesh, in_specs=specs, out_specs=EVERYWHERE, check_vma=False)
    )
    times = []
    for _ in range(2 + TIMINGS):
        start = time.perf_counter()
        jax.block_until_ready(loop(x, *whole))
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:]) / count


def product_flops(mesh: Mesh, dtype: str, peak: float, effort: Effort) -> float:
    """FLOP/s that one device keeps up, all at work, at the best of the sizes.

    How many products are made follows from the peak, so that all processes make the same.
    """
    return max(_product_flops(mesh, dtype, peak, edge, effort.seconds) for edge in effort.edges)


def _product_flops(mesh: Mesh, dtype: str, peak: float, edge: int, seconds: float) -> float:
    flops = 2.0 * edge**3
    count = max(1, round(seconds / TIMINGS * peak / flops))

    def normal(seed: int, rows: int, spec: PartitionSpec) -> jax.Array:
        """Not zeros, which take less power; scaled so that products keep their size."""

        def make() -> jax.Array:
            numbers = jax.random.normal(jax.random.key(seed), (rows, edge), jnp.dtype(dtype))
            return numbers / math.sqrt(edge)

        return jax.jit(make, out_shardings=NamedSharding(mesh, spec))()

    weights, x = normal(0, edge, PartitionSpec()), normal(1, mesh.size * edge, EVERYWHERE)
    return flops / seconds_of_one(lambda x, w: (x @ w).astype(x.dtype), count, mesh, x, weights)


def _all_reduces(mesh: Mesh, axes: tuple[str, ...], effort: Effort) -> dict[int, float]:
    """Seconds by bytes of one all-reduce of float32 over `axes`, all groups at once."""
    found = {}
    for size, count in zip((effort.small_bytes, effort.large_bytes), effort.counts, strict=True):
        make = partial(jnp.zeros, mesh.size * (size // 4), jnp.float32)
        zeros = jax.jit(make, out_shardings=NamedSharding(mesh, EVERYWHERE))()
        found[size] = seconds_of_one(lambda x: jax.lax.psum(x, axes), count, mesh, zeros)
    return found


# ------------------------------------------------------------------- times to the planner's fields


def with_link(
    cluster: Cluster, measured: Measured, times: dict[int, float], between: bool
) -> Measured:
    """`measured` and the latency and bandwidth that give these times of all-reduces.

    Args:
        times: seconds by bytes, at least two sizes. The smallest fixes the latency, the largest
            the bandwidth, twice over since each depends a little on the other.
        between: over all nodes; else inside every node.
    """
    where = "network" if between else "link"
    latency, bandwidth = f"{where}_latency_microseconds", f"{where}_gigabytes_per_second"
    devices = cluster.devices if between else cluster.per_node * cluster.accelerator.devices
    sheet = (cluster.network if between and cluster.network else cluster.link).gigabytes_per_second
    found = measured.model_copy(update={latency: 1.0, bandwidth: sheet})

    def predicted(size_bytes: int, field: str, value: float) -> float:
        tried = found.model_copy(update={field: value})
        links = Links.of(cluster.model_copy(update={"measured": tried}))
        return all_reduce(links, group(links, devices, 1), size_bytes)

    for _ in range(2):
        for size, field, low, high in (
            (min(times), latency, 0.1, 1e6),
            (max(times), bandwidth, 1e-4 * sheet, 10 * sheet),
        ):
            value = _solved(partial(predicted, size, field), times[size], low, high)
            found = found.model_copy(update={field: float(f"{value:.4g}")})
    return found


def _solved(predicted: Callable[[float], float], seconds: float, low: float, high: float) -> float:
    """Where a monotone function has this value, or the nearest end: a time too short or too long
    for the formula (noise, or a network that is no bottleneck) gives no absurd figure."""
    rising = predicted(high) > predicted(low)
    for _ in range(50):
        middle = math.sqrt(low * high)
        if (predicted(middle) < seconds) == rising:
            low = middle
        else:
            high = middle
    return middle


# ---------------------------------------------------------------------------------------- the file


def writable(path: str | PathLike[str]) -> Path:
    """The cluster file, if it is the user's own.

    Raises:
        RequestError: it comes with the package, or is not there.
    """
    file, bundled = Path(path), bundled_clusters()
    if file.is_file() and file.resolve() not in {each.resolve() for each in bundled.values()}:
        return file
    load_cluster(file)  # which says that there is none of the name
    raise RequestError(
        f"{path} comes with the package, so what is measured cannot be written to it; copy "
        f"{bundled[file.name.removesuffix('.yaml')]} and give the copy."
    )


def write(path: str | PathLike[str], measured: Measured) -> None:
    """Set the `measured` block of a cluster file; the rest of its text stays as it is.

    What was measured before and is not in `measured` is kept.

    Raises:
        RequestError: the file comes with the package, or cannot be edited by lines.
    """
    file = writable(path)
    text = file.read_text(encoding="utf-8")
    before = load_cluster(file).measured.model_dump(exclude_none=True)
    now = measured.model_dump(exclude_none=True)
    matmul = {**before.get("matmul_tflops", {}), **now.get("matmul_tflops", {})}
    merged = _rounded({**before, **now, "matmul_tflops": matmul})
    edited = _edited(text, merged)
    if not _is_with(edited, text, merged):
        raise RequestError(
            f"{file}: its `measured` block cannot be replaced in this text (each key is expected "
            f"at the start of a line); set it by hand:\n{_block(merged)}"
        )
    write_whole(file, edited.encode())


def _is_with(edited: str, text: str, merged: dict[str, Any]) -> bool:
    """Whether nothing but `measured` changed."""
    try:
        return bool(read_yaml(edited, "") == {**read_yaml(text, ""), "measured": merged})
    except RequestError:
        return False


def _rounded(tree: dict[str, Any]) -> dict[str, Any]:
    """Four figures."""
    return {
        key: _rounded(value) if isinstance(value, dict) else float(f"{value:.4g}")
        for key, value in tree.items()
    }


def _block(merged: dict[str, Any]) -> str:
    first, rest = yaml.safe_dump({"measured": merged}, sort_keys=False).split("\n", 1)
    return (
        f"{first}  # by plan --calibrate, {date.today().isoformat()}, JAX {jax.__version__}\n{rest}"
    )


def _edited(text: str, merged: dict[str, Any]) -> str:
    """The text with its old block replaced, or the new one at its end."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    for key, value in root.value if root else ():
        if key.value == "measured":
            start, end = key.start_mark.index, value.end_mark.index
            lines = text[start:end].splitlines(keepends=True)
            # A block's end is where the next key starts: comments in between are that key's.
            while len(lines) > 1 and (not lines[-1].strip() or lines[-1].startswith("#")):
                end -= len(lines.pop())
            rest = text[end:]
            if not lines[-1].endswith("\n"):  # written in braces: the line has its end to come
                rest = rest.partition("\n")[2]
            return text[:start] + _block(merged) + rest
    return text + ("" if not text or text.endswith("\n") else "\n") + _block(merged)
