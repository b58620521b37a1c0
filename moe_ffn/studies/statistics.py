"""Statistics of a study: intervals, paired differences, corrected p-values, detectable differences.

n is the number of seeds, d the paired differences, s their standard deviation (n - 1 in the denominator).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy import special

from moe_ffn.config.errors import ConfigError

LEVEL = 0.95
"""Confidence level of every interval."""
POWER = 0.8
"""Probability with which a study detects its smallest detectable difference."""
NUM_RESAMPLES = 2000
FIT_RESAMPLES = 200
"""Resamples of a fit, each of which is fitted again."""
SIGNIFICANT = 0.05
"""Significance level: a difference is claimed if its p-value after Holm's correction is below it."""
MIN_SEEDS = 3
"""Minimum number of seeds for an interval; with two it would extend 12.7 standard errors to each side."""
MIN_POOLED = 3
"""Minimum number of arms over which the standard error of two seeds is pooled."""
EQUALITY_MARGIN = 0.02
"""Nats per token: a smaller difference counts as equality, unless a study or the user sets another margin."""
SMALL_DIFFERENCE = 0.05
"""Nats per token: a difference worth finding, for which `PairedDifference.seeds_needed` is computed."""

Array = np.ndarray[Any, np.dtype[Any]]

Over = Literal["seeds", "windows"]
"""Samples of an interval: training seeds, or the validation windows of one seed."""


class Interval(NamedTuple):
    """An estimate, and the ends of its interval."""

    value: float
    low: float
    high: float

    @property
    def margin(self) -> float:
        """Half of the length."""
        return (self.high - self.low) / 2


class Estimate(NamedTuple):
    """A mean over pairs, its standard error, and the degrees of freedom of that error."""

    mean: float
    error: float
    degrees: int

    @property
    def interval(self) -> Interval:
        """Student's interval, mean +- t(degrees) error."""
        margin = float(special.stdtrit(self.degrees, (1 + LEVEL) / 2)) * self.error
        return Interval(self.mean, self.mean - margin, self.mean + margin)

    @property
    def p_value(self) -> float:
        """Two-sided p-value of Student's t."""
        if not self.error:
            return float(self.mean == 0)
        return float(2 * special.stdtr(self.degrees, -abs(self.mean / self.error)))

    def equality_p_value(self, margin: float) -> float:
        """Return the p-value of two one-sided t-tests that the mean lies between -margin and margin.

        It is the larger of the p-values against a mean of -margin or less, and of margin or more (Schuirmann
        1987). Below 0.05, the 90 % interval of the mean lies within the margin.
        """
        distance = margin - abs(self.mean)
        if not self.error:
            return float(distance <= 0)
        return float(special.stdtr(self.degrees, -distance / self.error))


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean with the error s / sqrt(n)."""
    return Estimate(fmean(values), stdev(values) / math.sqrt(len(values)), len(values) - 1)


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return the mean with Student's interval; None with too few values."""
    return estimate(values).interval if len(values) >= MIN_SEEDS else None


@dataclass(frozen=True)
class PairedDifference:
    """An arm's loss minus the baseline's, in nats per token, pair by pair; below 0 the arm is better."""

    mean: float
    over: Over
    num_pairs: int
    """Number of shared seeds or windows."""
    interval: Interval | None = None
    """Interval of the mean; this and the next two fields are None with too few seeds."""
    p_value: float | None = None
    """Two-sided p-value after Holm's correction; None over windows, which support no claim about training."""
    detectable: float | None = None
    """Smallest difference that would be detected, by `detectable_difference` at Holm's strictest level."""
    seeds_needed: int | None = None
    """Number of seeds that would detect `SMALL_DIFFERENCE`, at the same level; None over windows."""
    margin: float = EQUALITY_MARGIN
    """Largest difference that counts as equality, in nats per token."""
    p_equal: float | None = None
    """`Estimate.equality_p_value` after Holm's correction; None where `p_value` is."""
    is_pooled: bool = False
    """True if the standard error is pooled over arms; see `paired_differences`."""

    @property
    def is_claimed(self) -> bool:
        return self.p_value is not None and self.p_value < SIGNIFICANT

    @property
    def is_equal(self) -> bool:
        """Return True if the difference is shown to be smaller than the margin, in either direction."""
        return self.p_equal is not None and self.p_equal < SIGNIFICANT


