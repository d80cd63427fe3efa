"""The process that `compile.py` starts: one request a line on stdin, one answer a line on stdout.

It alone loads a backend's plugin. A request is `{"config": ..., "mesh": "4x2x4", "site": ...}`; an
answer has `resolved`, `seconds`, `memory`, `scheduled_peak` and `collectives`; or `out_of_memory`
(bytes) in place of the last three; or a sentence alone, `request_error` or `failure`.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
import traceback
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from spmd_train.errors import RequestError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from spmd_train.mesh import MeshShape

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# libtpu 0.0.42 and 0.0.52: "Ran out of memory in memory space hbm. Used 103.16G of 95.74G hbm." and
# "the total memory required for HLO temporaries (22.27G) exceeds available HBM (15.75G)".
_USED = re.compile(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm")
_TEMPORARIES = re.compile(r"required for HLO temporaries \(([\d.]+)([KMGT]?)\)")


def main() -> None:
    """Answer until stdin ends."""
    # Compilers print to stdout too; the answers keep it to themselves.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    import jax

    try:
        return _compiled(request)
    except RequestError as error:
        return {"request_error": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {"failure": (str(error).strip() or type(error).__name__).splitlines()[0]}
    finally:
        jax.clear_caches()


def _compiled(request: dict[str, Any]) -> dict[str, Any]:
    import jax

    from spmd_train.build import build_step
    from spmd_train.config import Config
    from spmd_train.mesh import MeshShape
    from spmd_train.pipeline.execute import loop_trips
    from spmd_train.plan.collectives import collectives
    from spmd_train.telemetry.memory import compiled_memory

    config = Config.model_validate(request["config"])
    shape = MeshShape.parse(request["mesh"])
    jax.config.update("jax_enable_x64", config.precision.master == "float64")
    mesh = _mesh(request["site"], shape)
    step, resolved = build_step(config, mesh, request["site"]["platform"])
    state = step.spec.abstract()
    batch = step.abstract_batch(config.batch.global_size, config.batch.sequence_length)
    answer: dict[str, Any] = {"resolved": asdict(resolved)}
    clock = time.perf_counter()
    lowered = step.jitted().lower(state, batch)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        needed = needed_bytes(str(error), _bytes_per_device((state, batch)))
        if needed is None:
            raise
        return answer | {"out_of_memory": needed, "seconds": time.perf_counter() - clock}
    answer["seconds"] = time.perf_counter() - clock
    found = collectives(compiled.as_text(), mesh.shape, loop_trips(step.pipeline))
    return answer | {
        "memory": asdict(compiled_memory(compiled)),
        "scheduled_peak": compiled.memory_analysis().peak_memory_in_bytes,
        "collectives": [asdict(each) for each in found],
    }


def needed_bytes(message: str, arguments: int) -> int | None:
    """What a TPU's compiler says that a program needs, if it failed for want of memory.

    Args:
        arguments: bytes per device, which one of its two messages leaves out. That one comes early,
            and says more than the compiler would end with: for a LLaMA 7B 22.3 GiB of temporaries
            on a v5e, of which a v6e, where it goes on, needs 13.7.
    """
    if used := _USED.search(message):
        return _read(*used.groups())
    temporaries = _TEMPORARIES.search(message)
    return arguments + _read(*temporaries.groups()) if temporaries else None


def _read(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])


def _bytes_per_device(tree: Any) -> int:
    import jax

    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def _mesh(site: dict[str, Any], shape: MeshShape) -> Mesh:
    """A mesh of devices that exist only as descriptions, laid out as real ones would be."""
    from jax.experimental import topologies

    from spmd_train.mesh import arrange

    options = site["options"]
    if site["platform"] == "tpu":
        bounds = tuple(options["chips_per_host_bounds"])
        options = {**options, "chips_per_host_bounds": bounds}
        description = topologies.get_topology_desc(site["topology"], platform="tpu", **options)
    else:
        description = topologies.get_topology_desc(
            "", platform="cuda", topology=site["topology"], **options
        )
    return arrange(description.devices, shape)


if __name__ == "__main__":
    main()
