"""Open token ids for reading: a prepared corpus, or a dataset that another program made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spmd_train.data.indexed import IndexedDataset
from spmd_train.data.manifest import Manifest, load_tokenizer, read_manifest
from spmd_train.data.tokenizer import Tokenizer
from spmd_train.errors import RequestError, listed


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents, and for a prepared corpus how they were made and what their ids mean.

    Attributes:
        loss_mask: for each id 1 if it is to be learned, else 0; None where all are.
    """

    dataset: IndexedDataset
    manifest: Manifest | None = None
    tokenizer: Tokenizer | None = None
    loss_mask: IndexedDataset | None = None


def open_corpus(path: Path) -> Corpus:
    """Open a directory of `data prepare`, or a pair PREFIX.bin, PREFIX.idx by any of these names.

    Raises:
        RequestError: there is none, it is unfinished or damaged, or its tokenizer has changed.
    """
    manifest = read_manifest(path)
    if manifest is None:
        return Corpus(IndexedDataset.open(_prefix(path)))
    dataset = IndexedDataset.open(path / "tokens")
    found = (len(dataset), dataset.tokens.size, dataset.tokens.dtype.name)
    said = (manifest.documents, manifest.tokens, manifest.dtype)
    if found != said:
        raise RequestError(
            f"{path}: tokens.bin has {found[0]} documents, {found[1]} tokens of {found[2]}, and its"
            f" manifest says {said[0]}, {said[1]} of {said[2]}; copy or prepare the corpus again."
        )
    mask = IndexedDataset.open(path / "loss_mask") if "loss_mask.bin" in manifest.files else None
    if mask and not np.array_equal(mask.sizes, dataset.sizes):
        raise RequestError(
            f"{path}: loss_mask.idx has other documents than tokens.idx; copy or prepare the corpus"
            " again."
        )
    return Corpus(dataset, manifest, load_tokenizer(path, manifest), mask)


def _prefix(path: Path) -> Path:
    if path.suffix in (".bin", ".idx"):
        return path.with_suffix("")
    if not path.is_dir():
        return path
    if (path / "partial").is_dir():
        raise RequestError(f"{path} is not finished: repeat the `data prepare` that began it.")
    indices = sorted(path.glob("*.idx"))
    if len(indices) == 1:
        return indices[0].with_suffix("")
    if indices:
        raise RequestError(f"{path} holds several datasets: name one of {listed(indices)}.")
    raise RequestError(f"{path} holds no dataset: neither a manifest.json nor an .idx file.")
