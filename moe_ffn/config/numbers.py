"""Numbers as text."""

from __future__ import annotations

import math
from typing import Any

NONE = "-"
"""Text of an absent value."""


def finite(value: Any) -> float | None:
    """Return the value if it is a finite number; None otherwise."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


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


def counted(number: int, noun: str) -> str:
    """Return `1 run`, or `1,200 runs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def si_format(number: float) -> str:
    """Format with three digits and an SI prefix: `1.25M`."""
    prefixes = iter("kMGTPE")
    prefix = ""
    while abs(number) >= 999.5:
        number, prefix = number / 1000, next(prefixes)
    return f"{number:.3g}{prefix}"


def gigabytes(num_bytes: int) -> str:
    """Format a size: `1.2 GB`, or `0.63 MB`."""
    size, unit = (num_bytes / 1e9, "GB") if num_bytes >= 1e8 else (num_bytes / 1e6, "MB")
    return f"{size:,.0f} {unit}" if size >= 10 else f"{size:.2g} {unit}"


def format_duration(seconds: float) -> str:
    """Format seconds as `40 s`, `12 min` or `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
