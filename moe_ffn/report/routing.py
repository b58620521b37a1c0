"""Where the tokens of one run went: the load of each expert over time, and every metric per layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from moe_ffn.layer_names import short_name
from moe_ffn.metrics.table import LAYER_METRICS, Metric, layer_measures
from moe_ffn.report.curves import how_drawn
from moe_ffn.report.figures import (
    DASHES,
    Plot,
    average_all,
    heat_figure,
    level,
    line,
    line_figure,
    load_figure,
    square_figure,
    unit_of,
)
from moe_ffn.report.markup import finite, spread
from moe_ffn.runs.reader import Run, Series

MAX_LINES = 6
"""More layers than this become rows of a heat map, and their load heat maps one with a choice."""

MAX_POINTS = 250
"""Of a line, where there is one for each layer."""

MAX_CELLS = 4000
"""Of a heat map of layers."""

MAX_LOADS = 240_000
"""Of all load heat maps together: what keeps the page of a large run under a megabyte of data."""

MAX_PAIRS = 200_000
"""Of experts in all co-activation heat maps together; some of the layers are left out beyond it."""


def load_plots(run: Run) -> list[Plot]:
    """A heat map per sparse layer; where the layers are many, one with a choice."""
    if not run.loads:
        return []
    rows = sum(map(len, run.loads.values()))
    columns = min(max(MAX_LOADS // rows, 32), 200)
    figures = {
        f"layer {short_name(layer)}": load_figure(average_all(loads, columns))
        for layer, loads in run.loads.items()
    }
    found = [series for loads in run.loads.values() for series in loads]
    note = how_drawn(found, columns).replace("point", "column")
    if len(figures) <= MAX_LINES:
        return [Plot(f"Load, {name}", {"": figure}, note) for name, figure in figures.items()]
    return [Plot("Load of each expert", figures, note, is_wide=True)]


def measure_plots(run: Run) -> list[Plot]:
    """The metrics that changed in the run; `constant_measures` names the rest."""
    plots: list[Plot] = []
    for measure in layer_measures():
        found = measured(run, measure)
        if found and _constant(found) is None:
            plots.append(_measure_plot(run, measure, found))
    return plots


def constant_measures(run: Run) -> list[str]:
    """`Dropped: 0%`, for each measure that had one value in all layers and at all steps."""
    said: list[str] = []
    for measure in layer_measures():
        value = _constant(measured(run, measure))
        if value is not None:
            title = measure.title
            name = title if title.startswith("MaxVio") else title.lower()
            said.append(
                f"{name} " + (f"{100 * value:.4g}%" if measure.is_share else f"{value:.4g}")
            )
    return said


def coactivation_plots(run: Run) -> list[Plot]:
    """Which experts share tokens, at the end of the run; one heat map, with a choice of layer."""
    metric = LAYER_METRICS["coactivation"]
    found = {
        layer: matrix
        for layer, v in run.validated.items()
        if (matrix := _square(v.get("coactivation")))
    }
    if not found:
        return []
    most = max(MAX_PAIRS // max(len(matrix) ** 2 for matrix in found.values()), 2)
    chosen = spread(list(found), most)
    figures = {
        f"layer {short_name(layer)}": square_figure(
            found[layer], unit_of(metric), ("expert j", "expert i")
        )
        for layer in chosen
    }
    note = "On the validation split."
    if len(chosen) < len(found):
        note += f" {len(chosen)} of {len(found)} layers, evenly chosen."
    return [Plot(metric.title, figures, note)]


def _square(value: Any) -> list[list[float | None]]:
    """A matrix of shares; empty where this is none."""
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        return []
    if any(len(row) != len(value) for row in value):
        return []
    return [[finite(share) for share in row] for row in value]


def measured(run: Run, measure: Metric) -> dict[str, Series]:
    """Sparse layer -> the metric's series, for the layers that have it."""
    return {
        layer: series
        for layer, found in _layers(run, measure).items()
        if (series := found.get(measure.key)) is not None
    }


def _layers(run: Run, measure: Metric) -> Mapping[str, Mapping[str, Series]]:
    return run.validated_layers if measure.measured == "validation" else run.layers


def _constant(found: Mapping[str, Series]) -> float | None:
    """The one value of them all; None where they differ, or where it is too early to tell."""
    values = {value for series in found.values() for value in series.values}
    rows = max(map(len, found.values()), default=0)
    return values.pop() if len(values) == 1 and rows > 1 and math.isfinite(min(values)) else None


def _measure_plot(run: Run, measure: Metric, found: Mapping[str, Series]) -> Plot:
    if len(_layers(run, measure)) > MAX_LINES:
        most = max(MAX_CELLS // len(found), 60)
        grid = average_all(list(found.values()), most)
        figure = heat_figure(grid, [short_name(layer) for layer in found], unit_of(measure))
    else:
        most = MAX_POINTS
        figure = line_figure(_lines(run, measure, found), unit_of(measure))
    notes = (
        measure.sentence,
        _even_entropies(run, measure),
        f"Healthy: {measure.healthy}.",
        how_drawn(list(found.values()), most),
    )
    return Plot(measure.title, {"": figure}, " ".join(filter(None, notes)))


def _lines(run: Run, measure: Metric, found: Mapping[str, Series]) -> list:
    numbers = {layer: number for number, layer in enumerate(_layers(run, measure))}
    unit = unit_of(measure)
    traces = []
    for layer, series in found.items():
        grid = average_all([series], MAX_POINTS)
        number, name = numbers[layer], f"layer {short_name(layer)}"
        traces.append(
            line(grid.steps, grid.values[0], name, unit, colour=number, dash=DASHES[number])
        )
    span = [step for series in found.values() for step in series.steps]
    if measure.key.startswith("entropy"):
        traces += [level(math.log(size), span, f"log {size}", unit) for size in _sizes(run)]
    return traces


def _sizes(run: Run) -> Sequence[int]:
    return sorted({len(loads) for loads in run.loads.values()})


def _even_entropies(run: Run, measure: Metric) -> str:
    if not measure.key.startswith("entropy"):
        return ""
    even = ", ".join(f"log {size} = {math.log(size):.3f}" for size in _sizes(run))
    return f"An even choice has {even}." if even else ""
