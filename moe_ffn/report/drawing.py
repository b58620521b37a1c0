"""How figures are drawn by plotly: averaged series, lines, heat maps, and their colours by role."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
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


@dataclass(frozen=True)
class Unit:
    """How the values of an axis read: its title, and a number's format (d3)."""

    axis: str
    form: str = ",.4~g"
    tick_form: str | None = None


_FORMS = {
    "share": ".2%",
    "nats": ".3f",
    "dimensionless": ".3f",
    "nats per token": ".4f",
    "bits per byte": ".4f",
    "tokens per second": ",.0f",
}


def unit_of(metric: Metric) -> Unit:
    """The axis of a metric; a share is drawn as percent."""
    form = _FORMS.get(metric.unit, Unit.form)
    if metric.is_share:
        return Unit(metric.axis("percent"), form, tick_form=".2~%")
    return Unit(metric.axis(), form)


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


# -- lines


def line(
    series: Series,
    name: str,
    unit: Unit,
    number: int,
    max_points: int,
    *,
    scale: float = 1.0,
    markers: bool | None = None,
) -> go.Scatter:
    """A series as at most `max_points` points.

    Args:
        number: chooses colour and dash, the same for the same thing in every plot.
        scale: what a step is worth on the x axis.
        markers: on the points too; None for where they are few, since a point alone is no line.
    """
    grid = average([series], max_points)
    # JSON has no infinity: what is beyond a float stands at its end.
    steps = [min(step * scale, sys.float_info.max) for step in grid.steps]
    markers = len(steps) <= 40 if markers is None else markers
    dash = DASHES[number % len(DASHES)]
    return _scatter(steps, grid.values[0], name, unit, number % len(SERIES), dash, markers)


def level(value: float, span: Sequence[float], name: str, unit: Unit) -> go.Scatter:
    """A horizontal line to compare with, such as the entropy of an even choice."""
    return _scatter([min(span), max(span)], [value, value], name, unit, "quiet", "dot", False)


def _scatter(
    steps: Sequence[float],
    values: Sequence[Value],
    name: str,
    unit: Unit,
    role: int | str,
    dash: str,
    markers: bool,
) -> go.Scatter:
    """`role` is the number of a colour in `SERIES`, or the role of another in style.css."""
    drawn = LIGHT.get(f"series-{role}", "gray")
    return go.Scatter(
        x=list(steps),
        y=list(values),
        name=label(name),
        mode="lines+markers" if markers else "lines",
        line={"dash": dash, "width": 2, "color": drawn},
        marker={"size": 5, "color": drawn},
        hovertemplate=f"%{{y:{unit.form}}}",
        meta={"colour": role},
    )


def line_figure(
    traces: Sequence[go.Scatter], unit: Unit, *, title: str, note: str = "", x_axis: str = STEP
) -> go.Figure:
    """Lines over a common x; the legend stands above, where it wraps on a phone."""
    x_options: dict[str, Any] = {"title": _axis_title(x_axis), "hoverformat": ",~r"}
    if x_axis == STEP:
        x_options["unifiedhovertitle"] = {"text": "step %{x:,~r}"}
    layout = {
        "height": 300,
        "hovermode": "x unified",
        "showlegend": True,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "margin": {"l": 62, "r": 12, "t": 14, "b": 48},
        "xaxis": x_options,
        "yaxis": {
            "title": _axis_title(unit.axis),
            "tickformat": unit.tick_form,
            "automargin": True,
        },
    }
    return _figure(traces, layout, title, note)


# -- heat maps


def heat_figure(
    grid: Grid, names: Sequence[str], unit: Unit, *, title: str, note: str = ""
) -> go.Figure:
    """A measure over steps, one row per layer, for more layers than lines can be told apart."""
    trace = go.Heatmap(
        x=grid.steps,
        y=list(names),
        z=grid.values,
        colorscale="Cividis",
        colorbar=_colour_bar(unit.axis, tickformat=unit.tick_form),
        hovertemplate=f"step %{{x:,~r}}, layer %{{y}}: <b>%{{z:{unit.form}}}</b><extra></extra>",
    )
    layout = _heat_layout(STEP, "layer", len(names), left=38 + 7 * max(map(len, names)))
    layout["yaxis"]["type"] = "category"
    return _figure([trace], layout, title, note)


