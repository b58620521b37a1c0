"""Figures of layouts of a model over GPUs: functions that return a plotly figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from moe_ffn.metrics.plotting import axis_title, figure
from moe_ffn.report.drawing import LEGEND, LIGHT, style_of

_MARGIN = {"l": 62, "r": 16, "t": 14, "b": 48}


def memory(bars: Mapping[str, Mapping[str, float]], limit: float) -> go.Figure:
    """Draw the memory of each layout as a bar of its parts.

    Args:
        bars: layout -> part -> GB of a rank.
        limit: GB that a rank has.
    """
    names = list(bars)
    traces: list[go.Bar | go.Scatter] = [
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
    traces.append(
        go.Scatter(
            x=[limit, limit],
            y=[names[0], names[-1]],
            name=f"{limit:g} GB",
            mode="lines+markers",
            line={"color": "gray", "dash": "dash"},
            marker={"color": "gray"},
            hoverinfo="skip",
            meta={"colour": "bad"},
        )
    )
    layout = {
        "height": 180 + 26 * len(bars),
        "barmode": "stack",
        "legend": LEGEND,
        "margin": _MARGIN,
        "xaxis": {"title": axis_title("GB of a GPU at the peak of a step")},
        "yaxis": {
            "title": axis_title("data x shard x expert"),
            "type": "category",
            "autorange": "reversed",
            "automargin": True,
        },
    }
    return figure(traces, layout, "Memory of each layout", "")


def step_times(points: Mapping[str, Sequence[tuple[float, float]]]) -> go.Figure:
    """Draw the time of a step over the balance of the ranks that share experts.

    Args:
        points: layout -> (MaxVio of ranks, time over that in perfect balance) of each step.
    """
    traces: list[go.Scatter] = []
    for number, (name, found) in enumerate(points.items()):
        role, _ = style_of(number)
        traces.append(
            go.Scatter(
                x=[x for x, _ in found],
                y=[y for _, y in found],
                name=name,
                mode="markers",
                marker={"size": 5, "opacity": 0.5, "color": LIGHT[f"series-{role}"]},
                hovertemplate=f"{name}: %{{y:.3f}} at %{{x:.2f}}<extra></extra>",
                meta={"colour": role},
            )
        )
    layout = {
        "height": 380,
        "showlegend": True,
        "legend": LEGEND,
        "margin": _MARGIN,
        "xaxis": {"title": axis_title("MaxVio of the ranks that share the experts")},
        "yaxis": {"title": axis_title("time of a step over that in balance"), "automargin": True},
    }
    return figure(traces, layout, "Time of a step by balance", "")
