"""What a run says at its end, on the screen and in `summary.json`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from moe_ffn.data.prepare import WORSE_THAN_UNIGRAM, PreparedData
from moe_ffn.errors import printable
from moe_ffn.ffn import FFNConfig
from moe_ffn.files import write_whole
from moe_ffn.layer_names import short_name
from moe_ffn.metrics.table import (
    LAYER_METRICS,
    percent,
    percent_digits,
    result_columns,
    summarize_load,
)
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import ALARMS_FILE, CHECKPOINTS_FOLDER, SUMMARY_FILE
from moe_ffn.sizes import linear_flops
from moe_ffn.training.monitoring.alarms import Advice
from moe_ffn.training.recovery.checkpoint_file import step_checkpoints
from moe_ffn.training.recovery.guard import Diverged


@dataclass(frozen=True)
class Results:
    """The results of one run."""

    folder: Path
    loss: float
    """Of the final weights on the validation split, in nats per token."""
    bits_per_byte: float
    """The same per byte of text, so that tokenizers compare."""
    unigram_loss: float
    """What a model that knows only the frequencies scores there, in nats per token."""
    tokens_per_second: float
    num_alarms: int
    not_judged: Sequence[str]
    """What no alarm could have rung for, since the run is too short; a sentence each."""
    num_skipped_steps: int
    """Optimizer steps that were not taken, because their numbers had gone wrong."""
    routing: Mapping[str, Mapping[str, Tensor]]
    """For each sparse layer, what was measured of it on the validation split."""
    sample: str
    """What the model made of `sample_prompt`."""
    sample_prompt: str
    profile: str
    """Where the time went, of a run with trainer.profiler; empty without."""

    def print(self, console: Console) -> None:
        say, warn = _plain_printer(console), _plain_printer(console, style="yellow")
        say(
            f"\nvalidation loss {self.loss:.4f} nats per token, {self.bits_per_byte:.3f} bits per byte\n"
            f"unigram model   {self.unigram_loss:.4f} nats per token\n"
            f"throughput      {self.tokens_per_second:,.0f} tokens/s"
        )
        if not math.isfinite(self.loss):
            warn(
                "training has diverged: lower optimizer.learning_rate or trainer.gradient_clip_val"
            )
        if self.loss > self.unigram_loss:
            warn(WORSE_THAN_UNIGRAM)
        if self.num_skipped_steps:
            say(f"skipped steps   {self.num_skipped_steps}")
        if self.num_alarms:
            warn(f"alarms          {self.num_alarms}; see {self.folder / ALARMS_FILE}")
        for sentence in self.not_judged:
            warn(f"not judged yet: {sentence}")
        if self.routing:
            console.print()
            console.print(load_table(self.routing, console.width))
            say(expert_use(self.routing))
            say(_LEGEND)
        if self.sample:
            say("\nSample:")
            prompt = Text(printable(self.sample_prompt, also="\n\t"), style="bold")
            console.print(prompt + Text(printable(self.sample, also="\n\t")))
        say(f"\nResults in {self.folder}/")
        for pattern, meaning in _FILES.items():
            for path in sorted(self.folder.glob(pattern))[-1:]:
                name = path.relative_to(self.folder).as_posix()
                say(f"  {name:31} {meaning}")

    def write(self) -> None:
        """Write the sample, the profile and `summary.json`, which says that the run is finished.

        Raises:
            OSError: they cannot be written.
        """
        summary = {
            "validation_loss": self.loss,
            "validation_bits_per_byte": self.bits_per_byte,
            "unigram_loss": self.unigram_loss,
            "tokens_per_second": self.tokens_per_second,
            "num_alarms": self.num_alarms,
            "num_skipped_steps": self.num_skipped_steps,
            "routing": {
                layer: {
                    name: _rounded(value)
                    for name, value in values.items()
                    if value.ndim < 2 or len(value) <= MAX_COACTIVATION_EXPERTS
                }
                for layer, values in self.routing.items()
            },
        }
        if self.sample:
            write_whole(self.folder / "sample.txt", self.sample_prompt + self.sample)
        if self.profile:
            write_whole(self.folder / "profile.txt", self.profile)
        else:  # one that was resumed may have had it before
            (self.folder / "profile.txt").unlink(missing_ok=True)
        text = json.dumps(_without_nan(summary), indent=2)
        write_whole(self.folder / SUMMARY_FILE, text + "\n")


def say_diverged(error: Diverged, config: TrainConfig, folder: Path) -> None:
    """On stderr: what happened and where it began, what is left, and what to try."""
    saved = step_checkpoints(folder / CHECKPOINTS_FOLDER)
    left = f"the last good checkpoint is {saved[0]}" if saved else "no checkpoint was saved before"
    advice = Advice(config.model, config.objective, config.optimizer, config.trainer)
    what_to_try = advice.against("loss_spike", None)
    print(f"diverged: {error}\ndiverged: {left}; {what_to_try}", file=sys.stderr)


MAX_COACTIVATION_EXPERTS = 64
"""Of more experts than this the summary keeps no matrix of who comes with whom; it would be a megabyte."""


def _rounded(value: Tensor) -> Any:
    """As it is, but a matrix to four digits, which is what a picture of it shows."""
    if value.ndim < 2:
        return value.tolist()
    return [[round(share, 4) for share in row] for row in value.tolist()]


_LEGEND = f"MaxVio: {LAYER_METRICS['max_violation'].formula}; entropy in nats"

_FILES = {
    "report.html": "all of this as a page; open it in a browser",
    "config.yaml": "the resolved options; --config takes it again",
    "facts.json": "corpus, code revision, sizes, precision",
    "metrics.jsonl": "every logged value, by step",
    "summary.json": "the numbers above",
    "sample.txt": "the text above",
    "profile.txt": "where the time went (trainer.profiler)",
    "samples.jsonl": "the texts of every validation",
    "alarms.jsonl": "what went wrong, and what to try",
    "tokenizer.json": "how text became tokens",
    "documents.json": "the documents it read, with their sha256",
    "saved.json": "which step was saved last",
    "checkpoints/best.ckpt": "weights of the lowest validation loss, alone",
    "checkpoints/step_*.ckpt": "what --resume goes on from",
    "wandb": "the run for wandb",
}


def _plain_printer(console: Console, style: str = "") -> Callable[[str], None]:
    """Prints text as it is: brackets in it are no markup."""
    return lambda text: console.print(Text(text, style=style), soft_wrap=True)


def _without_nan(value: Any) -> Any:
    """NaN says that a value does not exist; JSON's word for that is null, and for infinity too."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def model_table(config: TrainConfig, vocab_size: int) -> Table:
    """What will be trained: layers, FFN types, parameters, FLOPs and tokens per step."""
    model, seq_len = config.model, config.data.seq_len
    d_model, attention = model.d_model, model.attention
    table = Table(title="Model", title_justify="left", box=None, pad_edge=False)
    table.add_column("part")
    table.add_column("what")
    for name in ("parameters", "active", "FLOPs/token"):
        table.add_column(name, justify="right")

    def add(part: str, what: str, params: int, active: int, flops: int, count: int = 1) -> None:
        table.add_row(part, what, *(_short(count * size) for size in (params, active, flops)))

    embeddings = vocab_size * d_model * (1 if model.tie_embeddings else 2)
    embeddings += 0 if model.causal else d_model  # of the mask
    what = f"{vocab_size} x {d_model}, {'tied' if model.tie_embeddings else 'untied'}"
    output_flops = linear_flops(d_model, vocab_size)  # looking an embedding up costs none
    add("embeddings, output", what, embeddings, embeddings, output_flops)
    what = f"{attention.num_heads} heads, {attention.kv_heads} key-value"
    params = attention.num_params(d_model)
    flops = attention.flops_per_token(d_model, seq_len, model.causal)
    add(f"attention x {model.num_layers}", what, params, params, flops, count=model.num_layers)
    for ffn, layers in _runs(model.layer_ffns()):
        params, active = ffn.num_params(d_model), ffn.num_active_params(d_model)
        flops = ffn.flops_per_token(d_model, seq_len)
        add(f"ffn {_span(layers)}", ffn.describe(), params, active, flops, count=len(layers))
    params = model.num_norm_params() + model.positions.num_params(d_model, seq_len)
    add("norms, positions", f"{model.norm.type}, {model.positions.type}", params, params, 0)
    table.add_section()
    add(
        "total",
        f"{config.data.batch_size * seq_len * config.trainer.accumulate_grad_batches:,} tokens per step",
        model.num_params(vocab_size, seq_len),
        model.num_active_params(vocab_size, seq_len),
        model.flops_per_token(vocab_size, seq_len),
    )
    return table


