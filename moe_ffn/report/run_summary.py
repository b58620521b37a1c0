"""Texts on the page of a run: header, alarms, tables and samples."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_ffn.config.errors import ConfigError
from moe_ffn.config.numbers import NONE, counted, finite, number
from moe_ffn.config.sizes import TRAINING_FLOPS
from moe_ffn.ffn.base import short_name
from moe_ffn.metrics.baselines import WORSE_THAN_UNIGRAM
from moe_ffn.metrics.load_summary import percent, percent_digits, summarize_load
from moe_ffn.metrics.table import LAYER_METRICS, Metric, metrics_per_layer, result_columns
from moe_ffn.runs.options_in_words import block_of, value_in_words
from moe_ffn.runs.reader import Run
from moe_ffn.runs.rows import Series
from moe_ffn.training.config import AlarmsConfig
from moe_ffn.training.monitoring.json_lines import Alarm

MAX_COLUMNS = 16
"""Maximum number of experts with a column; more experts are shown in a folded table per layer."""

MAX_SAMPLES = 40
"""Maximum number of samples on a page, evenly chosen, with the first and the last."""

# -- the values of a run


def measured(run: Run, metric: Metric) -> dict[str, Series]:
    """Return sparse layer -> series of the metric, for the layers that have it."""
    layers = run.validated_layers if metric.measured == "validation" else run.layers
    return {
        layer: series
        for layer, by_key in layers.items()
        if (series := by_key.get(metric.key)) is not None
    }


def constant_value(by_layer: Mapping[str, Series]) -> float | None:
    """Return the value of a metric if it is the same at all steps in all layers; None otherwise.

    Returns None for a single row.
    """
    values = {value for series in by_layer.values() for value in series.values}
    rows = max(map(len, by_layer.values()), default=0)
    if len(values) != 1 or rows < 2 or not math.isfinite(min(values)):
        return None
    return values.pop() + 0.0  # not -0, the entropy of a single expert


def changing_metrics(run: Run) -> list[str]:
    """Return the keys of layer metrics that changed in the run; see `constant_metrics` for the others."""
    by_key = {metric.key: measured(run, metric) for metric in metrics_per_layer()}
    return [key for key, layers in by_key.items() if layers and constant_value(layers) is None]


def constant_metrics(run: Run) -> list[str]:
    """Return texts such as `dropped 0%` for the metrics that were the same in all layers at all steps."""
    values = {metric: constant_value(measured(run, metric)) for metric in metrics_per_layer()}
    return [
        f"{metric.title if metric.title.startswith('MaxVio') else metric.title.lower()} "
        + (f"{100 * value:.4g}%" if metric.is_share else f"{value:.4g}")
        for metric, value in values.items()
        if value is not None
    ]


# -- the head of a page

STATES = {
    "waiting": ("warn", "waiting for the first row"),
    "training": ("accent", "training"),
    "interrupted": ("bad", "interrupted"),
    "finished": ("good", "finished"),
}
"""State of a run -> (class of the style sheet, text)."""


def block(option: Callable[[str], Any]) -> str:
    """Describe the block of a run, and name the layers that differ."""
    overrides, ffn = option("model.ffn_at"), option("model.ffn")
    others = ", ".join(map(str, overrides)) if isinstance(overrides, dict) else ""
    # Options of untrusted code, or of another version, can be shown, but not described.
    text = block_of(option("model")) or (value_in_words(ffn) if ffn else "unknown block")
    return f"{text}; differs in layers {others}" if others else text


def progress(run: Run) -> str:
    """Return `240 of 600`, or `240` if the options of the run are missing."""
    planned = run.option("trainer.max_steps")
    done = f"{run.step or 0:,}"
    return f"{done} of {planned:,}" if isinstance(planned, int) and planned > 0 else done


def best_loss(run: Run) -> float | None:
    """Return the lowest validation loss if the last one is higher; None otherwise."""
    values = [value for value in run.series("validation/loss").values if value == value]
    last = run.final("validation/loss")
    if not values or last is None or min(values) >= last - 5e-5:
        return None
    return min(values)


def relative_to(run: Run, baseline: float | None) -> str:
    """Return `loss is 0.8448 lower (27%)`, compared with that of a baseline; its unit if one is unknown."""
    loss, other = finite(run.final("validation/loss")), finite(baseline)
    if loss is None or not other:
        return "nats per token"
    side = "lower" if loss <= other else "higher"
    return f"loss is {abs(other - loss):.4f} {side} ({abs(1 - loss / other):.0%})"


def tokens_seen(run: Run) -> float | None:
    """Return the tokens trained on so far, on all ranks; None if the options of the run are missing."""
    known = finite(run.summary.num_tokens)
    options = "data.batch_size", "data.seq_len", "trainer.accumulate_grad_batches"
    factors = [run.step or 0, *map(run.option, options)]
    if known is not None or not all(isinstance(factor, int) for factor in factors):
        return known
    return math.prod(factors)


def training_flops(run: Run) -> float | None:
    """Return the FLOPs of training so far, forward and backward."""
    tokens, cost = tokens_seen(run), finite(run.facts.flops_per_token)
    return None if tokens is None or cost is None else TRAINING_FLOPS * tokens * cost


def duration(seconds: float | None) -> str:
    """Return `1 h 23 min`, `4 min 5 s` or `12.3 s`; a dash if unknown."""
    if finite(seconds) is None or seconds is None:
        return NONE
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {rest} s"


def hardware(run: Run) -> tuple[str, str]:
    """Return (`2 CPU cores`, processor), or (GPU, `2 CPU cores, processor`); dashes for unknown values."""
    facts = run.facts.hardware
    processor, cores, gpu = (facts.get(key) for key in ("processor", "num_cpus", "gpu"))
    count = counted(cores, "CPU core") if isinstance(cores, int) else NONE
    if gpu:
        return str(gpu), f"{count}, {processor or NONE}"
    return count, str(processor or NONE)


# -- what is healthy at the end


@dataclass(frozen=True)
class Health:
    """Last value of a metric in each layer, and its healthy range."""

    title: str
    layers: Sequence[TableCell]
    """Text for each layer, empty without the metric, and `bad` if the value is out of range."""
    healthy: str


def health(run: Run) -> list[Health]:
    """Return the metrics with a healthy range, from the last row of each."""
    rows: list[Health] = []
    for metric in LAYER_METRICS.values():
        by_layer = measured(run, metric)
        if metric.healthy_range is None or not by_layer:
            continue
        low, high = metric.healthy_range
        cells: list[TableCell] = []
        for layer in run.layers:
            value = by_layer.get(layer, Series()).last
            kind = "" if value is None or low <= value <= high else "bad"
            cells.append(("" if value is None else _value_text(metric, value), kind))
        rows.append(Health(metric.title, cells, metric.healthy))
    return rows


# -- alarms


def concerns(run: Run) -> list[tuple[str, str]]:
    """Return (style class, sentence) of problems without alarm, and of alarms a short run cannot raise."""
    found: list[tuple[str, str]] = []
    loss, unigram = run.final("validation/loss"), run.summary.unigram_loss
    if loss is not None and not math.isfinite(loss):
        found.append(("bad", "The validation loss is not a finite number: training has diverged."))
    elif loss is not None and unigram is not None and loss > unigram:
        found.append(("bad", f"The model is {WORSE_THAN_UNIGRAM}."))
    unhealthy: list[str] = []
    for metric in health(run):
        kinds = zip(run.layers, metric.layers, strict=True)
        if layers := [short_name(layer) for layer, (_, kind) in kinds if kind == "bad"]:
            plural = "s" if len(layers) > 1 else ""
            unhealthy.append(f"{metric.title} in layer{plural} {', '.join(layers)}")
    if unhealthy:
        found.append(("bad", f"Out of the healthy range: {'; '.join(unhealthy)}."))
    try:
        rules = AlarmsConfig(after_steps=run.option("logging.alarms.after_steps"))
    except ConfigError:  # the option is missing or damaged
        rules = AlarmsConfig()
    losses = run.series("train/loss")
    sentences = rules.not_judged(
        int(losses.steps[-1]) if losses else 0,
        sum(map(math.isfinite, losses.values)),
        is_routed=bool(run.layers),
    )
    return found + [("warn", f"Not judged yet: {sentence}.") for sentence in sentences]


def alarm_groups(run: Run) -> list[list[Alarm]]:
    """Return the alarms of a run, grouped by step and kind."""
    groups: dict[tuple[int, str], list[Alarm]] = {}
    for alarm in run.alarms:
        groups.setdefault((alarm.step, alarm.kind), []).append(alarm)
    return list(groups.values())


# -- the experts of one run


TableCell = tuple[str, str]
"""Text of a share and its kind: `high` above 1.5 times the even share, `low` below 1 / 1.5 of it, `none` for
0, otherwise empty."""

EXTREMES = ("experts", "busiest", "median", "idlest", "unused")


@dataclass(frozen=True)
class ExpertRow:
    """The load of a layer on the validation split, as text."""

    layer: str
    shares: Sequence[TableCell]
    """Share of each expert in percent."""
    extremes: Sequence[TableCell]
    """Cells of `EXTREMES`: number of experts, three shares, and number of unused experts."""
    measures: Sequence[str]
    """Texts of `result_columns`."""


def expert_rows(validated: Mapping[str, Mapping[str, Any]]) -> list[ExpertRow]:
    """Return a row for each layer with a measured load, from `Run.validated`."""
    return [
        _expert_row(short_name(layer), values)
        for layer, values in validated.items()
        if isinstance(values.get("load"), list) and values["load"]
    ]


def _expert_row(layer: str, values: Mapping[str, Any]) -> ExpertRow:
    load = [finite(share) for share in values["load"]]
    digits = percent_digits(len(load))

    def kind(share: float | None) -> str:
        if share is None:
            return ""
        ratio = share * len(load)
        return "none" if share == 0 else "high" if ratio > 1.5 else "low" if ratio < 1 / 1.5 else ""

    extremes = [(NONE, "")] * 4
    if summary := summarize_load(load):
        shares = summary.highest, summary.median, summary.lowest
        extremes = [(percent(share, digits), kind(share)) for share in shares]
        extremes[0] = (f"#{summary.busiest} {extremes[0][0]}", extremes[0][1])
        extremes.append((str(len(summary.unused)), "none" if summary.unused else ""))
    return ExpertRow(
        layer,
        [(NONE if share is None else percent(share, digits), kind(share)) for share in load],
        [(str(len(load)), ""), *extremes],
        [_value_text(metric, finite(values.get(metric.key))) for metric in result_columns()],
    )


def _value_text(metric: Metric, value: float | None) -> str:
    return (
        f"{percent(value)}%"
        if metric.is_share and value is not None
        else number(value, metric.form)
    )


def result_headers() -> list[str]:
    """Return the headers of the columns that follow the shares of the experts."""
    return [f"{m.label} (nats)" if m.unit == "nats" else m.label for m in result_columns()]


# -- the texts and options of one run


def documents(run: Run) -> dict[str, str]:
    """Return name -> text for the resolved config and the remaining facts, if they exist."""
    facts = run.facts.model_dump(exclude_unset=True, exclude=set(run.options))
    texts = {
        "config.yaml": run.config_text.strip(),
        "facts.json, beyond the options": json.dumps(facts, indent=2) if facts else "",
    }
    return {name: text for name, text in texts.items() if text}
