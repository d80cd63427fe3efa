"""Conversations: what is learned, against lists of tokens written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from spmd_train.cli import main
from spmd_train.data.batches import IGNORE
from spmd_train.data.corpus import open_corpus
from spmd_train.data.indexed import Writer
from spmd_train.data.inspect import inspect
from spmd_train.data.manifest import Manifest
from spmd_train.data.prepare import Options, prepare
from spmd_train.data.source import open_source
from spmd_train.data.stream import Stream
from spmd_train.data.tokenizer import train_bpe
from spmd_train.errors import RequestError

USER, BOT, SYSTEM = "user", "assistant", "system"


def chat(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


TWO = chat((USER, "Hi"), (BOT, "Hello é"), (USER, "More"), (BOT, "No"))


def lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
    return path


def prepared(tmp_path: Path, *records: Any, **options: Any) -> Manifest:
    path = lines(tmp_path / "a.jsonl", *records)
    options = {"tokenizer": "bytes", "workers": 1} | options
    return prepare(Options([str(path)], tmp_path / "out", **options))


def template(tmp_path: Path, source: str) -> dict[str, Path]:
    (tmp_path / "t.jinja").write_text(source)
    return {"chat_template": tmp_path / "t.jinja"}


def refused(tmp_path: Path, *records: Any, **options: Any) -> str:
    with pytest.raises(RequestError) as caught:
        prepared(tmp_path, *records, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def marked(directory: Path) -> list[str]:
    """Each document, what is learned of it in [brackets], read without the package's reader."""
    tokens = np.fromfile(directory / "tokens.bin", np.uint8)
    mask = np.fromfile(directory / "loss_mask.bin", np.uint8)
    corpus = open_corpus(directory)
    found = []
    for first, stop in zip(*(corpus.dataset.document_offsets()[i:] for i in (0, 1)), strict=False):
        out, inside = bytearray(), 0
        for token, flag in zip(tokens[first:stop], mask[first:stop], strict=True):
            if flag != inside:
                out += b"]" if inside else b"["
                inside = flag
            out.append(token)
        found.append((bytes(out) + b"]" * int(inside)).decode())
    return found


def test_chatml_is_the_default(tmp_path: Path) -> None:
    manifest = prepared(tmp_path, TWO, chat((SYSTEM, "S"), (USER, "Q"), (BOT, "A")))
    assert marked(tmp_path / "out") == [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Hello é<|im_end|>\n]"
        "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n[No<|im_end|>\n]",
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n"
        "<|im_start|>assistant\n[A<|im_end|>\n]",
    ]
    assert manifest.learned_tokens == len("Hello é<|im_end|>\n".encode()) + 13 + 12
    assert manifest.request.format == "messages"
    assert {"loss_mask.bin", "loss_mask.idx"} <= manifest.files.keys()


def test_prompt_and_completion(tmp_path: Path) -> None:
    manifest = prepared(
        tmp_path, {"prompt": "2+2=", "completion": "4"}, train_bpe=257, tokenizer=None
    )
    corpus = open_corpus(tmp_path / "out")
    ids, mask = corpus.dataset.document(0), corpus.loss_mask.document(0)
    assert corpus.tokenizer.decode(ids) == "2+2=4<|endoftext|>"
    assert mask.tolist() == [0, 0, 0, 0, 1, 1]  # with the EOS, or a model would not learn to end
    assert (manifest.request.format, manifest.learned_tokens) == ("prompt-completion", 2)


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    """Hugging Face's conventions: loop controls, tojson, `generation`, the tokenizer's marks."""
    source = (
        "{{ bos_token }}{%- for m in messages -%}{% if m.role == 'tool' %}{% continue %}{% endif %}"
        "{% if m['role'] == 'user' %}[INST] {{ m['content'] | trim }} [/INST]"
        "{% elif m['role'] == 'system' %}{{ m | tojson }}"
        "{% else %}{% generation %} {{ m['content'] }}{{ eos_token }}{% endgeneration %}{% endif %}"
        "{%- endfor -%}"
    )
    turns = (SYSTEM, "é"), (USER, " Hi "), ("tool", "?"), (BOT, "Yo")
    prepared(tmp_path, chat(*turns), **template(tmp_path, source))
    assert marked(tmp_path / "out") == ['{"role": "system", "content": "é"}[INST] Hi [/INST][ Yo]']
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == source


