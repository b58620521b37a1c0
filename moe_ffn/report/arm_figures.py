"""Figures of several arms, each of one or more runs: functions that return a plotly figure.

    from moe_ffn.report import arm_figures
    from moe_ffn.studies.gather import gather

    comparison = gather([Path("runs/gating")]).compare()
    arm_figures.losses(arm_figures.curves_of(comparison.arms), over="FLOPs")
    arm_figures.frontier(comparison, "FLOPs")
    arm_figures.differences(comparison)

An arm has one colour and one dash in all of them. Pages show the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import plotly.graph_objects as go

from moe_ffn.metrics.plotting import axis_title, figure, label
from moe_ffn.report.drawing import LIGHT, SERIES, rounded, style_of
from moe_ffn.report.figures import NotMeasuredError
from moe_ffn.studies.budget import TRAINING_FLOPS
from moe_ffn.studies.comparison import COSTS, Arm, Comparison, Tuning
from moe_ffn.studies.result import Curve
from moe_ffn.studies.statistics import MIN_SEEDS, Interval, mean_interval

Over = Literal["tokens", "FLOPs", "seconds", "steps"]

AXES: dict[Over, str] = {
    "tokens": "tokens trained on",
    "FLOPs": "training FLOPs",
    "seconds": "seconds of training steps",
    "steps": "optimizer steps",
}

Loss = Literal["validation", "train"]

LOSSES: dict[Loss, str] = {"validation": "Validation loss", "train": "Training loss"}

WHOLE = 0.25
"""The axis of a loss has the part of it that comes after this share of training."""

MAX_LABELS = 16
"""More arms than this are named in the legend of the frontier alone."""

_MIN_SPAN = 0.1
"""The shortest axis of costs, as a share of the largest cost."""

_LOSS_AXIS: Mapping[str, Any] = {"title": axis_title("loss (nats per token)"), "automargin": True}
_AT = "%{y:.4f} at %{x:,.4~s}"
_LEGEND = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
_MARGIN = {"l": 62, "r": 16, "t": 14, "b": 48}


@dataclass(frozen=True)
class ArmCurves:
    """The losses of an arm over training, a curve for each seed."""

    name: str
    validation: Sequence[Curve]
    train: Sequence[Curve]
    flops_per_token: float | None = None
    """FLOPs of the forward pass; None where they are not known."""
    step_seconds: float | None = None
    """Seconds of a step, measured apart from the runs; None where the runs' own clocks count."""

    def curves(self, of: Loss, over: Over) -> list[tuple[list[float | None], list[float | None]]]:
        """The places and the losses of each curve that has both."""
        found: list[tuple[list[float | None], list[float | None]]] = []
        for curve in self.validation if of == "validation" else self.train:
            places: list[float | None] = list(
                curve.tokens if over == "FLOPs" else getattr(curve, over)
            )
            if over == "FLOPs":
                cost = self.flops_per_token
                places = [
                    None if x is None or cost is None else TRAINING_FLOPS * cost * x for x in places
                ]
            if over == "seconds" and self.step_seconds is not None:
                places = [step * self.step_seconds for step in curve.steps]
            if len(places) == len(curve.losses) and any(x is not None for x in places):
                found.append((places, list(curve.losses)))
        return found


def curves_of(arms: Sequence[Arm]) -> list[ArmCurves]:
    """What the runs of the arms measured over training."""
    return [
        ArmCurves(
            arm.name,
            [result.validation for result in arm.results],
            [result.train for result in arm.results],
            arm.budget.model.flops_per_token,
            arm.timed_step_seconds,
        )
        for arm in arms
    ]


def axes_of(arms: Sequence[ArmCurves], of: Loss) -> list[Over]:
    """What the losses can be drawn over: what every arm with one knows; nothing of one point each."""
    drawn = [arm for arm in arms if arm.curves(of, "steps")]
    if all(len(places) == 1 for arm in drawn for places, _ in arm.curves(of, "steps")):
        return []
    return [over for over in AXES if drawn and all(arm.curves(of, over) for arm in drawn)]


