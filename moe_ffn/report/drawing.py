"""How series are drawn by plotly: averaged, as lines, in colours by role."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import plotly.graph_objects as go

from moe_ffn.metrics.plotting import LOAD_SCALE, axis_title, figure, label
from moe_ffn.metrics.table import Metric
from moe_ffn.runs.rows import Series

STEP_AXIS = "optimizer step"
LEGEND = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
"""Place of a legend: above the plot, where it wraps on a phone."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""Beside the colour, so that lines are told apart in print and by people who see no red or green."""

SERIES = (
    *("#0072b2", "#d55e00", "#00875f", "#b5509a", "#b37a00"),
    *("#3a9bd6", "#5b3a9e", "#6b6f75", "#a3123f", "#5d7a00"),
)
"""Colours on a light ground: Okabe and Ito's, told apart without red or green, made darker, and two more.
Their roles are `series-0` and on; report.css has those on a dark ground."""

LIGHT = {f"series-{number}": colour for number, colour in enumerate(SERIES)}
LIGHT |= {role: colour for role, (_, colour) in LOAD_SCALE.items()}
"""Role -> colour on a light ground."""

HEALTHY = "#1a7f37"
"""The colour, almost transparent, behind healthy values; page.js takes it from the style sheet."""

Value = float | None
"""None where nothing finite was measured: JSON has no NaN, and plotly draws a gap."""


_FORMS = {
    "share": ".2%",
    "nats": ".3f",
    "dimensionless": ".3f",
    "nats per token": ".4f",
    "bits per byte": ".4f",
    "tokens per second": ",.0f",
}
"""Unit of a metric -> how a value of it reads (d3)."""


def form_of(metric: Metric) -> str:
    """How a value reads (d3)."""
    return _FORMS.get(metric.unit, ",.4~g")


def text_of(metric: Metric, value: float) -> str:
    """A value of a metric, as it reads beside its line."""
    return format(value, form_of(metric).replace("~", ""))


def style_of(number: int) -> tuple[int, str]:
    """The number of a colour in `SERIES`, and a dash: together different for the first 60 numbers."""
    turn, colour = divmod(number, len(SERIES))
    return colour, DASHES[(colour + turn) % len(DASHES)]


def scale_of(metric: Metric) -> tuple[str, str | None]:
    """The title of an axis of its values, and how its ticks read (d3); a share is drawn as percent."""
    return (metric.axis("percent"), ".2~%") if metric.is_share else (metric.axis(), None)


# -- series


@dataclass(frozen=True)
class Grid:
    """Rows over common steps: `values[row][column]` belongs to `steps[column]`."""

    steps: list[float]
    values: list[list[Value]]


def average(rows: Sequence[Series], max_points: int) -> Grid:
    """Series over common steps, at most `max_points` of them; a bin without a row is left out.

    Where the rows have more different steps, a point is the mean of the finite values in its bin, at
    the mean of its steps.
    """
    all_steps = np.unique(np.concatenate([np.asarray(series.steps) for series in rows]))
    if len(all_steps) > max_points:
        width = (all_steps[-1] - all_steps[0]) / max_points
        bins = np.minimum(((all_steps - all_steps[0]) / width).astype(int), max_points - 1)
        _, bins = np.unique(bins, return_inverse=True)
    else:
        bins = np.arange(len(all_steps))
    counts = np.bincount(bins)
    centres = np.bincount(bins, weights=all_steps) / counts
    values = [
        _means(bins[np.searchsorted(all_steps, series.steps)], series, len(counts))
        for series in rows
    ]
    return Grid([rounded(round(step, 1)) for step in centres], values)


def _means(bins: np.ndarray, series: Series, num_bins: int) -> list[Value]:
    values = np.asarray(series.values)
    kept = np.isfinite(values)
    counts = np.bincount(bins[kept], minlength=num_bins)
    # Each divided before they are added, so that no sum is beyond a float.
    parts = values[kept] / counts[bins[kept]]
    means = np.bincount(bins[kept], weights=parts, minlength=num_bins)
    means = np.clip(means, -sys.float_info.max, sys.float_info.max)  # rounding may go beyond
    return [rounded(mean) if count else None for mean, count in zip(means, counts, strict=True)]


