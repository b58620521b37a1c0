"""The experts of one run; several runs side by side, and the options in which they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from moe_ffn.layer_names import is_inner, short_name
from moe_ffn.metrics.load_summary import percent, percent_digits, summarize_load
from moe_ffn.metrics.table import LAYER_METRICS, Metric, result_columns
from moe_ffn.report.headline import (
    STATES,
    bits_per_byte,
    ffn_type,
    progress,
    tokens_per_second,
    validation_loss,
)
from moe_ffn.report.markup import NONE, finite, number, short, table, text
from moe_ffn.runs.reader import Run

MAX_COLUMNS = 16
"""More experts than this stand in a block of their own under each layer's row."""

BLOCK_COLUMNS = 16

UNCOMPARED = ("run.", "logging.")
"""Options that change no result."""

DOES_NOT_COMPARE = {
    "corpus_sha256": "read different corpora: their losses do not compare",
    "precision": "differ in precision, which by itself moves a loss in its second decimal",
}
"""Facts that should be the same in all runs, and what is said where they are not."""


def expert_table(run: Run) -> str:
    """Layer by expert, percent of the layer's pairs; shaded by the ratio to the even share."""
    layers = {k: v for k, v in run.validated.items() if _shares(v)}
    if not layers:
        return ""
    widest = max(len(_shares(values)) for values in layers.values())
    caption = (
        "Percent of a layer's (token, expert) pairs on the validation split. "
        '<span class="high">busy</span>: over 1.5 times the even share; '
        '<span class="low">idle</span>: under 1 / 1.5 of it; '
        '<span class="none">none</span>: no pair.'
    )
    ends = [_header(metric) for metric in result_columns()]
    if widest <= MAX_COLUMNS:
        rows = [
            [
                text(short_name(layer)),
                *(_share(share, len(_shares(values))) for share in _shares(values)),
                *[""] * (widest - len(_shares(values))),
                *_ends(values),
            ]
            for layer, values in layers.items()
        ]
        headers = ["layer", *map(str, range(widest)), *ends]
        return table(caption, headers, rows, "experts")
    rows = [[text(short_name(k)), *_extremes(_shares(v)), *_ends(v)] for k, v in layers.items()]
    headers = ["layer", "experts", "busiest", "median", "idlest", "without a pair", *ends]
    blocks = "".join(_block(layer, values) for layer, values in layers.items())
    return (
        table("Percent of a layer's pairs on the validation split.", headers, rows)
        + f"<details><summary>every expert of every layer</summary>\n<p class=small>{caption}</p>\n"
        + f"{blocks}</details>\n"
    )


def comparison(runs: Sequence[Run]) -> str:
    """One row per run, in the order given, which is that of the colours."""
    compared = [LAYER_METRICS[key] for key in ("max_violation", "dropped_fraction")]
    headers = [
        "run",
        "validation loss (nats)",
        "state",
        "steps",
        "block",
        "parameters",
        "active",
        "FLOPs per token",
        "bits per byte",
        "tokens per second",
        *(metric.label for metric in compared),
    ]
    losses = [loss for run in runs if (loss := finite(validation_loss(run))) is not None]
    rows = [
        [
            f"{swatch(place)}{text(run.name)}",
            _best_in_bold(validation_loss(run), losses),
            STATES[run.state][1],
            progress(run),
            text(ffn_type(run)),
            short(run.fact("num_params")),
            short(run.fact("num_active_params")),
            short(run.fact("flops_per_token")),
            number(bits_per_byte(run)),
            number(tokens_per_second(run), ",.0f"),
            *(number(layer_mean(run, metric.key), metric.form) for metric in compared),
        ]
        for place, run in enumerate(runs)
    ]
    warnings = [
        f'<p class="warn">These runs {what}.</p>\n'
        for fact, what in DOES_NOT_COMPARE.items()
        if len({repr(run.fact(fact)) for run in runs}) > 1
    ]
    caption = (
        "Loss and bits per byte: the validation split, at the end or the last so far. "
        f"{', '.join(metric.label for metric in compared)}: there too, mean of the layers. "
        f"Precision: {_precisions(runs)}."
    )
    return table(caption, headers, rows, "runs") + "".join(warnings)


