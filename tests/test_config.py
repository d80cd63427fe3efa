"""The configuration: what is accepted, and that every refusal says what to do.

Independent answers: parameter counts by a formula written here, from the published shapes.
"""

from __future__ import annotations

from pathlib import Path

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_train.config import Config, ModelConfig, bundled_configs, dump, fields, load, parse
from spmd_train.errors import RequestError
from spmd_train.mesh import MeshShape
from spmd_train.shape_rules import validate_shape


def refusal(text: str = "{}", *overrides: str, **top: object) -> str:
    with pytest.raises(RequestError) as caught:
        parse(text, "run.yaml", overrides, **top)
    return str(caught.value)


# ------------------------------------------------------------------------------ what is accepted


def test_default_is_the_bundled_tiny() -> None:
    config = load()
    assert (config.name, config.steps, config.mesh) == ("tiny", 80, None)
    assert (config.model.layers, config.model.vocab, config.batch.global_size) == (4, 256, 32)
    assert config.optim.lr == 3e-3
    assert config.model == ModelConfig()


def test_later_sources_win() -> None:
    config = parse("steps: 7\noptim: {lr: 1}", "run.yaml", ["steps=8", "optim.lr=2e-4"], steps=9)
    assert (config.steps, config.optim.lr) == (9, 2e-4)
    assert parse("steps: 7", overrides=["steps=8"], steps=None).steps == 8


def test_overrides_keep_the_rest_of_their_section() -> None:
    config = load(None, ["optim.warmup_steps=3", "optim.betas=[0, 0.5]", "optim.clip_norm=null"])
    assert config.optim.lr == 3e-3
    assert (config.optim.warmup_steps, config.optim.betas) == (3, (0.0, 0.5))
    assert config.optim.clip_norm is None


@pytest.mark.parametrize("text", ["3e-4", "3.0e-4", ".0003", "0.0003", "3E-4", "+3e-4"])
def test_floats_are_read_as_people_write_them(text: str) -> None:
    assert parse(f"optim: {{lr: {text}}}").optim.lr == 3e-4


def test_integers_are_numbers_and_text_stays_text() -> None:
    config = parse("name: on\nseed: 1_000\noptim: {lr: 1, decay_exclude: [norms]}")
    assert (config.name, config.seed, config.optim.lr) == ("on", 1000, 1.0)
    assert config.optim.decay_exclude == ("norms",)
    assert parse("name: 2026-01-01").name == "2026-01-01"
    assert "steps is '010'" in refusal("steps: 010")  # PyYAML alone reads 8


def test_head_dim_is_resolved() -> None:
    assert load().model.head_dim == 32
    assert load(None, ["model.head_dim=16"]).model.head_dim == 16
    assert ModelConfig(width=96, heads=4).head_dim == 24


def test_own_architecture_and_mesh() -> None:
    config = parse("mesh: data=2,stage=2\nmodel: {block: my.models:build}")
    assert config.mesh == "data=2,stage=2"
    assert config.model.block == "my.models:build"


def test_frozen_and_hashable() -> None:
    config = load()
    with pytest.raises(pydantic.ValidationError):
        config.steps = 3  # type: ignore[misc]
    assert hash(config) == hash(load())


