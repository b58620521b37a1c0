"""Small HTML cards that a notebook shows for a run, a block, its output or a routing.

Plain text with inline styles: no script, nothing from the network, and readable on light and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TypeVar
from urllib.parse import quote

Item = TypeVar("Item")

MAX_ROWS, MAX_COLUMNS = 8, 16
"""Maximum layers and experts in a table of loads."""

MAX_TOKENS, MAX_EXPERTS = 24, 32
"""Maximum tokens and experts in the drawing of a routing."""

ABOVE, BELOW = "#e07b28", "#3f83d8"
"""Colours of loads above and below the even share, visible on white and on black."""

_CARD = (
    "font:14px/1.5 system-ui,sans-serif;color:inherit;display:inline-block;max-width:100%;"
    "box-sizing:border-box;overflow-x:auto;border:1px solid #8886;border-radius:6px;padding:.5em .9em"
)
_CELL, _LEFT = 11, 30
"""Pixels of a cell in a drawing, and of the labels to its left."""


def card(title: str, facts: Mapping[str, str], *html: str) -> str:
    """Return a card: a title, facts as name -> value, and pieces of HTML below."""
    cells = "".join(
        f'<span style="white-space:nowrap"><span style="opacity:.7">{escape(name)}</span> '
        f"<b>{escape(value)}</b></span>"
        for name, value in facts.items()
    )
    row = f'<div style="display:flex;flex-wrap:wrap;gap:0 1.2em">{cells}</div>'
    return f'<div style="{_CARD}"><b>{escape(title)}</b>{row}{"".join(html)}</div>'


def note(text: str) -> str:
    return f'<div style="font-size:12px;opacity:.75">{escape(text)}</div>'


def folded(title: str, text: str) -> str:
    """Return preformatted text, folded until the reader opens it."""
    body = f'<pre style="font-size:12px;margin:.3em 0 0;white-space:pre-wrap">{escape(text)}</pre>'
    return f'<details style="font-size:12px"><summary>{escape(title)}</summary>{body}</details>'


def link(path: str, title: str) -> str:
    """Return a link to a file; a relative path starts at the notebook's folder."""
    return f'<a href="{escape(quote(path))}" style="color:inherit">{escape(title)}</a>'


