"""From a configuration and a mesh to a run's step: every `auto` resolved, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from spmd_train.errors import RequestError
from spmd_train.mesh import AXES, MeshShape
from spmd_train.model import build_model
from spmd_train.model.attention import resolve_attention
from spmd_train.optim import base_optimizer, first_moment_decay, learning_rate
from spmd_train.pipeline import make_schedule
from spmd_train.pipeline.execute import Pipeline
from spmd_train.precision import compose, resolve_policy
from spmd_train.precision.fp8 import history_leaves
from spmd_train.shape_rules import sequence_parallel_on, validate_shape
from spmd_train.sharding import Layout
from spmd_train.state import StateSpec
from spmd_train.step import Step

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from spmd_train.config import Config


@dataclass(frozen=True)
class Resolved:
    """What `auto` became for this platform and mesh; recorded in `events.jsonl`."""

    policy: str
    attention: str
    schedule: str
    remat: str
    sequence_parallel: bool


def build_step(config: Config, mesh: Mesh, platform: str | None = None) -> tuple[Step, Resolved]:
    """Everything static about a run.

    Args:
        platform: "cpu", "gpu" or "tpu", the devices the step is for; by default those of `mesh`.

    Raises:
        RequestError: the configuration does not fit the mesh; nothing was compiled.
    """
    shape = MeshShape(**{axis: mesh.shape[axis] for axis in AXES})
    validate_shape(config, shape)
    platform = platform or mesh.devices.flat[0].platform
    policy = resolve_policy(config.precision, platform, first_moment_decay(config.optim))
    schedule_name, remat = config.pipeline.resolved
    resolved = Resolved(
        policy=policy.name,
        attention=resolve_attention(
            config.model.attention,
            platform,
            policy.compute,
            config.batch.sequence_length,
            config.model.head_dim,
            config.data.packed,
        ),
        schedule=schedule_name,
        remat=remat,
        sequence_parallel=sequence_parallel_on(config, shape),
    )
    reproducible = config.precision.reproducible
    logical_shards = config.precision.logical_shards if reproducible else 0
    layout = Layout(mesh, config.parallel.zero, resolved.sequence_parallel, logical_shards)
    model = build_model(config.model, resolved.attention)
    if config.data.packed and not model.architecture.packed:
        raise RequestError(
            f"model.block={config.model.block} does not say that it keeps the documents of a row "
            "apart, as data.packing=documents needs; pass context.segments to its attention and "
            "declare Architecture(packed=True), or use data.packing=padded or windows."
        )
    leaves = model.leaves(layout)
    microbatches = config.batch.microbatches * (logical_shards // shape.data if reproducible else 1)
    schedule = make_schedule(resolved.schedule, shape.stage, microbatches)
    pipeline = Pipeline(
        model=model,
        layout=layout,
        schedule=schedule,
        policy=policy,
        leaves=leaves,
        remat=resolved.remat,
        idle=config.pipeline.idle,
        seed=config.seed,
    )
    tx = compose(
        base_optimizer(config.optim, config.steps, leaves, policy),
        policy,
        config.precision.loss_scale,
        config.guard,
        config.optim.clip_norm,
    )
    history = history_leaves(
        policy, model, layout, config.batch.sequence_length, config.precision.fp8_history
    )
    spec = StateSpec(model, layout, policy, tx, leaves, history)
    schedule_of_lr = learning_rate(config.optim, config.steps)
    return Step(pipeline, spec, schedule_of_lr, config.data.packed), resolved


def put_batch(step: Step, batch: Any) -> Any:
    """A host batch [M, B/M, T] on the mesh, each process placing only its own shards."""
    sharding = step.spec.layout.named(step.spec.layout.batch_spec)
    return jax.tree.map(
        lambda a: jax.make_array_from_callback(a.shape, sharding, lambda index: a[index]), batch
    )
