"""How much CPU time a training step costs, as a ratio to what it is measured against.

Two questions, both at one shape (8 layers, width 512, 16 rows of 256
tokens, FP32, AdamW with clipping), on CPU, in one process with 8 simulated devices:

    (a)  handwritten -> 1x1x1    what does the trainer add to a plain single-device JAX step?
    (b)  1x1x1       -> MESH     what does a mesh add to one device, at the same global batch?

A sample is the CPU time of the whole process, all its threads, around one blocked step; wall time
is shown, but on a shared machine only the ratio means something. The two steps of a comparison take
turns (A B A B ...), and the ratio is taken within each pair. Nothing is reported unless both sides
of a comparison computed the same losses in their first steps.

Smaller micro-batches fit the caches better, on one device too: a mesh may cost less than 1x1x1 with
its one micro-batch of 16 rows. `--base-microbatches 8` takes that advantage away: two rows at a
time, as every device of the default meshes has.

From the root of the repository (`PYTHONPATH=.` where the package is not installed):

    python scripts/bench_step.py                        # everything, 20 pairs: half an hour
    python scripts/bench_step.py --only a --pairs 5
    python scripts/bench_step.py --only 2x2x2 --remat full --json

Letters: B batch, T sequence, S key position, D width, H heads, E head_dim, V vocabulary.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from spmd_train.build import build_step, put_batch
from spmd_train.config import Config, load
from spmd_train.data.batches import Batch, micro_batched, shift
from spmd_train.errors import RequestError
from spmd_train.mesh import MeshShape, build_mesh
from spmd_train.pipeline.layers import REMAT

LAYERS, WIDTH, HEADS, FFN, VOCAB, LENGTH, ROWS = 8, 512, 8, 1376, 512, 256, 16
SHAPE = (
    f"model.layers={LAYERS}",
    f"model.width={WIDTH}",
    f"model.heads={HEADS}",
    f"model.kv_heads={HEADS}",
    f"model.ffn={FFN}",
    f"model.vocab={VOCAB}",
    "model.tied=true",
    f"batch.sequence_length={LENGTH}",
    f"batch.global_size={ROWS}",
    "precision.policy=fp32",
    "optim.schedule=constant",
    "optim.warmup_steps=0",
    "optim.clip_norm=1.0",
)
DEVICES = 8  # simulated, for every comparison: their number sizes XLA's thread pools
MESHES = ("1x1x8", "2x2x2", "8x1x1")
PIPELINE_ROWS = 2  # rows in a micro-batch of a pipeline, unless --microbatches says otherwise
WARM_UP = 2  # steps that compile, settle and prove that both sides compute the same
SAME_LOSS = 1e-5

# Wall / CPU seconds a step: a survey of 2026, by the mesh each is nearest to.
PUBLISHED = {
    "1x1x1": "MaxText 7.3/14.1, PyTorch 5.4/9.6, Levanter 7.8/14.4",
    "8x1x1": "MaxText 6.9/13.3 (FSDP 5.7/11.0), PyTorch 5.0/10.0 (2 processes)",
    "2x1x4": "MaxText 8.5/15.9 (circular 8.6/16.7)",
}


@dataclass(frozen=True)
class Arguments:
    """CPU time of the training step: against a plain JAX step, and of meshes against one device.

    Example: python scripts/bench_step.py --only a --pairs 5
    """

    pairs: int = 20
    """Timed steps of each side of a comparison."""
    only: str | None = None
    """One comparison: a (against the hand-written step), b (all meshes), or a mesh as 2x2x2."""
    remat: Literal["none", "dots", "full"] = "none"
    """What every side, the hand-written step too, keeps for its backward pass; recomputing is a
    choice about memory, not overhead, hence none."""
    base_microbatches: int = 1
    """Micro-batches of 1x1x1."""
    microbatches: int | None = None
    """Micro-batches of the meshes; by default pipelines get two rows in each, the others one."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON document on stdout, everything else on stderr."""

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise RequestError("--pairs must be at least 1")


# ------------------------------------------------------------------------------- the two contenders


class Sample(NamedTuple):
    """One step: seconds."""

    wall: float
    cpu: float


@dataclass
class Contender:
    """A compiled step with its state.

    Attributes:
        step: (state, batch) -> (state, loss); donates the state.
        losses: of the steps taken, the first on the initial parameters.
    """

    name: str
    microbatches: int
    step: Callable[[Any, Any], tuple[Any, jax.Array]]
    state: Any
    batch: Any
    losses: list[float]

    def run(self) -> Sample:
        wall, cpu = time.perf_counter(), time.process_time()
        self.state, loss = jax.block_until_ready(self.step(self.state, self.batch))
        sample = Sample(time.perf_counter() - wall, time.process_time() - cpu)
        self.losses.append(float(loss))
        return sample


def rows() -> Batch:
    """The batch of every step, [B, T], every token supervised."""
    return shift(np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH + 1), dtype=np.int32))