def evenly_chosen(items: Sequence[Item], max_items: int) -> list[Item]:
    """Return at most `max_items` items, evenly chosen, with the first and the last."""
    count, last = min(max_items, len(items)), len(items) - 1
    return [items[index * last // max(count - 1, 1)] for index in range(count)]


def load_heatmap(loads: Mapping[str, Sequence[float]]) -> str:
    """Return a heat map of some layers' loads, shares of their pairs, as multiples of the even share. More
    than `MAX_COLUMNS` experts are sorted by load, and only some are shown.
    """
    widest = max(map(len, loads.values()))
    cells = ""
    for name, load in evenly_chosen(list(loads.items()), MAX_ROWS):
        ordered = sorted(load, reverse=True) if widest > MAX_COLUMNS else load
        ratios = [share * len(load) for share in evenly_chosen(ordered, MAX_COLUMNS)]
        cells += f'<span style="grid-column:1;padding-right:.5em">{escape(name)}</span>'
        cells += "".join(map(_load_cell, ratios))
    order = "sorted by load" if widest > MAX_COLUMNS else "in order"
    columns = f"auto repeat({min(widest, MAX_COLUMNS)},2.2em)"
    style = "display:grid;justify-content:start;gap:1px;margin-top:.4em;font-size:12px;text-align:center"
    text = f"Load of the experts of each layer, {order}; 1.0 is the even share."
    return f'<div style="{style};grid-template-columns:{columns}">{cells}</div>{note(text)}'


def _load_cell(ratio: float) -> str:
    """Return a cell for a load over the even share; the colour is strongest at 4 and at 0."""
    colour, depth = (ABOVE, (ratio - 1) / 3) if ratio > 1 else (BELOW, 1 - ratio)
    return f'<span style="background:{colour}{round(200 * min(depth, 1)):02x}">{ratio:.1f}</span>'


def routing_map(pairs: Sequence[tuple[int, int, float, bool]], load_E: Sequence[float]) -> str:
    """Return a drawing of the experts (rows) of the first tokens (columns), from (token, expert, weight,
    dropped) of each pair, and of their loads, shares of the pairs.
    """
    by_load = sorted(range(len(load_E)), key=lambda expert: -load_E[expert])
    row_of = {expert: row for row, expert in enumerate(sorted(by_load[:MAX_EXPERTS]))}
    visible = [pair for pair in pairs if pair[0] < MAX_TOKENS and pair[1] in row_of]
    columns = 1 + max((token for token, *_ in visible), default=0)
    largest = max((weight for _, _, weight, _ in visible), default=1) or 1
    squares: dict[str, str] = {}
    for token, expert, weight, is_dropped in visible:
        level = max(0, min(3, int(4 * weight / largest)))
        style = f'fill="none" stroke="{ABOVE}"' if is_dropped else f'opacity="{(level + 1) / 4}"'
        corner = f"M{_LEFT + token * _CELL + 1} {row_of[expert] * _CELL + 1}"
        squares[style] = squares.get(style, "") + f"{corner}h9v9h-9z"
    bars, labels = "", ""
    left, highest = _LEFT + columns * _CELL + 8, max(load_E) or 1
    for expert, row in row_of.items():
        top, width = row * _CELL, 60 * load_E[expert] / highest
        bars += f"M{left} {top + 2}h{width:.1f}v7H{left}z"
        labels += f'<text x="2" y="{top + 9}">{expert}</text>'
        labels += f'<text x="{left + 64}" y="{top + 9}">{100 * load_E[expert]:.1f}%</text>'
    even, height = left + 60 / len(load_E) / highest, len(row_of) * _CELL
    rows = (
        "Rows are experts"
        if len(row_of) == len(load_E)
        else f"Rows are the {len(row_of)} busiest experts"
    )
    text = (
        f"{rows}, columns the first tokens. A darker square is a larger weight, a hollow one a dropped pair. "
        "Bars: each expert's share of the pairs; the dashed line is the even share."
    )
    drawn = [f'<path {style} d="{path}"/>' for style, path in sorted(squares.items())]
    size = f'width="{left + 104}" height="{height}" viewBox="0 0 {left + 104} {height}"'
    label = f"experts of the first {columns} tokens, and the load of each expert"
    style = "display:block;margin-top:.4em;max-width:100%;height:auto;font:9px system-ui,sans-serif"
    return (
        f'<svg {size} role="img" aria-label="{label}" style="{style}"><g fill="{BELOW}">{"".join(drawn)}'
        f'<path d="{bars}" opacity=".6"/></g><g fill="currentColor">{labels}</g>'
        f'<path d="M{even:.1f} 0v{height}" stroke="currentColor" stroke-dasharray="2 2"/></svg>{note(text)}'
    )


def curve(values: Sequence[float], name: str) -> str:
    """Return a small line through the finite values, labelled with both ends; empty without values."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    points = evenly_chosen(finite, 80)
    low, high, step = min(points), max(points), 200 / max(len(points) - 1, 1)
    heights = [36 - 32 * (value - low) / ((high - low) or 1) for value in points]
    line = "L".join(f"{step * n:.0f} {height:.1f}" for n, height in enumerate(heights))
    text = f"{name}: {finite[0]:.3f} to {finite[-1]:.3f}"
    return (
        f'<svg width="200" height="40" viewBox="0 0 200 40" role="img" aria-label="{escape(text)}" '
        f'style="display:block;margin-top:.4em"><path fill="none" stroke="{BELOW}" stroke-width="1.5" '
        f'd="M{line}"/></svg>{note(text)}'
    )
