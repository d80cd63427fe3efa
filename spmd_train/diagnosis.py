"""Diagnosing a bad step: run its batch again, measured, in its own formats and in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

from spmd_train.data.batches import Batch
from spmd_train.pipeline.diagnose import diagnose
from spmd_train.pipeline.execute import Pipeline
from spmd_train.precision import fp8, master_of
from spmd_train.precision.attribution import Conditions, attribute
from spmd_train.precision.measurements import Statistics, is_finite
from spmd_train.sharding import tree_map_leaves
from spmd_train.state import TrainState
from spmd_train.step import Step


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """A run's diagnosing programs, each compiled when first needed.

    Attributes:
        step: the training step that went wrong.
        lowest_scale: what a dynamic loss scale may fall to.
        compiler_options: XLA options of the two programs.
    """

    step: Step
    lowest_scale: float = 1.0
    compiler_options: dict[str, Any] | None = None

    def attribute(
        self, state: TrainState, batch: Batch, number: int, scale: float
    ) -> dict[str, Any]:
        """The finding (`precision.attribution.attribute`) of a step that changed nothing.

        A collective: every process calls it, and gets the same answer.

        Args:
            state: as before the step, which the step's guard has left it.
            batch: the step's. number: what `state.step` was; dropout depends on it.
            scale: the loss scale the step used; 1 without one.
        """
        inputs = (batch, jnp.int32(number), jnp.float32(scale))
        seen, problem = _run(self._as_trained, state.params, fp8.scales_from(state.fp8), *inputs)
        if seen is None:
            return {"cause": "unknown", "says": f"The step could not be run again: {problem}"}
        policy = self.step.pipeline.policy
        narrow = jnp.dtype(policy.compute) != jnp.float32 or policy.fp8 is not None or scale != 1
        float32: Statistics | None = seen
        if narrow:
            float32, problem = None, "not needed"
            if not is_finite(seen):
                master = master_of(state.opt_state)
                params = state.params if master is None else master
                float32, problem = _run(self._in_float32, params, *inputs[:2])
        finding = attribute(seen, float32, self._conditions(float(scale)))
        return finding if float32 is not None else {**finding, "float32_not_run": problem}

    def _conditions(self, scale: float) -> Conditions:
        policy = self.step.pipeline.policy
        return Conditions(
            compute=jnp.dtype(policy.compute).name,
            limit=float(jnp.finfo(policy.compute).max),
            reduce_limit=float(jnp.finfo(policy.reduce).max),
            narrow_products=policy.fp8 is not None,
            loss_scale=scale,
            lowest_scale=self.lowest_scale,
        )

    @cached_property
    def _as_trained(self) -> Callable[..., Statistics]:
        def program(params: Any, scales: Any, *inputs: Any) -> Statistics:
            return diagnose(self.step.pipeline, params, scales, *inputs)

        return self._jitted(program)

    @cached_property
    def _in_float32(self) -> Callable[..., Statistics]:
        pipeline = _float32(self.step.pipeline)
        layout = pipeline.layout

        def cast(leaf: Any, x: jax.Array) -> jax.Array:
            sharding = layout.named(layout.param_spec(leaf))
            return jax.lax.with_sharding_constraint(x.astype(jnp.float32), sharding)

        def program(params: Any, batch: Batch, step: jax.Array) -> Statistics:
            params = tree_map_leaves(cast, pipeline.leaves, params)
            return diagnose(pipeline, params, {}, batch, step, jnp.float32(1))

        return self._jitted(program)

    def _jitted(self, program: Callable[..., Statistics]) -> Callable[..., Statistics]:
        return jax.jit(program, compiler_options=self.compiler_options)


def _float32(pipeline: Pipeline) -> Pipeline:
    """The same pass in float32; a fused attention kernel may take 16-bit numbers only."""
    return replace(
        pipeline,
        policy=replace(pipeline.policy, compute=jnp.float32, fp8=None),
        model=replace(pipeline.model, attention="xla"),
    )


def _run(program: Callable[..., Statistics], *inputs: Any) -> tuple[Statistics | None, str]:
    """Measurements on every process's host, or None and why there are none."""
    try:
        return multihost_utils.process_allgather(program(*inputs), tiled=True), ""
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None, f"out of memory ({str(error).splitlines()[0]})"
