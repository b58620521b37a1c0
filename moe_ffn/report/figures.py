"""Plotly figures of a run, which a notebook shows.

    import moe_ffn
    from moe_ffn.report import figures

    run = moe_ffn.load_run("runs/x")
    figures.loss(run)
    figures.load(run, layer=3)
    figures.measure(run, "max_violation")

`figure.layout.meta["note"]` explains a figure. A metric that is unknown or was not measured, or an unknown
layer, raises `NotMeasuredError`. The page of a run shows the same figures; the last is of `moe-ffn plan`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import plotly.graph_objects as go

from moe_ffn.balancing.losses import BALANCING_LOSSES
from moe_ffn.ffn.base import is_inner, layer_name, short_name
from moe_ffn.metrics.plotting import LOAD_OPTIONS, LOAD_SCALE, axis_title, heat_figure
from moe_ffn.metrics.table import LAYER_METRICS, RUN_METRICS, Metric
from moe_ffn.report.drawing import (
    LIGHT,
    STEP_AXIS,
    average,
    averaging_note,
    curves_figure,
    d3_format,
    line_figure,
    rounded_rows,
    scale_of,
    scatter,
)
from moe_ffn.report.html import layer_title
from moe_ffn.report.run_summary import measured
from moe_ffn.runs.reader import Run
from moe_ffn.runs.rows import Series

Entry = TypeVar("Entry")

MAX_POINTS = 500
"""Maximum points of a curve."""

MAX_LAYER_POINTS = 250
"""Maximum points of a curve if each layer has a curve."""

MAX_LINES = 6
"""Maximum number of layers drawn as lines; more layers are rows of a heat map."""

MAX_LABELLED_EXPERTS = 12
"""Maximum number of experts for which co-activation cells contain numbers."""

MAX_CELLS = 4000
"""Maximum cells of a heat map of layers."""

MAX_LOADS = 120_000
"""Maximum cells of the load heat maps of all layers, which keeps the data of a page under a megabyte."""

LINE_NAMES = {"train": "training", "validation": "validation"}


class NotMeasuredError(LookupError):
    """Error: the run has no data for this figure."""


# -- curves of the whole model


def loss(run: Run) -> go.Figure:
    """Draw training and validation loss, and the losses of the unigram and 5-gram models."""
    return curve(run, "loss")


def curve(run: Run, key: str) -> go.Figure:
    """Draw a metric of the whole model, a key of `moe_ffn.metrics.table.RUN_METRICS`, over the steps."""
    metric = find(RUN_METRICS, key)
    only_line = metric.quantity if len(metric.rows) == 1 else ""
    keys = {only_line or LINE_NAMES[row]: f"{row}/{key}" for row in metric.rows}
    baselines = {"unigram model": run.summary.unigram_loss, "5-gram model": run.summary.ngram_loss}
    levels = {k: v for k, v in baselines.items() if v is not None} if key == "loss" else {}
    return _curves(run, metric, keys, levels=levels)


BEFORE_WEIGHTS = Metric(
    key="balancing_losses",
    title="Balancing losses",
    quantity="loss, before its weight",
    formula="every loss of `BALANCING_LOSSES`",
    healthy="",
)
"""Title and axis of the figure of all balancing losses."""


def balancing_losses(run: Run) -> go.Figure:
    """Draw every balancing loss that the run has, before its weight."""
    names = [name for name in sorted(BALANCING_LOSSES) if run.series(f"train/{name}")]
    notes = [note for name in names if (note := BALANCING_LOSSES[name].note)]
    keys = {name.replace("_", " "): f"train/{name}" for name in names}
    objective, loss = (run.series(f"train/{name}").last for name in ("objective", "loss"))
    has_teacher = bool(run.series("train/distillation"))
    if objective is not None and loss is not None and not has_teacher:
        notes.append(
            f"At the end, the weighted balancing losses add {objective - loss:.4f} nats to the loss."
        )
    return _curves(run, BEFORE_WEIGHTS, keys, " ".join(notes))


def _curves(
    run: Run,
    metric: Metric,
    keys: Mapping[str, str],
    note: str = "",
    levels: Mapping[str, float] = MappingProxyType({}),
) -> go.Figure:
    lines = {name: run.series(key) for name, key in keys.items()}
    if not any(lines.values()):
        missing = " or ".join(keys.values()) or metric.title.lower()
        raise NotMeasuredError(f"run '{run.name}' has no {missing}")
    return line_figure(lines, metric, MAX_POINTS, levels=levels, note=note)


# -- layers and their experts


def load(run: Run, layer: int | str) -> go.Figure:
    """Draw the load of each expert of a layer (its number or name) over time, in even shares."""
    name = _find_layer(run, layer, run.loads)
    rows = sum(map(len, run.loads.values()))
    columns = min(max(MAX_LOADS // rows, 32), 200)
    steps, loads = average(run.loads[name], columns)
    num_experts = len(loads)
    return heat_figure(
        steps,
        range(num_experts),
        rounded_rows(np.array(loads, dtype=float) * num_experts),
        (STEP_AXIS, "expert"),
        title=f"Load, {layer_title(name)}",
        note=averaging_note(run.loads[name], columns, "column"),
        hover="step %{x:,~r}, expert %{y}: <b>%{z:.2f}</b> times the even share",
        meta={"stops": {r: place for r, (place, _) in LOAD_SCALE.items()}},
        **LOAD_OPTIONS,
    )


def measure(run: Run, key: str) -> go.Figure:
    """Draw a `LAYER_METRICS` entry of every sparse layer: lines, or a heat map for many layers."""
    metric = find(LAYER_METRICS, key)
    by_layer = measured(run, metric)
    if not by_layer:
        raise NotMeasuredError(f"run '{run.name}' has no {key} for any layer")
    sizes = sorted({len(loads) for loads in run.loads.values()})
    uniform = {f"log {size}": math.log(size) for size in sizes if key.startswith("entropy")}
    values = ", ".join(f"{name} = {value:.3f}" for name, value in uniform.items())
    level_note = f"A uniform choice has {values}. " if uniform else ""
    note = f"{metric.sentence} {level_note}Healthy: {metric.healthy}."
    layers = list(run.validated_layers if metric.measured == "validation" else run.layers)
    if len(layers) <= MAX_LINES:
        lines = {layer_title(layer): by_layer.get(layer, Series()) for layer in layers}
        return line_figure(lines, metric, MAX_LAYER_POINTS, levels=uniform, note=note)
    max_points = max(MAX_CELLS // len(by_layer), 60)
    steps, values = average(list(by_layer.values()), max_points)
    return heat_figure(
        steps,
        [short_name(layer) for layer in by_layer],
        values,
        (STEP_AXIS, "layer"),
        title=metric.title,
        note=f"{note} {averaging_note(list(by_layer.values()), max_points)}".strip(),
        bar=scale_of(metric),
        hover=f"step %{{x:,~r}}, layer %{{y}}: <b>%{{z:{d3_format(metric)}}}</b>",
        colorscale="Cividis",
    )


def coactivation(run: Run, layer: int | str) -> go.Figure:
    """Draw how often experts of a layer (its number or name) share tokens at the last validation."""
    matrices = coactivations(run)
    name = _find_layer(run, layer, matrices)
    metric = LAYER_METRICS["coactivation"]
    experts = range(len(matrices[name]))
    shares = np.array(matrices[name], dtype=float)
    # The diagonal is always 1, and all other cells would have nearly one colour.
    np.fill_diagonal(shares, np.nan)
    k = run.validated[name].get("experts_per_token")
    even = ""
    if isinstance(k, float) and len(experts) > 1:
        even = f" If all pairs were equally frequent, every cell would be {(k - 1) / (len(experts) - 1):.1%}."
    return heat_figure(
        experts,
        experts,
        rounded_rows(shares),
        ("expert j", "expert i"),
        title=f"{metric.title}, {layer_title(name)}",
        note=f"On the validation split.{even}",
        bar=scale_of(metric),
        hover=f"<b>%{{z:{d3_format(metric)}}}</b> of the tokens of expert %{{y}} also went to expert %{{x}}",
        height=440,
        colorscale="Cividis",
        zmin=0,
        texttemplate="%{z:.0%}" if len(experts) <= MAX_LABELLED_EXPERTS else None,
    )


def coactivations(run: Run) -> dict[str, list[list[float | None]]]:
    """Return sparse layer -> matrix (expert i, expert j): share of expert i's tokens that j received too."""
    matrices = {layer: values.get("coactivation") for layer, values in run.validated.items()}
    return {layer: matrix for layer, matrix in matrices.items() if matrix}


