"""Numbers as text."""

from __future__ import annotations

import math
from typing import Any

from moe_ffn.runs.json_files import finite

NONE = "-"
"""Text of an absent value."""


def number(value: Any, form: str = ".4f") -> str:
    """Return a number as text, `NaN` or `infinite`; a dash for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NONE
    return format(value, form) if math.isfinite(value) else "NaN" if value != value else "infinite"


def compact(count: Any, unit: str = "") -> str:
    """Return 2,450,000 as `2.45 M`, or `2.45 MB` with a unit; a dash unless the count is finite."""
    size = finite(count)
    if size is None:
        return NONE
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= factor:
            return f"{size / factor:.2f} {prefix}{unit}"
    return f"{size:.0f} {unit}".strip()


def si_format(number: float) -> str:
    """Format with three digits and an SI prefix: `1.25M`."""
    prefixes = iter("kMGTPE")
    prefix = ""
    while abs(number) >= 999.5:
        number, prefix = number / 1000, next(prefixes)
    return f"{number:.3g}{prefix}"
