"""Plotly figures of series: averaging over steps, lines, and colours by role."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from types import MappingProxyType
from typing import Any

import numpy as np
import plotly.graph_objects as go

from moe_ffn.metrics.plotting import LOAD_SCALE, axis_title, figure, label
from moe_ffn.metrics.table import Metric
from moe_ffn.runs.rows import Series

STEP_AXIS = "optimizer step"
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""Dashes distinguish lines in print and for colour-blind readers."""

SERIES = (
    *("#0072b2", "#d55e00", "#00875f", "#b5509a", "#b37a00"),
    *("#3a9bd6", "#5b3a9e", "#6b6f75", "#a3123f", "#5d7a00"),
)
"""Colours on a light background, based on the colour-blind palette of Okabe and Ito, darkened and extended.
Their roles are `series-0` and so on; report.css has the colours on a dark background."""

LIGHT = {f"series-{number}": colour for number, colour in enumerate(SERIES)}
LIGHT |= {role: colour for role, (_, colour) in LOAD_SCALE.items()}
"""Role -> colour on a light background."""

HEALTHY = "#1a7f37"
"""Colour of the band of healthy values, almost transparent; page.js takes it from the style sheet instead."""

Value = float | None
"""Measured value; None if it is not finite, because JSON has no NaN. Plotly draws a gap."""

_FORMATS = {
    "share": ".2%",
    "nats": ".3f",
    "dimensionless": ".3f",
    "nats per token": ".4f",
    "bits per byte": ".4f",
    "tokens per second": ",.0f",
}
"""Unit of a metric -> d3 format of its values."""


def d3_format(metric: Metric) -> str:
    """Return the d3 format of the values of a metric."""
    return _FORMATS.get(metric.unit, ",.4~g")


def text_of(metric: Metric, value: float) -> str:
    """Return a value of a metric as text."""
    return format(value, d3_format(metric).replace("~", ""))


def style_of(number: int) -> tuple[int, str]:
    """Return the index of a colour in `SERIES`, and a dash; the first 60 pairs differ."""
    turn, colour = divmod(number, len(SERIES))
    return colour, DASHES[(colour + turn) % len(DASHES)]


def scale_of(metric: Metric) -> dict[str, str]:
    """Return the title and d3 tick format of an axis or colour bar; shares are shown in percent."""
    if metric.is_share:
        return {"title": metric.axis("percent"), "tickformat": ".2~%"}
    return {"title": metric.axis()}


# -- series


