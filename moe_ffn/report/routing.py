"""Where the tokens of one run went: the load of each expert over time, and every measure per layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_ffn.layer_names import short_name
from moe_ffn.report.curves import how_drawn
from moe_ffn.report.figures import (
    DASHES,
    Plot,
    Unit,
    average_all,
    heat_figure,
    level,
    line,
    line_figure,
    load_figure,
    square_figure,
)
from moe_ffn.report.markup import finite, spread
from moe_ffn.runs.reader import Run, Series

MOST_LINES = 6
"""More layers than this become rows of a heat map, and their load heat maps one with a choice."""

MOST_POINTS = 250
"""Of a line, where there is one for each layer."""

MOST_CELLS = 4000
"""Of a heat map of layers."""

MOST_LOADS = 240_000
"""Of all load heat maps together: what keeps the page of a large run under a megabyte of data."""

MOST_PAIRS = 200_000
"""Of experts in all co-activation heat maps together; some of the layers are left out beyond it."""

COUNT, SHARE, NATS = ",.4~g", ".2%", ".3f"


@dataclass(frozen=True)
class Measure:
    """One number per layer: its key in `metrics.jsonl`, its plot, and how to read it."""

    key: str
    title: str
    unit: Unit
    note: str
    is_validated: bool = False
    """Taken in validation alone; the others are drawn from the training rows."""


MEASURES = (
    Measure(
        "max_violation",
        "MaxVio",
        Unit("MaxVio (dimensionless)", NATS),
        "The busiest expert over the even share, minus 1: 0 is balance.",
    ),
    Measure(
        "load_cv",
        "Variation of the load",
        Unit("CV (dimensionless)", NATS),
        "Standard deviation of the experts' loads over their mean: 0 is balance.",
    ),
    Measure(
        "dropped_fraction",
        "Dropped",
        Unit("dropped pairs (percent)", SHARE, tick_form=".2~%"),
        "Share of the (token, expert) pairs beyond the capacity.",
    ),
    Measure(
        "entropy",
        "Entropy per token",
        Unit("entropy (nats)", NATS),
        "Of the router's distribution over experts, mean over tokens: low where it is sure.",
    ),
    Measure(
        "entropy_of_mean",
        "Entropy of the mean",
        Unit("entropy (nats)", NATS),
        "Of the mean distribution of a batch: log E where the experts share evenly.",
    ),
    Measure(
        "dead_experts",
        "Dead experts",
        Unit("dead experts (count)", COUNT),
        "Experts without a token for logging.alarms.after_steps steps.",
    ),
    Measure(
        "churn",
        "Churn",
        Unit("changed tokens (percent)", SHARE, tick_form=".2~%"),
        "Tokens of a fixed probe batch whose experts changed since the look before.",
    ),
    Measure(
        "logit_max",
        "Largest router logit",
        Unit("largest |logit|", COUNT),
        "Growth without end comes before instability.",
    ),
    Measure(
        "top1_margin",
        "Top-1 margin",
        Unit("margin (of scores)", NATS),
        "Best minus second normalised score, mean over tokens.",
    ),
    Measure(
        "shared_share",
        "Shared share",
        Unit("norm share (percent)", ".1%", tick_form=".2~%"),
        "Norm of the shared expert's output over the sum of both norms.",
    ),
    Measure(
        "capacity_used",
        "Capacity used",
        Unit("places filled (percent)", ".1%", tick_form=".2~%"),
        "Of the places that the capacity gives.",
    ),
    Measure(
        "experts_per_token",
        "Experts per token",
        Unit("experts (count)", COUNT),
        "Mean over tokens.",
    ),
    Measure(
        "sequence_max_violation",
        "MaxVio within sequences",
        Unit("MaxVio (dimensionless)", NATS),
        "Each sequence's own MaxVio, mean over sequences.",
    ),
    Measure(
        "rank_max_violation",
        "MaxVio over ranks",
        Unit("MaxVio (dimensionless)", NATS),
        "The busiest rank over the even share, minus 1.",
    ),
    Measure(
        "coactivation_max",
        "Strongest pair of experts",
        Unit("co-activation (percent)", SHARE, tick_form=".2~%"),
        "Largest share of one expert's tokens that also went to one other, on the validation split.",
        is_validated=True,
    ),
    Measure(
        "bias_spread",
        "Spread of the correction bias",
        Unit("bias range (of scores)", COUNT),
        "Largest minus smallest bias that balancing without a loss adds to the scores.",
    ),
    Measure(
        "load_balance",
        "Load-balancing loss",
        Unit("loss (dimensionless)", NATS),
        "Before its weight; 1 at balance.",
    ),
    Measure("router_z", "Router z-loss", Unit("loss (squared nats)", COUNT), "Before its weight."),
    Measure(
        "nonfinite_tokens",
        "Tokens without a finite score",
        Unit("tokens (count)", COUNT),
        "Those the router could not place.",
    ),
)


def load_plots(run: Run) -> list[Plot]:
    """A heat map per sparse layer; where the layers are many, one with a choice."""
    if not run.loads:
        return []
    rows = sum(map(len, run.loads.values()))
    columns = min(max(MOST_LOADS // rows, 32), 200)
    figures = {
        f"layer {short_name(layer)}": load_figure(average_all(loads, columns))
        for layer, loads in run.loads.items()
    }
    found = [series for loads in run.loads.values() for series in loads]
    note = how_drawn(found, columns).replace("point", "column")
    if len(figures) <= MOST_LINES:
        return [Plot(f"Load, {name}", {"": figure}, note) for name, figure in figures.items()]
    return [Plot("Load of each expert", figures, note, is_wide=True)]


def measure_plots(run: Run) -> list[Plot]:
    """Those measures that were taken and moved; `constant_measures` names the others."""
    plots: list[Plot] = []
    for measure in MEASURES:
        found = measured(run, measure)
        if found and _constant(found) is None:
            plots.append(_measure_plot(run, measure, found))
    return plots


def constant_measures(run: Run) -> list[str]:
    """`Dropped: 0%`, for each measure that had one value in all layers and at all steps."""
    values = {measure: _constant(measured(run, measure)) for measure in MEASURES}
    return [
        f"{m.title if m.title.startswith('MaxVio') else m.title.lower()} "
        + (f"{value:.4g}" if "percent" not in m.unit.axis else f"{100 * value:.4g}%")
        for m, value in values.items()
        if value is not None
    ]


def coactivation_plots(run: Run) -> list[Plot]:
    """Which experts share tokens, at the end of the run; one heat map, with a choice of layer."""
    unit = Unit("tokens of expert i that also went to j", ".1%", tick_form=".0%")
    found = {
        layer: matrix
        for layer, v in run.validated.items()
        if (matrix := _square(v.get("coactivation")))
    }
    if not found:
        return []
    most = max(MOST_PAIRS // max(len(matrix) ** 2 for matrix in found.values()), 2)
    chosen = spread(list(found), most)
    figures = {
        f"layer {short_name(layer)}": square_figure(found[layer], unit, ("expert j", "expert i"))
        for layer in chosen
    }
    note = "On the validation split."
    if len(chosen) < len(found):
        note += f" {len(chosen)} of {len(found)} layers, evenly chosen."
    return [Plot("Co-activation", figures, note)]


def _square(value: Any) -> list[list[float | None]]:
    """A matrix of shares; empty where this is none."""
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        return []
    if any(len(row) != len(value) for row in value):
        return []
    return [[finite(share) for share in row] for row in value]


def measured(run: Run, measure: Measure) -> dict[str, Series]:
    """Sparse layer -> the measure's series, for the layers that have it."""
    return {
        layer: series
        for layer, found in _layers(run, measure).items()
        if (series := found.get(measure.key)) is not None
    }


