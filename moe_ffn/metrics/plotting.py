"""Plotly heat maps for wandb and the report, and the title, colours and fonts of all figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

LOAD_SCALE = {
    "load-none": (0.0, "#123f8c"),
    "load-half": (0.125, "#7fb2e5"),
    "load-even": (0.25, "#f7f7f5"),
    "load-double": (0.5, "#f2a25c"),
    "load-most": (1.0, "#8f2d04"),
}
"""Role -> (position on the colour scale of loads, colour); position 1 is four times the even share."""

LOAD_OPTIONS: dict[str, Any] = {
    "bar": {
        "title": "load, times the even share 1/E",
        "tickvals": [0, 1, 2, 3, 4],
        "ticktext": ["0", "1 = even", "2", "3", "≥ 4"],
    },
    "zmin": 0,
    "zmax": 4,
    "colorscale": [[place, colour] for place, colour in LOAD_SCALE.values()],
}
"""Options of `heat_figure` for loads as multiples of the even share, the same for all layers and runs."""

TITLE_HEIGHT = 44
"""Pixels of a figure's title; a page has a heading instead and subtracts them."""

_PALE = {"gridcolor": "#ebf0f8", "linecolor": "#ebf0f8", "zerolinecolor": "#ebf0f8"}
TEMPLATE = {
    "layout": {"font": {"color": "#2a3f5f"}, "xaxis": _PALE, "yaxis": _PALE},
    "data": {"heatmap": [{"colorbar": {"outlinewidth": 0}}]},
}
"""The part of `plotly_white` that is used; the whole template would double the time to build a figure."""


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
    **trace_options: Any,
) -> go.Figure:
    """Return a heat map whose first row is on top. `x` are steps, or expert numbers as a range, `y` numbers
    or names of rows. `bar` are the colour bar's options, with a text as title, `hover` the text of a cell, as
    plotly's `hovertemplate`. `height` is in pixels without the title, by default from the number of rows;
    further options are those of `go.Heatmap`.
    """
    # The bar is above the plot, so that the plot has the full width of a phone.
    top_bar = {
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
        colorbar=top_bar,
        hovertemplate=f"{hover}<extra></extra>",
        **trace_options,
    )
    no_grid = {"showgrid": False, "zeroline": False}
    x_options = {"title": {"text": axes[0]}, **no_grid}
    y_options = {"title": axis_title(axes[1]), "autorange": "reversed", **no_grid}
    names = [row for row in y if isinstance(row, str)]
    if names:
        y_options["type"] = "category"
    else:
        y_options["dtick"] = _tick_distance(len(y))
    if isinstance(x, range):
        x_options["dtick"] = _tick_distance(len(x))
    left = 38 + 7 * max(map(len, names)) if names else 52
    layout = {
        "height": height or min(max(190 + 14 * len(y), 260), 620),
        "hovermode": "closest",
        # Fixed, because plotly would reserve twice the height of the colour bar.
        "margin": {"l": left, "r": 14, "t": 52, "b": 48, "autoexpand": False},
        "xaxis": x_options,
        "yaxis": y_options,
    }
    return figure([trace], layout, title, note)


def label(text: str) -> str:
    """Return a legend name, escaped because plotly interprets tags, and shortened to fit."""
    return escape(text if len(text) <= 44 else f"{text[:20]}…{text[-23:]}", quote=False)


def figure(traces: Sequence[Any], layout: dict[str, Any], title: str, note: str) -> go.Figure:
    """Return a figure; `layout.meta` holds title and note. The constructor validates once; `update_` methods
    would take a hundred times as long.
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
            # Plotly moves the title up by 24 pixels if a colour bar lies above the plot.
            "pad": {"t": 28 if isinstance(traces[0], go.Heatmap) else 6},
        },
        "meta": {"title": title, "note": note},
    }
    return go.Figure(list(traces), {**layout, **own})


def axis_title(text: str) -> dict[str, Any]:
    return {"text": text, "standoff": 8}


def _tick_distance(num_experts: int) -> int:
    return next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 10**9) if num_experts / step <= 16)