# -- several runs in one figure


def overlay_measure(arms: Mapping[str, Sequence[Run]], key: str) -> go.Figure:
    """Draw a metric of sparse layers as one line per arm, the mean over the layers of its runs."""
    metric = find(LAYER_METRICS, key)
    lines = {name: mean_over_layers(runs, metric) for name, runs in arms.items()}
    if not any(lines.values()):
        raise NotMeasuredError(f"no run has '{metric.title}'")
    note = f"{metric.sentence} Mean over the layers and seeds. Healthy: {metric.healthy}."
    return line_figure(lines, metric, MAX_POINTS, note=note)


def mean_over_layers(runs: Sequence[Run], metric: Metric) -> Series:
    """Return the mean of a metric over the layers of all runs at each step; inner blocks are left out."""
    all_series = [
        series
        for run in runs
        for layer, series in measured(run, metric).items()
        if not is_inner(layer)
    ]
    if not all_series:
        return Series()
    all_steps = np.concatenate([np.asarray(series.steps) for series in all_series])
    values = np.concatenate([np.asarray(series.values) for series in all_series])
    steps, places = np.unique(all_steps, return_inverse=True)
    means = np.bincount(places, weights=values) / np.bincount(places)
    return Series(array("q", steps.tolist()), array("d", means.tolist()))