def losses(
    arms: Sequence[ArmCurves],
    over: Over = "tokens",
    of: Loss = "validation",
) -> go.Figure:
    """The mean loss of each arm over training, with the 95 % interval of the mean over its seeds. An arm of
    fewer than `MIN_SEEDS` has a line for each seed instead.

    Args:
        of: the loss on the validation split, or in training.

    Raises:
        NotMeasuredError: no arm has such a loss over that.
    """
    traces: list[go.Scatter] = []
    late: list[float] = []
    lowest: list[float] = []
    seeds: set[int] = set()
    for number, arm in enumerate(arms):
        curves = arm.curves(of, over)
        of_lines = [curves] if len(curves) >= MIN_SEEDS else [[curve] for curve in curves]
        lines = [points for points in map(_means, of_lines) if points]
        if not lines:
            continue
        seeds.add(len(curves))
        traces += _lines(arm.name, number, lines)
        for points in lines:
            last = points[-1][0]
            late += [y.value for x, y in points if x >= WHOLE * last]
            lowest += [y.low for x, y in points if x >= WHOLE * last]
    if not traces:
        raise NotMeasuredError(f"no arm has a {LOSSES[of].lower()} over {over}")
    axis = dict(_LOSS_AXIS)
    note = ""
    if max(late) > min(lowest):
        pad = 0.05 * (max(late) - min(lowest))
        axis["range"] = [min(lowest) - pad, max(late) + pad]
        note = f"Of the losses before {WHOLE:.0%} of training only what is as low as later ones."
    if any(1 < count < MIN_SEEDS for count in seeds):
        note = f"Fewer than {MIN_SEEDS} seeds have a line each, and no interval. {note}"
    if max(seeds) >= MIN_SEEDS:
        note = f"Lines are means over seeds, bands their 95% intervals (Student's t). {note}"
    x_axis = {"title": axis_title(AXES[over]), "rangemode": "tozero", "exponentformat": "SI"}
    return figure(traces, _layout(x_axis, axis), LOSSES[of], note.strip())


def _means(
    curves: Sequence[tuple[list[float | None], list[float | None]]],
) -> list[tuple[float, Interval]]:
    """(mean place, mean loss with its interval) at each point that all curves have, by their order."""
    points: list[tuple[float, Interval]] = []
    for found in zip(*(zip(*curve, strict=True) for curve in curves), strict=False):
        xs = [x for x, y in found if x is not None and y is not None]
        ys = [y for x, y in found if x is not None and y is not None]
        if len(xs) == len(curves):
            mean = sum(ys) / len(ys)
            interval = mean_interval(ys) or Interval(mean, mean, mean)
            points.append((sum(xs) / len(xs), interval))
    return points


def _layout(x_axis: Mapping[str, Any], y_axis: Mapping[str, Any]) -> dict[str, Any]:
    """The layout of a figure with a legend of the arms."""
    return {
        "height": 380,
        "hovermode": "closest",
        "showlegend": True,
        "legend": _LEGEND,
        "margin": _MARGIN,
        "xaxis": x_axis,
        "yaxis": y_axis,
    }


def _trace(
    number: int, name: str, x: Any, y: Any, hover: str, shown: str = "", **options: Any
) -> go.Scatter:
    """The points of an arm, in the colour and the dash of its number; `shown` follows its name."""
    role, dash = style_of(number)
    return go.Scatter(
        x=x,
        y=y,
        name=f"{label(name)}{shown}",
        line={"color": LIGHT[f"series-{role}"], "dash": dash, "width": 2},
        marker_color=LIGHT[f"series-{role}"],
        hovertemplate=f"{label(name)}: {hover}<extra></extra>",
        meta={"colour": role, "name": label(name)},
        **options,
    )


def _error_bar(value: float, interval: Interval, number: int) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [interval.high - value],
        "arrayminus": [value - interval.low],
        "color": LIGHT[f"series-{style_of(number)[0]}"],
    }


