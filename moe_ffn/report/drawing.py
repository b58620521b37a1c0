"""How figures are drawn by plotly: averaged series, lines, heat maps, and their colours by role."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from types import MappingProxyType
from typing import Any

import numpy as np
import plotly.graph_objects as go

from moe_ffn.metrics.table import Metric
from moe_ffn.runs.rows import Series

STEP = "optimizer step"
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""Beside the colour, so that lines are told apart in print and by people who see no red or green."""

SERIES = ("#0072b2", "#d55e00", "#00875f", "#b5509a", "#b37a00", "#3a9bd6", "#5b3a9e", "#6b6f75")
"""Colours on a light ground: Okabe and Ito's, told apart without red or green, made darker. Their roles are
`series-0` and on; report.css has those on a dark ground."""

LOAD_SCALE = {
    "load-none": (0.0, "#123f8c"),
    "load-half": (0.125, "#7fb2e5"),
    "load-even": (0.25, "#f7f7f5"),
    "load-double": (0.5, "#f2a25c"),
    "load-most": (1.0, "#8f2d04"),
}
"""Role -> its place on the scale of a load, which runs to four times the even share, and its colour."""

LIGHT = {f"series-{number}": colour for number, colour in enumerate(SERIES)}
LIGHT |= {role: colour for role, (_, colour) in LOAD_SCALE.items()}
"""Role -> colour on a light ground."""

TITLE_HEIGHT = 44
"""Of a figure's own title; the page has a heading instead and takes this off again."""

_PALE = {"gridcolor": "#ebf0f8", "linecolor": "#ebf0f8", "zerolinecolor": "#ebf0f8"}
TEMPLATE = {
    "layout": {"font": {"color": "#2a3f5f"}, "xaxis": _PALE, "yaxis": _PALE},
    "data": {"heatmap": [{"colorbar": {"outlinewidth": 0}}]},
}
"""What is used of `plotly_white`; the whole of it would take half of the time that a figure does."""

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
    scale: float = 1
    """What a step is worth on the x axis."""


def line_figure(
    lines: Sequence[Line],
    metric: Metric,
    max_points: int,
    *,
    levels: Mapping[str, float] = MappingProxyType({}),
    title: str = "",
    note: str = "",
    x_axis: str = STEP,
) -> go.Figure:
    """Lines over a common x; the legend stands above, where it wraps on a phone.

    Args:
        max_points: of a line, see `average`.
        levels: horizontal lines to compare with by their names, such as the entropy of an even choice.
        title: instead of the metric's.
    """
    found = [line.series for line in lines]
    traces: list[go.Scatter] = []
    for line in lines:
        grid = average([line.series], max_points)
        # JSON has no infinity: what is beyond a float stands at its end.
        steps = [min(step * line.scale, sys.float_info.max) for step in grid.steps]
        role, dash = line.number % len(SERIES), DASHES[line.number % len(DASHES)]
        traces.append(_line(steps, grid.values[0], line.name, metric, role, dash))
    span = [step for series in found for step in series.steps]
    for name, value in levels.items():
        traces.append(_line([min(span), max(span)], [value, value], name, metric, "quiet", "dot"))
    x_options: dict[str, Any] = {"title": _axis_title(x_axis), "hoverformat": ",~r"}
    if x_axis == STEP:
        x_options["unifiedhovertitle"] = {"text": "step %{x:,~r}"}
    axis, ticks = scale_of(metric)
    layout = {
        "height": 300,
        "hovermode": "x unified",
        "showlegend": True,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "margin": {"l": 62, "r": 12, "t": 14, "b": 48},
        "xaxis": x_options,
        "yaxis": {"title": _axis_title(axis), "tickformat": ticks, "automargin": True},
    }
    note = f"{note} {describe_points(found, max_points)}".strip()
    return _figure(traces, layout, title or metric.title, note)


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
    return go.Scatter(
        x=list(steps),
        y=list(values),
        name=label(name),
        mode="lines+markers" if has_markers else "lines",
        line={"dash": dash, "width": 2, "color": colour},
        marker={"size": 5, "color": colour},
        hovertemplate=f"%{{y:{form_of(metric)}}}",
        meta={"colour": role},
    )


def heat_figure(
    x: Sequence[float],
    y: Sequence[int] | Sequence[str],
    z: Any,
    axes: tuple[str, str],
    *,
    title: str,
    note: str,
    bar: Mapping[str, Any],
    hover: str,
    height: int | None = None,
    **of_trace: Any,
) -> go.Figure:
    """A heat map whose rows stand from the top.

    Args:
        y: the number or the name of each row.
        bar: options of the colour bar; its title is a text.
        hover: what is said of a cell, as plotly's `hovertemplate`.
        height: without the title; None for one by the number of rows.
        of_trace: more options of `go.Heatmap`.
    """
    # Above the plot and as wide as it, so that a phone keeps its width for the plot.
    wide_bar = {
        "orientation": "h",
        "x": 0.5,
        "y": 1.0,
        "yanchor": "bottom",
        "len": 1.0,
        "thickness": 10,
        "ypad": 4,
        **bar,
        "title": {"text": bar["title"], "side": "top"},
    }
    trace = go.Heatmap(
        x=list(x),
        y=list(y),
        z=z,
        colorbar=wide_bar,
        hovertemplate=f"{hover}<extra></extra>",
        **of_trace,
    )
    plain = {"showgrid": False, "zeroline": False}
    x_options = {"title": {"text": axes[0]}, **plain}
    y_options = {"title": _axis_title(axes[1]), "autorange": "reversed", **plain}
    names = [row for row in y if isinstance(row, str)]
    if names:
        y_options["type"] = "category"
    else:
        y_options["dtick"] = _tick_distance(len(y))
    if x == y:
        x_options["dtick"] = _tick_distance(len(x))
    left = 38 + 7 * max(map(len, names)) if names else 52
    layout = {
        "height": height or min(max(190 + 14 * len(y), 260), 620),
        "hovermode": "closest",
        # Fixed: plotly would leave twice the room that the colour bar takes.
        "margin": {"l": left, "r": 14, "t": 52, "b": 48, "autoexpand": False},
        "xaxis": x_options,
        "yaxis": y_options,
    }
    return _figure([trace], layout, title, note)


def label(text: str) -> str:
    """A name for a legend: plotly reads tags in it, and a long one leaves no room for the plot."""
    return escape(text if len(text) <= 44 else f"{text[:20]}…{text[-23:]}", quote=False)


def _figure(traces: Sequence[Any], layout: dict[str, Any], title: str, note: str) -> go.Figure:
    """`meta` of its layout holds title and note as plain text.

    Checked by plotly once, as a whole: its `update_` methods take a hundred times as long.
    """
    margin = {**layout["margin"], "t": layout["margin"]["t"] + TITLE_HEIGHT}
    own = {
        "template": TEMPLATE,
        "height": layout["height"] + TITLE_HEIGHT,
        "margin": margin,
        "title": {
            "text": label(title),
            "x": 0,
            "xref": "paper",
            "y": 1,
            "yanchor": "top",
            # plotly moves it up by 24 pixels where a colour bar lies above the plot.
            "pad": {"t": 28 if isinstance(traces[0], go.Heatmap) else 6},
        },
        "meta": {"title": title, "note": note},
    }
    return go.Figure(list(traces), {**layout, **own})


def _axis_title(text: str) -> dict[str, Any]:
    return {"text": text, "standoff": 8}


def _tick_distance(num_experts: int) -> int:
    return next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 10**9) if num_experts / step <= 16)
