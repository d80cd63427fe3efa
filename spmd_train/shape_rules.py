"""The rules that say whether a configuration fits a mesh, checked before anything is compiled.

What does not divide is refused, never dropped or rounded. Two things need not divide: KV heads
fewer than `model` are replicated, and the vocabulary is padded, invisibly to the loss.
"""

from __future__ import annotations

from collections.abc import Iterator

from spmd_train.config import Config
from spmd_train.errors import RequestError, listed, nearest_divisors, nearest_multiples
from spmd_train.mesh import MeshShape


def validate_shape(config: Config, mesh: MeshShape) -> None:
    """Raise one RequestError with a sentence for every rule that `config` breaks on `mesh`."""
    broken = [
        *_layer_rule(config, mesh),
        *_head_rule(config, mesh),
        *_ffn_rule(config, mesh),
        *_batch_rule(config, mesh),
        *_sequence_rule(config, mesh),
        *(_reproducible_rules(config, mesh) if config.precision.reproducible else ()),
    ]
    if broken:
        raise RequestError("\n".join(broken))


def sequence_parallel_on(config: Config, mesh: MeshShape) -> bool:
    """Whether activations between blocks are split by position; `auto` means where model > 1."""
    setting = config.parallel.sequence_parallel
    return mesh.model > 1 and (setting == "auto" or setting is True)


def _layer_rule(config: Config, mesh: MeshShape) -> Iterator[str]:
    layers, stage = config.model.layers, mesh.stage
    if layers % stage:
        yield (
            f"stage={stage} does not divide {layers} layers; "
            f"sizes that do: {listed(nearest_divisors(layers, stage))}; "
            f"nearest model.layers for stage={stage}: {listed(nearest_multiples(layers, stage))}."
        )


def _head_rule(config: Config, mesh: MeshShape) -> Iterator[str]:
    heads, model = config.model.heads, mesh.model
    if heads % model:
        yield (
            f"model={model} does not divide {heads} heads; "
            f"sizes that do: {listed(nearest_divisors(heads, model))}."
        )


def _ffn_rule(config: Config, mesh: MeshShape) -> Iterator[str]:
    ffn, model = config.model.ffn, mesh.model
    if ffn % model:
        yield (
            f"model={model} does not divide the ffn width {ffn}; "
            f"sizes that do: {listed(nearest_divisors(ffn, model))}; "
            f"nearest model.ffn for model={model}: {listed(nearest_multiples(ffn, model))}."
        )


def _batch_rule(config: Config, mesh: MeshShape) -> Iterator[str]:
    if config.precision.reproducible:
        return  # cut by logical shards, whatever the mesh: _reproducible_rules
    size, microbatches, data = config.batch.global_size, config.batch.microbatches, mesh.data
    ways = data * microbatches
    if size % ways == 0:
        return
    if size % data:
        counts = f"no number of micro-batches works, since data={data} does not divide {size}"
    else:
        working = nearest_divisors(size // data, microbatches)
        counts = f"batch.microbatches that work for {size}: {listed(working)}"
    yield (
        f"batch.global_size={size} is not divisible by data={data} x "
        f"batch.microbatches={microbatches} = {ways}; "
        f"nearest sizes that are: {listed(nearest_multiples(size, ways))}; {counts}."
    )


def _sequence_rule(config: Config, mesh: MeshShape) -> Iterator[str]:
    length, model = config.batch.sequence_length, mesh.model
    if sequence_parallel_on(config, mesh) and length % model:
        yield (
            f"batch.sequence_length={length} is not divisible by model={model}, "
            f"over which sequence parallelism splits it; nearest lengths that are: "
            f"{listed(nearest_multiples(length, model))}, "
            f"or set parallel.sequence_parallel=false."
        )


def _reproducible_rules(config: Config, mesh: MeshShape) -> Iterator[str]:
    """What `precision.reproducible` asks for: one tree of sums, which every mesh cuts at a node."""
    shards, size = config.precision.logical_shards, config.batch.global_size
    keyed = f"precision.logical_shards={shards}"
    if shards & (shards - 1):
        below = 1 << (shards.bit_length() - 1)
        yield (
            f"{keyed} is not a power of two, as reproducible sums need; "
            f"nearest that are: {below}, {2 * below}."
        )
        return
    for what, parts in (
        (f"data={mesh.data}", mesh.data),
        (f"stage={mesh.stage} x model={mesh.model}", mesh.stage * mesh.model),
    ):
        if shards % parts:
            allowed = [1 << k for k in range(shards.bit_length())]
            enough = f", or {parts} logical shards" if parts & (parts - 1) == 0 else ""
            yield (
                f"{what} does not divide {keyed}, as reproducible sums need; "
                f"sizes that do: {listed(allowed)}{enough}."
            )
    pieces = shards * config.batch.microbatches
    if size % pieces:
        counts = ""
        if size % shards == 0:
            working = nearest_divisors(size // shards, config.batch.microbatches)
            counts = f"; batch.microbatches that work for {size}: {listed(working)}"
        yield (
            f"batch.global_size={size} is not divisible by {keyed} x "
            f"batch.microbatches={config.batch.microbatches} = {pieces} (micro-batches are those "
            f"of a logical shard); nearest sizes that are: "
            f"{listed(nearest_multiples(size, pieces))}{counts}."
        )
    for key, value, allowed_values in (
        ("parallel.zero", config.parallel.zero, ("0", "1")),
        ("optim.name", config.optim.name, ("adamw", "lion")),
        ("pipeline.idle", config.pipeline.idle, ("skip",)),
        ("precision.accumulate", config.precision.accumulate, ("auto", "float32")),
        ("precision.reduce", config.precision.reduce, ("auto", "float32")),
        ("precision.compensated", str(config.precision.compensated).lower(), ("false",)),
    ):
        if str(value) not in allowed_values:
            yield (
                f"{key}={value} makes sums follow the mesh, against precision.reproducible=true; "
                f"values that do not: {listed(allowed_values)}."
            )