def average(rows: Sequence[Series], max_points: int) -> tuple[list[float], list[list[Value]]]:
    """Return at most `max_points` common steps of series, and the values of each series at them.

    If the rows have more steps, each point is the mean of the finite values in a bin, at the mean step of the
    bin. Empty bins are left out.
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
    return [rounded(round(step, 1)) for step in centres], values


def _means(bins: np.ndarray, series: Series, num_bins: int) -> list[Value]:
    values = np.asarray(series.values)
    is_finite = np.isfinite(values)
    values, bins = values[is_finite], bins[is_finite]
    counts = np.bincount(bins, minlength=num_bins)
    # Values are divided before they are added, so that the sum cannot overflow.
    means = np.bincount(bins, weights=values / counts[bins], minlength=num_bins)
    return [rounded(mean) if count else None for mean, count in zip(means, counts, strict=True)]


def rounded(value: float) -> float:
    """Return the value with seven significant digits; more would double the size of the page."""
    value = float(f"{value:.7g}")
    return int(value) if value == int(value) else value


def rounded_rows(values: Any) -> list[list[Value]]:
    """Return the rows of a heat map with four decimals; None for a non-finite value."""
    return [
        [round(float(value), 4) if np.isfinite(value) else None for value in row] for row in values
    ]


def averaging_note(drawn: Sequence[Series], max_points: int, unit: str = "point") -> str:
    """Return a note on points that are means of several rows, and on values that cannot be drawn."""
    notes: list[str] = []
    longest = max(map(len, drawn))
    if longest > max_points:
        notes.append(f"Each {unit} is the mean of about {longest / max_points:.0f} rows.")
    if not all(np.isfinite(series.values).all() for series in drawn):
        notes.append("NaN and infinite values are not drawn.")
    return " ".join(notes)


# -- figures


def scatter(
    name: str,
    x: Sequence[Any],
    y: Sequence[Any],
    style: tuple[int | str, str],
    hover: str | None = None,
    suffix: str = "",
    **options: Any,
) -> go.Scatter:
    """Return a trace of points and lines in one colour, with more `options` of `go.Scatter`.

    The `style` is the index of a colour in `SERIES` or a role of style.css, and a dash. `hover` is plotly's
    `hovertemplate`; the `suffix` follows the name in the legend.
    """
    role, dash = style
    colour = LIGHT.get(f"series-{role}", "gray")
    return go.Scatter(
        x=list(x),
        y=list(y),
        name=f"{label(name)}{suffix}",
        line={"color": colour, "dash": dash, "width": 2},
        marker={"color": colour, **options.pop("marker", {})},
        hovertemplate=hover,
        meta={"colour": role, "name": label(name)},
        **options,
    )


def curves_figure(
    traces: Sequence[Any],
    title: str,
    note: str,
    x_axis: Mapping[str, Any],
    y_axis: Mapping[str, Any],
    height: int = 380,
    **layout: Any,
) -> go.Figure:
    """Return a figure with axes and a legend above the plot, which wraps on a phone."""
    defaults = {
        "height": height,
        "hovermode": "closest",
        "showlegend": True,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "margin": {"l": 62, "r": 16, "t": 14, "b": 48},
        "xaxis": x_axis,
        "yaxis": {"automargin": True, **y_axis},
    }
    return figure(traces, defaults | layout, title, note)


def line_figure(
    lines: Mapping[str, Series],
    metric: Metric,
    max_points: int,
    *,
    levels: Mapping[str, float] = MappingProxyType({}),
    note: str = "",
) -> go.Figure:
    """Draw lines of at most `max_points` (see `average`) over steps; the legend has the last values.

    The position of a line in the mapping determines its colour and dash, also if series before it are empty;
    one is not. `levels` are horizontal reference lines, such as the entropy of a uniform choice.
    """
    traces: list[go.Scatter] = []
    for number, (name, series) in enumerate(lines.items()):
        if series:
            steps, (values,) = average([series], max_points)
            last = next(filter(math.isfinite, reversed(series.values)), None)
            traces.append(_line(steps, values, name, metric, style_of(number), last))
    drawn = [series for series in lines.values() if series]
    all_steps = [step for series in drawn for step in series.steps]
    for (name, value), dash in zip(levels.items(), cycle(DASHES[2:]), strict=False):
        ends = [min(all_steps), max(all_steps)]
        traces.append(_line(ends, [value, value], name, metric, ("quiet", dash), value))
    # The axis starts at 0; plotly would draw a single validation on an axis from 99 to 101.
    x_axis = {
        "title": axis_title(STEP_AXIS),
        "hoverformat": ",~r",
        "rangemode": "tozero",
        "unifiedhovertitle": {"text": "step %{x:,~r}"},
    }
    scale = scale_of(metric)
    y_axis: dict[str, Any] = {**scale, "title": axis_title(scale["title"])}
    layout: dict[str, Any] = {}
    if metric.healthy_range is not None:
        y_axis["rangemode"] = "tozero"
        layout["shapes"] = [healthy_band(*metric.healthy_range)]
    note = f"{note} {averaging_note(drawn, max_points)}".strip()
    return curves_figure(
        traces, metric.title, note, x_axis, y_axis, height=300, hovermode="x unified", **layout
    )


def healthy_band(low: float, high: float) -> dict[str, Any]:
    """Return a background band from `low` to `high`; a line if they are equal."""
    return {
        "type": "rect",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": low,
        "y1": high,
        "fillcolor": HEALTHY,
        "line": {"width": 0 if high > low else 3, "color": HEALTHY},
        "opacity": 0.1 if high > low else 0.35,
        "layer": "below",
    }


def _line(
    steps: Sequence[float],
    values: Sequence[Value],
    name: str,
    metric: Metric,
    style: tuple[int | str, str],
    last: float | None,
) -> go.Scatter:
    """Draw the points of a line, which may be means, with the `last` measured value in the legend."""
    # Without a marker, a single point would be invisible.
    has_markers = len(steps) <= 40 and style[0] != "quiet"
    return scatter(
        name,
        steps,
        values,
        style,
        f"%{{y:{d3_format(metric)}}}<extra>{label(name)}</extra>",
        "" if last is None else f" {text_of(metric, last)}",
        mode="lines+markers" if has_markers else "lines",
        marker={"size": 5},
    )
