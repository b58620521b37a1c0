"""Plotly figures of several arms, each of one or more runs.

    from moe_ffn.report.studies import arm_figures
    from moe_ffn.studies.gather import gather

    comparison = gather([Path("runs/gating")]).compare()
    arm_figures.losses(comparison.arms, over="FLOPs")
    arm_figures.frontier(comparison, "FLOPs")
    arm_figures.differences(comparison)

An arm has the same colour and dash in all figures. A figure without data raises `NotMeasuredError`. The
pages of comparisons and studies show these figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go

from moe_ffn.config.numbers import compact
from moe_ffn.config.sizes import TRAINING_FLOPS
from moe_ffn.metrics.plotting import axis_title, label
from moe_ffn.report.drawing import LIGHT, SERIES, curves_figure, rounded, scatter, style_of
from moe_ffn.report.figures import NotMeasuredError
from moe_ffn.studies.comparison import COSTS, Arm, Comparison, Tuning
from moe_ffn.studies.statistics import MIN_SEEDS, Interval, mean_interval

XAxis = Literal["tokens", "FLOPs", "seconds", "steps"]

AXES: dict[XAxis, str] = {
    "tokens": "tokens trained on",
    "FLOPs": "training FLOPs",
    "seconds": "seconds of training steps",
    "steps": "optimizer steps",
}

Split = Literal["validation", "train"]

LOSSES: dict[Split, str] = {"validation": "Validation loss", "train": "Training loss"}

LATE = 0.25
"""Fraction of training that is ignored when the range of the loss axis is chosen."""

MAX_LABELS = 10
"""Maximum number of arms with names next to their points; with more, only the legend has names."""

_MIN_SPAN = 0.1
"""Minimum length of an axis of costs, as a fraction of the largest cost."""

LOSS_AXIS = "loss (nats per token)"
HOVER = "%{y:.4f} at %{x:,.4~s}"

Points = tuple[list[float | None], list[float | None]]
"""x values and losses of a curve; None for a missing or non-finite value."""


def curves_of(arm: Arm, of: Split, over: XAxis) -> list[Points]:
    """Return the curve of each seed that has both x values and losses."""
    curves: list[Points] = []
    for result in arm.results:
        curve = result.validation if of == "validation" else result.train
        xs: list[float | None]
        if over == "FLOPs":
            per_token = TRAINING_FLOPS * result.budget.model.flops_per_token
            xs = [per_token * x for x in curve.tokens]
        elif over == "seconds" and arm.timed_step_seconds is not None:
            xs = [step * arm.timed_step_seconds for step in curve.steps]
        else:
            xs = list(getattr(curve, over))
        if len(xs) == len(curve.losses) and any(x is not None for x in xs):
            curves.append((xs, list(curve.losses)))
    return curves


def axes_of(arms: Sequence[Arm], of: Split) -> list[XAxis]:
    """Return the axes for which every arm with this loss has x values; none if each curve is one point."""
    drawn = [arm for arm in arms if curves_of(arm, of, "steps")]
    if all(len(steps) == 1 for arm in drawn for steps, _ in curves_of(arm, of, "steps")):
        return []
    return [over for over in AXES if drawn and all(curves_of(arm, of, over) for arm in drawn)]


def losses(arms: Sequence[Arm], over: XAxis = "tokens", of: Split = "validation") -> go.Figure:
    """Draw the mean loss of each arm over training, with its 95 % interval over seeds.

    An arm with fewer than `MIN_SEEDS` seeds has a line per seed instead. The losses are those of the
    validations, or of the training steps.
    """
    traces: list[go.Scatter] = []
    late_losses: list[Interval] = []
    seed_counts: set[int] = set()
    for number, arm in enumerate(arms):
        curves = curves_of(arm, of, over)
        groups = [curves] if len(curves) >= MIN_SEEDS else [[curve] for curve in curves]
        lines = [points for points in map(_means, groups) if points]
        if not lines:
            continue
        seed_counts.add(len(curves))
        last = fmean(points[-1][1].value for points in lines)
        for place, points in enumerate(lines):
            traces += _band(arm.name, number, points)
            trace = arm_trace(
                number,
                arm.name,
                [rounded(x) for x, _ in points],
                [round(y.value, 5) for _, y in points],
                HOVER,
                f" {last:.4f}",
                marker={"size": 5},
                mode="lines+markers" if len(points) <= 40 else "lines",
                legendgroup=str(number),
                showlegend=place == 0,
            )
            traces.append(trace)
            late_losses += [loss for x, loss in points if x >= LATE * points[-1][0]]
    if not traces:
        raise NotMeasuredError(f"no arm has a {LOSSES[of].lower()} over {over}")
    notes: list[str] = []
    if max(seed_counts) >= MIN_SEEDS:
        notes.append("Lines are means over seeds, bands their 95% intervals (Student's t).")
    if any(1 < count < MIN_SEEDS for count in seed_counts):
        notes.append(
            f"Arms with fewer than {MIN_SEEDS} seeds have a line per seed and no interval."
        )
    y_axis: dict[str, Any] = {}
    top, bottom = max(loss.value for loss in late_losses), min(loss.low for loss in late_losses)
    if top > bottom:
        pad = 0.05 * (top - bottom)
        y_axis["range"] = [bottom - pad, top + pad]
        notes.append(f"Higher losses in the first {LATE:.0%} of training are cut off.")
    x_axis = {"title": axis_title(AXES[over]), "rangemode": "tozero", "exponentformat": "SI"}
    return arms_figure(traces, LOSSES[of], " ".join(notes), x_axis, y_axis)


def _means(curves: Sequence[Points]) -> list[tuple[float, Interval]]:
    """Return (mean x, mean loss with its interval) of each point that all curves have."""
    points: list[tuple[float, Interval]] = []
    for point in zip(*(zip(*curve, strict=True) for curve in curves), strict=False):
        known = [(x, y) for x, y in point if x is not None and y is not None]
        if len(known) == len(curves):
            xs, ys = zip(*known, strict=True)
            mean = fmean(ys)
            points.append((fmean(xs), mean_interval(ys) or Interval(mean, mean, mean)))
    return points


def _band(name: str, number: int, points: Sequence[tuple[float, Interval]]) -> list[go.Scatter]:
    """Return the band between the ends of the intervals; empty without intervals."""
    if all(y.low == y.high for _, y in points):
        return []
    xs = [rounded(x) for x, _ in points]
    edge = [y.high for _, y in points] + [y.low for _, y in reversed(points)]
    role, _ = style_of(number)
    return [
        go.Scatter(
            x=xs + xs[::-1],
            y=[round(y, 5) for y in edge],
            fill="toself",
            fillcolor=f"{LIGHT[f'series-{role}']}24",
            mode="none",
            legendgroup=str(number),
            showlegend=False,
            hoverinfo="skip",
            name=label(name),
            meta={"fill": role, "name": label(name)},
        )
    ]


def frontier(comparison: Comparison, cost: str = "FLOPs") -> go.Figure:
    """Draw final losses over one of the `COSTS` of training; a line joins the arms on the Pareto frontier."""
    arms = comparison.arms
    costs = [COSTS[cost](arm) for arm in arms]
    known = [value for value in costs if value is not None]
    if len(known) < len(costs):
        raise NotMeasuredError(f"{cost} of training is not known for every arm")
    traces: list[go.Scatter] = []
    pairs = list(zip(known, arms, strict=True))
    best = sorted(
        (x, arm.loss) for x, arm in pairs if arm.on_frontier.get(cost) and arm.task == arms[0].task
    )
    if len(best) > 1:
        xs, ys = zip(*best, strict=True)
        style = ("quiet", "dot")
        traces.append(scatter("frontier", xs, ys, style, mode="lines", hoverinfo="skip"))
    for number, (x, arm) in enumerate(pairs):
        traces.append(
            arm_trace(
                number,
                arm.name,
                [x],
                [arm.loss],
                HOVER,
                f" {arm.loss:.4f}",
                marker={"size": 9, "symbol": number // len(SERIES)},
                mode="markers+text" if len(arms) <= MAX_LABELS else "markers",
                text=[_short(arm.name)],
                textposition="top right" if number % 2 == 0 else "bottom right",
                cliponaxis=False,
                error_y=arm.interval and error_bar(arm.loss, arm.interval, number),
            )
        )
    over = {arm.interval_over for arm in arms if arm.interval is not None}
    note = f"Bars are 95% intervals over {' or '.join(sorted(over))}." if over else ""
    if len(best) > 1:
        note += " For an arm on the dotted line, no other arm has a lower loss at no more cost."
    title = f"{cost} of training" if cost != "parameters" else cost
    x_axis = {"title": axis_title(title), "exponentformat": "SI", **_cost_range(known)}
    return arms_figure(traces, "Final loss against cost", note.strip(), x_axis)


def _cost_range(costs: Sequence[float]) -> dict[str, Any]:
    """Return the scale and range of an axis of costs, with room for the names on the right."""
    low, high = min(costs), max(costs)
    if low > 0 and high / low > 4:
        low, high = math.log10(low), math.log10(high)
        return {"type": "log", "range": [low - 0.05 * (high - low), high + 0.25 * (high - low)]}
    span, middle = max(high - low, _MIN_SPAN * high), (low + high) / 2
    return {"range": [middle - 0.58 * span, middle + 0.8 * span]}


def differences(comparison: Comparison) -> go.Figure:
    """Draw each arm's paired difference from the baseline with its 95 % interval; left of 0 is better.

    An arm without an interval has a point per seed instead.
    """
    rows = [
        (number, arm, arm.difference)
        for number, arm in enumerate(comparison.arms)
        if arm.difference is not None
    ]
    if not rows:
        raise NotMeasuredError(f"no arm has a difference from {comparison.baseline}")
    traces: list[go.Scatter] = []
    ends = [0.0]
    for row, (number, arm, paired) in enumerate(rows):
        if paired.interval is None:
            xs = comparison.seed_differences(arm)
            hover = "%{x:+.4f} in one seed"
            options: dict[str, Any] = {
                "marker": {"size": 8, "symbol": "circle-open"},
                "mode": "markers",
            }
        else:
            mean, low, high = paired.interval
            xs, hover = [mean], f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"
            options = {
                "marker": {"size": 10, "symbol": "circle" if paired.is_claimed else "circle-open"},
                "mode": "markers+text",
                "text": [f"{mean:+.4f}"],
                "textposition": "top center",
                "error_x": error_bar(mean, paired.interval, number),
            }
        traces.append(arm_trace(number, arm.name, xs, [row] * len(xs), hover, **options))
        ends += paired.interval or xs
    pad = 0.15 * (max(ends) - min(ends)) or 0.01  # room for half a label
    x_axis = {
        "title": axis_title("Δ loss (nats per token)"),
        "zeroline": True,
        "zerolinewidth": 2,
        "range": [min(ends) - pad, max(ends) + pad],
    }
    y_axis = {
        "title": None,
        "tickvals": [*range(len(rows))],
        "ticktext": [_short(arm.name) for _, arm, _ in rows],
        "range": [len(rows) - 0.5, -0.7],  # first arm on top, with room for its label
        "showgrid": False,
    }
    over = {paired.over for _, _, paired in rows if paired.interval is not None}
    kinds = {"seeds": "seeds, paired", "windows": "windows of the text, with one seed"}
    note = f"Left of 0 is better than {comparison.baseline}."
    if over:
        note += (
            f" Bars are 95% intervals over {' or '.join(kinds[kind] for kind in sorted(over))}; a filled "
            "circle is significant after Holm's correction."
        )
    if any(paired.interval is None for _, _, paired in rows):
        note += " Arms without an interval have a point per seed."
    title = f"Difference from {comparison.baseline}"
    return arms_figure(
        traces, title, note, x_axis, y_axis, height=122 + 44 * len(rows), showlegend=False
    )


def tuning(comparison: Comparison, tuned: Tuning) -> go.Figure:
    """Draw the final loss of each arm over the values of an option of `comparison.tuning`."""
    if not any(tuned.losses.values()):
        raise NotMeasuredError(f"no arm was tuned over {tuned.option}")
    traces: list[go.Scatter] = []
    names = [arm.name for arm in comparison.arms]
    for arm, by_value in tuned.losses.items():
        values = [value for value in tuned.values if value in by_value]
        best = tuned.best[arm]
        traces.append(
            arm_trace(
                names.index(arm),
                arm,
                values,
                [by_value[value] for value in values],
                "%{y:.4f} at %{x}",
                f": {best}",
                marker={"size": [11 if value == best else 6 for value in values]},
                mode="lines+markers",
            )
        )
    # Categories are evenly spaced: most values form a geometric series, and some are not numbers.
    x_axis = {
        "title": axis_title(tuned.option),
        "type": "category",
        "categoryorder": "array",
        "categoryarray": list(tuned.values),
    }
    note = f"{' '.join(tuned.verdicts)} A large point is the best value of an arm."
    return arms_figure(traces, f"Final loss by {tuned.option}", note, x_axis)


# -- parts of figures


def arms_figure(
    traces: Sequence[go.Scatter],
    title: str,
    note: str,
    x_axis: Mapping[str, Any],
    y_axis: Mapping[str, Any] | None = None,
    **layout: Any,
) -> go.Figure:
    num_named = sum(trace.showlegend is not False for trace in traces)
    layout.setdefault("height", 380 + 12 * max(num_named - 6, 0))  # a long legend needs more height
    y_axis = {"title": axis_title(LOSS_AXIS), **(y_axis or {})}
    return curves_figure(traces, title, note, x_axis, y_axis, **layout)


def arm_trace(
    number: int,
    name: str,
    x: Sequence[Any],
    y: Sequence[Any],
    hover: str,
    suffix: str = "",
    **options: Any,
) -> go.Scatter:
    hover = f"{label(name)}: {hover}<extra></extra>"
    return scatter(name, x, y, style_of(number), hover, suffix, **options)


def error_bar(value: float, interval: Interval, number: int) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [interval.high - value],
        "arrayminus": [value - interval.low],
        "color": LIGHT[f"series-{style_of(number)[0]}"],
    }


def _short(name: str) -> str:
    """Return a name that fits next to a point."""
    return label(name if len(name) <= 24 else f"{name[:11]}…{name[-12:]}")


# -- values over a size, such as final losses over the number of experts

MAX_TICKS = 8
"""Maximum number of ticks on an axis of sizes."""


@dataclass(frozen=True)
class SizedLine:
    """Values per seed at several sizes, such as final losses, and a law fitted to the values."""

    name: str
    points: Mapping[float, Sequence[float]]
    """Size -> values, one per seed; a size without values is a gap."""
    curve: Callable[[Any], Any] | None = None
    """Fitted law, drawn between the smallest and the largest size."""
    minimum: Interval | None = None
    """Size at which the law is lowest."""
    labels: Mapping[float, str] = field(default_factory=dict)
    """Size -> words next to its mean."""
    margins: Mapping[float, float] = field(default_factory=dict)
    """Size -> half of the interval, if it is not that of the mean over seeds."""


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
    over = f"of the mean, for {MIN_SEEDS} seeds or more"
    if any(line.margins for line in lines):
        over = "over windows of the text with one seed, otherwise over seeds"
    note = f"Small points are seeds; bars are 95% intervals {over}."
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
    means = [fmean(values) if (values := line.points[x]) else None for x in xs]
    intervals = [mean_interval(line.points[x]) for x in xs]
    margins = [interval.high - interval.value if interval else 0 for interval in intervals]
    if line.margins:
        margins = [line.margins.get(x, 0) for x in xs]
    first, *_, last = [mean for mean in means if mean is not None] * 2
    right, left = ("bottom", "top") if last > first else ("top", "bottom")
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