def trainer(mesh_name: str, microbatches: int, remat: str) -> Contender:
    """The package's own step, as `train` compiles it."""
    config = load(None, [*SHAPE, f"batch.microbatches={microbatches}", f"pipeline.remat={remat}"])
    mesh, _ = build_mesh(MeshShape.parse(mesh_name), "cpu")
    step, _ = build_step(config, mesh)
    jitted = step.jitted()

    def one(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        state, metrics = jitted(state, batch)
        return state, metrics["loss"]

    batch = put_batch(step, micro_batched(rows(), microbatches))
    return Contender(mesh_name, microbatches, one, step.spec.init(0), batch, [])


def handwritten(like: Contender, remat: str) -> Contender:
    """A plain single-device JAX step of the same model, from a copy of `like`'s parameters."""
    config = load(None, SHAPE)
    params = jax.device_put(jax.device_get(like.state.params), jax.devices()[0])
    tx = plain_optimizer(config)

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, batch: Batch) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, gradients = jax.value_and_grad(plain_loss)(params, batch, config, remat)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    batch = jax.device_put(rows(), jax.devices()[0])
    return Contender("handwritten", 1, step, (params, jax.jit(tx.init)(params)), batch, [])


# --------------------------------------------- the hand-written step: nothing of the package's math


def plain_optimizer(config: Config) -> optax.GradientTransformation:
    """Clip, then AdamW that decays the matrices but the embedding."""
    c = config.optim

    def decays(params: Any) -> Any:
        return {
            "embed": {"table": False},
            "blocks": {
                "attention": dict.fromkeys(params["blocks"]["attention"], True),
                "attention_norm": {"scale": False},
                "mlp": dict.fromkeys(params["blocks"]["mlp"], True),
                "mlp_norm": {"scale": False},
            },
            "head": {"norm": {"scale": False}},
        }

    adamw = optax.adamw(
        c.lr, c.betas[0], c.betas[1], eps=c.eps, weight_decay=c.weight_decay, mask=decays
    )
    return optax.chain(optax.clip_by_global_norm(c.clip_norm or float("inf")), adamw)


def plain_loss(params: Any, batch: Batch, config: Config, remat: str) -> jax.Array:
    """Token-mean cross-entropy of a pre-norm decoder with tied embeddings."""
    m = config.model

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + m.norm_eps) * scale

    exponent = jnp.arange(0, m.head_dim, 2) / m.head_dim
    angles = jnp.arange(LENGTH)[:, None] * m.rope_theta**-exponent
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]  # [T, 1, E/2]
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))

    def rotate(x: jax.Array) -> jax.Array:  # [B, T, H, E]
        low, high = jnp.split(x, 2, -1)
        return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    def attention(p: Any, x: jax.Array) -> jax.Array:
        q = rotate(jnp.einsum("btd,dhe->bthe", x, p["query"]))
        k = rotate(jnp.einsum("btd,dhe->bthe", x, p["key"]))
        v = jnp.einsum("btd,dhe->bthe", x, p["value"])
        scores = jnp.einsum("bthe,bshe->bhts", q, k) * m.head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), -1)
        return jnp.einsum("bthe,hed->btd", jnp.einsum("bhts,bshe->bthe", weights, v), p["out"])

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        x = x + attention(p["attention"], norm(x, p["attention_norm"]["scale"]))
        h, mlp = norm(x, p["mlp_norm"]["scale"]), p["mlp"]
        return x + (jax.nn.silu(h @ mlp["gate"]) * (h @ mlp["up"])) @ mlp["down"], None

    if remat != "none":
        layer = jax.checkpoint(layer, policy=REMAT[remat])
    table = params["embed"]["table"]
    x, _ = jax.lax.scan(layer, table[batch.inputs], params["blocks"])
    logits = norm(x, params["head"]["norm"]["scale"]) @ table.T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    return jnp.mean(losses)


# -------------------------------------------------------------------------------------- measurement


@dataclass(frozen=True)
class Spread:
    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Comparison:
    """What `name` costs against `against`; seconds a step, medians of wall and CPU time."""

    name: str
    against: str
    microbatches: tuple[int, int]  # of `name` and of `against`
    pairs: int
    wall_seconds: tuple[float, float]
    cpu_seconds: tuple[float, float]
    cpu_ratio: Spread
    wall_ratio: Spread


class DifferentLossesError(Exception):
    """Two contenders do not compute the same thing, so their costs do not compare."""


def check_same(one: Contender, other: Contender) -> None:
    """Equal losses before and after the first updates: same forward, gradients and optimizer."""
    mine, theirs = (np.array(c.losses[:WARM_UP]) for c in (one, other))
    if not np.allclose(mine, theirs, rtol=SAME_LOSS, atol=0):
        raise DifferentLossesError(
            f"{one.name} and {other.name} differ by more than {SAME_LOSS} (relative) in their "
            f"first losses: {mine.tolist()} and {theirs.tolist()}; nothing is reported"
        )