# --------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps=abc", "steps is 'abc'; it must be an integer >= 1."),
        ("steps=true", "steps is true; it must be an integer >= 1."),
        ("steps=1.5", "steps is 1.5; it must be an integer >= 1."),
        ("steps=0", "steps is 0; it must be an integer >= 1."),
        ("steps=", "steps is null; it must be an integer >= 1."),
        ("seed=-1", "seed is -1; it must be an integer >= 0"),
        ("name=3", "name is 3; it must be text."),
        ("mesh=8", "mesh is 8; it must be text or null."),
        ("model.dropout=1", "model.dropout is 1; it must be a number >= 0 and < 1."),
        ("model.logit_softcap=0", "it must be a number > 0 or null."),
        ("model.tied=1", "model.tied is 1; it must be true or false."),
        ("model.attention=flash", "it must be one of auto, xla, cudnn, splash."),
        ("model.block=mine", "it must be decoder or package.module:function."),
        ("parallel.zero=4", "parallel.zero is 4; it must be an integer >= 0 and <= 3."),
        ("parallel.zero=true", "parallel.zero is true"),
        ("parallel.sequence_parallel=1", "it must be auto or true or false."),
        ("pipeline.remat=some", "it must be one of auto, none, dots, full, stage."),
        ("precision.loss_scale=3", "is a group; set one of rule, initial,"),
        ("precision.loss_scale.initial=-1", "it must be a number > 0."),
        ("precision.loss_scale.initial=0.5", "nearest value that is: 1."),
        ("precision.loss_scale.intial=2", "did you mean 'precision.loss_scale.initial'?"),
        ("precision.policy=fp4", "it must be one of auto, fp32, bf16, fp16, fp8."),
        ("optim.lr=0", "optim.lr is 0; it must be a number > 0."),
        ("optim.lr=fast", "optim.lr is 'fast'; it must be a number > 0."),
        ("optim.lr=true", "optim.lr is true; it must be a number > 0."),
        ("optim.lr=.nan", "optim.lr is nan; it must be a number > 0."),
        ("optim.lr=.inf", "optim.lr is inf; it must be a number > 0."),
        ("optim.betas=[0.9]", "optim.betas is [0.9]; it must be a list of 2, each a number"),
        ("optim.betas=[0.9, 1]", "it must be a list of 2, each a number >= 0 and < 1."),
        ("optim.betas=[0.9, '0.5']", "it must be a list of 2"),
        ("optim.decay_exclude=[norm]", "each one of norms, biases, embeddings."),
        ("optim.name=sgd", "optim.name is 'sgd'; it must be one of adamw, adafactor, lion, muon."),
        ("data.tokenizer=7", "it must be text or null."),
        ("data.packing=rows", "it must be one of windows, documents, padded."),
        ("data.eval_fraction=0.5", "it must be a number >= 0 and < 0.5."),
        ("data.mixing=[a]", "it must be a mapping from text to a number or null."),
        ("data.mixing={a: x}", "it must be a mapping from text to a number or null."),
        ("data.mixing={a: .inf}", "it must be a mapping from text to a number or null."),
        ("data.mixing={a: 1, b/c: 0}", "data.mixing gives 'b/c' the weight 0; a weight is above 0"),
        ("data.mixing={a: -0.5}", "data.mixing gives 'a' the weight -0.5; a weight is above 0"),
        ("data.mixing={}", "data.mixing is empty; name at least one corpus"),
        ("checkpoint.keep_last=0", "checkpoint.keep_last is 0; it must be an integer >= 1."),
    ],
)
def test_bad_values_name_key_value_and_what_is_allowed(override: str, expected: str) -> None:
    message = refusal("{}", override)
    assert expected in message
    assert override.partition("=")[0] in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("optim.learning_rte", "optim.lr"),
        ("optim.learning_rate", "optim.lr"),
        ("optimizer.batch_size", "batch.global_size"),
        ("optimizer.lr", "optim.lr"),
        ("modle.layers", "model.layers"),
        ("model.layer", "model.layers"),
        ("model.num_layers", "model.layers"),
        ("model.hidden_size", "model.width"),
        ("model.num_heads", "model.heads"),
        ("model.vocab_size", "model.vocab"),
        ("seq_len", "batch.sequence_length"),
        ("optimizer.schedule", "optim.schedule"),
        ("pipe.schedule", "pipeline.schedule"),
        ("checkpoint.every_step", "checkpoint.every_steps"),
        ("batch-size", "batch.global_size"),
        ("max_steps", "steps"),
        ("optimizer", "optim"),
    ],
)
def test_unknown_keys_are_answered_with_the_nearest(key: str, meant: str) -> None:
    from_override = refusal("{}", f"{key}=1")
    assert f"unknown key {key!r}; did you mean {meant!r}?" in from_override
    section, _, leaf = key.rpartition(".")
    assert refusal(f"{section}: {{{leaf}: 1}}" if section else f"{leaf}: 1") == from_override


