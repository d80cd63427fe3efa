"""Held-out documents against sets, and the bytes of their text against the text itself."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_train.data.batches import IGNORE
from spmd_train.data.heldout import _hash, split
from spmd_train.data.prepare import Options, prepare
from spmd_train.data.source import TokenSource, open_source
from spmd_train.data.stream import Stream
from spmd_train.data.tokenizer import ByteTokenizer

PACKINGS = ["windows", "documents", "padded"]
TEXTS = [
    "plain words, and more of them",
    "Grüße aus Köln",
    "日本語のテキスト",
    "😀😃😄 mixed é",
    "x",
]


def offsets(sizes: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=60),
    st.floats(0.001, 0.499),
    st.integers(0, 2**32 - 1),
)
def test_each_document_is_on_one_side(sizes, fraction, seed):
    trained, held = split(offsets(sizes), fraction, seed)
    assert sorted([*trained.starts, *held.starts]) == offsets(sizes)[:-1].tolist()
    assert held.starts.size == max(1, round(fraction * len(sizes)))
    assert held.starts.tolist() == sorted(held.starts)
    again = split(offsets(sizes), fraction, seed)[1]
    assert held.starts.tolist() == again.starts.tolist()


def test_the_choice_is_by_seed_and_spread():
    sizes = [1] * 1000
    chosen = [set(split(offsets(sizes), 0.1, seed)[1].starts.tolist()) for seed in range(4)]
    assert all(len(c) == 100 for c in chosen)
    assert all(len(a & b) < 40 for a, b in pairwise(chosen))
    assert all(30 <= sum(i < 500 for i in c) <= 70 for c in chosen)
    assert len(np.unique(_hash(10_000, 7))) == 10_000


def test_the_hash_is_splitmix64():
    """The first outputs of SplitMix64 seeded with 1234567, as its authors' program prints them."""
    state, expected = 1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423]
    found = []
    for _ in expected:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        found.append(z ^ (z >> 31))
    assert found == expected
    start = int(np.random.SeedSequence(5).generate_state(1, np.uint64)[0])
    z = (start + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    assert int(_hash(1, 5)[0]) == z ^ (z >> 31)


def test_a_single_document_holds_out_its_end():
    trained, held = split(offsets([1000]), 0.1, 3)
    assert [a.tolist() for a in (*trained, *held)] == [[0], [900], [900], [100]]
    assert split(offsets([1000]), 0.0, 3)[1].starts.size == 0


def made(texts: list[str], packing: str, fraction: float = 0.4, length: int = 7) -> Stream:
    data = [text.encode() for text in texts]
    source = TokenSource(
        "it",
        np.frombuffer(b"".join(data), np.uint8),
        offsets([len(d) for d in data]),
        "content",
        ByteTokenizer(),
    )
    return Stream((source,), length, 2, 0, packing=packing, eval_fraction=fraction)


def held_texts(stream: Stream) -> list[bytes]:
    _, held = split(stream.sources[0].offsets, stream.eval_fraction, stream.seed)
    whole = stream.sources[0].tokens.tobytes()
    return [whole[a : a + n] for a, n in zip(held.starts, held.sizes, strict=True)]


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_row_once_with_the_bytes_of_its_targets(packing):
    """Of bytes, each target is one byte; a character that two rows share must not count twice."""
    stream = made(TEXTS, packing)
    heldout = stream.heldout
    numbers = np.arange(len(heldout))
    batch = heldout.rows(numbers).batch()
    found = heldout.text_bytes(numbers)
    per_row = (batch.targets != IGNORE).sum(1)
    texts = held_texts(stream)
    firsts = 1 if packing == "windows" else len(texts)
    assert per_row.sum() == sum(map(len, texts)) - firsts
    # The first token of a text may be a part of a character; its share is then decoded as U+FFFD.
    leading = [len(t[:1].decode("utf-8", "replace").encode()) for t in texts[:firsts]]
    assert found.sum() == sum(map(len, texts)) - sum(leading)
    one_by_one = [heldout.text_bytes(np.array([i]))[0] for i in numbers[::-1]]
    assert one_by_one[::-1] == found.tolist()
    if packing == "windows":
        assert all(t in b"".join(texts) for t in texts)
        joined = b"".join(texts)
        got = batch.targets[batch.targets != IGNORE]
        assert bytes(got.astype(np.uint8)) == joined[1:]


@pytest.mark.parametrize("packing", PACKINGS)
def test_bytes_of_a_bpe(packing: str, tmp_path: Path) -> None:
    """Tokens of several bytes and parts of characters; EOS is a target but no text."""
    texts = [f"{TEXTS[i % 5]} {i} {TEXTS[(i * 3 + 1) % 5]}" for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    prepare(Options([str(tmp_path / "a.jsonl")], tmp_path / "c", train_bpe=300, workers=1))
    source = open_source(str(tmp_path / "c"), None, "data.source")
    stream = Stream((source,), 5, 2, 0, packing=packing, eval_fraction=0.25)
    heldout, text = stream.heldout, source.tokenizer
    _, held = split(source.offsets, 0.25, 0)
    documents = [source.tokens[a : a + n] for a, n in zip(held.starts, held.sizes, strict=True)]
    assert len(documents) == 10
    firsts = documents[:1] if packing == "windows" else documents
    expected = sum(len(text.decode(d[:-1]).encode()) for d in documents)
    expected -= sum(len(text.decode(d[:1]).encode()) for d in firsts)
    numbers = np.arange(len(heldout))
    assert heldout.text_bytes(numbers).sum() == expected
    assert all(d[-1] == text.eos_id for d in documents)


@given(st.lists(st.text(min_size=1), min_size=2, max_size=8), st.integers(1, 9))
@settings(max_examples=40)
def test_bytes_of_any_text(texts, length):
    stream = made(texts, "padded", length=length)
    total = stream.heldout.text_bytes(np.arange(len(stream.heldout)))
    rows = [t for t in held_texts(stream) if len(t) > 1]
    leading = [len(t[:1].decode("utf-8", "replace").encode()) for t in rows]
    assert (total.sum() if total.size else 0) == sum(map(len, rows)) - sum(leading)


def test_without_a_tokenizer_there_are_no_bytes():
    source = TokenSource("ids", np.arange(40, dtype=np.uint16), offsets([10] * 4), "content")
    heldout = Stream((source,), 3, 2, 0, eval_fraction=0.25).heldout
    assert len(heldout) == 3
    assert heldout.text_bytes(np.arange(3)) is None


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_loss_mask_decides_whose_bytes_count(packing):
    data = b"prompt:answer."
    mask = np.array([0] * 7 + [1] * 7, np.uint8)
    source = TokenSource(
        "it", np.frombuffer(data * 2, np.uint8), offsets([14, 14]), "content", ByteTokenizer(),
        np.tile(mask, 2),
    )  # fmt: skip
    heldout = Stream((source,), 5, 2, 0, packing=packing, eval_fraction=0.3).heldout
    assert heldout.text_bytes(np.arange(len(heldout))).sum() == 7