def describe_data(data: PreparedData) -> str:
    """One line: how much text, cut into how many tokens, and which text it was."""
    sizes = data.train_size, data.validation_size
    train, validation = (f"{_short(size.num_tokens)} tokens" for size in sizes)
    return (
        f"data: {train} to train on, {validation} to validate on, "
        f"vocabulary {data.tokenizer.vocab_size}\ncorpus sha256 {data.corpus_sha256[:12]}"
    )


def load_table(routing: Mapping[str, Mapping[str, Tensor]], width: int = 80) -> Table:
    """How the validation's tokens spread over the experts: percent of the pairs, layer by layer.

    Where `width` has no room for every expert: the busiest, the median, the idlest, and how many had no
    token.
    """
    whole = _every_expert(routing)
    fits = Console(width=_UNBOUNDED).measure(whole).maximum <= width
    return whole if fits else _extremes(routing)


_UNBOUNDED = 1_000_000


def _every_expert(routing: Mapping[str, Mapping[str, Tensor]]) -> Table:
    num_experts = max(len(values["load"]) for values in routing.values())
    table = _load_table(map(str, range(num_experts)))
    for layer, values in routing.items():
        load = values["load"].tolist()
        cells = [_shade(share, len(load)) for share in load]
        cells += [Text("")] * (num_experts - len(load))
        table.add_row(short_name(layer), *cells, *_ends(values))
    return table