def test_unknown_keys_list_their_neighbours() -> None:
    assert "the keys of batch are global_size, microbatches" in refusal("{}", "batch.foo=1")
    assert "the top-level keys are name, seed, steps" in refusal("zzz: 1")
    begun = refusal("{}", "checkpoint.every=1")
    assert "did you mean 'checkpoint.every_steps' or 'checkpoint.every_seconds'?" in begun
    ambiguous = refusal("every_steps: 1")
    several = "'eval.every_steps' or 'checkpoint.every_steps' or 'log.every_steps'"
    assert f"did you mean {several}?" in ambiguous
    assert "unknown key '1'" in refusal("1: 2")


def test_all_errors_are_reported_together() -> None:
    message = refusal("optim: {lr: -1}\nfoo: 1", "steps", "model.bar=2", steps=0)
    lines = message.splitlines()
    assert len(lines) == 5
    for part in ("optim.lr is -1", "'foo'", "--set steps: has no '='", "'model.bar'", "steps is 0"):
        assert part in message
    assert "--set model=3: model is a group; set one of layers, width" in refusal("{}", "model=3")


def test_a_section_must_be_a_group() -> None:
    for value in ("5", "", "[a]"):
        assert "it must be a group of keys: global_size, mic" in refusal(f"batch: {value}")
    assert "batch is 5" in refusal("batch: 5", "batch.microbatches=2")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["model.heads=8", "model.kv_heads=3"],
            "model.kv_heads=3 does not divide model.heads=8; values that do: 1, 2, 4, 8.",
        ),
        (["model.width=130"], "not divisible by model.heads=4; nearest widths that are: 128, 132"),
        (["model.width=132"], "model.head_dim=33 is odd, but RoPE rotates pairs; nearest even"),
        (["model.head_dim=31"], "values: 30, 32"),
        (["model.width=2", "model.heads=4"], "nearest widths that are: 4, or set"),
        (["mesh=3x0x2"], "mesh '3x0x2' gives model the size '0'"),
        (["mesh=data=4,modle=2"], "did you mean 'model'?"),
    ],
)
def test_rules_between_keys_name_the_nearest_values(overrides: list[str], expected: str) -> None:
    assert expected in refusal("{}", *overrides)


# ------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"steps: 3\nsteps: 4\n", "line 2: is not valid YAML (the key 'steps' is given twice)"),
        (b"optim:\n  lr: 1\n  eps: 1\n  lr: 2\n", "line 4: is not valid YAML (the key 'lr'"),
        (b"steps: [1,\n", "line 2: is not valid YAML"),
        (b"a: b: c\n", "line 1: is not valid YAML"),
        (b"name: x\n? [a]\n: b\n", "line 2: is not valid YAML"),
        (b"name: x\n\x00", "line 2: is not valid YAML"),
        (b"steps: 1\n---\nsteps: 2\n", "line 2: is not valid YAML"),
        (b"a: !!python/object:os.system {}\n", "line 1: is not valid YAML"),
        (b"name: x\nseed: \xff\n", "line 2: is not UTF-8 text"),
        (b"- steps\n", "must be a mapping"),
        (b"", "must be a mapping"),
        (b"just words\n", "must be a mapping"),
    ],
)
def test_bad_files_are_refused_with_file_and_line(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(RequestError) as caught:
        load(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_bad_override_values_are_refused() -> None:
    assert "--set optim.lr=[, line 1: is not valid YAML" in refusal("{}", "optim.lr=[")


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load("configs/llama-1b.yaml").name == "llama-1b"  # not here: the bundled one
    assert load("llama-1b") == load("configs/llama-1b.yaml")
    (tmp_path / "tiny.yaml").write_text("name: mine")
    assert load("tiny.yaml").name == "mine"  # a file that is here wins
    for path, expected in (
        ("llama1b.yaml", "did you mean 'llama-1b'?"),
        ("zzz.yaml", "bundled are llama-1b"),
    ):
        with pytest.raises(RequestError) as caught:
            load(path)
        assert "no such file" in str(caught.value)
        assert expected in str(caught.value)
    with pytest.raises(RequestError, match="cannot be read"):
        load(tmp_path)


# -------------------------------------------------------------------------------------- round trips


texts = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"])),
    st.sampled_from(
        ["1e3", "010", "on", "null", "~", "", "1:30", "<<", ".nan", "- a", "a: b", "#"]
    ),
)
positive = st.floats(min_value=1e-12, max_value=1e12)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    kv_heads = draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(1, 4))
    model = {
        "heads": heads,
        "kv_heads": kv_heads,
        "width": heads * 2 * draw(st.integers(1, 8)),
        "norm_eps": draw(positive),
        "logit_softcap": draw(st.none() | positive),
    }
    optim = {
        "lr": draw(positive),
        "betas": draw(st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2)),
        "decay_exclude": draw(st.lists(st.sampled_from(["norms", "biases", "embeddings"]))),
        "clip_norm": draw(st.none() | positive),
    }
    return Config.model_validate(
        {
            "name": draw(texts),
            "seed": draw(st.integers(0, 2**32 - 1)),
            "model": model,
            "optim": optim,
            "data": {"source": draw(st.none() | texts)},
            "parallel": {"sequence_parallel": draw(st.sampled_from(["auto", True, False]))},
        }
    )