def _lines(
    name: str, number: int, lines: Sequence[Sequence[tuple[float, Interval]]]
) -> list[go.Scatter]:
    """An arm's line with its band, or the lines of its seeds; the legend has one, and the mean last loss."""
    last = fmean(points[-1][1].value for points in lines)
    found = [_line(name, number, points, last) for points in lines]
    for traces in found[1:]:
        traces[-1].showlegend = False
    return [trace for traces in found for trace in traces]


def _line(
    name: str, number: int, points: Sequence[tuple[float, Interval]], last: float
) -> list[go.Scatter]:
    xs = [rounded(x) for x, _ in points]
    role, _ = style_of(number)
    traces: list[go.Scatter] = []
    if any(y.low < y.high for _, y in points):
        edge = [y.high for _, y in points] + [y.low for _, y in reversed(points)]
        traces.append(
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
        )
    ys = [round(y.value, 5) for _, y in points]
    traces.append(
        _trace(
            number,
            name,
            xs,
            ys,
            _AT,
            f" {last:.4f}",
            marker_size=5,
            mode="lines+markers" if len(xs) <= 40 else "lines",
            legendgroup=str(number),
        )
    )
    return traces


def frontier(comparison: Comparison, cost: str = "FLOPs") -> go.Figure:
    """Final loss against what training took, with intervals; a line joins the arms that none beats in both.

    Args:
        cost: one of `COSTS`.

    Raises:
        NotMeasuredError: it is not known of every arm.
    """
    costs = [COSTS[cost](arm) for arm in comparison.arms]
    known = [value for value in costs if value is not None]
    if len(known) < len(costs):
        raise NotMeasuredError(f"not every arm knows its {cost}")
    traces: list[go.Scatter] = []
    best = sorted(
        (x, arm.loss)
        for x, arm in zip(known, comparison.arms, strict=True)
        if arm.on_frontier.get(cost)
    )
    if len(best) > 1:
        traces.append(
            go.Scatter(
                x=[x for x, _ in best],
                y=[y for _, y in best],
                mode="lines",
                line={"dash": "dot", "width": 2, "color": "gray"},
                marker={"color": "gray"},
                name="frontier",
                hoverinfo="skip",
                meta={"colour": "quiet", "name": "frontier"},
            )
        )
    for number, (x, arm) in enumerate(zip(known, comparison.arms, strict=True)):
        has_text = len(comparison.arms) <= MAX_LABELS
        traces.append(
            _trace(
                number,
                arm.name,
                [x],
                [arm.loss],
                _AT,
                f" {arm.loss:.4f}",
                marker={"size": 9, "symbol": number // len(SERIES)},
                mode="markers+text" if has_text else "markers",
                text=[_short(arm.name)],
                textposition="top right" if number % 2 == 0 else "bottom right",
                cliponaxis=False,
                error_y=arm.interval and _error_bar(arm.loss, arm.interval, number),
            )
        )
    is_wide = min(known) > 0 and max(known) / min(known) > 4
    # Costs that are nearly equal are drawn near one another.
    span = max(max(known) - min(known), _MIN_SPAN * max(known))
    x_axis: dict[str, Any] = {
        "title": axis_title(f"{cost} of training" if cost != "parameters" else cost),
        "exponentformat": "SI",
    }
    # Room for the names on the right.
    if is_wide:
        low, high = math.log10(min(known)), math.log10(max(known))
        x_axis |= {"type": "log", "range": [low - 0.05 * (high - low), high + 0.25 * (high - low)]}
    else:
        middle = (min(known) + max(known)) / 2
        x_axis["range"] = [middle - 0.58 * span, middle + 0.8 * span]
    layout = _layout(x_axis, _LOSS_AXIS)
    over = {arm.interval_over for arm in comparison.arms if arm.interval is not None}
    note = f"Bars are 95% intervals over {' or '.join(sorted(over))}." if over else ""
    if len(best) > 1:
        note += " On the dotted line no other arm has a lower loss at no more cost."
    return figure(traces, layout, "Final loss against cost", note.strip())


def differences(comparison: Comparison) -> go.Figure:
    """Each arm's paired difference from the baseline, with its 95 % interval: left of 0 it is better. An arm
    of fewer than `MIN_SEEDS` has a point for each seed instead.

    Raises:
        NotMeasuredError: no arm has one.
    """
    rows = [
        (number, arm, arm.difference)
        for number, arm in enumerate(comparison.arms)
        if arm.difference is not None
    ]
    if not rows:
        raise NotMeasuredError(f"no arm has a difference from {comparison.baseline}")
    traces: list[go.Scatter] = []
    for number, arm, found in rows:
        y = _short(arm.name)
        if found.interval is None:
            by_seed = comparison.seed_differences(arm)
            traces.append(
                _trace(
                    number,
                    arm.name,
                    by_seed,
                    [y] * len(by_seed),
                    "%{x:+.4f} in one seed",
                    marker={"size": 8, "symbol": "circle-open"},
                    mode="markers",
                )
            )
            continue
        mean, low, high = found.interval
        traces.append(
            _trace(
                number,
                arm.name,
                [mean],
                [y],
                f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]",
                marker={"size": 10, "symbol": "circle" if found.is_claimed else "circle-open"},
                mode="markers+text",
                text=[f"{mean:+.4f}"],
                textposition="top center",
                error_x=_error_bar(mean, found.interval, number),
            )
        )
    x_axis = {
        "title": axis_title(f"loss minus that of {_short(comparison.baseline)} (nats per token)"),
        "zeroline": True,
        "zerolinewidth": 2,
        "rangemode": "tozero",
    }
    y_axis = {
        "type": "category",
        "range": [len(rows) - 0.5, -0.7],  # the first on top, with room for its number
        "automargin": True,
        "showgrid": False,
    }
    layout = _layout(x_axis, y_axis) | {
        "height": 110 + 44 * len(rows),
        "showlegend": False,
        "margin": {**_MARGIN, "t": 26},
    }
    over = {found.over for _, _, found in rows if found.interval is not None}
    pairs = {"seeds": "seeds, paired", "windows": "windows of the text, in one seed"}
    note = f"Left of 0 is better than {comparison.baseline}."
    if over:
        note += (
            f" Bars are 95% intervals over {' or '.join(pairs[o] for o in sorted(over))}; a full circle is a "
            "difference that Holm's correction leaves significant."
        )
    if any(found.interval is None for _, _, found in rows):
        note += f" Fewer than {MIN_SEEDS} seeds have a point each, and no interval."
    return figure(traces, layout, f"Difference from {comparison.baseline}", note)


