"""Figures of layouts of a model over GPUs: functions that return a plotly figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from moe_ffn.metrics.plotting import axis_title
from moe_ffn.report.drawing import LIGHT, curves_figure, scatter, style_of


def memory(bars: Mapping[str, Mapping[str, float]], limit: float) -> go.Figure:
    """Draw the memory of each layout as a bar of its parts.

    Args:
        bars: layout -> part -> GB of a rank.
        limit: GB that a rank has.
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


def step_times(points: Mapping[str, Sequence[tuple[float, float]]]) -> go.Figure:
    """Draw the time of a step over the balance of the ranks that share experts.

    Args:
        points: layout -> (MaxVio of ranks, time over that in perfect balance) of each step.
    """
    traces = [
        scatter(
            name,
            [x for x, _ in found],
            [y for _, y in found],
            style_of(number),
            f"{name}: %{{y:.3f}} at %{{x:.2f}}<extra></extra>",
            mode="markers",
            marker={"size": 5, "opacity": 0.5},
        )
        for number, (name, found) in enumerate(points.items())
    ]
    x_axis = {"title": axis_title("MaxVio of the ranks that share the experts")}
    y_axis = {"title": axis_title("time of a step over that in balance")}
    return curves_figure(traces, "Time of a step by balance", "", x_axis, y_axis)