@given(configs())
def test_dump_and_parse_round_trip(config: Config) -> None:
    assert parse(dump(config)) == config


@pytest.mark.parametrize("name", sorted(bundled_configs()))
def test_bundled_configs_round_trip_through_a_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(dump(load(name)), encoding="utf-8")
    assert load(path) == load(name)


def test_every_key_has_a_type_and_one_sentence_of_help() -> None:
    keys = {key.name: key for key in fields()}
    assert {"steps", "model.kv_heads", "optim.decay_exclude", "log.every_steps"} <= set(keys)
    for key in keys.values():
        assert key.type
        assert key.description.endswith(".")
        assert ". " not in key.description
    assert keys["optim.lr"][1:3] == ("a number > 0", 3e-4)


# -------------------------------------------------------------------------------- bundled configs


def count_parameters(model: ModelConfig) -> int:
    """Embedding, q k v o, gate up down, two norms a block, the final norm, the head."""
    attention = 2 * model.width * model.head_dim * (model.heads + model.kv_heads)
    block = attention + 3 * model.width * model.ffn + 2 * model.width
    tables = 1 if model.tied else 2
    return model.layers * block + model.width + tables * model.vocab * model.width


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("tiny", 0.77),
        ("small", 30),
        ("llama-1b", 1235.8),  # published: 1.23 B
        ("llama-7b", 6738.4),  # published: 6.7 B
        ("llama-30b", 32528.9),  # published: 32.5 B
        ("llama-70b", 70553.7),  # published: 70.6 B
    ],
)
def test_parameter_counts(name: str, millions: float) -> None:
    assert count_parameters(load(name).model) / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("tiny", "4x2x4"),
        ("tiny", "4x4x4"),
        ("small", "2x2x2"),
        ("llama-1b", "8x1x1"),
        ("llama-1b", "4x2x1"),
        ("llama-7b", "4x2x1"),
        ("llama-7b", "4x2x4"),
        ("llama-30b", "4x2x4"),
        ("llama-70b", "4x8x4"),
    ],
)
def test_bundled_configs_fit_the_meshes_their_comments_name(name: str, mesh: str) -> None:
    validate_shape(load(name), MeshShape.parse(mesh))


def test_llama_30b_shape() -> None:
    model = load("llama-30b").model
    assert (model.layers, model.width, model.heads, model.kv_heads) == (60, 6656, 52, 52)
    assert (model.head_dim, model.ffn, model.vocab, model.tied) == (128, 17920, 32000, False)


def test_configs_folder_at_the_root_is_the_bundled_one() -> None:
    link = Path(__file__).parents[1] / "configs"
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert {path.stem for path in link.glob("*.yaml")} == set(bundled_configs())
