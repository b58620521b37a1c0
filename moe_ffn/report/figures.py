"""Axes, lines and heat maps. Colours are named by role; page.js finds them in the style sheet."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go

from moe_ffn.metrics.table import Metric
from moe_ffn.report.markup import text
from moe_ffn.runs.reader import Series

STEP = "optimizer step"
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""Beside the colour, so that lines are told apart in print and by people who see no red or green."""

NUM_COLOURS = 8
LINE_HEIGHT = 300
NOT_MEASURED = 65535
"""In the packed shares of a load heat map; the shares themselves end one below."""


@dataclass(frozen=True)
class Plot:
    """One plot of the page, or several behind one choice, such as a heat map per layer."""

    title: str
    figures: Mapping[str, go.Figure]
    """What is chosen -> what is drawn; one alone needs no choice."""
    note: str = ""
    """How to read it; plain text."""
    is_wide: bool = False
    choice: str = "layer"


@dataclass(frozen=True)
class Unit:
    """How the values of an axis read: its title, and a number's format (d3) with what follows it."""

    axis: str
    form: str = ".4~g"
    suffix: str = ""
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
    form = _FORMS.get(metric.unit, ",.4~g")
    if metric.is_share:
        return Unit(metric.axis("percent"), form, tick_form=".2~%")
    return Unit(metric.axis(), form)


def line_figure(traces: Sequence[go.Scatter], unit: Unit, *, x_axis: str = STEP) -> go.Figure:
    """Lines over a common x; the legend stands above, where it wraps on a phone."""
    x_options: dict[str, Any] = {"title": _title(x_axis), "hoverformat": ",~r"}
    if x_axis == STEP:
        x_options["unifiedhovertitle"] = {"text": "step %{x:,~r}"}
    layout = {
        "height": LINE_HEIGHT,
        "hovermode": "x unified",
        "showlegend": True,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "margin": {"l": 62, "r": 12, "t": 4, "b": 48},
        "xaxis": x_options,
        "yaxis": {"title": _title(unit.axis), "tickformat": unit.tick_form, "automargin": True},
    }
    return _figure(traces, layout)


def line(
    steps: Sequence[float],
    values: Sequence[Value],
    name: str,
    unit: Unit,
    *,
    colour: int | str,
    dash: str = "solid",
    markers: bool | None = None,
) -> go.Scatter:
    """
    Args:
        colour: number of a series, the same for the same thing in every plot, or a role (`quiet`).
        markers: on the points too; None for where they are few, since a point alone is no line.
    """
    with_markers = len(values) <= 40 if markers is None else markers
    return go.Scatter(
        x=list(steps),
        y=list(values),
        name=label(name),
        mode="lines+markers" if with_markers else "lines",
        line={"dash": dash, "width": 2},
        marker={"size": 5},
        hovertemplate=f"%{{y:{unit.form}}}{unit.suffix}",
        meta={"colour": colour % NUM_COLOURS if isinstance(colour, int) else colour},
    )


def level(value: float, span: Sequence[float], name: str, unit: Unit) -> go.Scatter:
    """A horizontal line to compare with, such as the entropy of an even choice."""
    return line(
        [min(span), max(span)],
        [value, value],
        name,
        unit,
        colour="quiet",
        dash="dot",
        markers=False,
    )


def heat_figure(
    grid: Grid, names: Sequence[str], unit: Unit, *, y_axis: str = "layer"
) -> go.Figure:
    """A measure over steps, one row per name, for more layers than lines can be told apart."""
    trace = go.Heatmap(
        x=grid.steps,
        y=list(names),
        z=grid.values,
        colorscale="Cividis",
        colorbar=_colour_bar(unit.axis, tickformat=unit.tick_form),
        hovertemplate=(
            f"step %{{x:,~r}}, {y_axis} %{{y}}: <b>%{{z:{unit.form}}}{unit.suffix}</b><extra></extra>"
        ),
    )
    layout = _heat_layout(
        STEP,
        y_axis,
        height=_height(len(names)),
        left=38 + 7 * max(map(len, names)),
        y_options={"type": "category", "autorange": "reversed"},
    )
    return _figure([trace], layout)


