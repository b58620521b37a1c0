"""Tables and results of a run, as text for a terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_ffn.config.errors import printable
from moe_ffn.config.numbers import compact
from moe_ffn.config.sizes import linear_flops
from moe_ffn.data.prepare import PreparedData
from moe_ffn.ffn.base import short_name
from moe_ffn.metrics.baselines import WORSE_THAN_UNIGRAM
from moe_ffn.metrics.load_summary import percent, summarize_load
from moe_ffn.metrics.table import LAYER_METRICS, result_columns
from moe_ffn.report.run_summary import EXTREMES, ExpertRow, TableCell, expert_rows
from moe_ffn.runs.budget import Budget
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import ALARMS_FILE, MODEL_FOLDER, REPORT_FILE
from moe_ffn.runs.json_files import plain_values

if TYPE_CHECKING:
    from moe_ffn.runs.assemble import RunCallbacks


def plain_table(headers: Sequence[str | Text], *, num_texts: int = 1, **options: Any) -> Table:
    """Return an empty table without lines; columns after the first `num_texts` are aligned to the right."""
    table = Table(box=None, pad_edge=False, **options)
    for place, name in enumerate(headers):
        table.add_column(name, justify="left" if place < num_texts else "right", overflow="fold")
    return table


def print_results(
    console: Console, folder: Path, summary: Mapping[str, Any], callbacks: RunCallbacks
) -> None:
    """Print the numbers of a `summary_of`, the load of every expert, a sample, and the run's folder."""
    loss, unigram, ngrams = (summary[f"{name}_loss"] for name in ("validation", "unigram", "ngram"))
    samples, routing = callbacks.samples, plain_values(summary["routing"])

    def say(text: str, style: str = "") -> None:
        # As a Text, brackets are not markup.
        console.print(Text(text, style=style), soft_wrap=True)

    warn = partial(say, style="yellow")
    say(
        f"\nvalidation loss {loss:.4f} nats per token, "
        f"{summary['validation_bits_per_byte']:.3f} bits per byte\n"
        f"unigram model   {unigram:.4f} nats per token"
    )
    if ngrams is not None:
        say(f"5-gram model    {ngrams:.4f} nats per token")
    say(f"throughput      {summary['tokens_per_second']:,.0f} tokens/s")
    if not math.isfinite(loss):
        warn("training has diverged: lower optimizer.learning_rate or trainer.gradient_clip_val")
    if loss > unigram:
        warn(WORSE_THAN_UNIGRAM)
    if (best := callbacks.checkpoints.loss_of_best) < loss - 5e-5:
        say(f"best validation {best:.4f} nats per token; {MODEL_FOLDER}/ has those weights")
    if summary["num_skipped_steps"]:
        say(f"skipped steps   {summary['num_skipped_steps']}")
    if summary["num_alarms"]:
        warn(f"alarms          {summary['num_alarms']}; see {folder / ALARMS_FILE}")
    for sentence in callbacks.steps.not_judged(is_routed=bool(routing)):
        warn(f"not judged yet: {sentence}")
    if routing:
        console.print()
        # Routers of many experts list pairs, and have no load of every expert.
        listed = {layer: values for layer, values in routing.items() if "experts_used" in values}
        if loads := {layer: values for layer, values in routing.items() if layer not in listed}:
            console.print(load_table(loads, console.width), soft_wrap=False)
            say(unused_experts(loads))
            say(_LEGEND)
        if listed:
            say(listed_expert_use(listed))
    if samples.last:
        say("\nSample:")
        prompt = Text(printable(samples.prompt, also="\n\t"), style="bold")
        console.print(prompt + Text(printable(samples.last, also="\n\t")), soft_wrap=False)
    say(f"\nResults in {folder}/; open its {REPORT_FILE} in a browser")


_LEGEND = f"MaxVio: {LAYER_METRICS['max_violation'].formula}; entropy in nats"


