"""Lines on logarithmic axes, as an SVG that any browser opens from disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 880, 460
LEFT, RIGHT, TOP, BOTTOM = 84, 232, 56, 76
"""Margins; the legend stands in the right one."""

COLOURS = ("#0b5fa5", "#d1495b", "#2f8f4e", "#e08a00", "#7b4fb5", "#00838f", "#8d5a2b", "#555f6b")
"""Told apart on white, by people who see no red or green too, together with the markers."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Plot:
    """Series of (x, y), one line each; x and y above 0."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[Point]]
    x_names: Sequence[str] = ()
    """What stands under x = 1, 2, ... where x counts cases, in one line or several; the points are then
    not joined."""
    x_unit: Callable[[float], str] = "{:,.0f}".format
    y_unit: Callable[[float], str] = "{:,g}".format


def svg(plot: Plot) -> str:
    """The whole file."""
    points = [point for line in plot.series.values() for point in line]
    named = bool(plot.x_names)
    x_low, x_high = (0.5, len(plot.x_names) + 0.5) if named else _span([x for x, _ in points])
    y_low, y_high = _span([y for _, y in points])

    def place_x(x: float) -> float:
        part = (
            (x - x_low) / (x_high - x_low)
            if named
            else math.log(x / x_low) / math.log(x_high / x_low)
        )
        return LEFT + part * (WIDTH - LEFT - RIGHT)

    def place_y(y: float) -> float:
        part = math.log(y / y_low) / math.log(y_high / y_low)
        return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)

    x_ticks = {float(n): name for n, name in enumerate(plot.x_names, start=1)}
    x_ticks = x_ticks or {x: plot.x_unit(x) for x in sorted({x for x, _ in points})}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{escape(plot.title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 30, plot.title, size=16, weight="600"),
        *_grid(plot, x_ticks, place_x, place_y, (y_low, y_high)),
    ]
    for number, (name, line) in enumerate(plot.series.items()):
        placed = [(place_x(x), place_y(y)) for x, y in line]
        parts += _series(number, name, placed, joined=not named)
    return "\n".join([*parts, "</svg>", ""])


def _grid(
    plot: Plot,
    x_ticks: Mapping[float, str],
    place_x: Callable[[float], float],
    place_y: Callable[[float], float],
    y_span: Point,
) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts: list[str] = []
    for y in log_ticks(*y_span):
        at = place_y(y)
        parts.append(_line(LEFT, at, right, at, "#e3e6ea"))
        parts.append(_text(LEFT - 8, at + 4, plot.y_unit(y), anchor="end"))
    for x, name in x_ticks.items():
        at = place_x(x)
        parts.append(_line(at, TOP, at, bottom, "#eef0f3"))
        for number, line in enumerate(name.split("\n")):
            parts.append(_text(at, bottom + 19 + 15 * number, line, anchor="middle", size=12))
    middle = (TOP + bottom) / 2
    return [
        *parts,
        _line(LEFT, TOP, LEFT, bottom, "#6b7480"),
        _line(LEFT, bottom, right, bottom, "#6b7480"),
        _text((LEFT + right) / 2, HEIGHT - 18, plot.x_label, anchor="middle"),
        f'<g transform="rotate(-90 22 {middle})">',
        _text(22, middle, plot.y_label, anchor="middle"),
        "</g>",
    ]


def _series(number: int, name: str, placed: Sequence[Point], joined: bool) -> list[str]:
    colour = COLOURS[number % len(COLOURS)]
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    legend_x, legend_y = WIDTH - RIGHT + 24.0, TOP + 12 + 22.0 * number
    dashed = ' stroke-dasharray="6 4"' if number >= len(COLOURS) else ""
    parts = [f'<g class="series" fill="{colour}"><title>{escape(name)}</title>']
    if joined:
        parts.append(
            f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="2"{dashed}/>'
        )
    parts += [_marker(number, x, y) for x, y in [*placed, (legend_x, legend_y)]]
    parts.append(_text(legend_x + 14, legend_y + 4, name))
    return [*parts, "</g>"]


def _marker(number: int, x: float, y: float) -> str:
    """Circle, square, diamond or triangle, so that colour alone tells nothing."""
    kind = (number + number // len(COLOURS)) % 4  # a colour that comes again has another shape
    if kind == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'
    corners = {
        1: ((-4, -4), (4, -4), (4, 4), (-4, 4)),
        2: ((0, -6), (6, 0), (0, 6), (-6, 0)),
        3: ((0, -5.5), (5.5, 4.5), (-5.5, 4.5)),
    }[kind]
    drawn = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{drawn}"/>'


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten between the two; more of them if near, fewer if far apart."""
    digits = (1, 2, 5)
    if high / low < 8:
        digits = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    elif high / low > 1000:
        digits = (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in digits]
    return [tick for tick in ticks if low <= tick <= high]


def _span(values: Sequence[float]) -> Point:
    """A little more than the values cover, so that no marker stands on an axis."""
    low, high = min(values), max(values)
    margin = max((high / low) ** 0.06, 1.05)
    return low / margin, high * margin


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 13, weight: str = "400"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}" fill="#1d232b">{escape(text)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'