def compare(contender: Contender, against: Contender, pairs: int) -> Comparison:
    check_same(contender, against)
    samples = []
    for number in range(1, pairs + 1):
        samples.append((against.run(), contender.run()))
        theirs, mine = samples[-1]
        say(f"  pair {number} of {pairs}: CPU {mine.cpu:.2f} | {theirs.cpu:.2f} s")

    def medians(kind: str) -> tuple[float, float]:
        theirs, mine = ([getattr(s, kind) for s in side] for side in zip(*samples, strict=True))
        return statistics.median(mine), statistics.median(theirs)

    return Comparison(
        name=contender.name,
        against=against.name,
        microbatches=(contender.microbatches, against.microbatches),
        pairs=pairs,
        wall_seconds=medians("wall"),
        cpu_seconds=medians("cpu"),
        cpu_ratio=Spread.of([mine.cpu / theirs.cpu for theirs, mine in samples]),
        wall_ratio=Spread.of([mine.wall / theirs.wall for theirs, mine in samples]),
    )


def warmed_up(contender: Contender) -> Contender:
    start = time.perf_counter()
    for _ in range(WARM_UP):
        contender.run()
    say(
        f"{contender.name}, micro-batches {contender.microbatches}: compiled and {WARM_UP} steps "
        f"in {time.perf_counter() - start:.0f} s, losses {contender.losses}"
    )
    return contender


def comparisons(args: Arguments) -> Iterator[Comparison]:
    """Each one as it is done; a mesh's memory is freed before the next is built."""
    base = trainer("1x1x1", args.base_microbatches, args.remat)
    plain = handwritten(base, args.remat) if args.only in (None, "a") else None
    warmed_up(base)
    if plain is not None:
        yield compare(base, warmed_up(plain), args.pairs)
        del plain
    for name in chosen_meshes(args.only):
        count = args.microbatches or default_microbatches(MeshShape.parse(name))
        yield compare(warmed_up(trainer(name, count, args.remat)), base, args.pairs)


def chosen_meshes(only: str | None) -> tuple[str, ...]:
    if only == "a":
        return ()
    return MESHES if only in (None, "b") else (str(MeshShape.parse(only)),)


def default_microbatches(shape: MeshShape) -> int:
    return max(ROWS // shape.data // PIPELINE_ROWS, 1) if shape.stage > 1 else 1


# ------------------------------------------------------------------------------------------- report


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(results: list[Comparison]) -> str:
    """One line a comparison."""
    header = (
        "step", "against", "micro-batches", "wall s", "CPU s", "CPU ratio", "min", "max",
        "wall ratio",
    )  # fmt: skip
    lines = [
        (
            c.name,
            c.against,
            "{} | {}".format(*c.microbatches),
            "{:.2f} | {:.2f}".format(*c.wall_seconds),
            "{:.2f} | {:.2f}".format(*c.cpu_seconds),
            f"{c.cpu_ratio.median:.3f}",
            f"{c.cpu_ratio.min:.3f}",
            f"{c.cpu_ratio.max:.3f}",
            f"{c.wall_ratio.median:.3f}",
        )
        for c in results
    ]
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    padded = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in (header, *lines)]
    published = [
        f"  {mesh}  {figures}"
        for mesh, figures in PUBLISHED.items()
        if any(mesh in (c.name, c.against) for c in results)
    ]
    return "\n".join(
        [
            *padded,
            "Pairs of figures are this step's | those of what it is measured against.",
            "Others, wall/CPU s a step, measured elsewhere: a quiet 2-core machine of this kind",
            "(a survey of 2026). Compare them with the seconds above only on one such.",
            *published,
        ]
    )


def main() -> int:
    try:
        return run(tyro.cli(Arguments))
    except RequestError as error:
        say(str(error))
        return 2


def run(args: Arguments) -> int:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    for name in chosen_meshes(args.only):
        if (size := MeshShape.parse(name).size) > DEVICES:
            raise RequestError(
                f"--only {name}: needs {size} devices; this benchmark simulates {DEVICES}"
            )
    conditions = {
        "tokens": ROWS * LENGTH,
        "remat": args.remat,
        "jax": jax.__version__,
        "simulated_devices": DEVICES,
        "cores": os.cpu_count(),
        "load_average_before": os.getloadavg()[0],
    }
    say(", ".join(f"{k.replace('_', ' ')} {v}" for k, v in conditions.items()))
    results = []
    try:
        for result in comparisons(args):
            results.append(result)
            say(
                f"{result.name} / {result.against}: CPU time x {result.cpu_ratio.median:.3f} "
                f"({result.cpu_ratio.min:.3f} to {result.cpu_ratio.max:.3f})"
            )
    except DifferentLossesError as error:
        say(str(error))
        return 1
    if args.json:
        published = {"measured": "elsewhere, quiet 2-core machine", "wall/cpu": PUBLISHED}
        document = {**conditions, "comparisons": list(map(asdict, results)), "others": published}
        print(json.dumps(document, indent=2))
    else:
        print(f"remat {args.remat}, {args.pairs} pairs, {ROWS * LENGTH} tokens a step, FP32")
        print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