def model_table(config: TrainConfig, vocab_size: int) -> Table:
    """Return a table of the model: layers, FFN types, parameters, FLOPs and tokens per step."""
    model, seq_len = config.model, config.data.seq_len
    d_model, attention = model.d_model, model.attention
    headers = ["part", "type", "parameters", "active", "FLOPs/token"]
    table = plain_table(headers, num_texts=2, title="Model", title_justify="left")

    def add(part: str, kind: str, params: int, active: int, flops: int, count: int = 1) -> None:
        table.add_row(part, kind, *(compact(count * size) for size in (params, active, flops)))

    embeddings = vocab_size * d_model * (1 if model.tie_embeddings else 2)
    embeddings += 0 if model.causal else d_model  # the mask embedding
    kind = f"{vocab_size} x {d_model}, {'tied' if model.tie_embeddings else 'untied'}"
    output_flops = linear_flops(d_model, vocab_size)  # the lookup of an embedding has no FLOPs
    add("embeddings, output", kind, embeddings, embeddings, output_flops)
    params = attention.num_params(d_model, model.norm)
    for window, count in Counter(model.layer_windows()).items():
        kind = attention.describe(window)
        flops = attention.flops_per_token(d_model, seq_len, model.causal, window)
        add(f"attention x {count}", kind, params, params, flops, count=count)
    # Consecutive layers with the same block are one row.
    for _, items in groupby(enumerate(model.layer_ffns()), key=lambda item: item[1].to_dict()):
        layers, (ffn, *_) = zip(*items, strict=True)
        span = str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
        params, active = ffn.num_params(d_model), ffn.num_active_params(d_model)
        flops = ffn.flops_per_token(d_model, seq_len)
        add(f"ffn {span}", ffn.describe(), params, active, flops, count=len(layers))
    params = model.num_norm_params() + model.positions.num_params(d_model, seq_len)
    add("norms, positions", f"{model.norm.type}, {model.positions.type}", params, params, 0)
    table.add_section()
    add(
        "total",
        f"{config.tokens_per_step:,} tokens per step",
        *astuple(Budget.of(config, vocab_size).model),
    )
    return table


def describe_data(data: PreparedData) -> str:
    """Return the size of the text in tokens, and its sha256."""
    sizes = data.train_size, data.validation_size
    train, validation = (f"{compact(size.num_tokens)} tokens" for size in sizes)
    return (
        f"data: {train} to train on, {validation} to validate on, "
        f"vocabulary {data.tokenizer.vocab_size}\ncorpus sha256 {data.corpus_sha256[:12]}"
    )


def load_table(routing: Mapping[str, Mapping[str, Any]], width: int = 80) -> Table:
    """Return a table of each expert's share of the (token, expert) pairs in the validation, in percent.

    If `width` is too small for every expert, show the busiest, the median, the idlest and the number unused.
    """
    rows = expert_rows(routing)

    def table(columns: Sequence[str], cells: Callable[[ExpertRow], Sequence[TableCell]]) -> Table:
        title = "Load of each expert on the validation split, percent of its pairs"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for name in ("layer", *columns, *(metric.label for metric in result_columns())):
            table.add_column(name, justify="right", min_width=4)
        for row in rows:
            texts = [Text(text, style=_STYLES.get(kind, "")) for text, kind in cells(row)]
            padding = [""] * (len(columns) - len(texts))
            table.add_row(row.layer, *texts, *padding, *row.measures)
        return table

    num_experts = max(len(row.shares) for row in rows)
    every_expert = table([str(expert) for expert in range(num_experts)], lambda row: row.shares)
    fits = Console(width=1_000_000).measure(every_expert).maximum <= width
    return every_expert if fits else table(EXTREMES, lambda row: row.extremes)


_STYLES = {"high": "yellow", "low": "yellow", "none": "bold red"}

MAX_NAMED_EXPERTS = 6


def unused_experts(routing: Mapping[str, Mapping[str, Any]]) -> str:
    """List the experts without a token on the validation split, one line per layer with such experts."""
    lines: list[str] = []
    for layer, values in routing.items():
        load = values["load"]
        summary = summarize_load(load)
        if summary is None:
            lines.append(f"  layer {short_name(layer)}: not measured")
        elif summary.unused:
            names = [str(expert) for expert in summary.unused[:MAX_NAMED_EXPERTS]]
            if len(summary.unused) > len(names):
                names.append("...")
            count = f"{len(summary.unused)} of {len(load)}"
            lines.append(f"  layer {short_name(layer)}: {count} ({', '.join(names)})")
    if lines:
        return "\n".join(["experts without a token on the validation split", *lines])
    return "every expert is used on the validation split" if routing else ""


def listed_expert_use(routing: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the share of experts that a validation batch used, per layer whose router lists pairs."""
    lines = (
        f"  layer {short_name(layer)}: {percent(float(values['experts_used']), 2)}%, usage "
        f"{float(values['usage_kl']):.2f} nats from uniform"
        for layer, values in routing.items()
    )
    return "\n".join(["experts that a batch of the validation split used", *lines])
