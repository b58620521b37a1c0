"""Optimal model size at each FLOPs budget, by parabolas (arXiv 2203.15556, approach 2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moe_ffn.config.errors import ConfigError
from moe_ffn.studies.statistics import (
    FIT_RESAMPLES,
    LEVEL,
    Array,
    Interval,
    check_runs,
    percentile_interval,
    positive_logs,
    resampled_residuals,
)


@dataclass(frozen=True)
class Parabola:
    """A parabola of the loss in the logarithm of the size, and its minimum."""

    sizes: tuple[float, ...]
    losses: tuple[float, ...]
    coefficients: tuple[float, float, float]
    """Coefficients of log(size)^2, of log(size) and of 1."""
    minimum: Interval | None
    """Size with the lowest loss; None if there is no minimum."""
    problem: str
    """Reason why there is no minimum, or an empty string."""
    resampled: Array = field(repr=False, compare=False)
    """log of the size with the lowest loss in each resample; NaN without a minimum."""

    def curve(self, sizes: Array) -> Array:
        """Return the fitted losses at these sizes."""
        return np.polyval(self.coefficients, np.log(sizes))


def fit_parabola(sizes: Sequence[float], losses: Sequence[float], *, seed: int = 0) -> Parabola:
    """Fit a parabola of the loss in log(size) by least squares; its minimum must lie within the sizes.

    Raises ConfigError if a value is not positive and finite, the loss is the same in all runs, or there are
    fewer than three sizes or four runs.
    """
    x, y = positive_logs("size", sizes), np.exp(positive_logs("loss", losses))
    check_runs({"size": x}, y, 3)
    centre = x.mean()  # keeps the least-squares problem well-conditioned
    estimate = np.polyfit(x - centre, y, 2)
    fitted = np.polyval(estimate, x - centre)
    drawn = resampled_residuals(y - fitted, 3, FIT_RESAMPLES, np.random.default_rng(seed))
    low, high = x.min() - centre, x.max() - centre

    def lowest(coefficients: Array) -> Array:
        a, b, _ = coefficients
        with np.errstate(divide="ignore", invalid="ignore"):
            vertex = -b / (2 * a)
        return np.where((a > 0) & (low < vertex) & (vertex < high), vertex, np.nan)

    vertex = float(lowest(estimate))
    resampled = lowest(np.polyfit(x - centre, (fitted + drawn).T, 2)) + centre
    share_without = float(np.isnan(resampled).mean())
    a, b, c = map(float, estimate)
    minimum, problem = None, ""
    if a <= 0:
        problem = "the parabola opens downwards: it has no minimum"
    elif math.isnan(vertex):
        end = "largest" if -b / (2 * a) >= high else "smallest"
        problem = f"the loss is lowest at the {end} size: the minimum lies beyond the sizes tried"
    elif share_without > 1 - LEVEL:
        problem = (
            f"a minimum near {math.exp(vertex + centre):.3g} is not certain: {share_without:.0%} of the "
            "resamples have none among the sizes tried"
        )
    else:
        minima = np.exp(resampled[~np.isnan(resampled)])
        minimum = percentile_interval(math.exp(vertex + centre), minima)
    return Parabola(
        tuple(map(float, sizes)),
        tuple(map(float, losses)),
        (a, b - 2 * a * centre, a * centre**2 - b * centre + c),
        minimum,
        problem,
        resampled,
    )


@dataclass(frozen=True)
class IsoFlop:
    """The optimal size at each FLOPs budget, and a power law of the optimal size in the budget."""

    parabolas: Mapping[float, Parabola]
    """Training FLOPs -> parabola, in ascending order."""
    problems: Mapping[float, str]
    """Budget without a parabola or a minimum -> reason."""
    exponent: Interval | None
    """Exponent of the power law; None if fewer than two budgets have a minimum."""

    @property
    def limits(self) -> str:
        """Limits of the fit, in sentences."""
        low, high = min(self.parabolas, default=0), max(self.parabolas, default=0)
        budgets = (
            f"budgets from {low:.3g} to {high:.3g}" if low < high else f"a budget of {low:.3g}"
        )
        text = (
            f"The fit is valid for {budgets} FLOPs, and for the same data, tokenizer and schedule. A "
            "parabola is an approximation near its minimum"
        )
        if self.exponent is None:
            text += "; with fewer than two minima there is no power law"
        elif sum(parabola.minimum is not None for parabola in self.parabolas.values()) == 2:
            text += "; a line through two minima cannot show whether they lie on a power law"
        return f"{text}."


def fit_isoflop(flops: Sequence[float], sizes: Sequence[float], losses: Sequence[float]) -> IsoFlop:
    """Fit a parabola in log N at each budget, and a power law through the minima (approach 2).

    Runs whose training FLOPs differ by less than 5 % share a budget. Sizes are parameters, total or active;
    losses are in nats. Raises ConfigError if lengths differ, or a value is not positive and finite.
    """
    logs = positive_logs("FLOPs", flops)
    for name, values in {"sizes": sizes, "losses": losses}.items():
        if len(values) != len(logs):
            raise ConfigError(f"there are {len(values)} {name} for {len(logs)} budgets")
    if not len(logs):
        raise ConfigError("there are no runs to fit")
    order = np.argsort(logs, kind="stable")
    ends = np.flatnonzero(np.diff(logs[order]) > math.log(1.05)) + 1
    parabolas: dict[float, Parabola] = {}
    problems: dict[float, str] = {}
    for number, runs in enumerate(np.split(order, ends)):
        budget = float(np.exp(logs[runs].mean()))
        try:
            parabola = fit_parabola(
                [sizes[run] for run in runs], [losses[run] for run in runs], seed=number
            )
        except ConfigError as error:
            problems[budget] = str(error)
            continue
        parabolas[budget] = parabola
        if parabola.problem:
            problems[budget] = parabola.problem
    exponent = None
    minima = {budget: p.minimum for budget, p in parabolas.items() if p.minimum is not None}
    if len(minima) >= 2:
        log_budgets = np.log(list(minima))
        slope, _ = np.polyfit(log_budgets, [math.log(size.value) for size in minima.values()], 1)
        resampled = np.array([parabolas[budget].resampled for budget in minima])
        complete = resampled[:, ~np.isnan(resampled).any(axis=0)]
        exponent = percentile_interval(float(slope), np.polyfit(log_budgets, complete, 1)[0])
    return IsoFlop(parabolas, problems, exponent)