def load_figure(grid: Grid) -> go.Figure:
    """The load of each expert over the steps, as a multiple of the even share 1/E.

    The shares go into the page packed, two bytes each, since there are by far the most of them;
    page.js unpacks them. The colours run to four times the even share.
    """
    num_experts = len(grid.values)
    trace = go.Heatmap(
        x=grid.steps,
        y=list(range(num_experts)),
        zmin=0,
        zmax=4,
        colorbar=_colour_bar(
            "load, times the even share 1/E",
            tickvals=[0, 1, 2, 3, 4],
            ticktext=["0", "1 = even", "2", "3", "≥ 4"],
        ),
        hovertemplate=(
            "step %{x:,~r}, expert %{y}<br><b>%{customdata:.2%}</b> of the pairs, "
            "<b>%{z:.2f}</b> times the even share<extra></extra>"
        ),
        meta={"scale": "load", "rows": num_experts, "shares": pack_shares(grid.values)},
    )
    layout = _heat_layout(
        STEP,
        "expert",
        height=_height(num_experts),
        # Expert 0 at the top, as in the co-activation map and in the table.
        y_options={"dtick": _tick_distance(num_experts), "autorange": "reversed"},
    )
    return _figure([trace], layout)


def square_figure(
    values: Sequence[Sequence[Value]], unit: Unit, axes: tuple[str, str]
) -> go.Figure:
    """A matrix of shares over experts: columns are the x axis, rows the y axis, from the top."""
    size = list(range(len(values)))
    trace = go.Heatmap(
        x=size,
        y=size,
        colorscale="Cividis",
        zmin=0,
        colorbar=_colour_bar(unit.axis, tickformat=unit.tick_form),
        hovertemplate=(
            f"of the tokens of expert %{{y}}, <b>%{{z:{unit.form}}}</b> went to expert %{{x}} too"
            "<extra></extra>"
        ),
        meta={"rows": len(values), "shares": pack_shares(values)},
    )
    ticks = {"dtick": _tick_distance(len(values))}
    layout = _heat_layout(
        *axes, height=440, x_options=ticks, y_options={**ticks, "autorange": "reversed"}
    )
    return _figure([trace], layout)


def pack_shares(rows: Sequence[Sequence[Value]]) -> str:
    """Shares of 1 as base64 of little-endian 16-bit integers, row after row."""
    top = NOT_MEASURED - 1
    packed = array(
        "H",
        [
            NOT_MEASURED if v is None or v != v else round(min(max(v, 0), 1) * top)
            for row in rows
            for v in row
        ],
    )
    return base64.b64encode(packed.tobytes()).decode()


def label(text: str) -> str:
    """A name for a legend: plotly reads tags in it, and a long one leaves no room for the plot."""
    return escape(text if len(text) <= 44 else f"{text[:20]}…{text[-23:]}", quote=False)


def to_json(figure: go.Figure) -> dict[str, Any]:
    """Plain values, without plotly's own template: the page has its own colours."""
    found = figure.to_plotly_json()
    found["layout"].pop("template", None)
    return found


def _figure(traces: Sequence[Any], layout: dict[str, Any]) -> go.Figure:
    """Checked by plotly once, as a whole: its `update_` methods take a hundred times as long."""
    return go.Figure(list(traces), layout)


