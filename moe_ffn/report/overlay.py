"""Several runs in one plot; a run has one colour and one dash in all of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from moe_ffn.layer_names import is_inner
from moe_ffn.metrics.table import RUN_METRICS, layer_measures
from moe_ffn.report.curves import ROW_NAMES, how_drawn
from moe_ffn.report.figures import (
    DASHES,
    STEP,
    Plot,
    Unit,
    average,
    line,
    line_figure,
    unit_of,
)
from moe_ffn.report.routing import measured
from moe_ffn.runs.reader import Run, Series

MAX_POINTS = 400

FLOPS_PER_FORWARD = 3
"""A training step costs its forward pass and, for the backward pass, twice as much again."""

NOT_COMPARED = ("objective", "skipped_steps")
"""An objective is a sum by weights that differ between runs; a skipped step is one run's own matter."""


def overlay_plots(runs: Sequence[Run]) -> list[Plot]:
    """The curves; the losses over training FLOPs too where every run knows what it costs."""
    plots: list[Plot] = []
    for metric in RUN_METRICS.values():
        for row in () if metric.key in NOT_COMPARED else reversed(metric.rows):
            series_of = {run.name: run.series(f"{row}/{metric.key}") for run in runs}
            found = {name: series for name, series in series_of.items() if series}
            if not found:
                continue
            title = metric.title
            if len(metric.rows) > 1:
                title = f"{ROW_NAMES[row].capitalize()} {title.lower()}"
            axes: dict[str, Callable[[Run], float]] = {STEP: _one}
            if metric.key == "loss" and all(flops_per_step(run) for run in runs):
                axes["training FLOPs"] = lambda run: flops_per_step(run) or 0.0
            plots.append(_plot(runs, title, unit_of(metric), found, axes))
    return plots


def overlay_measures(runs: Sequence[Run]) -> list[Plot]:
    """Each metric of a layer, mean over the layers of a run; not of the blocks inside their blocks."""
    plots: list[Plot] = []
    for measure in layer_measures():
        found = {
            run.name: series
            for run in runs
            if (series := mean_over_layers(_whole_layers(measured(run, measure))))
        }
        if len({v for series in found.values() for v in series.values}) > 1:
            note = f"{measure.sentence} Mean over the layers."
            plots.append(_plot(runs, measure.title, unit_of(measure), found, {STEP: _one}, note))
    return plots


def _whole_layers(found: Mapping[str, Series]) -> dict[str, Series]:
    return {layer: series for layer, series in found.items() if not is_inner(layer)}


def mean_over_layers(layers: Mapping[str, Series]) -> Series:
    """A measure averaged over the layers that have it, at each step; NaN where one of them is."""
    found = [series for series in layers.values() if series]
    result = Series()
    if found:
        steps = np.concatenate([np.asarray(series.steps) for series in found])
        values = np.concatenate([np.asarray(series.values) for series in found])
        kept, places = np.unique(steps, return_inverse=True)
        means = np.bincount(places, weights=values) / np.bincount(places)
        result.steps.extend(kept.tolist())
        result.values.extend(means.tolist())
    return result


def flops_per_step(run: Run) -> float | None:
    """Of one optimizer step, forward and backward; None where the run does not say."""
    counts = [
        run.fact("flops_per_token"),
        run.option("data.batch_size"),
        run.option("data.seq_len"),
        run.option("trainer.accumulate_grad_batches"),
    ]
    flops: float = FLOPS_PER_FORWARD
    for count in counts:
        if not isinstance(count, int | float) or not math.isfinite(count):
            return None
        flops *= count
    return flops if math.isfinite(flops) else None


def _one(_run: Run) -> float:
    return 1.0


def _plot(
    runs: Sequence[Run],
    title: str,
    unit: Unit,
    found: dict[str, Series],
    axes: dict[str, Callable[[Run], float]],
    note: str = "",
) -> Plot:
    figures: dict[str, go.Figure] = {}
    for axis, scale in axes.items():
        traces = []
        for number, run in enumerate(runs):
            if run.name not in found:
                continue
            grid = average(found[run.name], MAX_POINTS)
            # JSON has no infinity: what is beyond a float stands at its end.
            steps = [min(step * scale(run), sys.float_info.max) for step in grid.steps]
            dash = DASHES[number % len(DASHES)]
            traces.append(
                line(steps, grid.values[0], run.name, unit, colour=number, dash=dash, markers=False)
                if len(steps) > 1
                else line(steps, grid.values[0], run.name, unit, colour=number, markers=True)
            )
        figures[axis] = line_figure(traces, unit, x_axis=axis)
    if len(axes) > 1:
        note += (
            f"FLOPs are {FLOPS_PER_FORWARD} (forward and backward) x flops_per_token x batch_size x "
            "seq_len x accumulate_grad_batches x step."
        )
    note = f"{note} {how_drawn(list(found.values()), MAX_POINTS)}".strip()
    return Plot(title, figures, note, choice="over")