def test_special_tokens_of_a_template_are_single_ids(tmp_path: Path) -> None:
    train_bpe(["Hi Hello user assistant"], 300, tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["added_tokens"] += [
        {**spec["added_tokens"][0], "id": 400 + i, "content": mark}
        for i, mark in enumerate(("<|im_start|>", "<|im_end|>"))
    ]
    (tmp_path / "chat.json").write_text(json.dumps(spec))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    prepared(tmp_path, chat((USER, "Hi"), (BOT, "Hello")), tokenizer=str(tmp_path / "chat.json"))
    corpus = open_corpus(tmp_path / "out")
    ids, mask, text = corpus.dataset.document(0), corpus.loss_mask.document(0), corpus.tokenizer
    library = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    start, end = map(library.token_to_id, ("<|im_start|>", "<|im_end|>"))
    said = [text.encode(part).tolist() for part in ("user\nHi", "\n", "assistant\n", "Hello")]
    expected = [start, *said[0], end, *said[1], start, *said[2], *said[3], end, *said[1]]
    assert ids.tolist() == expected  # and no EOS of its own: the template ends the turns
    learned = len(said[3]) + 1 + len(said[1])
    assert mask.tolist() == [0] * (len(ids) - learned) + [1] * learned


def test_neither_workers_nor_shards_show(tmp_path: Path) -> None:
    records = [chat((USER, f"q {i}"), (BOT, "a" * (i % 7))) for i in range(60)]
    lines(tmp_path / "a.jsonl", *records)
    for workers, shard_bytes in ((1, None), (1, 500), (2, 900)):
        out = tmp_path / f"{workers}-{shard_bytes}"
        options = {"workers": workers, "shard_bytes": shard_bytes}
        prepare(Options([str(tmp_path / "a.jsonl")], out, "bytes", **options))
    first, *others = [
        {p.name: p.read_bytes() for p in out.iterdir()} for out in tmp_path.glob("*-*")
    ]
    assert set(first) == {
        "manifest.json", "tokens.bin", "tokens.idx", "loss_mask.bin", "loss_mask.idx",
        "chat_template.jinja",
    }  # fmt: skip
    assert others == [first] * 2


@pytest.mark.parametrize("packing", ["windows", "documents", "padded"])
def test_training_rows_honour_the_mask(packing: str, tmp_path: Path) -> None:
    prepared(tmp_path, TWO, TWO)
    source = open_source(str(tmp_path / "out"), None, "data.source")
    stream = Stream((source,), 10, 2, 0, packing=packing)
    numbers = np.arange(len(stream.samples))
    targets = stream.batch(numbers).targets
    learned = bytes(targets[targets != IGNORE].astype(np.uint8)).decode()
    said = "Hello é<|im_end|>\nNo<|im_end|>\n" * 2
    # `windows` leaves out what does not fill a row.
    assert learned == said[: len(learned)] and len(said) - len(learned) < 10  # noqa: PT018
    assert packing == "windows" or learned == said


def test_inspect_shows_what_is_learned(tmp_path: Path, capsys: Any) -> None:
    prepared(tmp_path, chat((USER, "Hi"), (BOT, "Hello")))
    assert "to learn: what the assistant says, 16 of 68 tokens" in capsys.readouterr().out
    assert main(["data", "inspect", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "learned (in samples between ⟦ and ⟧): what the assistant says, 16 of 68" in out
    assert "<|im_start|>assistant\n⟦Hello<|im_end|>\n⟧" in out
    assert inspect(tmp_path / "out", 0).as_json()["manifest"]["learned_tokens"] == 16


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    lines(tmp_path / "a.jsonl", TWO)
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
    flags = ["--tokenizer", "bytes", "--workers", "1", "--out", str(tmp_path / "out")]
    command = ["data", "prepare", str(tmp_path / "a.jsonl"), *flags]
    assert main([*command, "--chat-template", str(tmp_path / "t.jinja")]) == 0
    assert marked(tmp_path / "out") == ["Hi;[Hello é;]More;[No;]"]
    assert main(command) == 2  # with another template
    assert "was begun for another request: chat_template is " in capsys.readouterr().err


# ------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": "Hi"}, "field 'messages' is a string, not a list of messages"),
        ({"messages": []}, "field 'messages' is empty, not a list of messages"),
        ({"messages": ["Hi"]}, "message 0: is a string where an object with 'role' is expected"),
        ({"messages": [{"role": "user"}]}, "message 0: has no field 'content' (it has role)"),
        (chat((USER, None)), "message 0: field 'content' is null, not a string"),
        (chat((USER, "Hi")), "has no message of the role 'assistant', so nothing to learn"),
        ({"text": "Hi"}, "has no field 'messages' (it has text)"),
        (chat((USER, "\ud800"), (BOT, "")), "message 0: field 'content' holds half a surrogate"),
    ],
)
def test_bad_records_are_named_or_skipped(tmp_path: Path, record: Any, expected: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(TWO) + "\n" + json.dumps(record))
    options = Options([str(tmp_path / "a.jsonl")], tmp_path / "out", "bytes", workers=1)
    with pytest.raises(RequestError) as caught:
        prepare(options)
    assert f"a.jsonl, line 2: {expected}" in str(caught.value)
    skipped = Options([*options.inputs], options.out, "bytes", workers=1, skip_bad=True)
    assert (prepare(skipped).skipped, prepare(skipped).documents) == (1, 1)


def test_templates_that_cannot_be_trusted(tmp_path: Path) -> None:
    """One that drops earlier thoughts, one that refuses a role, one that is no template."""
    forgets = "{% for m in messages %}{{ m.content if loop.last else '...' }}{% endfor %}"
    message = refused(tmp_path, TWO, **template(tmp_path, forgets))
    assert (
        "line 1: the chat template writes what comes before or in message 1 differently" in message
    )
    raises = "{{ raise_exception('roles must alternate') }}"
    message = refused(tmp_path, TWO, **template(tmp_path, raises))
    assert "line 1: the chat template fails on it (roles must alternate)" in message
    message = refused(tmp_path, TWO, **template(tmp_path, "a\n{% for m in %}"))
    assert "t.jinja, line 2: is no Jinja template (" in message
    unsafe = "{{ messages.__class__.__mro__ }}"
    assert "fails on it (access to attribute" in refused(
        tmp_path, TWO, **template(tmp_path, unsafe)
    )
    message = refused(tmp_path, TWO, chat_template=tmp_path / "no.jinja")
    assert "no.jinja: cannot be read (No such file or directory)." in message


def test_tokens_across_the_edge(tmp_path: Path) -> None:
    """GPT-2's words begin with a space: 'is ' and '42' have other ids together than apart."""
    train_bpe(["the answer is 42 is 42 is 42"] * 9, 280, tmp_path)
    options = {"tokenizer": str(tmp_path / "tokenizer.json")}
    good = {"prompt": "the answer is", "completion": " 42"}
    bad = {"prompt": "the answer is ", "completion": "42"}
    message = refused(tmp_path, good, bad, **options)
    assert "line 2: a token reaches from the context into what is learned" in message
    assert "between 'e answer is ' and '42'" in message
    assert prepared(tmp_path, good, bad, skip_bad=True, **options).documents == 1


def test_formats_and_files(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("text")
    path = lines(tmp_path / "a.jsonl", TWO)
    with pytest.raises(RequestError, match=r"b\.txt: records of the format messages are read from"):
        prepare(Options([str(path), str(tmp_path / "b.txt")], tmp_path / "out", "bytes"))
    message = refused(tmp_path, {"text": "x"}, **template(tmp_path, "x"))
    assert message == ("--chat-template is for records of the format messages, and these are text.")
    assert "has no field 'text'" in refused(tmp_path, TWO, format="text")
    manifest = prepared(tmp_path, {"messages": "not these", "body": "this"}, text_field="body")
    assert (manifest.request.format, manifest.learned_tokens) == ("text", None)
    assert "loss_mask.bin" not in manifest.files


def test_a_mask_of_another_corpus(tmp_path: Path) -> None:
    prepared(tmp_path, TWO)
    with Writer(tmp_path / "out" / "loss_mask", np.dtype("u1")) as writer:
        writer.add([1])
    with pytest.raises(RequestError, match=r"loss_mask\.idx has other documents than tokens\.idx"):
        open_corpus(tmp_path / "out")
