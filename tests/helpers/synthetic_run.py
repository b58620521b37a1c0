"""Synthetic runs with their pages, and one-layer decoders whose units and routers are known."""

from __future__ import annotations

import json
import math
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import yaml
from torch import Tensor

from moe_ffn import DecoderConfig
from moe_ffn.config.option_tree import merge, nest_options
from moe_ffn.config.yaml_files import validate
from moe_ffn.data.tokenizer import BytesConfig
from moe_ffn.model.decoder import Decoder
from moe_ffn.report.inspect import TokenizedText, text_of_tokens
from moe_ffn.report.studies.comparison_page import html_of_runs
from moe_ffn.runs.budget import Budget, Cost
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.reader import read_runs
from moe_ffn.studies.result import Curve, Outcome, RunResult

MEASURES = (
    *("max_violation", "load_cv", "dead_experts", "dropped_fraction", "capacity_used"),
    *("experts_per_token", "nonfinite_tokens", "entropy", "entropy_of_mean", "top1_margin"),
    *("logit_max", "router_z", "load_balance", "coactivation_max", "sequence_max_violation"),
    *("shared_share", "rank_max_violation", "bias_spread", "churn"),
)
"""Measures that a run logs for each sparse layer, some of them only in some runs."""
WORDS = ["return", "self", "value", "for", "name", "in", "if", "not", "None:\n    ", "raise"]


