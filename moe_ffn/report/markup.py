"""Text as HTML, numbers as text, and a few of many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, TypeVar

Item = TypeVar("Item")

NONE = "-"
"""Stands where a value is absent."""

CONTROL_PICTURES = 0x2400


def text(value: object) -> str:
    """Escaped, and with control characters made visible: what a run wrote can do nothing here."""
    return "".join(_visible(c) for c in escape(str(value)))


def finite(value: Any) -> float | None:
    """A number as it is; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def number(value: Any, form: str = ".4f") -> str:
    """Formatted; a dash where it is absent, `NaN` where it is not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NONE
    return format(value, form) if math.isfinite(value) else "NaN" if value != value else "infinite"


def short(count: Any) -> str:
    """2,450,000 as `2.45 M`."""
    if isinstance(count, bool) or not isinstance(count, int | float) or not math.isfinite(count):
        return NONE
    for size, suffix in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= size:
            return f"{count / size:.2f}{suffix}"
    return f"{count:.0f}"


def table(
    caption: str, headers: Sequence[str], rows: Iterable[Sequence[str]], kind: str = ""
) -> str:
    """A table that scrolls by itself, below its caption, which does not; the cells are HTML already."""
    head = "".join(f'<th scope="col">{header}</th>' for header in headers)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(rest)}</tr>\n'
        for first, *rest in ([row[0], *map(_cell, row[1:])] for row in rows)
    )
    return (
        f'<p class="quiet small">{caption}</p>\n<div class="scroll"><table class="{kind}">\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n"
    )


def _cell(html: str) -> str:
    return html if html.startswith("<td") else f"<td>{html}</td>"


def _visible(char: str) -> str:
    if char.isprintable() or char in "\n\t":
        return char
    code = ord(char)
    if code < 0x20:
        return f'<span class="control">{chr(CONTROL_PICTURES + code)}</span>'
    return f'<span class="control">U+{code:04X}</span>'


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` of them (2 or more), evenly chosen, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]
