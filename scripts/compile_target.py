"""Compile the real training step for hardware that is not here, and print its memory per device.

    pip install --no-deps --target /tmp/cuda_plugin jax-cuda13-plugin==JAX jax-cuda13-pjrt==JAX
    PYTHONPATH=/tmp/cuda_plugin JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python scripts/compile_target.py \
        --target h100 --hosts 4 --config configs/llama-30b.yaml --mesh 4x2x4 \
        --set pipeline.remat=stage --set batch.sequence_length=2048 \
        --set batch.global_size=64 --set batch.microbatches=16
    pip install --no-deps --target /tmp/tpu_plugin libtpu
    PYTHONPATH=/tmp/tpu_plugin TPU_SKIP_MDS_QUERY=1 python scripts/compile_target.py \
        --target v5p:4x4x2 --config configs/llama-30b.yaml --mesh 4x2x4 ...

JAX is the installed JAX's own version (the plugin must match it). The plugins stay out of the
trainer's environment: JAX can load only one set of them, and the trainer must not see any. cuDNN
attention cannot be lowered without its library: a GPU figure is for the blockwise XLA attention.
"""

from __future__ import annotations

import argparse
import time

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from spmd_train.build import build_step
from spmd_train.config import load
from spmd_train.mesh import ARRAY_AXES, MeshShape
from spmd_train.telemetry.memory import compiled_memory, spell

# GpuTargetConfigProto fields that every JAX from 0.10.2 on accepts; numbers from NVIDIA's
# architecture papers. They steer kernel choice; buffer sizes depend on the program.
GPUS = {
    "h100": dict(
        description="NVIDIA H100 80GB HBM3", major=9, minor=0, cores=132, clock=1.755,
        memory=85520809984, bandwidth=3352000000000, l2=52428800, shared=233472, optin=232448,
        threads=2048,
    ),
    "a100-80gb": dict(
        description="NVIDIA A100-SXM4-80GB", major=8, minor=0, cores=108, clock=1.41,
        memory=85899345920, bandwidth=2039000000000, l2=41943040, shared=167936, optin=166912,
        threads=2048,
    ),
    "rtx4090": dict(
        description="NVIDIA GeForce RTX 4090", major=8, minor=9, cores=128, clock=2.52,
        memory=25757220864, bandwidth=1008000000000, l2=75497472, shared=102400, optin=101376,
        threads=1536,
    ),
}  # fmt: skip

TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {shared}
  threads_per_core_limit: {threads} core_count: {cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2} clock_rate_ghz: {clock}
  device_memory_size: {memory} shared_memory_per_block_optin: {optin}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{description}"
"""


def topology_mesh(target: str, hosts: int, shape: MeshShape) -> tuple[Mesh, str]:
    """A mesh of devices that exist only as descriptions, and their platform."""
    if target in GPUS:
        devices = topologies.get_topology_desc(
            "",
            platform="cuda",
            topology=f"1x{hosts}x{shape.size // hosts}",
            target_config=TARGET.format(**GPUS[target]),
        ).devices
        platform = "gpu"
    else:
        devices = topologies.get_topology_desc(target, platform="tpu").devices
        platform = "tpu"
    array = np.array(devices)[: shape.size].reshape(shape.array_shape)
    return Mesh(array, ARRAY_AXES, axis_types=(AxisType.Auto,) * 3), platform


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="h100", help=f"{', '.join(GPUS)}, or as v5p:4x4x2")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mesh", default="4x2x4")
    parser.add_argument("--config", default="llama-30b")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--hlo", help="write the compiled HLO here")
    request = parser.parse_args()
    shape = MeshShape.parse(request.mesh)
    config = load(request.config, request.set, mesh=request.mesh)
    mesh, platform = topology_mesh(request.target, request.hosts, shape)
    if platform == "gpu" and config.model.attention == "auto":
        config = load(request.config, [*request.set, "model.attention=xla"], mesh=request.mesh)
    step, resolved = build_step(config, mesh, platform)
    batch = step.abstract_batch(config.batch.global_size, config.batch.sequence_length)
    clock = time.perf_counter()
    lowered = step.jitted().lower(step.spec.abstract(), batch)
    lowered_seconds = time.perf_counter() - clock
    compiled = lowered.compile()
    seconds = time.perf_counter() - clock
    memory = compiled_memory(compiled)
    print(f"jax {jax.__version__}; {request.target} mesh {shape}; {resolved}")
    print(f"lowered in {lowered_seconds:.1f} s, compiled in {seconds:.1f} s")
    print(
        f"arguments {spell(memory.arguments)}, temporaries {spell(memory.temporaries)}, "
        f"peak {spell(memory.peak)} per device"
    )
    if request.hlo:
        with open(request.hlo, "w") as file:
            file.write(compiled.as_text())


if __name__ == "__main__":
    main()