def _extremes(routing: Mapping[str, Mapping[str, Tensor]]) -> Table:
    table = _load_table(("experts", "busiest", "median", "idlest", "unused"))
    for layer, values in routing.items():
        load = values["load"].tolist()
        summary = summarize_load(load)
        if summary is None:
            cells = [Text("-")] * 4
        else:
            busiest = Text(f"#{summary.busiest} ") + _shade(summary.highest, len(load))
            unused = Text(str(len(summary.unused)), style="bold red" if summary.unused else "")
            others = [_shade(share, len(load)) for share in (summary.median, summary.lowest)]
            cells = [busiest, *others, unused]
        table.add_row(short_name(layer), str(len(load)), *cells, *_ends(values))
    return table


def _load_table(columns: Iterable[str]) -> Table:
    table = Table(
        title="Load of each expert on the validation split, percent of its pairs",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for name in ("layer", *columns, *(metric.label for metric in result_columns())):
        table.add_column(name, justify="right")
    return table


def _ends(values: Mapping[str, Tensor]) -> list[str]:
    cells: list[str] = []
    for metric in result_columns():
        value = values[metric.key].item()
        cells.append(f"{percent(value)}%" if metric.is_share else f"{value:{metric.form}}")
    return cells


MAX_NAMED_EXPERTS = 6


def expert_use(routing: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Which experts had no token on the validation split, a line for each layer that has such experts; a
    layer whose load was not measured is named as that.
    """
    lines: list[str] = []
    for layer, values in routing.items():
        load = values["load"].tolist()
        summary = summarize_load(load)
        if summary is None:
            lines.append(f"  layer {short_name(layer)}: not measured")
        elif summary.unused:
            named = [str(expert) for expert in summary.unused[:MAX_NAMED_EXPERTS]]
            rest = ["..."] if len(summary.unused) > len(named) else []
            count = f"{len(summary.unused)} of {len(load)}"
            lines.append(f"  layer {short_name(layer)}: {count} ({', '.join([*named, *rest])})")
    if lines:
        return "\n".join(["experts without a token on the validation split", *lines])
    return "every expert is used on the validation split" if routing else ""


def _shade(share: float, num_experts: int) -> Text:
    """Green near the even share, yellow beyond a factor 1.5 either way, red beyond 3."""
    ratio = share * num_experts
    ratio = max(ratio, 1 / ratio) if ratio > 0 else float("inf")
    style = "green" if ratio < 1.5 else "yellow" if ratio < 3 else "bold red"
    return Text(f"{percent(share, percent_digits(num_experts)):>4}", style=style)


def _short(count: float) -> str:
    for size, suffix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= size:
            return f"{count / size:.2f}{suffix}"
    return f"{count:.0f}"


def _span(layers: list[int]) -> str:
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"


def _runs(ffns: list[FFNConfig]) -> list[tuple[FFNConfig, list[int]]]:
    """Neighbouring layers with the same block, together."""
    groups = groupby(enumerate(ffns), key=lambda item: item[1].to_dict())
    runs = [list(items) for _, items in groups]
    return [(items[0][1], [layer for layer, _ in items]) for items in runs]
