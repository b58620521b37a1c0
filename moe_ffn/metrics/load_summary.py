"""Summary of a layer's load, for lines and tables without room for every expert."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import Any


@dataclass(frozen=True)
class LoadSummary:
    """Extremes of a layer's load, as shares of its (token, expert) pairs between 0 and 1."""

    busiest: int
    """Index of the expert with the largest share; the first one if several are equal."""
    highest: float
    """The largest share."""
    median: float
    """The median share; the higher of the two middle shares if their number is even."""
    lowest: float
    unused: tuple[int, ...]
    """Indices of the experts without a token."""


def summarize_load(load: Sequence[Any]) -> LoadSummary | None:
    """Return the summary of a load; None if it is empty, or a share is missing or not finite."""
    if not load or not all(isinstance(x, int | float) and math.isfinite(x) for x in load):
        return None
    return LoadSummary(
        busiest=load.index(max(load)),
        highest=max(load),
        median=median_high(load),
        lowest=min(load),
        unused=tuple(expert for expert, share in enumerate(load) if share == 0),
    )


def percent(share: float, digits: int = 1) -> str:
    """Return a share in percent, such as `12.4`; `<0.1` if a share above 0 would round to 0."""
    text = f"{100 * share:.{digits}f}"
    return f"<{10**-digits:.{digits}f}" if share > 0 and not float(text) else text


def percent_digits(num_experts: int) -> int:
    """Return the number of decimals of a share in percent: 1, or 2 for more than 32 experts."""
    return 1 if num_experts <= 32 else 2
