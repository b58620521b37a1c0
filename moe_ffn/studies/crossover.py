"""Final losses against the FLOPs of all training, that of the model a run began with included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from moe_ffn.studies.result import RunResult


@dataclass(frozen=True)
class Point:
    """The runs of an arm that had one length."""

    flops: float
    """FLOPs of all training, including that of the initial model."""
    losses: Sequence[float]
    """The final validation loss of each, in nats per token."""

    @property
    def loss(self) -> float:
        """Mean of the losses."""
        return fmean(self.losses)


def loss_by_flops(
    results: Sequence[RunResult], initial_flops: float
) -> Mapping[str, Sequence[Point]]:
    """Return arm, up to the first comma of its name -> a point for each length of its runs, by FLOPs.

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
        arm: [Point(flops, losses) for flops, losses in sorted(points.items())]
        for arm, points in found.items()
    }


def gaps(one: Sequence[Point], other: Sequence[Point]) -> Sequence[tuple[float, float]]:
    """Return FLOPs, and how far the loss of `other` is above that of `one` there, where both are measured.

    From the fewest FLOPs that both have to the most, at each point of either; between points the loss is a
    line in log FLOPs. Empty where they share none.
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
    """Return the FLOPs from which the losses of `other` stay at or below those of `one`, see `gaps`.

    Returns:
        None where both are not measured at so many FLOPs: they never cross where both are, or `other` is
        already below where both begin.
    """
    found = gaps(one, other)
    above = [place for place, (_, gap) in enumerate(found) if gap > 0]
    if not above or above[-1] == len(found) - 1:
        return None
    (x, gap), (next_x, next_gap) = found[above[-1] : above[-1] + 2]
    return x * (next_x / x) ** (gap / (gap - next_gap))