def _layers(run: Run, measure: Measure) -> Mapping[str, Mapping[str, Series]]:
    return run.validated_layers if measure.is_validated else run.layers


def _constant(found: Mapping[str, Series]) -> float | None:
    """The one value of them all; None where they differ, or where it is too early to tell."""
    values = {value for series in found.values() for value in series.values}
    rows = max(map(len, found.values()), default=0)
    return values.pop() if len(values) == 1 and rows > 1 and math.isfinite(min(values)) else None


def _measure_plot(run: Run, measure: Measure, found: Mapping[str, Series]) -> Plot:
    if len(_layers(run, measure)) > MOST_LINES:
        most = max(MOST_CELLS // len(found), 60)
        grid = average_all(list(found.values()), most)
        figure = heat_figure(grid, [short_name(layer) for layer in found], measure.unit)
    else:
        most = MOST_POINTS
        figure = line_figure(_lines(run, measure, found), measure.unit)
    note = f"{measure.note} {_even_entropies(run, measure)} {how_drawn(list(found.values()), most)}"
    return Plot(measure.title, {"": figure}, " ".join(note.split()))


def _lines(run: Run, measure: Measure, found: Mapping[str, Series]) -> list:
    numbers = {layer: number for number, layer in enumerate(_layers(run, measure))}
    traces = []
    for layer, series in found.items():
        grid = average_all([series], MOST_POINTS)
        number, name = numbers[layer], f"layer {short_name(layer)}"
        traces.append(
            line(grid.steps, grid.values[0], name, measure.unit, colour=number, dash=DASHES[number])
        )
    span = [step for series in found.values() for step in series.steps]
    if measure.key.startswith("entropy"):
        traces += [level(math.log(size), span, f"log {size}", measure.unit) for size in _sizes(run)]
    return traces


def _sizes(run: Run) -> Sequence[int]:
    return sorted({len(loads) for loads in run.loads.values()})


def _even_entropies(run: Run, measure: Measure) -> str:
    if not measure.key.startswith("entropy"):
        return ""
    even = ", ".join(f"log {size} = {math.log(size):.3f}" for size in _sizes(run))
    return f"An even choice has {even}." if even else ""