def paired_differences(
    arms: Mapping[str, tuple[Mapping[int, float], Mapping[int, float]]],
    margin: float = EQUALITY_MARGIN,
) -> dict[str, PairedDifference]:
    """Compare each arm with its baseline by Student's paired t, over two or more shared seeds.

    An arm has its loss and the baseline's in each seed, in nats per token. The two runs of a seed share the
    data order and the initial weights outside the block, so that effects of the seed on both cancel in the
    difference. With two seeds, the standard error is `pooled_error` if enough arms share baseline and seeds.
    """
    paired: dict[str, list[float]] = {}
    with_two: dict[Any, list[str]] = defaultdict(list)
    for name, (losses, baseline) in arms.items():
        seeds = sorted(losses.keys() & baseline.keys())
        if len(seeds) > 1:
            paired[name] = [losses[seed] - baseline[seed] for seed in seeds]
        if len(seeds) == 2:
            with_two[tuple((seed, baseline[seed]) for seed in seeds)].append(name)
    tested = {name: estimate(d) for name, d in paired.items() if len(d) >= MIN_SEEDS}
    for names in (names for names in with_two.values() if len(names) >= MIN_POOLED):
        error, degrees = pooled_error([paired[name] for name in names])
        tested |= {name: Estimate(fmean(paired[name]), error, degrees) for name in names}
    p_values = dict(zip(tested, holm([e.p_value for e in tested.values()]), strict=True))
    p_equal = holm([e.equality_p_value(margin) for e in tested.values()])
    p_equal_values = dict(zip(tested, p_equal, strict=True))
    differences: dict[str, PairedDifference] = {}
    for name, d in paired.items():
        found, is_tested = tested.get(name, estimate(d)), name in tested
        sd, alpha = (
            found.error * math.sqrt(len(d)),
            (1 - LEVEL) / len(tested if is_tested else paired),
        )
        differences[name] = PairedDifference(
            fmean(d),
            "seeds",
            len(d),
            found.interval if is_tested else None,
            p_values.get(name),
            detectable_difference(sd, len(d), alpha=alpha, degrees=found.degrees)
            if is_tested
            else None,
            seeds_needed(sd, alpha=alpha),
            margin,
            p_equal_values.get(name),
            is_tested and len(d) < MIN_SEEDS,
        )
    return differences


