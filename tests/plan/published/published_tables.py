"""The published tables as rows of numbers, with the measured seconds of a step.

Nothing of the planner is imported here. Where a paper prints TFLOP/s, the seconds are what its own
formula makes of them.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def read(name: str) -> list[dict[str, Any]]:
    """A table without its comment lines; numbers as numbers."""
    lines = (FOLDER / name).read_text().splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return [{key: _number(value) for key, value in row.items()} for row in rows]


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        source: of the table; `sweep`: rows whose model, batch and devices are the same.
        name: what tells it from the others.
        seconds: measured, of a step.
        hidden, heads, layers, sequence, vocab: the model.
        model, stage, data, context: ways it is split.
        batch: sequences of a step; micro_batch: of one micro-batch and data shard.
        more: whatever else the source says.
    """

    source: str
    sweep: str
    name: str
    seconds: float
    hidden: int
    heads: int
    layers: int
    sequence: int
    vocab: int
    model: int
    stage: int
    data: int
    batch: int
    micro_batch: int
    context: int = 1
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def facts(self) -> dict[str, Any]:
        return dict(self.more)


def narayanan_flops(batch: float, s: int, layers: int, h: int, vocab: int) -> float:
    """Of a step with full recomputation: Narayanan et al. 2021, eq. 3."""
    return 96.0 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))


def narayanan_1() -> list[Row]:
    """Weak scaling, 1.7B to 1T."""
    rows = []
    for r in read("narayanan2021_table1_a100.csv"):
        flops = narayanan_flops(r["global_batch"], r["seq"], r["layers"], r["hidden"], r["vocab"])
        seconds = flops / (r["tflops_per_gpu_hfu"] * 1e12 * r["gpus"])
        rows.append(
            Row(
                "Narayanan 2021, table 1", "", r["model"], seconds,
                r["hidden"], r["heads"], r["layers"], r["seq"], r["vocab"],
                r["tp"], r["pp"], r["dp"], r["global_batch"], r["micro_batch"],
                more=(("interleave", r["virtual_stages_v"]),),
            )
        )  # fmt: skip
    return rows


def narayanan_2() -> list[Row]:
    """PTD-P against ZeRO-3: 175B and 530B on more and more GPUs."""
    shapes = {174.6: (12288, 96, 96, 12), 529.6: (20480, 128, 105, 35)}
    rows = []
    for r in read("narayanan2021_table2_zero3_vs_ptdp_a100.csv"):
        h, heads, layers, stages = shapes[r["params_billion"]]
        zero3 = r["scheme"] == "ZeRO-3"
        model, stage = (1, 1) if zero3 else (8, stages)
        flops = narayanan_flops(r["global_batch"], 2048, layers, h, 51200)
        rows.append(
            Row(
                "Narayanan 2021, table 2" + (", ZeRO-3" if zero3 else ""), "",
                f"{r['params_billion']:.0f}B, {r['gpus']} GPUs",
                flops / (r["tflops_per_gpu"] * 1e12 * r["gpus"]),
                h, heads, layers, 2048, 51200, model, stage, r["gpus"] // (model * stage),
                r["global_batch"], r["micro_batch"], more=(("zero", 3 if zero3 else 0),),
            )
        )  # fmt: skip
    return rows


def korthikanti() -> list[Row]:
    """Full recomputation against sequence parallelism with selective recomputation."""
    rows = []
    for r in read("korthikanti2022_table5_iter_time_mfu.csv"):
        for remat, key in (("full", "iter_s_full_recompute"), ("selective", "iter_s_sp_selective")):
            rows.append(
                Row(
                    "Korthikanti 2022, table 5", "", f"{r['model']} {remat}", r[key],
                    r["hidden"], r["heads"], r["layers"], r["seq"], r["vocab"],
                    r["tp"], r["pp"], r["dp"], r["global_batch"], r["micro_batch"],
                    more=(("interleave", r["interleave_v"]), ("remat", remat)),
                )
            )  # fmt: skip
    return rows


def llama_3() -> list[Row]:
    """405B. Model FLOPs are taken as 6 N + 6 L D T a token, the causal mask's half of attention:
    with all of it, 131,072 positions would run at a higher rate than 8,192 do."""
    rows = []
    for r in read("llama3_405b_table4_h100.csv"):
        tokens = r["batch_per_dp"] * r["dp"] * r["seq"]
        flops = (6 * 405e9 + 6 * 126 * 16384 * r["seq"]) * tokens
        rows.append(
            Row(
                "Llama 3, table 4", "", f"{r['gpus']} GPUs, {r['seq']} positions",
                flops / (r["tflops_per_gpu"] * 1e12 * r["gpus"]),
                16384, 128, 126, r["seq"], 128256,
                r["tp"], r["pp"], r["dp"], r["batch_per_dp"] * r["dp"], 1, r["cp"],
            )
        )  # fmt: skip
    return rows


