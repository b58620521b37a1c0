"""Figures of values over a size, such as final losses over the number of experts, with fitted laws."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
import plotly.graph_objects as go

from moe_ffn.metrics.plotting import axis_title
from moe_ffn.report.numbers import compact
from moe_ffn.report.studies.arm_figures import HOVER, LOSS_AXIS, arm_trace, arms_figure, error_bar
from moe_ffn.studies.statistics import MIN_SEEDS, Interval, mean_interval

MAX_TICKS = 8
"""Maximum number of ticks on an axis of sizes."""


@dataclass(frozen=True)
class SizedLine:
    """Values per seed at several sizes, such as final losses, and a law fitted to the values."""

    name: str
    points: Mapping[float, Sequence[float]]
    """Size -> values, one per seed."""
    curve: Callable[[Any], Any] | None = None
    """Fitted law, drawn between the smallest and the largest size."""
    minimum: Interval | None = None
    """Size at which the law is lowest."""
    labels: Mapping[float, str] = field(default_factory=dict)
    """Size -> words next to its mean."""


def over_sizes(
    lines: Sequence[SizedLine], size: str, title: str, value: str = LOSS_AXIS
) -> go.Figure:
    """Draw values over a size: a dot per seed, means with 95 % intervals, and fitted laws."""
    traces: list[go.Scatter] = []
    for number, line in enumerate(lines):
        traces += _traces_of(number, line)
    ticks = _ticks(sorted({x for line in lines for x in line.points}))
    x_axis = {
        "title": axis_title(size),
        "type": "log",
        "tickvals": ticks,
        "ticktext": [f"{tick:g}" if tick < 1000 else compact(tick) for tick in ticks],
    }
    note = f"Small points are seeds; bars are 95% intervals of the mean, for {MIN_SEEDS} seeds or more."
    if any(line.curve for line in lines):
        note += " Curves are fits."
    if any(line.minimum for line in lines):
        note += " A triangle marks the minimum of a fit, with its interval."
    y_axis = {"title": axis_title(value)}
    return arms_figure(traces, title, note, x_axis, y_axis)


def _ticks(sizes: Sequence[float]) -> Sequence[float]:
    """Return the sizes, or powers of 2 if sizes have many digits, are many, or two are nearly equal."""
    are_short = all(size >= 1000 or float(f"{size:.3g}") == size for size in sizes)
    apart = min(1.1, (sizes[-1] / sizes[0]) ** 0.1)  # the axis may be narrower than a power of 2
    if are_short and len(sizes) <= MAX_TICKS and all(b / a > apart for a, b in pairwise(sizes)):
        return sizes
    low, high = math.floor(math.log2(sizes[0])), math.ceil(math.log2(sizes[-1]))
    return [2.0**power for power in range(low, high + 1, -(-(high - low) // MAX_TICKS) or 1)]


def _traces_of(number: int, line: SizedLine) -> list[go.Scatter]:
    xs = sorted(line.points)
    means = [fmean(line.points[x]) for x in xs]
    intervals = [mean_interval(line.points[x]) for x in xs]
    margins = [interval.high - interval.value if interval else 0 for interval in intervals]
    right, left = ("bottom", "top") if means[-1] > means[0] else ("top", "bottom")
    traces = [
        arm_trace(
            number,
            line.name,
            xs,
            means,
            HOVER,
            marker={"size": 7},
            mode="markers" if line.curve else "lines+markers+text",
            text=[line.labels.get(x, "") for x in xs],
            textposition=[f"{right} right"] * (len(xs) - 1) + [f"{left} left"],
            error_y={"type": "data", "array": margins} if any(margins) else None,
            legendgroup=str(number),
        )
    ]

    def add(x: Sequence[float], y: Sequence[float], hover: str, **options: Any) -> None:
        hidden = {"legendgroup": str(number), "showlegend": False}
        traces.append(arm_trace(number, line.name, x, y, hover, **hidden, **options))

    if any(len(values) > 1 for values in line.points.values()):
        pairs = [(x, y) for x in xs for y in line.points[x]]
        seeds = {"marker": {"size": 4, "opacity": 0.5}, "mode": "markers"}
        add([x for x, _ in pairs], [y for _, y in pairs], f"{HOVER}, one seed", **seeds)
    if line.curve is not None:
        fine = np.geomspace(xs[0], xs[-1], 60)
        add(fine.tolist(), np.asarray(line.curve(fine)).tolist(), f"{HOVER}, fitted", mode="lines")
    if line.minimum is not None and line.curve is not None:
        lowest = float(line.curve(np.array([line.minimum.value]))[0])
        bar = {**error_bar(line.minimum.value, line.minimum, number), "thickness": 3}
        marker = {"symbol": "triangle-down", "size": 11}
        add([line.minimum.value], [lowest], HOVER, mode="markers", marker=marker, error_x=bar)
    return traces
