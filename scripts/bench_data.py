"""How fast `data prepare` tokenizes, as a ratio to the `tokenizers` library called directly; and
how fast training rows are read from a prepared corpus.

Both sides encode the same texts with the same BPE and the same number of cores, each in a fresh
process, in turns. The direct side only encodes: the texts are in memory, in pieces of a MiB, and
the ids go nowhere. The other side is all of `prepare`, from an empty directory to the manifest: it
starts its workers, reads, hashes, writes, joins and hashes again.

From the root of the repository (`PYTHONPATH=.` where the package is not installed):

    python scripts/bench_data.py ../shared/data/shakespeare_38plays.txt
    python scripts/bench_data.py FILE --copies 8 --workers 4 --pairs 5

`read` makes a corpus of random ids in documents of a thousand on average, and reads batches of 32
rows of 1024 tokens from the page cache in one thread, order, rows, masks and shift included:

    python scripts/bench_data.py read
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from spmd_train.data.indexed import Writer
from spmd_train.data.prepare import Options, prepare
from spmd_train.data.source import open_source
from spmd_train.data.stream import Stream
from spmd_train.data.tokenizer import train_bpe


@dataclass(frozen=True)
class Arguments:
    """Compare data prepare with the tokenizers library."""

    file: tyro.conf.Positional[str]
    """UTF-8 text."""
    copies: int = 4
    """Documents: so many copies of the text."""
    workers: int = len(os.sched_getaffinity(0))
    """Processes of one side, threads of the other."""
    pairs: int = 3
    """Measurements of each side."""
    vocab: int = 8192
    """Ids of the BPE, trained on the text."""


def direct(directory: Path, workers: int) -> tuple[int, float]:
    """Tokens and seconds of the library alone."""
    os.environ |= {"RAYON_NUM_THREADS": str(workers), "TOKENIZERS_PARALLELISM": "true"}
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = [path.read_text("utf-8") for path in sorted(directory.glob("*.txt"))]
    pieces = [text[i : i + 2**20] for text in texts for i in range(0, len(text), 2**20)]
    start = time.perf_counter()
    tokens = 0
    for i in range(0, len(pieces), workers):
        encoded = library.encode_batch_fast(pieces[i : i + workers], add_special_tokens=False)
        tokens += sum(len(one.ids) for one in encoded)
    return tokens, time.perf_counter() - start


def prepared(directory: Path, workers: int) -> tuple[int, float]:
    """Tokens and seconds of `prepare`."""
    name = str(directory / "tokenizer.json")
    with tempfile.TemporaryDirectory() as out:
        start = time.perf_counter()
        options = Options([str(directory)], Path(out) / "out", name, eos=False, workers=workers)
        return prepare(options).tokens, time.perf_counter() - start


def read(tokens: int = 2**26, steps: int = 200) -> None:
    """Print the positions and the targets read per second, in every packing, mixed or held out."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        lengths = rng.geometric(1e-3, tokens // 1000)
        for half in ("a", "b"):
            with Writer(Path(name) / half, np.dtype("u2")) as writer:
                ids = rng.integers(0, 50_000, lengths.sum()).astype(np.uint16)
                writer.extend(ids, lengths)
        a, b = (open_source(f"{name}/{half}", None, "") for half in ("a", "b"))
        for packing in ("windows", "documents", "padded"):
            for what, sources, shares, fraction in (
                ("one corpus", (a,), (1,), 0.0),
                ("a tenth held out", (a,), (1,), 0.1),
                ("two corpora", (a, b), (7, 3), 0.0),
            ):
                stream = Stream(sources, 1024, 32, 0, shares, packing, fraction)
                stream.sample_ids(0)  # splits the documents, once a run
                targets = 0
                start = time.perf_counter()
                for step in range(steps):
                    targets += (stream.batch(stream.sample_ids(step)).targets >= 0).sum()
                seconds = time.perf_counter() - start
                positions = steps * 32 * 1024 / seconds
                print(
                    f"{packing:9}  {what:16}  {positions / 1e6:.0f} M tokens/s, of which targets"
                    f" {targets / seconds / 1e6:.0f}",
                    flush=True,
                )


def measured(side: str, directory: Path, workers: int) -> float:
    """Tokens per second of one side, in a fresh process."""
    command = [sys.executable, __file__, side, str(directory), str(workers)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    tokens, seconds = json.loads(output.splitlines()[-1])
    return tokens / seconds


def main() -> None:
    """Measure in turns and print the ratio of each pair."""
    arguments = tyro.cli(Arguments, description=__doc__)
    text = Path(arguments.file).read_text("utf-8")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        train_bpe([text], arguments.vocab, directory)
        for i in range(arguments.copies):
            (directory / f"{i}.txt").write_text(text, "utf-8")
        ratios = []
        for _ in range(arguments.pairs):
            speeds = [measured(s, directory, arguments.workers) for s in ("direct", "prepare")]
            ratios.append(speeds[1] / speeds[0])
            print("direct {:,.0f}  prepare {:,.0f} tokens/s".format(*speeds), flush=True)
        print(f"ratio {statistics.median(ratios):.2f}, of {arguments.workers} workers")


if __name__ == "__main__":
    if sys.argv[1:] == ["read"]:
        read()
    elif sys.argv[1:2] in (["direct"], ["prepare"]):
        side = direct if sys.argv[1] == "direct" else prepared
        print(json.dumps(side(Path(sys.argv[2]), int(sys.argv[3]))))
    else:
        main()