def rounded(value: float) -> float:
    """Seven significant digits: more cannot be seen, and would double the page."""
    value = float(f"{value:.7g}")
    return int(value) if value == int(value) else value


def describe_points(found: Sequence[Series], max_points: int, what: str = "point") -> str:
    """Says so where points are means of rows, and where a value could not be drawn."""
    notes: list[str] = []
    longest = max(map(len, found))
    if longest > max_points:
        notes.append(f"Each {what} is the mean of about {longest / max_points:.0f} rows.")
    if not all(np.isfinite(series.values).all() for series in found):
        notes.append("Where a value was NaN or infinite, nothing is drawn.")
    return " ".join(notes)


# -- figures


@dataclass(frozen=True)
class Line:
    """One line of a figure."""

    name: str
    series: Series
    number: int
    """Chooses colour and dash, the same for the same thing in every plot."""


def line_figure(
    lines: Sequence[Line],
    metric: Metric,
    max_points: int,
    *,
    levels: Mapping[str, float] = MappingProxyType({}),
    note: str = "",
) -> go.Figure:
    """Lines over steps; the legend stands above, where it wraps on a phone, with the last values.

    Args:
        max_points: of a line, see `average`.
        levels: horizontal lines to compare with by their names, such as the entropy of an even choice.
    """
    found = [line.series for line in lines]
    traces: list[go.Scatter] = []
    for line in lines:
        grid = average([line.series], max_points)
        traces.append(_line(grid.steps, grid.values[0], line.name, metric, *style_of(line.number)))
    span = [step for series in found for step in series.steps]
    for name, value in levels.items():
        traces.append(_line([min(span), max(span)], [value, value], name, metric, "quiet", "dot"))
    # From the first step on: of a single validation plotly would make an axis from 99 to 101.
    x_options: dict[str, Any] = {
        "title": axis_title(STEP_AXIS),
        "hoverformat": ",~r",
        "rangemode": "tozero",
        "unifiedhovertitle": {"text": "step %{x:,~r}"},
    }
    axis, ticks = scale_of(metric)
    layout = {
        "height": 300,
        "hovermode": "x unified",
        "showlegend": True,
        "legend": LEGEND,
        "margin": {"l": 62, "r": 12, "t": 14, "b": 48},
        "xaxis": x_options,
        "yaxis": {"title": axis_title(axis), "tickformat": ticks, "automargin": True},
    }
    if metric.healthy_range is not None:
        low, high = metric.healthy_range
        layout["yaxis"]["rangemode"] = "tozero"
        layout["shapes"] = [healthy_band(low, high)]
    note = f"{note} {describe_points(found, max_points)}".strip()
    return figure(traces, layout, metric.title, note)


def healthy_band(low: float, high: float) -> dict[str, Any]:
    """A ground behind the values from low to high."""
    across = {"xref": "paper", "x0": 0, "x1": 1}
    # Where one value alone is healthy it is a line.
    line = {"width": 0 if high > low else 3, "color": HEALTHY}
    return {
        "type": "rect",
        "y0": low,
        "y1": high,
        "fillcolor": HEALTHY,
        "line": line,
        "opacity": 0.1 if high > low else 0.35,
        "layer": "below",
        **across,
    }


def _line(
    steps: Sequence[float],
    values: Sequence[Value],
    name: str,
    metric: Metric,
    role: int | str,
    dash: str,
) -> go.Scatter:
    """`role` is the number of a colour in `SERIES`, or the role of another in style.css."""
    colour = LIGHT.get(f"series-{role}", "gray")
    # A point alone is no line, and few of them show where the rows are.
    has_markers = len(steps) <= 40 and role != "quiet"
    measured = [value for value in values if value is not None]
    last = f" {text_of(metric, measured[-1])}" if measured else ""
    return go.Scatter(
        x=list(steps),
        y=list(values),
        name=f"{label(name)}{last}",
        mode="lines+markers" if has_markers else "lines",
        line={"dash": dash, "width": 2, "color": colour},
        marker={"size": 5, "color": colour},
        hovertemplate=f"%{{y:{form_of(metric)}}}<extra>{label(name)}</extra>",
        meta={"colour": role, "name": label(name)},
    )
