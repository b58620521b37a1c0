"""Long series as few points: the mean over neighbouring rows, bins of equally many optimizer steps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from experiments.report.metrics_file import Series

Item = TypeVar("Item")

Value = float | None
"""None where nothing finite was measured: JSON has no NaN, and plotly draws a gap."""


@dataclass(frozen=True)
class Grid:
    """Rows over common steps: `values[row][column]` belongs to `steps[column]`."""

    steps: list[float]
    values: list[list[Value]]
    is_averaged: bool


def average(series: Series, most: int) -> Grid:
    """One series as at most `most` points; a bin without a row is left out."""
    return average_all([series], most)


def average_all(rows: Sequence[Series], most: int) -> Grid:
    """Several series over common steps, at most `most` of them.

    Where the rows have more different steps, a point is the mean of the finite values in its bin, at
    the mean of its steps.
    """
    all_steps = np.unique(np.concatenate([np.asarray(series.steps) for series in rows]))
    is_averaged = len(all_steps) > most
    if is_averaged:
        width = (all_steps[-1] - all_steps[0]) / most
        bins = np.minimum(((all_steps - all_steps[0]) / width).astype(int), most - 1)
        _, bins = np.unique(bins, return_inverse=True)
    else:
        bins = np.arange(len(all_steps))
    counts = np.bincount(bins)
    centres = np.bincount(bins, weights=all_steps) / counts
    values = [
        _means(bins[np.searchsorted(all_steps, series.steps)], series, len(counts))
        for series in rows
    ]
    return Grid([short(round(step, 1)) for step in centres], values, is_averaged)


def _means(bins: np.ndarray, series: Series, num_bins: int) -> list[Value]:
    values = np.asarray(series.values)
    kept = np.isfinite(values)
    counts = np.bincount(bins[kept], minlength=num_bins)
    # Each divided before they are added, so that no sum is beyond a float.
    parts = values[kept] / counts[bins[kept]]
    means = np.bincount(bins[kept], weights=parts, minlength=num_bins)
    means = np.clip(means, -sys.float_info.max, sys.float_info.max)  # rounding may go beyond
    return [short(mean) if count else None for mean, count in zip(means, counts, strict=True)]


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` of them (2 or more), evenly chosen, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def short(value: float) -> float:
    """Seven significant digits: more cannot be seen, and would double the page."""
    value = float(f"{value:.7g}")
    return int(value) if value == int(value) else value
