"""Losses over training FLOPs: where the curves of two arms cross, and how many FLOPs one of them saves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from moe_ffn.config.errors import ConfigError
from moe_ffn.studies.result import RunResult, first_at
from moe_ffn.studies.statistics import Interval, mean_interval, positive_logs

# -- crossover: final losses over total training FLOPs, including those of a run's initial model


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

    Runs with `init_from` count the `initial_flops` of that model too.
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
    """Return the FLOPs from which the loss of `other` stays at or below that of `one`; None without them.

    See `gaps`: only the range that both curves cover counts.
    """
    points = gaps(one, other)
    above = [index for index, (_, gap) in enumerate(points) if gap > 0]
    if not above or above[-1] == len(points) - 1:
        return None
    (x, gap), (next_x, next_gap) = points[above[-1] : above[-1] + 2]
    return x * (next_x / x) ** (gap / (gap - next_gap))


# -- efficiency leverage: ratio of the FLOPs with which two arms reach the same loss


def flops_at(loss: float, flops: Sequence[float], losses: Sequence[float]) -> float | None:
    """Return the FLOPs at which a curve falls to this loss, interpolated in log FLOPs.

    None if it never does, or starts below the loss.
    """
    if losses[0] < loss:
        return None
    log_flops = first_at(np.log(flops).tolist(), np.minimum.accumulate(losses).tolist(), loss)
    return None if log_flops is None else math.exp(log_flops)


LEVERAGE_LIMITS = (
    "Larger budgets may have another leverage. In the middle of a run, before the learning rate has decayed, "
    "the loss is higher than at the end of a shorter run: leverage above 1 is a lower bound there."
)
"""Limits of leverage, for the page of a study."""

CurvePoints = tuple[Sequence[float], Sequence[float]]
"""Training FLOPs in ascending order, and the loss at each."""


@dataclass(frozen=True)
class Leverage:
    """Efficiency leverage, C_dense / C_MoE at equal loss (Tian et al. 2025, arXiv 2507.17702)."""

    by_seed: Mapping[int, float]
    """Seed -> leverage at the lowest loss that both curves reach."""
    interval: Interval | None
    """Geometric mean over the seeds, with Student's interval; None with fewer than 3 seeds."""


def leverage(dense: Mapping[int, CurvePoints], moe: Mapping[int, CurvePoints]) -> Leverage:
    """Divide the FLOPs of the dense model by those of the MoE at the same loss; above 1 the MoE saves FLOPs.

    The curve of a seed is one run, the final losses of several sizes, or for the MoE a single point. Curves
    are compared within a seed, at the lowest loss that both reach.

    Raises ConfigError if the arms share no seed, a value is not positive and finite, FLOPs do not rise, or
    the curves of some seed have no loss in common. Leaving out such seeds would bias the mean.
    """
    seeds = sorted(set(dense) & set(moe))
    if not seeds:
        raise ConfigError("the two arms have no seed in common")
    by_seed: dict[int, float] = {}
    for seed in seeds:
        for flops, losses in (dense[seed], moe[seed]):
            positive_logs("loss", losses)
            is_rising = np.all(np.diff(positive_logs("FLOPs", flops)) > 0)
            if not (is_rising and len(flops) == len(losses) > 0):
                raise ConfigError("a curve needs rising FLOPs, and one loss for each")
        loss = max(min(dense[seed][1]), min(moe[seed][1]))
        dense_flops, moe_flops = (flops_at(loss, *curves[seed]) for curves in (dense, moe))
        if dense_flops is not None and moe_flops is not None:
            by_seed[seed] = dense_flops / moe_flops
    if num_apart := len(seeds) - len(by_seed):
        raise ConfigError(
            f"the curves of the two arms have no loss in common in {num_apart} of {len(seeds)} seeds"
        )
    mean = mean_interval([math.log(value) for value in by_seed.values()])
    interval = Interval(*map(math.exp, mean)) if mean else None
    return Leverage(by_seed, interval)
