"""Efficiency leverage: how many times the FLOPs one arm takes to the loss of another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moe_ffn.config.errors import ConfigError
from moe_ffn.studies.result import first_at
from moe_ffn.studies.statistics import Interval, mean_interval, positive_logs


def compute_at(loss: float, flops: Sequence[float], losses: Sequence[float]) -> float | None:
    """The FLOPs at which a curve first has this loss, between its points in log FLOPs; None outside of it."""
    if losses[0] < loss:
        return None
    log_flops = first_at(np.log(flops).tolist(), np.minimum.accumulate(losses).tolist(), loss)
    return None if log_flops is None else math.exp(log_flops)


LEVERAGE_LIMITS = (
    "Not for larger budgets, at which leverage differs. In the middle of a run the learning rate has not "
    "decayed yet, and the loss is above what a shorter run ends at: leverage above 1 is a lower bound there."
)
"""Limits of leverage."""

Curve = tuple[Sequence[float], Sequence[float]]
"""Training FLOPs, rising, and the loss at each."""


@dataclass(frozen=True)
class Leverage:
    """Efficiency leverage, C_dense / C_MoE at equal loss (Tian et al. 2025, arXiv 2507.17702)."""

    by_seed: Mapping[int, float]
    """Seed -> leverage at the loss that both curves reach: the higher of their lowest."""
    interval: Interval | None
    """Geometric mean over the seeds, with an interval by Student's t; None of fewer than 3 seeds."""


def leverage(dense: Mapping[int, Curve], moe: Mapping[int, Curve]) -> Leverage:
    """Compute the FLOPs of the dense model over those of the MoE at the same loss; above 1 the MoE saves.

    Curves are compared within a seed, at the higher of the two lowest losses, which both reach.

    Args:
        dense: seed -> curve of the dense model: of one run, or final losses of several sizes.
        moe: the same of the MoE; of one point, such as its final loss, where that lies on the dense curve.

    Raises:
        ConfigError: they share no seed, a value is not positive and finite, FLOPs do not rise, or the curves
            of a seed have no loss in common: without the seeds in which an arm is best, the rest would lie.
    """
    seeds = sorted(set(dense) & set(moe))
    if not seeds:
        raise ConfigError("the two arms have no seed in common")
    by_seed: dict[int, float] = {}
    for seed in seeds:
        for flops, losses in (dense[seed], moe[seed]):
            positive_logs("loss", losses)
            if (
                len(flops) != len(losses)
                or not len(flops)
                or np.any(np.diff(positive_logs("FLOPs", flops)) <= 0)
            ):
                raise ConfigError("a curve takes a loss for each of its FLOPs, which rise")
        loss = max(min(dense[seed][1]), min(moe[seed][1]))
        costs = [compute_at(loss, *curve) for curve in (dense[seed], moe[seed])]
        if costs[0] is not None and costs[1] is not None:
            by_seed[seed] = costs[0] / costs[1]
    if num_apart := len(seeds) - len(by_seed):
        raise ConfigError(
            f"the curves of the two arms have no loss in common in {num_apart} of {len(seeds)} seeds"
        )
    mean = mean_interval([math.log(value) for value in by_seed.values()])
    interval = Interval(*map(math.exp, mean)) if mean else None
    return Leverage(by_seed, interval)
