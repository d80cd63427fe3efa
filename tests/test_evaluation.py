"""Evaluation: every token once and alike, whatever the mesh, the batch and the padding.

References: the plain forward pass on one device, public case P22, and bytes counted from the text.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import pytest
from commands import SMALL, events, records, run, sets
from helpers import FAST, T0, Run, configure, parameters, plain_loss, token_rows
from helpers import run as compiled_run
from test_hlo import collectives
from test_packing import documents, packed

from spmd_train.data.batches import IGNORE, Batch, shift
from spmd_train.data.heldout import Heldout
from spmd_train.data.sequences import Documents, Samples, Sequences
from spmd_train.data.stream import open_stream
from spmd_train.data.tokenizer import tokenizer
from spmd_train.errors import RequestError, RunError
from spmd_train.evaluation import Evaluated, Evaluation, filled
from spmd_train.interop.evaluate import with_batch
from spmd_train.model import build_model
from spmd_train.runs import RunDirectory

REPRODUCIBLE = "precision.reproducible=true"


# ------------------------------------------------------------------------- the compiled program


def summed(of: Run, batch: Batch | None = None) -> tuple[np.ndarray, int]:
    """Nats and tokens of a batch (the fixture's own), float32 and int."""
    batch = of.batch() if batch is None else of.placed(batch)
    state = of.state()
    lowered = of.step.jitted_eval().lower(state.params, state.fp8, batch)
    found = lowered.compile(compiler_options=of.compiler_options)(state.params, state.fp8, batch)
    assert found.keys() == {"loss", "tokens"}
    return np.asarray(found["loss"]), int(found["tokens"])


def reference(of: Run, batch: Batch) -> tuple[float, int]:
    """The same through the plain forward pass."""
    model = build_model(of.config.model)
    mean, _ = jax.jit(functools.partial(plain_loss, model))(parameters(of.config.model), batch)
    tokens = int((batch.targets != IGNORE).sum())
    return float(mean) * tokens, tokens


def own_batch(of: Run) -> Batch:
    rows = token_rows(of.config)
    return shift(rows, np.arange(len(rows)) * 5 % 17)  # rows of 0 to 16 targets


TIED = ("model.tied=true", "model.vocab=61", "model.z_loss=1e-3", "model.dropout=0.3")


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ("1x1x1", TIED),
        ("8x1x1", ("parallel.zero=3",)),
        ("1x4x2", ("model.kv_heads=4", *TIED)),
        ("1x1x4", ("batch.microbatches=8",)),
        ("2x2x2", ("batch.microbatches=2", "parallel.zero=2", "pipeline.idle=masked", *TIED)),
        ("2x2x1", (REPRODUCIBLE, "precision.logical_shards=2", *TIED)),
    ],
)
def test_a_batch_is_summed_as_by_the_plain_forward_pass(mesh: str, more: tuple[str, ...]) -> None:
    """z-loss and dropout, which only train, are no part of it."""
    of = compiled_run(mesh, *more, base=T0)
    batch = own_batch(of)
    nats, tokens = summed(of, batch)
    want, of_tokens = reference(of, batch)
    assert tokens == of_tokens
    np.testing.assert_allclose(nats, want, rtol=1e-6)


@pytest.mark.parametrize("mesh", ["1x1x1", "2x1x2"])
def test_documents_of_a_row_are_evaluated_apart(mesh: str) -> None:
    of = compiled_run(mesh, "data.packing=documents", base=T0)
    alone = [document for row in documents() for document in row]
    rows = np.array([document + [0] * (17 - len(document)) for document in alone])
    want, of_tokens = reference(of, shift(rows, [len(document) - 1 for document in alone]))
    nats, tokens = summed(of, packed(documents()))
    assert tokens == of_tokens
    np.testing.assert_allclose(nats, want, rtol=1e-6)


def test_reproducible_losses_have_the_same_bits_on_every_mesh() -> None:
    sets_ = (REPRODUCIBLE, "precision.logical_shards=4", *TIED)
    seen = {
        mesh: summed(compiled_run(mesh, *sets_, base=T0))[0].tobytes()
        for mesh in ("1x1x1", "4x1x1", "1x1x2", "2x1x2")
    }
    assert len(set(seen.values())) == 1, seen