def differences(runs: Sequence[Run]) -> str:
    """The options that are not the same in all runs, by their dotted paths."""
    flat = [flatten(run.options) for run in runs]
    paths = sorted(
        {path for options in flat for path in options if not path.startswith(UNCOMPARED)}
    )
    rows = [
        [f"<code>{text(path)}</code>", *(_option(options, path) for options in flat)]
        for path in paths
        if len({repr(options.get(path)) for options in flat}) > 1
    ]
    if not rows:
        return "<p>All options are the same, but for names and logging.</p>\n"
    headers = ["option", *(f"{swatch(n)}{text(run.name)}" for n, run in enumerate(runs))]
    return table("Options in which the runs differ.", headers, rows, "options")


def _precisions(runs: Sequence[Run]) -> str:
    """The number format of each run in order, or of all where it is the same."""
    names = [text(run.fact("precision") or "unknown") for run in runs]
    return ", ".join(names) if len(set(names)) > 1 else names[0]


def swatch(place: int) -> str:
    """The colour of a run, beside its name."""
    return f'<i class="swatch c{place % 8}"></i> '


def flatten(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"model": {"ffn": 1}}` as `{"model.ffn": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in options.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def layer_mean(run: Run, key: str) -> float | None:
    """A measure on the validation split, mean of the layers; not of the blocks inside their blocks."""
    layers = [values for layer, values in run.validated.items() if not is_inner(layer)]
    found = [value for values in layers if (value := finite(values.get(key))) is not None]
    return fmean(found) if found else None


def _option(options: Mapping[str, Any], path: str) -> str:
    if path not in options:
        return f'<td class="quiet">{NONE}</td>'
    value = options[path]
    return text(
        "null" if value is None else str(value).lower() if isinstance(value, bool) else value
    )


def _best_in_bold(loss: Any, losses: Sequence[float]) -> str:
    shown = number(loss)
    return f"<b>{shown}</b>" if len(losses) > 1 and loss == min(losses) else shown


def _shares(values: Mapping[str, Any]) -> list[float | None]:
    """None for a share that was not measured, which is not the same as no pair."""
    load = values.get("load")
    return [finite(share) for share in load] if isinstance(load, list) else []


def _share(share: float | None, num_experts: int) -> str:
    """A cell: the percentage, with more digits where an even share is small."""
    if share is None:
        return NONE
    ratio = share * num_experts
    kind = "none" if share == 0 else "high" if ratio > 1.5 else "low" if ratio < 1 / 1.5 else ""
    mark = f' class="{kind}"' if kind else ""
    return f"<td{mark}>{text(percent(share, percent_digits(num_experts)))}</td>"


def _extremes(shares: Sequence[float | None]) -> list[str]:
    summary = summarize_load(shares)
    if summary is None:
        return [str(len(shares)), *[NONE] * 4]
    return [
        str(len(shares)),
        text(f"{percent(summary.highest, 2)} (expert {summary.busiest})"),
        text(percent(summary.median, 2)),
        text(percent(summary.lowest, 2)),
        str(len(summary.unused)),
    ]


def _ends(values: Mapping[str, Any]) -> list[str]:
    return [number(values.get(metric.key), metric.form) for metric in result_columns()]


def _header(metric: Metric) -> str:
    return f"{metric.label} (nats)" if metric.unit == "nats" else metric.label


def _block(layer: str, values: Mapping[str, Any]) -> str:
    shares = _shares(values)
    rows = [
        [
            f"{start} to {min(start + BLOCK_COLUMNS, len(shares)) - 1}",
            *(_share(share, len(shares)) for share in shares[start : start + BLOCK_COLUMNS]),
        ]
        for start in range(0, len(shares), BLOCK_COLUMNS)
    ]
    headers = ["experts", *(f"+{n}" for n in range(BLOCK_COLUMNS))]
    return table(f"Layer {text(short_name(layer))}", headers, rows, "experts")
