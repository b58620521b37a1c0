"""The load of a layer's experts in a few numbers, for lines and tables with no room for every expert."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import Any


@dataclass(frozen=True)
class LoadSummary:
    """Shares of a layer's (token, expert) pairs, between 0 and 1, and experts by their index."""

    busiest: int
    """The expert with the largest share; the first of several."""
    highest: float
    """The largest share."""
    median: float
    """The median share; the higher of the two in the middle."""
    lowest: float
    unused: tuple[int, ...]
    """The experts without a token."""


def summarize_load(load: Sequence[Any]) -> LoadSummary | None:
    """None where the load was not measured: a share is absent or not finite, or there is none."""
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
    """`12.4`, and `<0.1` where there is something that would round to nothing."""
    text = f"{100 * share:.{digits}f}"
    return f"<{10**-digits:.{digits}f}" if share > 0 and not float(text) else text


def percent_digits(num_experts: int) -> int:
    """Digits after the point that tell shares apart: one more where an even share is small."""
    return 1 if num_experts <= 32 else 2
