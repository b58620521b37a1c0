"""Static figures as SVG, which code hosts show inside Markdown: of equal results, equal bytes."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from moe_ffn.config.errors import ConfigError, install
from moe_ffn.report.drawing import SERIES
from moe_ffn.studies.comparison import Arm
from moe_ffn.studies.statistics import MIN_SEEDS, Interval, mean_interval

LOSS = "validation loss, nats per token"
WIDTH = 7.6
"""Inches."""
ROW_HEIGHT = 0.34
"""Inches for an arm in `forest`."""
SVG_OPENING = "<?xml"
MARKERS = "osD^vPX*"
DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
START = 0.25
"""Curves are drawn from this share of training: before, all are far above where they end."""

_STYLE: Any = {
    "svg.hashsalt": "moe_ffn",
    "svg.fonttype": "none",  # text stays text: a quarter of the size, and it can be searched
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "path.simplify": False,
}


@dataclass(frozen=True)
class Line:
    """Points of one line, each with the losses of its seeds."""

    name: str
    points: Mapping[float, Sequence[float]]
    """x -> loss of each seed."""
    number: int = 0
    """Chooses colour and marker."""
    variant: int = 0
    """Tells lines of one colour apart, by their dashes."""
    curve: Callable[[Any], Any] | None = None
    """A fitted law, drawn between the smallest and the largest x."""
    minimum: Interval | None = None
    """The x at which the fit is lowest."""


def curves(lines: Sequence[Line], x_label: str) -> str:
    """Loss over training: the mean over seeds, with a band that is its 95 % interval; of fewer than
    `MIN_SEEDS` each seed, thin.
    """
    figure, (axes,) = _figure(1, 3.6)
    top, bottom = -math.inf, math.inf
    for line in lines:
        x = np.array(sorted(line.points))
        losses = [line.points[value] for value in x]
        means = np.array([np.mean(values) for values in losses])
        style = _style(line.number)
        dashes = DASHES[line.variant % len(DASHES)]
        axes.plot(x, means, label=line.name, color=style["color"], linestyle=dashes, linewidth=1.4)
        num_seeds = min(map(len, losses))
        if 1 < num_seeds < MIN_SEEDS:
            for seed in range(num_seeds):
                of_seed = [values[seed] for values in losses]
                axes.plot(x, of_seed, color=style["color"], linewidth=0.6, alpha=0.6)
        elif num_seeds > 1:
            ends = np.array([mean_interval(values) for values in losses])
            axes.fill_between(
                x, ends[:, 1], ends[:, 2], color=style["color"], alpha=0.15, linewidth=0
            )
        late = means[x >= START * x.max()]
        top, bottom = max(top, late.max()), min(bottom, late.min())
    margin = 0.05 * (top - bottom) or 0.1
    axes.set_ylim(bottom - margin, top + margin)
    ends = [max(line.points) for line in lines]
    if max(ends) > 4 * min(ends):
        axes.set_xscale("log")
    axes.xaxis.set_major_formatter(_count)
    axes.set_xlabel(x_label)
    axes.set_ylabel(LOSS)
    _legend(figure, axes)
    return _svg(figure)


def forest(arms: Sequence[Arm], numbers: Sequence[int]) -> str:
    """Final losses, a dot a seed, and the differences to the baseline, both with 95 % intervals.

    Args:
        numbers: choose colour and marker of each.
    """
    has_differences = any(arm.difference is not None for arm in arms)
    height = 1.0 + ROW_HEIGHT * len(arms)
    figure, panels = _figure(2 if has_differences else 1, height, sharey=True)
    for place, (arm, number) in enumerate(zip(arms, numbers, strict=True)):
        style = _style(number)
        losses = list(arm.losses.values())
        panels[0].plot(
            losses, [place + 0.22] * len(losses), **style, linestyle="", alpha=0.4, markersize=3
        )
        if arm.interval is not None:
            _interval(panels[0], arm.interval, place, style, arm.loss)
        if arm.difference is not None:
            found = arm.difference
            _interval(panels[1], found.interval, place, style, found.mean)
    mark = " (baseline)" if len(arms) > 1 else ""
    names = [arm.name if arm.base else arm.name + mark for arm in arms]
    panels[0].set_yticks(range(len(arms)), names)
    panels[0].set_ylim(len(arms) - 0.5, -0.5)
    panels[0].set_xlabel(LOSS)
    if has_differences:
        panels[1].axvline(0, color="#555555", linewidth=0.8)
        panels[1].set_xlabel("difference to the baseline, nats per token")
    return _svg(figure)


def against(lines: Sequence[Line], x_label: str, y_label: str = LOSS) -> str:
    """Final loss against a size or an option: a dot a seed, means with 95 % intervals, and any fits."""
    figure, (axes,) = _figure(1, 3.6)
    for line in lines:
        _points(axes, line)
    _scale_sizes(axes, lines)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    _legend(figure, axes)
    return _svg(figure)


def panels(groups: Mapping[str, Sequence[Line]], x_label: str) -> str:
    """`against` several times beside one another with a common loss axis, such as IsoFLOP parabolas."""
    figure, found = _figure(len(groups), 3.6, sharey=True)
    for axes, (title, lines) in zip(found, groups.items(), strict=True):
        for line in lines:
            _points(axes, line)
        _scale_sizes(axes, lines)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel(x_label)
        axes.legend(fontsize=7, frameon=False)
    found[0].set_ylabel(LOSS)
    return _svg(figure)


def memory_and_balance(
    bars: Mapping[str, Mapping[str, float]],
    limit: float,
    lines: Mapping[str, Sequence[tuple[float, float]]],
) -> str:
    """Memory of layouts as bars, and, where there are lines, what balance makes of their times.

    Args:
        bars: layout -> part -> GB of a rank.
        limit: GB that a rank has.
        lines: name -> (MaxVio of ranks, time of a step over that in perfect balance) of each step.
    """
    height = 1.2 + ROW_HEIGHT * max(len(bars), 6)
    figure, found = _figure(2 if lines else 1, height)
    axes, parts = found[0], list(next(iter(bars.values())))
    left = [0.0] * len(bars)
    for number, part in enumerate(parts):
        widths = [bar[part] for bar in bars.values()]
        axes.barh(range(len(bars)), widths, left=left, color=SERIES[number], label=part, height=0.7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.axvline(limit, color="#a3123f", linestyle="--", linewidth=1)
    axes.text(limit, -0.6, f" {limit:g} GB", fontsize=7, color="#a3123f", va="bottom")
    axes.set_yticks(range(len(bars)), list(bars))
    axes.set_ylim(len(bars) - 0.5, -1.2)
    axes.set_xlabel("GB of a GPU at the peak of a step")
    axes.set_ylabel("data x shard x expert")
    _legend(figure, axes)
    for number, (name, points) in enumerate(lines.items()):
        style = _style(number)
        x, y = zip(*sorted(points), strict=True)
        found[1].plot(x, y, **style, label=name, linestyle="", markersize=3, alpha=0.5)
    if lines:
        found[1].set_xlabel("MaxVio of the ranks that share the experts")
        found[1].set_ylabel("time of a step over that in balance")
        found[1].legend(fontsize=7, frameon=False)
    return _svg(figure)


def _scale_sizes(axes: Any, lines: Sequence[Line]) -> None:
    """A logarithmic axis with the sizes that were tried, where they are few."""
    axes.set_xscale("log", base=2)
    x = sorted({value for line in lines for value in line.points})
    if len(x) <= 8 and min(b / a for a, b in pairwise([*x, 2 * x[-1]])) > 1.1:
        axes.set_xticks(x)
    axes.xaxis.set_major_formatter(_count)
    axes.minorticks_off()


def _points(axes: Any, line: Line) -> None:
    style = _style(line.number)
    x = sorted(line.points)
    for value in x:
        losses = line.points[value]
        axes.plot([value] * len(losses), losses, **style, linestyle="", alpha=0.35, markersize=3)
    means = [float(np.mean(line.points[value])) for value in x]
    intervals = [mean_interval(line.points[value]) for value in x]
    errors = [0 if found is None else found.high - found.value for found in intervals]
    dashes = "" if line.curve is not None else DASHES[line.variant % len(DASHES)]
    axes.errorbar(
        x, means, errors, **style, linestyle=dashes, markersize=5, linewidth=1, label=line.name
    )
    if line.curve is not None:
        fine = np.geomspace(x[0], x[-1], 60)
        axes.plot(fine, line.curve(fine), color=style["color"], linewidth=1, linestyle="--")
    if line.minimum is not None and line.curve is not None:
        at, low, high = line.minimum
        loss = float(line.curve(np.array([at]))[0])
        axes.plot([low, high], [loss, loss], color=style["color"], linewidth=3, alpha=0.4)
        axes.plot([at], [loss], marker="v", color=style["color"], markersize=8)


def _interval(
    axes: Any, interval: Interval | None, place: float, style: Mapping[str, Any], value: float
) -> None:
    ends = interval[1:] if interval else ()
    if ends:
        axes.plot(ends, [place, place], color=style["color"], linewidth=2)
    axes.plot([value], [place], **style, markersize=4, linestyle="")
    for end in ends:
        axes.plot([end, end], [place - 0.15, place + 0.15], color=style["color"], linewidth=1)


def _style(number: int) -> dict[str, Any]:
    return {"color": SERIES[number % len(SERIES)], "marker": MARKERS[number % len(MARKERS)]}


def _count(value: float, _: object = None) -> str:
    """A tick: `0.005`, `48`, `1.3 M`."""
    for unit, suffix in ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= 10 * unit or value >= unit > 1e3:
            return f"{value / unit:.3g}{suffix}"
    return f"{value:.4g}"


def _legend(figure: Any, axes: Any) -> None:
    """Above the axes, where it covers nothing."""
    handles, names = axes.get_legend_handles_labels()
    if len(names) > 1:
        widest = max(map(len, names))
        columns = max(1, min(len(names), 100 // (widest + 6)))
        figure.legend(
            handles, names, loc="outside upper left", ncols=columns, fontsize=8, frameon=False
        )


def _figure(num_panels: int, height: float, **options: Any) -> tuple[Any, Sequence[Any]]:
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"figures need matplotlib; install with: {install('studies')}") from None
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots(1, num_panels, squeeze=False, **options)[0]
    return figure, list(axes)


def _svg(figure: Any) -> str:
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context(_STYLE):
        # No date and no version: they would make other bytes of the same figure.
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    lines = buffer.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"
