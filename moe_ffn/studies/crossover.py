"""Final losses against total training FLOPs, including those of the model that a run started from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from moe_ffn.studies.result import RunResult


@dataclass(frozen=True)
class Point:
    """Runs of an arm with the same length."""

    flops: float
    """Total training FLOPs, including those of the initial model."""
    losses: Sequence[float]
    """Final validation loss of each run, in nats per token."""

    @property
    def loss(self) -> float:
        """Mean of the losses."""
        return fmean(self.losses)


def loss_by_flops(
    results: Sequence[RunResult], initial_flops: float
) -> Mapping[str, Sequence[Point]]:
    """Return arm (its name before the first comma) -> points for the lengths of its runs, sorted by FLOPs.

    Args:
        initial_flops: training FLOPs of the initial model, added to runs with `init_from`.
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
        arm: [Point(flops, losses) for flops, losses in sorted(points.items())]
        for arm, points in found.items()
    }


def gaps(one: Sequence[Point], other: Sequence[Point]) -> Sequence[tuple[float, float]]:
    """Return pairs of FLOPs and the loss of `other` minus that of `one`, over the range that both cover.

    There is a pair for each point of either curve in this range; between points the loss is interpolated
    linearly in log FLOPs. Empty if the ranges do not overlap.
    """
    lines = [
        (np.log([p.flops for p in points]), [p.loss for p in points]) for points in (one, other)
    ]
    low, high = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
    xs = np.unique(np.concatenate([x for x, _ in lines]))
    xs = xs[(xs >= low) & (xs <= high)]
    found = np.interp(xs, *lines[1]) - np.interp(xs, *lines[0])
    return list(zip(np.exp(xs).tolist(), found.tolist(), strict=True))


def crossover(one: Sequence[Point], other: Sequence[Point]) -> float | None:
    """Return the FLOPs from which the loss of `other` stays at or below that of `one`; see `gaps`.

    Returns:
        None if the curves do not cross in the range that both cover, or `other` is below from its start.
    """
    found = gaps(one, other)
    above = [place for place, (_, gap) in enumerate(found) if gap > 0]
    if not above or above[-1] == len(found) - 1:
        return None
    (x, gap), (next_x, next_gap) = found[above[-1] : above[-1] + 2]
    return x * (next_x / x) ** (gap / (gap - next_gap))