@pytest.mark.parametrize("policy", ["bf16", "fp8"])
def test_it_predicts_in_the_precision_that_trains(policy: str) -> None:
    """The sum of a step's own mean, whose micro-batch is the same: only the order differs."""
    of = compiled_run("1x1x1", f"precision.policy={policy}", base=T0)
    nats, tokens = summed(of)
    _, metrics = of(of.state(), of.batch())
    assert tokens == int(metrics["tokens"])
    np.testing.assert_allclose(nats, float(metrics["loss"]) * tokens, rtol=1e-6)


def test_it_communicates_two_sums_and_what_a_forward_needs() -> None:
    """No gradient is made: nothing as large as a parameter is summed over `data`."""
    of = compiled_run("2x2x2", "model.vocab=512", "batch.microbatches=4", base=T0)
    state = of.step.spec.abstract()
    batch = of.step.abstract_batch(8, 16)
    lowered = of.step.jitted_eval().lower(state.params, state.fp8, batch)
    found = collectives(lowered.compile(compiler_options=FAST).as_text())
    over_data = [c for c in found if "data" in c.axes]
    assert {c.kind for c in over_data} == {"all-reduce"}
    assert max(math.prod(shape) for c in over_data for shape in c.shapes) == 1
    assert all(c.depth == 0 for c in over_data)
    sends = [c for c in found if c.kind == "collective-permute" and c.axes == {"stage"}]
    assert sends
    assert max(c.depth for c in sends) == 1, "one loop of ticks, and none of layers"
    kinds: Counter[str] = Counter(c.kind for c in found)
    assert not kinds["reduce-scatter"], "forward only, and vocabulary sums are all-reduced"


# ------------------------------------------------------------------------------------ the rows


@functools.cache
def on_mesh(mesh: str, batch_size: int, *more: str) -> Run:
    """T0's model with a step for this batch size, as `eval --batch-size` makes it."""
    asked = configure(mesh, *more, base=T0)
    config = with_batch(asked, Run(asked).spec.layout.mesh, batch_size)
    return Run(config)


def heldout(tokens: list[list[int]], packing: Any, length: int, mask: Any = None) -> Heldout:
    sizes = np.array([len(document) for document in tokens])
    starts = np.cumsum(sizes) - sizes
    flat = np.array([t for document in tokens for t in document], np.int32)
    rows = Sequences.of(flat, Documents(starts, sizes), packing, length, mask, keep_tail=True)
    return Heldout(Samples([rows]), None)


def evaluated(of: Run, rows: Heldout, params: Any = None, batches: int | None = None) -> Evaluated:
    evaluation = Evaluation(of.step, of.config, rows, batches, "the test")
    evaluation.compile()
    state = of.state(params)
    found = evaluation(state.params, state.fp8)
    assert found is not None
    assert found == without_time(evaluation(state.params, state.fp8), found)
    return found


def without_time(again: Evaluated | None, first: Evaluated) -> Evaluated:
    assert again is not None
    return Evaluated(again.loss, again.bits_per_byte, again.tokens, again.rows, first.seconds)


