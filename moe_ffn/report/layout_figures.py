"""Plotly figures of the layouts of a model on GPUs."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go

from moe_ffn.metrics.plotting import axis_title
from moe_ffn.report.drawing import LIGHT, curves_figure, scatter


def memory(bars: Mapping[str, Mapping[str, float]], limit: float) -> go.Figure:
    """Draw the memory of each layout as a stacked bar.

    Args:
        bars: layout -> part, such as gradients -> GB per rank.
        limit: memory of a rank in GB.
    """
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