def tuning(comparison: Comparison, found: Tuning) -> go.Figure:
    """The final loss of each arm by the value of the option that was tuned.

    Args:
        found: one of `comparison.tuning`.

    Raises:
        NotMeasuredError: no arm was tuned.
    """
    if not any(found.losses.values()):
        raise NotMeasuredError(f"no arm was tuned by {found.option}")
    traces: list[go.Scatter] = []
    names = [arm.name for arm in comparison.arms]
    for arm, by_value in found.losses.items():
        values = [value for value in found.values if value in by_value]
        best = found.best[arm]
        traces.append(
            _trace(
                names.index(arm),
                arm,
                values,
                [by_value[value] for value in values],
                "%{y:.4f} at %{x}",
                f": {best}",
                marker_size=[11 if value == best else 6 for value in values],
                mode="lines+markers",
            )
        )
    # As categories, evenly apart: most are powers of each other, and some are no numbers.
    x_axis = {
        "title": axis_title(found.option),
        "type": "category",
        "categoryorder": "array",
        "categoryarray": list(found.values),
    }
    layout = _layout(x_axis, _LOSS_AXIS) | {"height": 340}
    return figure(
        traces,
        layout,
        f"Final loss by {found.option}",
        f"{found.verdict}. The large point is an arm's best.",
    )


def _short(name: str) -> str:
    """A name beside its point."""
    return label(name if len(name) <= 24 else f"{name[:11]}…{name[-12:]}")