def load_figure(grid: Grid, *, title: str, note: str = "") -> go.Figure:
    """The load of each expert over the steps, as a multiple of the even share 1/E.

    The colours run to four times the even share.
    """
    num_experts = len(grid.values)
    shares = np.array(grid.values, dtype=float)
    trace = go.Heatmap(
        x=grid.steps,
        y=list(range(num_experts)),
        z=shares * num_experts,
        customdata=shares,
        zmin=0,
        zmax=4,
        colorscale=[[place, colour] for place, colour in LOAD_SCALE.values()],
        colorbar=_colour_bar(
            "load, times the even share 1/E",
            tickvals=[0, 1, 2, 3, 4],
            ticktext=["0", "1 = even", "2", "3", "≥ 4"],
        ),
        hovertemplate=(
            "step %{x:,~r}, expert %{y}<br><b>%{customdata:.2%}</b> of the pairs, "
            "<b>%{z:.2f}</b> times the even share<extra></extra>"
        ),
        meta={"is_packed": True, "stops": {r: place for r, (place, _) in LOAD_SCALE.items()}},
    )
    layout = _heat_layout(STEP, "expert", num_experts)
    layout["yaxis"]["dtick"] = _tick_distance(num_experts)
    return _figure([trace], layout, title, note)


def pair_figure(
    shares: Sequence[Sequence[Value]], unit: Unit, *, title: str, note: str = ""
) -> go.Figure:
    """A matrix of shares over pairs of experts: row i, from the top, is of the tokens of expert i."""
    experts = list(range(len(shares)))
    trace = go.Heatmap(
        x=experts,
        y=experts,
        z=np.array(shares, dtype=float),
        colorscale="Cividis",
        zmin=0,
        colorbar=_colour_bar(unit.axis, tickformat=unit.tick_form),
        hovertemplate=(
            f"of the tokens of expert %{{y}}, <b>%{{z:{unit.form}}}</b> went to expert %{{x}} too"
            "<extra></extra>"
        ),
        meta={"is_packed": True},
    )
    layout = _heat_layout("expert j", "expert i", len(shares))
    layout["height"] = 440
    for axis in ("xaxis", "yaxis"):
        layout[axis]["dtick"] = _tick_distance(len(shares))
    return _figure([trace], layout, title, note)


# -- layouts


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


def _heat_layout(x_axis: str, y_axis: str, num_rows: int, left: int = 52) -> dict[str, Any]:
    """The first row, as expert 0, stands at the top."""
    plain = {"showgrid": False, "zeroline": False}
    return {
        "height": min(max(190 + 14 * num_rows, 260), 620),
        "hovermode": "closest",
        # Fixed: plotly would leave twice the room that the colour bar takes.
        "margin": {"l": left, "r": 14, "t": 52, "b": 48, "autoexpand": False},
        "xaxis": {"title": {"text": x_axis}, **plain},
        "yaxis": {"title": _axis_title(y_axis), "autorange": "reversed", **plain},
    }


def _axis_title(text: str) -> dict[str, Any]:
    return {"text": text, "standoff": 8}


def _colour_bar(title: str, **options: Any) -> dict[str, Any]:
    """Above the plot and as wide as it, so that a phone keeps its width for the plot."""
    return {
        "orientation": "h",
        "x": 0.5,
        "y": 1.0,
        "yanchor": "bottom",
        "len": 1.0,
        "thickness": 10,
        "ypad": 4,
        "title": {"text": title, "side": "top"},
        **{key: value for key, value in options.items() if value is not None},
    }


def _tick_distance(num_experts: int) -> int:
    return next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 10**9) if num_experts / step <= 16)
