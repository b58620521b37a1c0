"""Final losses over total training FLOPs, including the FLOPs of a run's initial model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from moe_ffn.studies.result import RunResult


@dataclass(frozen=True)
class Point:
    """Runs of an arm with equal FLOPs."""

    flops: float
    """Total training FLOPs, including those of the initial model."""
    losses: Sequence[float]
    """Final validation loss of each run, in nats per token."""

    @property
    def loss(self) -> float:
        return fmean(self.losses)


def loss_by_flops(
    results: Sequence[RunResult], initial_flops: float
) -> Mapping[str, Sequence[Point]]:
    """Return arm (its name before the first comma) -> points of its runs, sorted by FLOPs.

    Args:
        initial_flops: training FLOPs of the initial model, added to runs with `init_from`.
    """
    by_arm: dict[str, dict[float, list[float]]] = {}
    for result in results:
        loss = result.outcome.validation_loss
        if loss is None or result.tuning:
            continue
        start = initial_flops if result.option("init_from") else 0
        flops = start + result.budget.training_flops
        points = by_arm.setdefault(result.main_arm.partition(",")[0], {})
        points.setdefault(flops, []).append(loss)
    return {
        arm: [Point(flops, losses) for flops, losses in sorted(points.items())]
        for arm, points in by_arm.items()
    }


def gaps(one: Sequence[Point], other: Sequence[Point]) -> Sequence[tuple[float, float]]:
    """Return (FLOPs, loss of `other` minus loss of `one`) pairs, over the range that both cover.

    There is a pair for each point of either curve in this range; between points the loss is interpolated
    linearly in log FLOPs. Empty if the ranges do not overlap.
    """
    curves = [
        (np.log([p.flops for p in points]), [p.loss for p in points]) for points in (one, other)
    ]
    low, high = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    xs = np.unique(np.concatenate([x for x, _ in curves]))
    xs = xs[(xs >= low) & (xs <= high)]
    differences = np.interp(xs, *curves[1]) - np.interp(xs, *curves[0])
    return list(zip(np.exp(xs).tolist(), differences.tolist(), strict=True))


def crossover(one: Sequence[Point], other: Sequence[Point]) -> float | None:
    """Return the FLOPs from which the loss of `other` stays at or below that of `one`; see `gaps`.

    Returns:
        None if the curves do not cross in the range that both cover.
    """
    points = gaps(one, other)
    above = [index for index, (_, gap) in enumerate(points) if gap > 0]
    if not above or above[-1] == len(points) - 1:
        return None
    (x, gap), (next_x, next_gap) = points[above[-1] : above[-1] + 2]
    return x * (next_x / x) ** (gap / (gap - next_gap))
