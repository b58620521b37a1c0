"""Scaling laws: formulas for the loss, fitted to runs of different sizes.

`fit` follows Hoffmann et al. 2022 (arXiv 2203.15556, approach 3): it minimises the Huber loss of log L from a
grid of starts.

Intervals are percentiles of a bootstrap that resamples the residuals, because the sizes are chosen, not
random (Davison and Hinkley 1997, section 6.3). They cover the scatter between runs, not errors of the
formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from moe_ffn.config.errors import ConfigError
from moe_ffn.ffn.match import MAX_MISMATCH
from moe_ffn.studies.statistics import (
    FIT_RESAMPLES,
    Array,
    Interval,
    check_runs,
    percentile_interval,
    positive_logs,
    resampled_residuals,
)

DELTA = 1e-3
"""Threshold of the Huber loss, in log L: larger residuals count linearly."""

NUM_STARTS = 12
"""Number of starts: the points of the grid with the smallest Huber loss."""

LOG_10 = math.log(10)


# -- formulas


class Parameter(NamedTuple):
    """Search range of one parameter of a formula."""

    starts: Sequence[float]
    is_log: bool = False
    """True if the search is over the natural logarithm; `starts` and bounds are logarithms too."""
    low: float = -60
    high: float = 60


@dataclass(frozen=True)
class Law:
    """A formula for the loss."""

    formula: str
    source: str
    size: str
    """Variable that measures the size of a run, for `Fit.held_out_error`."""
    parameters: Mapping[str, Parameter]
    log_loss: Callable[[Any, Mapping[str, Array]], Array]
    """Maps search parameters and natural logarithms of the variables, (runs,), to log L, (runs,). It must be
    complex-analytic, because derivatives are computed by complex steps."""
    published: Mapping[str, float] = field(default_factory=dict)
    """Parameters in the paper, to compare with."""


def power_law(variable: str) -> Law:
    """Return the law `L = E + A / C^alpha`, for a study that varies only one size."""
    return Law(
        formula=f"L = E + A / {variable}^alpha",
        source="Hoffmann et al. 2022, arXiv 2203.15556, in one variable",
        size=variable,
        parameters={
            "E": Parameter((-1.0, -0.5, 0.0, 0.5, 1.0), is_log=True),
            "A": Parameter((0.0, 5.0, 10.0, 15.0, 20.0, 25.0), is_log=True),
            "alpha": Parameter((0.0, 0.5, 1.0, 1.5, 2.0), low=-1, high=4),
        },
        log_loss=lambda p, x: np.log(np.exp(p[0]) + np.exp(p[1] - p[2] * x[variable])),
    )


E_START, E_MAX = 1.847, 314.478
"""Published constants of Clark's saturation, which studies with few experts do not determine."""


def _clark(p: Any, x: Mapping[str, Array]) -> Array:
    shift = 1 / (1 / E_START - 1 / E_MAX)
    experts = -np.log10(1 / (np.exp(x["E"]) - 1 + shift) + 1 / E_MAX)
    parameters = x["N"] / LOG_10
    a, b, c, d = p
    return LOG_10 * (a * parameters + b * experts + c * parameters * experts + d)


CLARK = Law(
    formula="log10 L = a log10 N + b log10 E^ + c log10 N log10 E^ + d, "
    "1/E^ = 1 / (E - 1 + 1 / (1/E_start - 1/E_max)) + 1/E_max",
    source="Clark et al. 2022, arXiv 2202.01169, equations 1 and 2",
    size="N",
    parameters={
        "a": Parameter((-0.1,)),
        "b": Parameter((-0.1,)),
        "c": Parameter((0.0,)),
        "d": Parameter((1.0,)),
    },
    log_loss=_clark,
    published={"a": -0.082, "b": -0.108, "c": 0.009, "d": 1.104},  # table 3, S-BASE
)

# -- fitting