def pooled_error(differences: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the standard error of a mean difference, pooled over arms, and its degrees of freedom.

    Each arm has its difference from the same baseline in each of the same seeds. The seeds are the blocks of
    a randomized block design, whose a + 1 arms, the baseline among them, share one residual variance (Cochran
    and Cox 1957, chapter 4): error = sqrt(2 variance / seeds), with a (seeds - 1) degrees of freedom.
    """
    rows = np.array([*differences, [0.0] * len(differences[0])])
    residuals = rows - rows.mean(axis=1, keepdims=True) - rows.mean(axis=0) + rows.mean()
    num_seeds = rows.shape[1]
    degrees = len(differences) * (num_seeds - 1)
    return math.sqrt(2 * float((residuals**2).sum()) / degrees / num_seeds), degrees


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for multiple comparisons, in the given order (Holm 1979).

    The i-th smallest of m becomes the largest of (m - j + 1) p(j) over j <= i, at most 1. If all results
    below 0.05 are claimed, the probability that any claim is wrong is at most 0.05.
    """
    order = np.argsort(p_values)
    factors = np.arange(len(p_values), 0, -1)
    corrected = np.empty(len(p_values))
    corrected[order] = np.maximum.accumulate(factors * np.asarray(p_values)[order]).clip(max=1)
    return corrected.tolist()


def detectable_difference(
    sd: float,
    num_pairs: int,
    *,
    alpha: float = 1 - LEVEL,
    power: float = POWER,
    degrees: int | None = None,
) -> float:
    """Return the smallest true difference that a paired t-test at `alpha` detects with probability `power`.

    The result is nc * s / sqrt(n). nc is the noncentrality for which a noncentral t variable (by default with
    n - 1 `degrees` of freedom) exceeds the critical value t(1 - alpha / 2) with probability `power` (Cohen
    1988, chapter 2). The estimate s is treated as the true standard deviation.
    """
    degrees = degrees or num_pairs - 1
    critical = special.stdtrit(degrees, 1 - alpha / 2)
    noncentrality = special.nctdtrinc(degrees, 1 - power, critical)
    return float(noncentrality) * sd / math.sqrt(num_pairs)


def seeds_needed(
    sd: float,
    difference: float = SMALL_DIFFERENCE,
    *,
    alpha: float = 1 - LEVEL,
    power: float = POWER,
) -> int:
    """Return the smallest number of pairs >= `MIN_SEEDS` whose `detectable_difference` is <= `difference`."""
    quantiles = special.ndtri([1 - alpha / 2, power])
    by_normal = (sum(quantiles) * sd / difference) ** 2  # a few less than by Student's t
    num_pairs = max(MIN_SEEDS, math.ceil(by_normal))
    while detectable_difference(sd, num_pairs, alpha=alpha, power=power) > difference:
        num_pairs += 1
    return num_pairs


def bootstrap_interval(values: Sequence[float]) -> Interval:
    """Return the mean over windows of text with its bootstrap percentile interval.

    The interval shows how much the mean depends on the validation text, not on the training seed. To compare
    two runs, pass the differences per window. Efron and Tibshirani 1993, chapter 13.
    """
    values_N = np.asarray(values, dtype=np.float64)
    random = np.random.default_rng(0)
    means = [
        values_N[random.integers(len(values_N), size=len(values_N))].mean()
        for _ in range(NUM_RESAMPLES)
    ]
    return percentile_interval(float(values_N.mean()), np.array(means))


# -- fits


def resampled_residuals(
    residuals: Array, num_parameters: int, num_resamples: int, generator: np.random.Generator
) -> Array:
    """Return residuals drawn with replacement, (resamples, runs), scaled up because a fit shrinks them."""
    num_runs = len(residuals)
    centred = (residuals - residuals.mean()) * math.sqrt(num_runs / (num_runs - num_parameters))
    return centred[generator.integers(num_runs, size=(num_resamples, num_runs))]


def percentile_interval(value: float, resampled: Array) -> Interval:
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(value), float(low), float(high))


def positive_logs(name: str, values: Sequence[float]) -> Array:
    """Return natural logarithms; raise ConfigError for a value that is not positive and finite."""
    array = np.asarray(values, dtype=np.float64)
    wrong = array[~(np.isfinite(array) & (array > 0))]
    if wrong.size:
        raise ConfigError(f"{name}: must be positive and finite in all runs, got {wrong[0]:g}")
    return np.log(array)


def check_runs(x: Mapping[str, Array], y: Array, num_parameters: int) -> None:
    """Raise ConfigError if runs with variables x and losses y cannot determine a fit."""
    for name, values in x.items():
        if len(values) != len(y):
            raise ConfigError(f"there are {len(values)} values of {name} for {len(y)} losses")
    num_points = len({*zip(*x.values(), strict=True)})
    if len(y) <= num_parameters or num_points < num_parameters:
        raise ConfigError(
            f"{len(y)} runs at {num_points} sizes cannot determine {num_parameters} parameters; give at "
            f"least {num_parameters} sizes and {num_parameters + 1} runs"
        )
    for name, values in {**x, "the loss": y}.items():
        if np.ptp(values) == 0:
            raise ConfigError(
                f"{name} is the same in all runs, so no fit can show its effect; add runs that vary it"
            )
