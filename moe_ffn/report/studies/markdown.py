"""Markdown: tables, intervals, and escaped text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from moe_ffn.config.errors import printable
from moe_ffn.config.numbers import NONE
from moe_ffn.studies.statistics import Interval


def markdown_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, num_texts: int = 1
) -> str:
    """Return a Markdown table; all columns after the first `num_texts` contain numbers."""
    alignment = ["---" if column < num_texts else "---:" for column in range(len(head))]
    return "\n".join(map(markdown_row, (head, alignment, *rows)))


def markdown_row(cells: Sequence[str]) -> str:
    """Return a row on one line, with `|` in its cells escaped."""
    return f"| {' | '.join(' '.join(cell.split()).replace('|', '&#124;') for cell in cells)} |"


def escape_markdown(text: str) -> str:
    """Return text with Markdown escaped; the name of an arm may be `<b>` or `a|b`."""
    special = r"[\\|<>&`*\[\]]|(?<!\w)_|_(?!\w)"
    return re.sub(special, lambda match: f"&#{ord(match[0])};", printable(text))


def with_interval(
    interval: Interval | None, form: Callable[[float], str], value: float | None = None
) -> str:
    """Return `1.9512 [1.9440, 1.9583]`, or only the value without an interval."""
    if interval is None:
        return NONE if value is None else form(value)
    if not math.isfinite(interval.high - interval.low):
        return f"{form(interval.value)} (not determined)"
    return f"{form(interval.value)} [{form(interval.low)}, {form(interval.high)}]"