class TestP22:
    """transformers#39241: 26 nats of 16 tokens are 1.625, in batches of any size."""

    DOCUMENTS = ((1, 4.0), (2, 3.0), (3, 2.0), (10, 1.0))
    """Tokens to predict, and nats of each."""

    @pytest.mark.parametrize(
        ("mesh", "batch_size"),
        [("1x1x1", 1), ("1x1x1", 2), ("1x1x1", 3), ("1x1x1", 4), ("2x1x1", 2), ("4x1x1", 4),
         ("8x1x1", 8)],
    )  # fmt: skip
    def test_the_reports_numbers(self, mesh: str, batch_size: int) -> None:
        """Token c, which document c repeats, has the same probability after any other."""
        vocab = 8
        of = on_mesh(
            mesh,
            batch_size,
            *("model.block=own_model:column", "model.width=1", f"model.vocab={vocab}"),
            *("model.layers=1", "data.packing=padded"),
        )
        probabilities = np.exp([-nats for _, nats in self.DOCUMENTS])
        rest = (1 - probabilities.sum()) / (vocab - 4)
        matrix = np.log(np.append(probabilities, [rest] * (vocab - 4)))[None]
        params = {
            "embed": {"table": np.ones((vocab, 1), np.float32)},
            "blocks": {},
            "head": {"matrix": matrix.astype(np.float32)},
        }
        texts = [[c] * (size + 1) for c, (size, _) in enumerate(self.DOCUMENTS)]
        found = evaluated(of, heldout(texts, "padded", 16), params)
        assert (found.tokens, found.rows) == (16, 4)
        assert found.loss == pytest.approx(1.625, rel=1e-6)
        assert found.bits_per_byte is None

    TEN: ClassVar = [
        np.random.default_rng(9).integers(0, 61, 1 + 3 * i % 17).tolist() for i in range(1, 11)
    ]

    @pytest.mark.parametrize("packing", ["windows", "documents", "padded"])
    def test_ten_rows_in_batches_of_any_size(self, packing: str) -> None:
        """The last batch is not full, or the only one is not."""
        tokens = self.TEN if packing == "padded" else [*self.TEN, self.TEN[4] * 5]
        rows = heldout(tokens, packing, 16)
        of = compiled_run("1x1x1", f"data.packing={packing}", base=T0)
        nats, count = reference(of, rows.rows(np.arange(len(rows))).batch())
        sizes = (1, 3, 4, 8, 10) if packing == "windows" else (4,)
        for size in sizes:
            found = evaluated(on_mesh("1x1x1", size, f"data.packing={packing}"), rows)
            assert (found.tokens, found.rows) == (count, len(rows))
            assert found.loss == pytest.approx(nats / count, rel=1e-6)

    def test_nothing_to_evaluate_is_an_error(self) -> None:
        of = on_mesh("1x1x1", 4)
        with pytest.raises(RequestError, match="the test holds no row to evaluate on"):
            evaluated(of, heldout([[3]], "padded", 16))
        masked = heldout([[1, 2, 3, 4]], "padded", 16, np.zeros(4, np.uint8))
        with pytest.raises(RunError, match="no token to predict in 1 rows: the loss mask"):
            evaluated(of, masked)


def test_some_batches_are_spread_over_all_rows() -> None:
    of = on_mesh("1x1x1", 4)
    rows = heldout([[i, i] for i in range(60)], "padded", 16)
    some = Evaluation(of.step, of.config, rows, 3, "x")
    np.testing.assert_array_equal(some.numbers, np.arange(12) * 5)
    assert str(some) == "12 of 60 rows of 16 tokens from x"
    more = Evaluation(of.step, of.config, rows, 16, "x")
    np.testing.assert_array_equal(more.numbers, np.arange(60))
    assert str(more) == "60 rows of 16 tokens from x"


def test_rows_that_fill_a_batch_teach_nothing() -> None:
    full = filled(packed(documents()), 11)
    assert {x.shape for x in (full.inputs, full.targets, full.segments)} == {(11, 16)}
    assert (full.targets[8:] == IGNORE).all()
    np.testing.assert_array_equal(full.targets[:8], packed(documents()).targets)


@pytest.mark.parametrize(
    ("mesh", "asked", "microbatches", "more", "gives"),
    [
        ("1x1x1", 8, 4, (), (8, 4)),
        ("1x1x1", 7, 4, (), (7, 1)),
        ("1x1x1", 6, 4, (), (6, 3)),
        ("4x1x1", 9, 4, (), (12, 3)),
        ("8x1x1", 1, 1, (), (8, 1)),
        ("1x1x1", 9, 4, (REPRODUCIBLE, "precision.logical_shards=4"), (12, 3)),
    ],
)
def test_a_batch_is_what_the_mesh_divides(
    mesh: str, asked: int, microbatches: int, more: tuple[str, ...], gives: tuple[int, int]
) -> None:
    sets_ = ("batch.global_size=64", f"batch.microbatches={microbatches}", *more)
    config = configure(mesh, *sets_, base=T0)
    fitting = with_batch(config, Run(config).spec.layout.mesh, asked)
    assert (fitting.batch.global_size, fitting.batch.microbatches) == gives
    Run(fitting)  # is one


