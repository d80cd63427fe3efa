"""What is in a corpus: counts, lengths, frequent tokens, duplicates, and some of its documents."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from spmd_train.data.corpus import Corpus, open_corpus
from spmd_train.data.indexed import IndexedDataset
from spmd_train.data.manifest import Manifest, learned_share
from spmd_train.errors import RequestError

PREFIX_TOKENS = 64
"""Documents that begin with the same so many tokens are counted as alike."""

_TOP = 20
_HEAD, _TAIL = 192, 48  # tokens shown of a long document
_CHUNK = 2**22
_LARGEST_VOCABULARY = 2**24


@dataclass(frozen=True)
class Lengths:
    """Tokens per document. `histogram`: documents of [from, to) tokens; every other is empty."""

    smallest: int
    median: float
    mean: float
    largest: int
    histogram: list[dict[str, int]]


@dataclass(frozen=True)
class TokenCount:
    """How often an id occurs; `text` is None without a tokenizer."""

    id: int
    count: int
    text: str | None


@dataclass(frozen=True)
class Duplicates:
    """Documents equal to an earlier one, and documents that begin like one (of `long_enough`)."""

    exact: int
    same_beginning: int
    long_enough: int


@dataclass(frozen=True)
class Sample:
    """One document, the middle of a long one left out; text, or ids without a tokenizer.

    Of a corpus with a loss mask, what is learned stands between ⟦ and ⟧.
    """

    document: int
    tokens: int
    head: str
    tail: str


@dataclass(frozen=True)
class Report:
    """Everything `data inspect` shows."""

    path: str
    documents: int
    tokens: int
    dtype: str
    manifest: Manifest | None
    distinct_tokens: int
    lengths: Lengths
    top_tokens: list[TokenCount]
    duplicates: Duplicates
    samples: list[Sample]

    def as_json(self) -> dict[str, Any]:
        """The report as plain values."""
        manifest = self.manifest.model_dump() if self.manifest else None
        return asdict(self) | {"manifest": manifest}


def inspect(path: Path, samples: int) -> Report:
    """Read a corpus in full, once.

    Raises:
        RequestError: it cannot be opened, is empty, or holds what is no id of its vocabulary.
    """
    if samples < 0:
        raise RequestError(f"--samples is {samples}; it must be 0 or more.")
    corpus = open_corpus(path)
    dataset, text = corpus.dataset, corpus.tokenizer
    offsets = dataset.document_offsets()
    if not len(dataset):
        raise RequestError(f"{path} holds no document.")
    counts = _count(corpus)
    most = np.argsort(-counts, kind="stable")[:_TOP]
    return Report(
        path=str(path),
        documents=len(dataset),
        tokens=int(dataset.tokens.size),
        dtype=dataset.tokens.dtype.name,
        manifest=corpus.manifest,
        distinct_tokens=int(np.count_nonzero(counts)),
        lengths=_lengths(offsets[1:] - offsets[:-1]),
        top_tokens=[
            TokenCount(int(i), int(counts[i]), text.decode([i]) if text else None)
            for i in most
            if counts[i]
        ],
        duplicates=_duplicates(dataset),
        samples=[_sample(corpus, n) for n in _spread(len(dataset), samples)],
    )


def _count(corpus: Corpus) -> np.ndarray:
    """How often each id occurs, int64. [largest id + 1]"""
    tokens = corpus.dataset.tokens
    vocabulary = corpus.tokenizer.vocab_size if corpus.tokenizer else _LARGEST_VOCABULARY
    counts = np.zeros(0, np.int64)
    for start in range(0, tokens.size, _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        if int(chunk.min()) < 0 or int(chunk.max()) >= vocabulary:
            at = start + int(np.argmax((chunk < 0) | (chunk >= vocabulary)))
            whose = "its tokenizer" if corpus.tokenizer else "any tokenizer"
            raise RequestError(
                f"{corpus.dataset.prefix}.bin: token {at} is {tokens[at]}, which is beyond the"
                f" vocabulary of {whose} (0 to {vocabulary - 1}): the file holds other data."
            )
        found = np.bincount(chunk, minlength=counts.size)
        found[: counts.size] += counts
        counts = found
    return counts


def _lengths(lengths: np.ndarray) -> Lengths:
    """Statistics of the lengths [D], with a histogram over powers of two."""
    powers = np.frexp(lengths.astype(np.float64))[1]  # length is in [2^(power-1), 2^power)
    histogram = [
        {"from": 2**power // 2, "to": 2**power, "documents": int(np.sum(powers == power))}
        for power in map(int, np.unique(powers))
    ]
    return Lengths(
        smallest=int(lengths.min()),
        median=float(np.median(lengths)),
        mean=float(lengths.mean()),
        largest=int(lengths.max()),
        histogram=histogram,
    )


def _duplicates(dataset: IndexedDataset) -> Duplicates:
    """By 64-bit hashes: 8 bytes of memory a document, a wrong match in about D^2 / 2^65 corpora."""
    whole = np.empty(len(dataset), np.uint64)
    beginnings = []
    for number in range(len(dataset)):
        ids = dataset.document(number)
        whole[number] = _hash(ids)
        if ids.size >= PREFIX_TOKENS:
            beginnings.append(_hash(ids[:PREFIX_TOKENS]))
    return Duplicates(
        exact=len(whole) - np.unique(whole).size,
        same_beginning=len(beginnings) - len(set(beginnings)),
        long_enough=len(beginnings),
    )


def _hash(ids: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(ids.data, digest_size=8).digest())


def _spread(documents: int, samples: int) -> list[int]:
    """Numbers of documents, evenly spread."""
    count = min(documents, samples)
    return [(2 * i + 1) * documents // (2 * count) for i in range(count)]


def _sample(corpus: Corpus, number: int) -> Sample:
    text, ids = corpus.tokenizer, corpus.dataset.document(number)
    learned = corpus.loss_mask.document(number) if corpus.loss_mask else np.zeros_like(ids)
    is_long = ids.size > _HEAD + _TAIL

    def shown(part: slice) -> str:
        if text is None:
            return " ".join(map(str, ids[part].tolist()))
        edges = np.flatnonzero(np.diff(learned[part])) + 1
        runs = zip(np.split(ids[part], edges), np.split(learned[part], edges), strict=True)
        decoded = ((text.decode(run), is_learned.any()) for run, is_learned in runs)
        return "".join(f"⟦{shown}⟧" if marked else shown for shown, marked in decoded)

    head = shown(slice(_HEAD if is_long else None))
    return Sample(number, int(ids.size), head, shown(slice(-_TAIL, None)) if is_long else "")


# ------------------------------------------------------------------------------------- for a person


def show(report: Report, console: Console) -> None:
    """Print a report."""

    def say(line: str = "") -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    say(f"{report.path}: {report.documents:,} documents, {report.tokens:,} tokens, {report.dtype}")
    say(_origin(report.manifest) if report.manifest else "no manifest: ids are shown as they are")
    if report.manifest and report.manifest.learned_tokens is not None:
        say(f"learned (in samples between ⟦ and ⟧): {learned_share(report.manifest)}")
    lengths, alike = report.lengths, report.duplicates
    say(
        f"\ntokens per document: {lengths.smallest:,} to {lengths.largest:,},"
        f" median {lengths.median:,.0f}, mean {lengths.mean:,.0f}"
    )
    console.print(_histogram(lengths))
    say(f"repeated documents: {_share(alike.exact, report.documents)}")
    say(
        f"repeated beginnings of {PREFIX_TOKENS} tokens:"
        f" {_share(alike.same_beginning, alike.long_enough)}"
    )
    say(f"\n{report.distinct_tokens:,} distinct tokens; the most frequent:")
    console.print(_top(report))
    for sample in report.samples:
        number = f"document {sample.document} of {report.documents:,}, {sample.tokens:,} tokens"
        console.rule(Text(number), align="left", characters="─")
        say(sample.head)
        if sample.tail:
            say(f"[... {sample.tokens - _HEAD - _TAIL:,} tokens ...]\n{sample.tail}")
    if report.samples:
        console.rule(characters="─")


def _origin(manifest: Manifest) -> str:
    request, text = manifest.request, manifest.tokenizer
    inputs = decimal(sum(source.bytes for source in request.inputs))
    around = {"bos": request.add_bos, "eos": request.add_eos}
    marks = " and ".join(name.upper() for name, added in around.items() if added) or "nothing"
    trained = f", a BPE trained on them for {request.train_bpe} ids" if request.train_bpe else ""
    count = len(request.inputs)
    return (
        f"from {count} file{'s' * (count > 1)}, {inputs}"
        f" ({manifest.skipped} records skipped, {manifest.empty_documents} empty)\n"
        f"tokenizer {text.name}{trained}: {text.vocab_size:,} ids,"
        f" SHA-256 {text.fingerprint[:12]}; {marks} added to each document"
    )


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({part / max(whole, 1):.1%})"


def _histogram(lengths: Lengths) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(justify="right")
    table.add_column(justify="right")
    most = max(row["documents"] for row in lengths.histogram)
    for row in lengths.histogram:
        span = f"{row['from']:,} to {row['to'] - 1:,}" if row["to"] > 1 else "0"
        bar = "█" * max(1, round(40 * row["documents"] / most))
        table.add_row(span, f"{row['documents']:,}", bar)
    return table


def _top(report: Report) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(3):
        table.add_column(justify="right")
    for token in report.top_tokens:
        shown = "" if token.text is None else Text(repr(token.text))
        share = f"{token.count / report.tokens:.1%}"
        table.add_row(str(token.id), f"{token.count:,}", share, shown)
    return table