def _heat_layout(
    x_axis: str,
    y_axis: str,
    *,
    height: int,
    left: int = 52,
    x_options: Mapping[str, Any] | None = None,
    y_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    plain = {"showgrid": False, "zeroline": False}
    return {
        "height": height,
        "hovermode": "closest",
        # Fixed: plotly would leave twice the room that the colour bar takes.
        "margin": {"l": left, "r": 14, "t": 52, "b": 48, "autoexpand": False},
        "xaxis": {"title": {"text": x_axis}, **plain, **(x_options or {})},
        "yaxis": {"title": _title(y_axis), **plain, **(y_options or {})},
    }


def _height(rows: int) -> int:
    return min(max(190 + 14 * rows, 260), 620)


def _title(text: str) -> dict[str, Any]:
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


class PlotBook:
    """Collects the plots of a page while their places are written; `content` is id -> choices."""

    def __init__(self) -> None:
        self.content: dict[str, list[dict[str, Any]]] = {}

    def place(self, plots: Sequence[Plot]) -> str:
        """The HTML of a grid of plots; empty without any."""
        if not plots:
            return ""
        return f'<div class="plots">\n{"".join(map(self._figure, plots))}</div>\n'

    def _figure(self, plot: Plot) -> str:
        name = f"plot-{len(self.content)}"
        self.content[name] = [to_json(figure) for figure in plot.figures.values()]
        height = self.content[name][0]["layout"]["height"]
        note = (
            f'<figcaption class="quiet small">{text(plot.note)}</figcaption>' if plot.note else ""
        )
        return (
            f"<figure{' class=wide' if plot.is_wide else ''}><h3>{text(plot.title)}"
            f"{self._choice(plot, name)}</h3>"
            f'<div class="plot" id="{name}" style="min-height:{height}px" role="img" '
            f'aria-label="{text(plot.title)}"></div>{note}</figure>\n'
        )

    def _choice(self, plot: Plot, name: str) -> str:
        if len(plot.figures) == 1:
            return ""
        options = "".join(
            f'<option value="{number}">{text(choice)}</option>'
            for number, choice in enumerate(plot.figures)
        )
        return f' <select aria-label="{plot.choice}" data-plot="{name}">{options}</select>'


Value = float | None
"""None where nothing finite was measured: JSON has no NaN, and plotly draws a gap."""


@dataclass(frozen=True)
class Grid:
    """Rows over common steps: `values[row][column]` belongs to `steps[column]`."""

    steps: list[float]
    values: list[list[Value]]
    is_averaged: bool


def average(series: Series, most: int) -> Grid:
    """One series as at most `most` points; a bin without a row is left out."""
    return average_all([series], most)


def average_all(rows: Sequence[Series], most: int) -> Grid:
    """Several series over common steps, at most `most` of them.

    Where the rows have more different steps, a point is the mean of the finite values in its bin, at
    the mean of its steps.
    """
    all_steps = np.unique(np.concatenate([np.asarray(series.steps) for series in rows]))
    is_averaged = len(all_steps) > most
    if is_averaged:
        width = (all_steps[-1] - all_steps[0]) / most
        bins = np.minimum(((all_steps - all_steps[0]) / width).astype(int), most - 1)
        _, bins = np.unique(bins, return_inverse=True)
    else:
        bins = np.arange(len(all_steps))
    counts = np.bincount(bins)
    centres = np.bincount(bins, weights=all_steps) / counts
    values = [
        _means(bins[np.searchsorted(all_steps, series.steps)], series, len(counts))
        for series in rows
    ]
    return Grid([short(round(step, 1)) for step in centres], values, is_averaged)


def _means(bins: np.ndarray, series: Series, num_bins: int) -> list[Value]:
    values = np.asarray(series.values)
    kept = np.isfinite(values)
    counts = np.bincount(bins[kept], minlength=num_bins)
    # Each divided before they are added, so that no sum is beyond a float.
    parts = values[kept] / counts[bins[kept]]
    means = np.bincount(bins[kept], weights=parts, minlength=num_bins)
    means = np.clip(means, -sys.float_info.max, sys.float_info.max)  # rounding may go beyond
    return [short(mean) if count else None for mean, count in zip(means, counts, strict=True)]


def short(value: float) -> float:
    """Seven significant digits: more cannot be seen, and would double the page."""
    value = float(f"{value:.7g}")
    return int(value) if value == int(value) else value