# -------------------------------------------------------------------------------- in a run


TEXT = "".join(f"{i * 7919 % 1000} is no sonnet; é{i}.\n" for i in range(700))
HELD_OUT = round(len(TEXT.encode()) * 0.1)
"""Tokens at the text's end, a byte each."""
ROWS = -(-(HELD_OUT - 1) // 32)
EVALUATED = ("data.eval_fraction=0.1", "eval.every_steps=2", "batch.microbatches=1")


def train(out: Path, text: Path, *more: str, mesh: str = "1x1x1") -> int:
    given = sets(*SMALL, *EVALUATED, f"data.source={text}")
    return run("train", "--mesh", mesh, "--out", out, "--steps", 5, *given, *more)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """Five steps, evaluated after the second, the fourth and the last."""
    out = tmp_path_factory.mktemp("runs") / "run"
    assert train(out, text) == 0
    return out


def evaluations(out: Path) -> dict[int, float]:
    return {r["step"]: r["eval_loss"] for r in records(out) if "eval_loss" in r}


def asked(capsys: pytest.CaptureFixture[str], out: Path, *flags: object) -> dict[str, Any]:
    """What `eval --json` prints."""
    capsys.readouterr()
    assert run("eval", "--run", out, "--json", *flags) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_is_evaluated_every_so_many_steps_and_at_its_end(trained: Path) -> None:
    assert list(evaluations(trained)) == [2, 4, 5]
    last = records(trained)[-1]
    assert last["eval_tokens"] == HELD_OUT - 1
    assert last["eval_seconds"] > 0
    per_byte = last["eval_loss"] / math.log(2)  # a token is a byte
    assert last["eval_bits_per_byte"] == pytest.approx(per_byte, rel=1e-12)


def test_evaluating_changes_nothing_that_is_learned(
    trained: Path, text: Path, tmp_path: Path
) -> None:
    assert train(tmp_path / "run", text, *sets("eval.every_steps=0")) == 0
    assert [r["loss"] for r in records(tmp_path / "run")] == [r["loss"] for r in records(trained)]
    assert not evaluations(tmp_path / "run")


def test_a_saved_step_is_evaluated_as_the_run_was(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    want = evaluations(trained)[5]
    here = asked(capsys, trained)
    assert here["loss"] == pytest.approx(want, rel=1e-12)
    assert (here["run"], here["step"], here["mesh"]) == (str(trained), 5, "1x1x1")
    there = asked(capsys, trained, "--mesh", "2x2x2", "--batch-size", 5)
    assert there["loss"] == pytest.approx(want, rel=1e-6)
    assert there["tokens"] == here["tokens"]
    assert there["bits_per_byte"] == pytest.approx(here["bits_per_byte"], rel=1e-6)
    assert run("eval", "--run", trained, "--batches", 2) == 0
    said = capsys.readouterr().out
    assert (
        f"step 5 of {trained}, 16 of {ROWS} rows of 32 tokens from what {trained} held out" in said
    )
    assert "512 tokens in 16 rows" in said


def test_a_resumed_run_evaluates_the_same_rows_on_another_mesh(
    trained: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert train(out, text, "--stop-after", 3, mesh="2x1x1") == 0
    assert run("--resume", "--out", out, "--mesh", "1x2x2") == 0
    assert evaluations(out) == pytest.approx(evaluations(trained), rel=1e-5)
    assert len(events(out, "compile")) == 2


def test_other_text_is_read_with_the_runs_tokenizer(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bits per byte, from the text's own length, of text and corpus alike."""
    corpus, out = tmp_path / "corpus", tmp_path / "run"
    assert run("data", "prepare", text, "--train-bpe", 300, "--no-eos", "--out", corpus) == 0
    more = (
        "model.vocab=320",
        f"data.source={corpus}",
        "data.eval_fraction=0",
        "eval.every_steps=0",
    )
    assert train(out, text, *sets(*more)) == 0
    other = tmp_path / "other.txt"
    other.write_text("It is a truth é universally acknowledged.\n" * 40)
    found = asked(capsys, out, "--data", other)
    speaks = tokenizer(str(out))
    ids = speaks.encode(other.read_text())
    assert found["tokens"] == ids.size - 1
    size = len(other.read_text().encode()) - len(speaks.decode(ids[:1]).encode())
    per_byte = found["loss"] * found["tokens"] / math.log(2) / size
    assert found["bits_per_byte"] == pytest.approx(per_byte, rel=1e-9)

    prepared = ("data", "prepare", other, "--no-eos", "--out")
    assert run(*prepared, tmp_path / "same", "--tokenizer", out) == 0
    again = asked(capsys, out, "--data", tmp_path / "same")
    assert {k: again[k] for k in ("loss", "tokens", "bits_per_byte")} == {
        k: found[k] for k in ("loss", "tokens", "bits_per_byte")
    }
    assert run(*prepared, tmp_path / "bytes", "--tokenizer", "bytes") == 0
    capsys.readouterr()
    assert run("eval", "--run", out, "--data", tmp_path / "bytes") == 2
    assert "was prepared with another tokenizer" in capsys.readouterr().err
    assert run("eval", "--run", out) == 2
    assert "held nothing out (data.eval_fraction=0); give --data" in capsys.readouterr().err


def test_what_cannot_be_evaluated_is_refused(
    trained: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*flags: object, status: int = 2) -> str:
        capsys.readouterr()
        assert run("eval", "--run", trained, *flags) == status
        return capsys.readouterr().err

    assert "--batch-size is 0; it must be at least 1" in refused("--batch-size", 0)
    assert "--batches is -1; it must be at least 1" in refused("--batches", -1)
    assert "no checkpoint of step 3" in refused("--step", 3)
    assert "it has 5" in refused("--step", 3)
    assert "data.eval_fraction is 0.2 in the request" in refused("--set", "data.eval_fraction=0.2")
    assert "'/nothing.txt' does not exist" in refused("--data", "/nothing.txt")
    (tmp_path / "one.txt").write_text("a")
    assert "one.txt holds no row to evaluate on" in refused("--data", tmp_path / "one.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert "is not UTF-8 text" in refused("--data", tmp_path / "latin.txt")
    assert "sizes that do: 1, 2, 4" in refused("--mesh", "1x3x1")
    other = tmp_path / "other.txt"
    other.write_text(TEXT + " ")
    assert "the data are not those that" in refused("--set", f"data.source={other}")
    assert run("eval", "--run", tmp_path) == 2
    assert "is no run directory" in capsys.readouterr().err
    assert train(tmp_path / "no", text, *sets("data.eval_fraction=0")) == 2
    message = capsys.readouterr().err
    assert "eval.every_steps=2 has nothing to evaluate on" in message
    assert "set data.eval_fraction=0.01" in message


def test_a_damaged_step_is_not_evaluated(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    largest = max(
        (copy / "checkpoints/5").rglob("*"), key=lambda p: p.is_file() and p.stat().st_size
    )
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    assert run("eval", "--run", copy, "--step", 5) == 1
    message = capsys.readouterr().err
    assert f"step 5 in {copy}/checkpoints is damaged: " in message
    assert largest.name in message
    assert run("eval", "--run", copy) == 1
    assert largest.exists(), "evaluating changes nothing in a run"


def test_held_out_rows_are_those_of_the_stream(trained: Path) -> None:
    """All of the text's end, to its last token."""
    stream = open_stream(RunDirectory(trained).read_config())
    assert len(stream.heldout) == ROWS
    targets = stream.heldout.rows(np.arange(ROWS)).tokens[:, 1:].reshape(-1)
    end = np.frombuffer(TEXT.encode()[-HELD_OUT:], np.uint8)[1:]
    np.testing.assert_array_equal(targets[: end.size], end)
