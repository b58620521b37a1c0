"""Efficiency leverage: ratio of the FLOPs with which two arms reach the same loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moe_ffn.config.errors import ConfigError
from moe_ffn.studies.result import first_at
from moe_ffn.studies.statistics import Interval, mean_interval, positive_logs


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

Curve = tuple[Sequence[float], Sequence[float]]
"""Training FLOPs in ascending order, and the loss at each."""


@dataclass(frozen=True)
class Leverage:
    """Efficiency leverage, C_dense / C_MoE at equal loss (Tian et al. 2025, arXiv 2507.17702)."""

    by_seed: Mapping[int, float]
    """Seed -> leverage at the lowest loss that both curves reach."""
    interval: Interval | None
    """Geometric mean over the seeds, with Student's interval; None with fewer than 3 seeds."""


def leverage(dense: Mapping[int, Curve], moe: Mapping[int, Curve]) -> Leverage:
    """Divide the FLOPs of the dense model by those of the MoE at the same loss; above 1 the MoE saves FLOPs.

    Curves are compared within a seed, at the lowest loss that both reach.

    Args:
        dense: seed -> curve of the dense model: one run, or the final losses of several sizes.
        moe: seed -> curve of the MoE; a single point, such as its final loss, if the dense curve reaches it.

    Raises:
        ConfigError: the arms share no seed, a value is not positive and finite, FLOPs do not rise, or the
            curves of some seed have no loss in common. Leaving out such seeds would bias the mean.
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