@dataclass(frozen=True)
class Fit:
    """A law fitted to the losses of runs."""

    parameters: Mapping[str, Interval]
    residuals: tuple[float, ...]
    """Measured minus fitted log L of each run, in the given order."""
    ranges: Mapping[str, tuple[float, float]]
    """Variable -> smallest and largest value among the runs."""
    num_held_out: int
    """Number of the largest runs."""
    held_out_error: float | None
    """Root mean square relative error, on the largest runs, of a fit to the other runs; None if those are too
    few."""
    undetermined: tuple[str, ...] = ()
    """Parameters whose interval reaches a bound of the search."""

    @property
    def limits(self) -> str:
        """Limits of the fit, as one sentence."""
        ranges = ", ".join(
            f"{name} from {low:.3g} to {high:.3g}" for name, (low, high) in self.ranges.items()
        )
        text = (
            f"The fit is valid for the fitted sizes ({ranges}), and for the same data, tokenizer, schedule "
            "and number of tokens"
        )
        if self.undetermined:
            text += f"; the runs do not determine {', '.join(self.undetermined)}"
        return f"{text}."


def fit(
    law: Law,
    variables: Mapping[str, Sequence[float]],
    losses: Sequence[float],
    *,
    num_resamples: int = FIT_RESAMPLES,
    seed: int = 0,
) -> Fit:
    """Fit a law to the final losses of runs, in nats, with intervals and an error on the largest runs.

    Each variable has its value in each run. Only `held_out_error` holds out the largest runs; the parameters
    are fitted to all runs. Raises ConfigError if lengths differ, a value is not positive and finite, a
    variable or the loss is the same in all runs, or there are no more runs than parameters.
    """
    x = {name: positive_logs(name, values) for name, values in variables.items()}
    y = positive_logs("loss", losses)
    num_parameters = len(law.parameters)
    check_runs(x, y, num_parameters)
    estimate = _best(law, x, y)
    residuals = y - law.log_loss(estimate, x)
    drawn = resampled_residuals(
        residuals, num_parameters, num_resamples, np.random.default_rng(seed)
    )
    resampled = np.array([_minimise(law, x, y - residuals + noise, estimate)[1] for noise in drawn])
    intervals = {
        name: percentile_interval(estimate[i], resampled[:, i])
        for i, name in enumerate(law.parameters)
    }
    kinds = law.parameters
    # Widths solved for equal FLOPs give slightly different sizes, which count as one size.
    largest = x[law.size] >= x[law.size].max() - math.log1p(MAX_MISMATCH)
    return Fit(
        parameters={
            name: Interval(*map(math.exp, interval)) if kinds[name].is_log else interval
            for name, interval in intervals.items()
        },
        residuals=tuple(map(float, residuals)),
        ranges={name: (float(min(v)), float(max(v))) for name, v in variables.items()},
        num_held_out=int(largest.sum()),
        held_out_error=_held_out_error(law, x, y, largest),
        undetermined=tuple(
            name
            for name, (_, low, high) in intervals.items()
            if low <= kinds[name].low + 1e-3 or high >= kinds[name].high - 1e-3
        ),
    )


def _held_out_error(law: Law, x: Mapping[str, Array], y: Array, largest: Array) -> float | None:
    x_others, x_largest = (
        {name: values[runs] for name, values in x.items()} for runs in (~largest, largest)
    )
    try:
        check_runs(x_others, y[~largest], len(law.parameters))
    except ConfigError:
        return None
    estimate = _best(law, x_others, y[~largest])
    errors = np.expm1(law.log_loss(estimate, x_largest) - y[largest])
    return float(np.sqrt(np.mean(errors**2)))


def _best(law: Law, x: Mapping[str, Array], y: Array) -> Array:
    """Return the search parameters with the smallest Huber loss, from the best starts of the grid."""
    grid = list(product(*(kind.starts for kind in law.parameters.values())))
    grid.sort(key=lambda start: _huber(y - law.log_loss(start, x)))
    minima = [_minimise(law, x, y, start) for start in grid[:NUM_STARTS]]
    return min(minima, key=lambda minimum: minimum[0])[1]


def _huber(residuals: Array) -> float:
    r = np.abs(residuals) / DELTA
    return float(np.where(r <= 1, r**2 / 2, r - 0.5).sum())


def _minimise(
    law: Law, x: Mapping[str, Array], y: Array, start: Sequence[float] | Array
) -> tuple[float, Array]:
    """Return the smallest Huber loss near a start, and its search parameters."""
    minimum = least_squares(
        lambda parameters: (y - law.log_loss(parameters, x)) / DELTA,
        start,
        jac="cs",
        bounds=tuple(
            zip(*((kind.low, kind.high) for kind in law.parameters.values()), strict=True)
        ),
        x_scale="jac",
        loss="huber",
    )
    return float(minimum.cost), minimum.x