# -- parts


def _find_layer(run: Run, layer: int | str, known: Mapping[str, object]) -> str:
    name = layer_name(layer) if isinstance(layer, int) else layer
    if name not in known:
        layers = ", ".join(known) or "no layer"
        raise NotMeasuredError(f"run '{run.name}' has this figure for {layers}, not for {name}")
    return name


def find(known: Mapping[str, Entry], name: str, kind: str = "metric") -> Entry:
    """Return the entry with this name, or raise a `NotMeasuredError` that lists the names."""
    if name not in known:
        names = ", ".join(known) or "none"
        raise NotMeasuredError(f"there is no {kind} '{name}'; there are {names}")
    return known[name]


def memory_of_layouts(bars: Mapping[str, Mapping[str, float]], limit: float) -> go.Figure:
    """Draw the memory of each layout (GB per rank and part) as a stacked bar, and its limit."""
    names = list(bars)
    traces = [
        go.Bar(
            x=[bar[part] for bar in bars.values()],
            y=names,
            name=part,
            orientation="h",
            marker={"color": LIGHT[f"series-{number}"]},
            hovertemplate=f"{part}: %{{x:.3~f}} GB<extra></extra>",
            meta={"colour": number},
        )
        for number, part in enumerate(next(iter(bars.values())))
    ]
    ends = [names[0], names[-1]]
    full = scatter(f"{limit:g} GB", [limit, limit], ends, ("bad", "dash"), "a GPU's memory")
    x_axis = {"title": axis_title("GB of a GPU at the peak of a step")}
    y_axis = {
        "title": axis_title("data x shard x expert"),
        "type": "category",
        "autorange": "reversed",
    }
    return curves_figure(
        [*traces, full],
        "Memory of each layout",
        "",
        x_axis,
        y_axis,
        height=180 + 26 * len(bars),
        barmode="stack",
    )