def write_run(
    folder: Path,
    *,
    layers: int = 4,
    experts: int = 8,
    rows: int = 60,
    seed: int = 0,
    is_finished: bool = True,
    learning_rate: float = 0.003,
    worse_by: float = 0.0,
) -> Path:
    """A run of `rows` training rows, ten steps apart; `experts` 0 is a dense one."""
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    every, validate_every = 10, 100
    max_steps = every * rows
    done = max_steps if is_finished else max_steps // 2
    config = _config(folder.name, layers, experts, max_steps, learning_rate, seed)
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    facts = {
        **config,
        "git_revision": "146dbad7166a4465e5030191ba5465daa6b2c61b-dirty",
        "tokenizer_sha256": "0123456789abcdef" * 4,
        "validation_sha256": "fedcba9876543210" * 4,
        "corpus_sha256": "66b795b1a032a35aab3821d737f2147293b46d817f5cfa10d23ac864eed29115",
        "precision": "bf16-mixed",
        "num_params": 2_450_000,
        "num_active_params": 870_000,
        "flops_per_token": 1_740_000,
        "ffn_params": 2_000_000,
        "ffn_active_params": 420_000,
        "ffn_flops_per_token": 840_000,
        "hardware": {"processor": "Some CPU", "num_cpus": 2, "gpu": None},
        "versions": {"python": "3.11.7", "torch": "2.13.0+cpu"},
    }
    (folder / "facts.json").write_text(json.dumps(facts))
    table = [
        _row(step, max_steps, layers, experts, rng, prefix="")
        for step in range(every, done + 1, every)
    ]
    table += [
        _row(step, max_steps, layers, experts, rng, prefix="validation/")
        for step in range(validate_every, done + 1, validate_every)
    ]
    table.sort(key=lambda row: row["step"])
    for row in table:
        losses = ("train/loss", "validation/loss")
        row |= {key: row[key] + worse_by for key in losses if key in row}
        if "train/loss" in row:
            row["train/seconds"] = 0.1 * row["step"]
    write_metrics(folder / "metrics.jsonl", table)
    samples = [
        {"step": step, "prompt": "def ", "text": " ".join(rng.choices(WORDS, k=24))}
        for step in range(validate_every, done + 1, validate_every)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    if is_finished:
        (folder / "summary.json").write_text(json.dumps(_summary(table, layers, experts, rng)))
    return folder


def write_metrics(path: Path, table: list[dict[str, Any]]) -> None:
    """A log of rows, in which a load may stand as a list or entry by entry."""
    path.write_text("".join(json.dumps(row) + "\n" for row in table))


def change(file: Path, **values: Any) -> None:
    """Replace values of a JSON or YAML file by their dotted keys, `_` for a dot."""
    load, dump = (
        (json.loads, json.dumps) if file.suffix == ".json" else (yaml.safe_load, yaml.safe_dump)
    )
    content = load(file.read_text())
    for key, value in values.items():
        place = content
        *parts, last = key.split("__")
        for part in parts:
            place = place[part]
        place[last] = value
    file.write_text(dump(content))


def write_arm(folder: Path, arm: str, losses: list[float], *, experts: int = 0) -> None:
    """Finished runs of an arm in a folder of runs, one a seed."""
    for seed, loss in enumerate(losses):
        run = write_run(folder / f"{arm}-seed{seed}", layers=2, experts=experts, rows=20, seed=seed)
        own = yaml.safe_load((run / "config.yaml").read_text())
        whole = merge(TrainConfig().to_dict(), own | {"seed": seed})
        (run / "config.yaml").write_text(yaml.safe_dump(whole, sort_keys=False))
        sizes = dict.fromkeys(("ffn_params", "ffn_active_params", "ffn_flops_per_token"), 9)
        hashes = {"tokenizer_sha256": "t" * 64, "validation_sha256": "v" * 64}
        change(run / "facts.json", **sizes, **hashes)
        change(run / "summary.json", validation_loss=loss, peak_memory_bytes=600_000_000)


def raise_alarms(folder: Path) -> None:
    keys = ("step", "kind", "layer", "message", "advice")
    alarms = [
        (300, "collapse", "layer_01", "2 of 8 experts take 81% of the pairs.",
         "Raise objective.load_balance (0.01), or use router.type sigmoid_top_k."),
        (420, "loss_spike", None, "The loss rose from 1.61 to 2.90 within 10 steps.",
         "Lower optimizer.learning_rate (0.003) or gradient_clip_val (1.0)."),
    ]  # fmt: skip
    lines = (json.dumps(dict(zip(keys, alarm, strict=True))) + "\n" for alarm in alarms)
    (folder / "alarms.jsonl").write_text("".join(lines))


def age(folder: Path, seconds: float) -> None:
    """Date the files back, as if the run had last written so long ago."""
    then = time.time() - seconds
    for path in folder.iterdir():
        os.utime(path, (then, then))


def _config(
    name: str, layers: int, experts: int, max_steps: int, learning_rate: float, seed: int
) -> dict[str, Any]:
    ffn: dict[str, Any] = {"type": "swiglu", "d_ff": None}
    if experts:
        router = {"type": "top_k", "k": 2, "renormalize": False}
        capacity = {"factor": 1.25}
        ffn = {"type": "moe", "num_experts": experts, "router": router, "capacity": capacity}
    return {
        "seed": seed,
        "run": {"name": name, "output_dir": "runs"},
        "model": {"d_model": 128, "num_layers": layers, "causal": True, "ffn": ffn},
        "data": {"corpus": {"type": "stdlib"}, "seq_len": 256, "batch_size": 16},
        "objective": {"load_balance": 0.01, "router_z": 0.001},
        "optimizer": {"learning_rate": learning_rate, "weight_decay": 0.1},
        "trainer": {"max_steps": max_steps, "accumulate_grad_batches": 1},
        "logging": {"every_n_steps": 10},
    }


def _row(
    step: int, max_steps: int, layers: int, experts: int, rng: random.Random, prefix: str
) -> dict[str, Any]:
    part = step / max_steps
    loss = 1.5 + 4.0 * math.exp(-7 * part) + rng.gauss(0, 0.03 if not prefix else 0.005)
    row: dict[str, Any] = {"step": step}
    if prefix:
        row |= {"validation/loss": loss + 0.05, "validation/bits_per_byte": (loss + 0.05) / 0.6931}
    else:
        row |= {
            "train/loss": loss,
            "train/objective": loss + (0.012 if experts else 0),
            "train/learning_rate": 0.003 * math.cos(1.45 * part),
            "train/gradient_norm": 0.4 + 2 * math.exp(-5 * part) + abs(rng.gauss(0, 0.1)),
            "train/tokens": 4096 * step,
            "train/tokens_per_second": 41_000 + rng.gauss(0, 900),
        }
        if experts:
            row |= {"train/load_balance": 1 + 0.3 * (1 - part), "train/router_z": 2.5 - part}
    for layer in range(layers if experts else 0):
        for key, value in _routing(part, layer, experts, rng).items():
            if (prefix or step % 50) and key == "churn":
                continue
            if not prefix and key == "coactivation_max":
                continue
            row[f"{prefix}routing/layer_{layer:02d}/{key}"] = value
    return row


def _routing(part: float, layer: int, experts: int, rng: random.Random) -> Mapping[str, float]:
    """Uneven at first and evener later, more so in deeper layers; expert 1 of layer 1 dies."""
    uneven = 0.2 + 1.6 * math.exp(-5 * part) / (1 + 0.3 * layer)
    weights = [
        math.exp(uneven * math.sin(2.4 * expert + layer) + rng.gauss(0, 0.05))
        for expert in range(experts)
    ]
    if layer == 1 and part > 0.6:
        weights[1] = 0.0
    load = [weight / sum(weights) for weight in weights]
    busiest = max(load) * experts - 1
    values = {f"load/expert_{expert:02d}": share for expert, share in enumerate(load)}
    entropy = -sum(share * math.log(share) for share in load if share)
    measures = dict.fromkeys(MEASURES, 0.4 - 0.3 * part + 0.01 * layer) | {
        "max_violation": busiest,
        "dead_experts": float(load.count(0)),
        "dropped_fraction": 0.12 * busiest / (1 + busiest),
        "experts_per_token": 2.0,
        "nonfinite_tokens": 0.0,
        "entropy": entropy * (0.95 - 0.4 * part),
        "entropy_of_mean": entropy,
    }
    return values | measures


def _summary(
    table: list[dict[str, Any]], layers: int, experts: int, rng: random.Random
) -> dict[str, Any]:
    last = [row for row in table if "validation/loss" in row][-1]
    routing: dict[str, Any] = {}
    for layer in range(layers if experts else 0):
        prefix = f"validation/routing/layer_{layer:02d}/"
        values = {k.removeprefix(prefix): v for k, v in last.items() if k.startswith(prefix)}
        load = [values.pop(f"load/expert_{expert:02d}") for expert in range(experts)]
        pairs = [[rng.random() * (i != j) for j in range(experts)] for i in range(experts)]
        routing[f"layer_{layer:02d}"] = {**values, "load": load, "coactivation": pairs}
    return {
        "validation_loss": last["validation/loss"],
        "validation_bits_per_byte": last["validation/bits_per_byte"],
        "unigram_loss": 3.08,
        "ngram_loss": 1.21,
        "tokens_per_second": 41_207.3,
        "train_seconds": 60.0,
        "wall_seconds": 75.5,
        "peak_memory_bytes": 1_500_000_000,
        "routing": routing,
    }


class Written:
    """A page as text without tags, and the figures in it by their titles."""

    def __init__(self, *folders: Path) -> None:
        # The script of plotly is megabytes, which these tests would read again and again.
        with patch("moe_ffn.report.plots.get_plotlyjs", return_value=""):
            self.html = html_of_runs(read_runs(folders))
        found = re.search(r'id="plots">(.*?)</script>', self.html, re.DOTALL)
        assert found
        plots = json.loads(found[1])
        self.size_of_data = len(found[1])
        titles = re.findall(r'class="plot" .*? aria-label="([^"]*)"', self.html)
        self.figures: dict[str, list[dict[str, Any]]] = {
            unescape(title): figures for title, figures in zip(titles, plots.values(), strict=True)
        }
        body = self.html[self.html.index("<body>") : self.html.index('<script type="application')]
        self.body = body
        self.text = re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", body)))

    def traces(self, title: str) -> dict[str, dict[str, Any]]:
        (figure,) = self.figures[title]
        return {trace["meta"]["name"]: trace for trace in figure["data"]}

    def of_one(self) -> dict[str, list[dict[str, Any]]]:
        """The plots without a choice."""
        return {title: figures for title, figures in self.figures.items() if len(figures) == 1}


NO_PLOTS: dict[str, list[Any]] = {
    section: []
    for section in (
        *("curves", "more_curves", "loads", "measures", "more_measures", "coactivation"),
        *("answer", "tuning"),
    )
}


def without_plots(*folders: Path) -> Written:
    """The page without its plots, which take a second to draw."""
    with (
        patch("moe_ffn.report.plots.plots_of_run", return_value=NO_PLOTS),
        patch("moe_ffn.report.studies.comparison_page.plots_of_arms", return_value=NO_PLOTS),
    ):
        return Written(*folders)


def row_of(text: str, cells: Sequence[object]) -> bool:
    return " ".join(map(str, cells)) in text


# -- results

SHA = {"corpus": "c" * 64, "tokenizer": "t" * 64, "validation": "v" * 64}


@cache
def _defaults() -> dict[str, Any]:
    return validate(TrainConfig, {"optimizer": {"type": "adamw"}}).to_dict()


def make_result(
    arm: str,
    seed: int = 0,
    loss: float | None = 2.0,
    *,
    options: dict[str, Any] | None = None,
    tuning: dict[str, Any] | None = None,
    main_arm: str | None = None,
    steps: int = 100,
    curve: list[float] | None = None,
    flops_per_token: int = 1000,
    params: int = 500,
    step_seconds: float = 0.5,
    windows: Sequence[float] = (),
    fingerprints: Mapping[str, str] = SHA,
    machine: dict[str, Any] | None = None,
    **outcome: Any,
) -> RunResult:
    """A finished run with validations evenly spread over its steps, of 10 tokens each.

    Args:
        options: by dotted keys, over the defaults.
        curve: its validation losses; the last is replaced by `loss`.
    """
    config = merge(deepcopy(_defaults()), nest_options((options or {}).items()))
    config |= {"seed": seed}
    del config["run"]
    losses: list[float | None] = [*(curve or [4.0, 3.0])[:-1], loss]
    places = [round(steps * (place + 1) / len(losses)) for place in range(len(losses))]
    points = Curve(
        steps=places,
        tokens=[step * 10 for step in places],
        seconds=[step * step_seconds for step in places],
        losses=losses,
    )
    return RunResult(
        arm=arm,
        seed=seed,
        main_arm=main_arm or arm,
        tuning=tuning or {},
        config=config,
        budget=Budget(
            Cost(params, params // 2, flops_per_token), Cost(params // 2, 9, 9), tokens=steps * 10
        ),
        train=points,
        validation=points,
        outcome=Outcome(
            **{
                "is_finished": True,
                "step": steps,
                "validation_loss": loss,
                "step_seconds": step_seconds,
                "tokens_per_second": 10 / step_seconds,
                "peak_memory_bytes": 600_000_000,
                **outcome,
            }
        ),
        window_losses=list(windows),
        machine=machine or {"precision": "32-true"},
        fingerprints=dict(fingerprints),
    )


BYTES = BytesConfig().build([])
D, S = 32, 16


def random_text(letters: bytes, size: int = 4000, seq_len: int = S) -> TokenizedText:
    ids = np.random.default_rng(0).choice(list(letters), size)
    return text_of_tokens(np.append(ids, BYTES.end_of_document), BYTES, seq_len, size)


def decoder_of(ffn: Any, letters: bytes, **config: Any) -> Decoder:
    """Decoder of one layer with one axis per letter and an attention that adds nothing."""
    torch.manual_seed(0)
    options = {"d_model": D, "num_layers": 1, "tie_embeddings": False, "ffn": ffn} | config
    options.setdefault("attention", {"num_heads": 2})
    decoder: Any = DecoderConfig.model_validate(options).build(BYTES.vocab_size, 64).eval()
    with torch.no_grad():
        for layer in decoder.layers:
            layer.attention.output.weight.zero_()
        decoder.embedding.weight.zero_()
        decoder.unembedding.weight.zero_()
        for place, letter in enumerate(letters):
            decoder.embedding.weight[letter, place] = 1
            decoder.unembedding.weight[letter, place] = 1
    return decoder


LETTERS = b"abcdef"


def axis(letter: str, sign: float = 1.0) -> Tensor:
    return sign * torch.eye(D)[LETTERS.index(letter.encode())]