def vtrain(which: str) -> list[Row]:
    """GPT on A100s; `which` is "single" or "multi" (nodes)."""
    rows = []
    for r in read(f"vtrain_ground_truth_{which}_node_a100.csv"):
        model, stage, data = (r[f"{kind}_parallelism"] for kind in ("tensor", "pipeline", "data"))
        shape = f"h{r['hidden_size']} L{r['layers']}"
        rows.append(
            Row(
                f"vTrain, {which} node",
                f"{shape}, batch {r['global_batch']}, {r['gpus']} GPUs",
                f"{shape} batch {r['global_batch']} of {r['micro_batch']} "
                f"t{model} d{data} p{stage}",
                r["iteration_time_ms"] / 1e3,
                r["hidden_size"], r["attention_heads"], r["layers"], r["sequence_length"], 50257,
                model, stage, data, r["global_batch"], r["micro_batch"],
            )
        )  # fmt: skip
    return rows


MODELS = {  # width, query heads, key heads, head_dim, ffn, layers, vocabulary, gated: config.json
    "Llama3.1-8B": (4096, 32, 8, 128, 14336, 32, 128256, True),
    "Llama3.1-70B": (8192, 64, 8, 128, 28672, 80, 128256, True),
    "Llama3.1-405B": (16384, 128, 8, 128, 53248, 126, 128256, True),
    "Llama2-70B": (8192, 64, 8, 128, 28672, 80, 32000, True),
    "Mistral-7B": (4096, 32, 8, 128, 14336, 32, 32768, True),
    "GPT3-175B": (12288, 96, 96, 128, 49152, 96, 50304, False),
}
LENGTHS = {"Llama2-70B": 4096, "GPT3-175B": 2048}  # else 8192: the recipes' max_target_length


def tpu_recipes() -> list[Row]:
    """Dense recipes: step seconds of the log. FSDP over all chips (`ici_fsdp_parallelism` -1; over
    slices too for 405B on v6e), one micro-batch; their remat policies keep at most the attention
    projections, on the host, and recompute all else, so count as `full`."""
    rows = []
    for r in read("tpu_recipes_step_logs.csv"):
        folder = r["recipe"].split("/")[1:]
        model = folder[0].removesuffix("-MaxText")
        if model not in MODELS or r["recipe"] == "v5p/GPT3-175B-MaxText":
            continue
        width, heads, _, _, _, layers, vocab, _ = MODELS[model]
        length = LENGTHS.get(model, 8192)
        batch = r["tokens_per_step"] // length
        rows.append(
            Row(
                "tpu-recipes", "", f"{r['chip']} {' '.join(folder)}", r["step_s"],
                width, heads, layers, length, vocab, 1, 1, r["devices_derived"], batch,
                batch // r["devices_derived"],
                more=(
                    ("chip", r["chip"]), ("model", model), ("chips", r["devices_derived"]),
                    ("slices", 2 if r["recipe"] == "trillium/Llama3.1-405B-MaxText" else 1),
                    ("compute", "float8" if "fp8" in folder else "bfloat16"),
                    ("remat", "full"),
                ),
            )
        )  # fmt: skip
    return rows


# configs/tpu/*/*.sh of maxtext, which the README tables are of: sequences a chip, ways of tensor
# parallelism, remat policy.
MAXTEXT = {
    ("v5e", "16B"): (6, 1, "full"),
    ("v5e", "32B"): (4, 1, "full"),
    ("v5e", "128B"): (1, 16, "full"),
    ("v5p", "32B"): (6, 4, "dots"),
    ("v5p", "64B"): (3, 4, "dots"),
    ("v5p", "128B"): (1, 8, "dots"),
    ("v5p", "256B"): (1, 8, "dots"),
    ("v5p", "512B"): (2, 8, "full"),
    ("v5p", "1024B"): (2, 16, "full"),
}


def scaled(billions: int) -> tuple[int, int, int, int]:
    """Width, heads, ffn, layers of maxtext's `global_parameter_scale` (pyconfig.py): from 2048, 16,
    7168, 16 it doubles heads and ffn, then the width, then the layers, in turn."""
    whole, rest = divmod(billions.bit_length() - 1, 3)
    wide = 2 ** (whole + (rest > 0))
    return 2048 * 2 ** (whole + (rest > 1)), 16 * wide, 7168 * wide, 16 * 2**whole


def maxtext() -> list[Row]:
    """README tables: TFLOP/s per chip, attention counted whole (before PR 1988)."""
    rows = []
    for r in read("maxtext_tpu_v4_v5e_v5p_v6e.csv"):
        setting = MAXTEXT.get((r["chip"], r["model"]))
        if (
            setting is None
            or r["consistency"] != "ok"
            or r["slices"] > 1
            or "parent" in r["source"]
        ):
            continue
        per_chip, model, remat = setting
        width, heads, ffn, layers = scaled(int(r["model"].removesuffix("B")))
        matrices = layers * (4 * width * heads * 128 + 3 * width * ffn) + 32000 * width
        tokens = per_chip * 2048 * r["chips"]
        flops = tokens * (6 * matrices + 12 * layers * heads * 128 * 2048)
        data = r["chips"] // model
        rows.append(
            Row(
                f"MaxText {r['chip']}", "", f"{r['model']} {r['hardware']}",
                flops / (r["tflops_per_chip"] * 1e12 * r["chips"]),
                width, heads, layers, 2048, 32000, model, 1, data, tokens // 2048,
                per_chip * model,
                more=(
                    ("chip", r["chip"]), ("chips", r["chips"]), ("slices", 1),
                    ("ffn", ffn), ("remat", remat), ("compute", "bfloat16"),
                ),
            )
        )  # fmt: skip
    return rows
