"""Final losses against the FLOPs of all training, that of the model a run began with included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from moe_ffn.studies.result import RunResult


@dataclass(frozen=True)
class Point:
    """The runs of an arm that had one length."""

    flops: float
    """Of all training, its beginning included."""
    loss: float
    """The mean of their final validation losses, in nats per token."""
    sd: float | None
    """Over the seeds; None of one."""


def loss_by_flops(
    results: Sequence[RunResult], initial_flops: float
) -> Mapping[str, Sequence[Point]]:
    """Arm, up to the first comma of its name -> a point for each length of its runs, by FLOPs.

    Args:
        initial_flops: of training, added to runs that began with the weights of a folder (`init_from`).
    """
    found: dict[str, dict[float, list[float]]] = {}
    for result in results:
        if result.outcome.validation_loss is None or result.tuning:
            continue
        began = initial_flops if result.option("init_from") else 0
        points = found.setdefault(result.main_arm.partition(",")[0], {})
        points.setdefault(began + result.budget.training_flops, []).append(
            result.outcome.validation_loss
        )
    return {
        arm: [
            Point(flops, fmean(losses), stdev(losses) if len(losses) > 1 else None)
            for flops, losses in sorted(points.items())
        ]
        for arm, points in found.items()
    }


def crossover(one: Sequence[Point], other: Sequence[Point]) -> float | None:
    """The FLOPs from which the losses of `other` stay at or below those of `one`.

    Between points the loss is a line in log FLOPs.

    Returns:
        None where both are not measured at so many FLOPs: they never cross where both are, or `other` is
        already below where both begin.
    """
    lines = [
        (np.log([p.flops for p in points]), [p.loss for p in points]) for points in (one, other)
    ]
    low, high = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
    xs = np.unique(np.concatenate([x for x, _ in lines]))
    xs = xs[(xs >= low) & (xs <= high)]
    if len(xs) < 2:
        return None
    gap = np.interp(xs, *lines[1]) - np.interp(xs, *lines[0])
    above = np.flatnonzero(gap > 0)
    if not len(above) or above[-1] == len(xs) - 1:
        return None
    last = int(above[-1])
    share = gap[last] / (gap[last] - gap[last + 1])
    return float(np.exp(xs[last] + share * (xs[last + 1] - xs[last])))
