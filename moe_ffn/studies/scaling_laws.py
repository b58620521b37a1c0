"""Scaling fits: a formula for the loss of runs that differ in size, with intervals and a held-out error.

`fit` follows Hoffmann et al. 2022 (arXiv 2203.15556, approach 3): the Huber loss of log L, minimised by
L-BFGS from a grid of starts.

Intervals are percentiles of a bootstrap of residuals: the sizes of a study are chosen and not drawn, so that
they stay, and the residuals are resampled (Davison and Hinkley 1997, section 6.3). They hold what scatters
between runs, and no error of the formula itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from moe_ffn.config.errors import ConfigError, install, show
from moe_ffn.ffn.match import MAX_MISMATCH
from moe_ffn.studies.statistics import (
    Array,
    Interval,
    check_runs,
    percentile_interval,
    positive_logs,
    resampled_residuals,
)

DELTA = 1e-3
"""Of the Huber loss, in log L: a residual beyond it counts by its size, not by its square."""

NUM_RESAMPLES = 200

NUM_STARTS = 12
"""L-BFGS begins from so many points of the grid: those with the smallest Huber loss."""

NUM_STEPS = 40
"""Of Levenberg and Marquardt, from the estimate to that of a resample."""

LOG_10 = math.log(10)


# -- formulas


class Parameter(NamedTuple):
    """One parameter of a formula, as it is searched."""

    starts: Sequence[float]
    is_log: bool = False
    """Whether it is searched as its natural logarithm, in which `starts` and bounds are given too."""
    low: float = -60
    high: float = 60


@dataclass(frozen=True)
class Law:
    """A formula for the loss."""

    formula: str
    source: str
    variables: Mapping[str, str]
    """Name in the formula -> meaning and unit."""
    size: tuple[str, ...]
    """The variables whose product says which runs are the largest."""
    parameters: Mapping[str, Parameter]
    log_loss: Callable[[Mapping[str, Array], Mapping[str, Array]], Array]
    """Parameters as they are searched, (..., 1), and natural logarithms of the variables, (runs,), to
    log L, (..., runs). Analytic in the parameters, which may be complex: see `_with_slopes`."""
    published: Mapping[str, float] = field(default_factory=dict)
    """The parameters that its authors found, to compare with; of their data, in their units."""


def _log_sum_exp(*terms: Array) -> Array:
    largest = reduce(np.maximum, (np.real(term) for term in terms))
    return largest + np.log(reduce(np.add, (np.exp(term - largest) for term in terms)))


def power_law(variable: str, meaning: str) -> Law:
    """`L = E + A / C^alpha`, for a study in which only one size varies."""
    return Law(
        formula=f"L = E + A / {variable}^alpha",
        source="Hoffmann et al. 2022, arXiv 2203.15556, in one variable",
        variables={variable: meaning},
        size=(variable,),
        parameters={
            "E": Parameter((-1.0, -0.5, 0.0, 0.5, 1.0), is_log=True),
            "A": Parameter((0.0, 5.0, 10.0, 15.0, 20.0, 25.0), is_log=True),
            "alpha": Parameter((0.0, 0.5, 1.0, 1.5, 2.0), low=-1, high=4),
        },
        log_loss=lambda p, x: _log_sum_exp(p["E"], p["A"] - p["alpha"] * x[variable]),
    )


def _clark(p: Mapping[str, Array], x: Mapping[str, Array]) -> Array:
    start, most = np.exp(-p["E_start"]), np.exp(-p["E_max"])
    inverse = 1 / (np.exp(x["E"]) - 1 + 1 / (start - most)) + most
    experts, parameters = -np.log(inverse) / LOG_10, x["N"] / LOG_10
    slope = p["b"] + p["c"] * parameters
    return LOG_10 * (p["a"] * parameters + slope * experts + p["d"])


CLARK = Law(
    formula="log10 L = a log10 N + b log10 E^ + c log10 N log10 E^ + d, "
    "1/E^ = 1 / (E - 1 + 1 / (1/E_start - 1/E_max)) + 1/E_max",
    source="Clark et al. 2022, arXiv 2202.01169, equations 1 and 2",
    variables={"N": "parameters of the dense model, those that a token uses", "E": "experts"},
    size=("N",),
    parameters={
        "a": Parameter((-0.2, -0.1, -0.05)),
        "b": Parameter((-0.2, -0.1, 0.0)),
        "c": Parameter((0.0, 0.01)),
        "d": Parameter((0.5, 1.0, 1.5)),
        "E_start": Parameter((0.3, 0.7, 1.4), is_log=True, low=0, high=math.log(8)),
        "E_max": Parameter((4.0, 6.0), is_log=True, low=math.log(9), high=math.log(1e5)),
    },
    log_loss=_clark,
    # Table 3, S-BASE.
    published={
        "a": -0.082,
        "b": -0.108,
        "c": 0.009,
        "d": 1.104,
        "E_start": 1.847,
        "E_max": 314.478,
    },
)

# -- a fit of one of them


@dataclass(frozen=True)
class Fit:
    """A law fitted to the losses of runs."""

    law: Law
    parameters: Mapping[str, Interval]
    residuals: tuple[float, ...]
    """log L as measured less log L as fitted, one for each run in the order given."""
    ranges: Mapping[str, tuple[float, float]]
    """Variable -> smallest and largest of the runs."""
    num_held_out: int
    """How many runs were the largest."""
    held_out_error: float | None
    """Root mean square of the relative error on the largest runs, of a fit that has not seen them; None
    where without them too few runs are left."""
    fixed: Mapping[str, float] = field(default_factory=dict)
    """Parameters that were given and not fitted."""
    resampled: Array = field(default_factory=lambda: np.empty(0), repr=False, compare=False)
    """Parameters of each resample as they are searched, (resamples, parameters), in the law's order."""

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Parameters that the runs do not determine: their interval reaches a bound of the search."""
        found: list[str] = []
        for name, interval in self.parameters.items():
            kind = self.law.parameters[name]
            if name in self.fixed:
                continue
            bounds = _reported(self.law, name, np.array([kind.low + 1e-6, kind.high - 1e-6]))
            if interval.low <= bounds[0] or interval.high >= bounds[1]:
                found.append(name)
        return tuple(found)

    @property
    def limits(self) -> str:
        """What the fit may not be used for, as one sentence."""
        ranges = ", ".join(
            f"{name} from {low:.3g} to {high:.3g}" for name, (low, high) in self.ranges.items()
        )
        text = (
            f"Not for sizes outside of those fitted ({ranges}), nor for other data, tokenizers, schedules or "
            "numbers of tokens"
        )
        if self.undetermined:
            text += f"; the runs do not determine {_names(self.undetermined)}"
        return f"{text}."


def fit(
    law: Law,
    variables: Mapping[str, Sequence[float]],
    losses: Sequence[float],
    *,
    fixed: Mapping[str, float] = MappingProxyType({}),
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Fit:
    """Fit a law to the final losses of runs, with intervals and an error on the largest runs.

    The largest runs are held out once, for `held_out_error`; the parameters are of all runs.

    Args:
        variables: each variable of the law -> its value in each run.
        losses: of each run, in nats.
        fixed: parameters that are not fitted, such as an `E_max` far beyond the experts of the runs.

    Raises:
        ConfigError: lengths differ, a value is not positive and finite, a variable or the loss is the same in
            all runs, or the runs are no more than the parameters.
    """
    if set(variables) != set(law.variables):
        raise ConfigError(f"'{law.formula}' takes {_names(law.variables)}, got {_names(variables)}")
    if unknown := [name for name in fixed if name not in law.parameters]:
        raise ConfigError(f"'{law.formula}' has no parameter {_names(unknown)}")
    x = {name: positive_logs(name, variables[name]) for name in law.variables}
    y = positive_logs("loss", losses)
    free = [name for name in law.parameters if name not in fixed]
    check_runs(x, y, len(free))

    settings = _Settings(law, free, {name: _searched(law, name, v) for name, v in fixed.items()})
    estimate = settings.best(x, y)
    residuals = y - _log_loss(law, estimate, x)
    generator = np.random.default_rng(seed)
    drawn = resampled_residuals(residuals, len(free), num_resamples, generator)
    resampled = settings.refit(x, y - residuals + drawn, estimate)
    intervals = {
        name: percentile_interval(estimate[place], resampled[:, place])
        for place, name in enumerate(law.parameters)
    }
    for name in settings.exchangeable(estimate, x):
        intervals[name] = Interval(intervals[name].value, -math.inf, math.inf)
    sizes = np.sum([x[name] for name in law.size], axis=0)
    # Widths that were solved to cost the same are of one size.
    largest = sizes >= sizes.max() - math.log1p(MAX_MISMATCH)
    held_out_error = None
    kept = {name: values[~largest] for name, values in x.items()}
    try:
        check_runs(kept, y[~largest], len(free))
    except ConfigError:
        pass
    else:
        seen = settings.best(kept, y[~largest])
        beyond = {name: values[largest] for name, values in x.items()}
        errors = np.expm1(_log_loss(law, seen, beyond) - y[largest])
        held_out_error = float(np.sqrt(np.mean(errors**2)))
    return Fit(
        law,
        parameters={
            name: Interval(*map(float, _reported(law, name, ends)))
            for name, ends in intervals.items()
        },
        residuals=tuple(map(float, residuals)),
        ranges={name: (float(min(v)), float(max(v))) for name, v in variables.items()},
        num_held_out=int(largest.sum()),
        held_out_error=held_out_error,
        fixed=dict(fixed),
        resampled=resampled,
    )


@dataclass(frozen=True)
class _Settings:
    """What all fits of one bootstrap share."""

    law: Law
    free: Sequence[str]
    fixed: Mapping[str, float]
    """As they are searched."""

    def best(self, x: Mapping[str, Array], y: Array) -> Array:
        """The parameters with the smallest Huber loss over the grid of starts."""
        axes = [
            (self.fixed[name],) if name in self.fixed else kind.starts
            for name, kind in self.law.parameters.items()
        ]
        grid = np.array(list(product(*axes)))
        order = np.argsort(_huber(y - _log_loss(self.law, grid, x)), kind="stable")
        found = [self.minimise(x, y, grid[place]) for place in order[:NUM_STARTS]]
        return min(found, key=lambda pair: pair[0])[1]

    def minimise(self, x: Mapping[str, Array], y: Array, start: Array) -> tuple[float, Array]:
        """Huber loss and parameters at the end of L-BFGS."""
        try:
            from scipy.optimize import minimize
        except ImportError:
            raise ConfigError(f"fits need scipy; install with: {install('studies')}") from None

        def objective(free: Array) -> tuple[float, Array]:
            values, slopes = self._with_slopes(self._filled(start, free), x)
            residuals = y - values
            return float(_huber(residuals)), slopes @ -(np.clip(residuals / DELTA, -1, 1) / DELTA)

        result = minimize(
            objective,
            start[self._places],
            jac=True,
            method="L-BFGS-B",
            bounds=self._bounds.T,
            options={"maxiter": 2000, "maxfun": 4000, "ftol": 1e-13, "gtol": 1e-8},
        )
        return float(result.fun), self._filled(start, result.x)

    def refit(self, x: Mapping[str, Array], y: Array, start: Array) -> Array:
        """Parameters for each of (resamples, runs) losses, found together from one start near to all.

        Levenberg and Marquardt's steps on the same Huber loss, by weights: L-BFGS would do them one by one.
        """
        found = np.tile(start, (len(y), 1))
        damping = np.full((len(y), 1, 1), 1e-3)
        loss = _huber(y - _log_loss(self.law, found, x))
        for _ in range(NUM_STEPS):
            values, slopes = self._with_slopes(found, x)
            residuals = y - values
            weights = 1 / np.maximum(np.abs(residuals) / DELTA, 1)
            gradient = slopes @ (weights * residuals)[..., None]
            hessian = (slopes * weights[:, None]) @ slopes.swapaxes(-1, -2)
            scale = np.einsum("bii->bi", hessian)[..., None] * np.eye(len(self.free))
            # Of a parameter that changes nothing, such as a floor of 0, there are no slopes.
            never_singular = 1e-9 * np.eye(len(self.free))
            step = np.linalg.solve(hessian + damping * scale + never_singular, gradient)[..., 0]
            trial = self._filled(found, np.clip(found[:, self._places] + step, *self._bounds))
            tried = _huber(y - _log_loss(self.law, trial, x))
            better = tried < loss
            found, loss = np.where(better[:, None], trial, found), np.where(better, tried, loss)
            damping = np.clip(np.where(better[:, None, None], damping / 5, damping * 4), 1e-9, 1e9)
        return found

    def exchangeable(self, parameters: Array, x: Mapping[str, Array]) -> list[str]:
        """Parameters that can make up for each other: others give the same losses at these sizes."""
        slopes = self._with_slopes(parameters, x)[1]
        lengths = np.linalg.norm(slopes, axis=1, keepdims=True)
        directions, strengths, _ = np.linalg.svd(slopes / np.maximum(lengths, 1e-9))
        loose = np.abs(directions[:, strengths < 1e-6 * strengths[0]]).max(axis=1, initial=0)
        return [name for name, share in zip(self.free, loose, strict=True) if share > 0.01]

    @cached_property
    def _places(self) -> list[int]:
        return [list(self.law.parameters).index(name) for name in self.free]

    @cached_property
    def _bounds(self) -> Array:
        """Lowest and highest, (2, free parameters)."""
        kinds = self.law.parameters
        return np.array([(kinds[name].low, kinds[name].high) for name in self.free]).T

    def _filled(self, parameters: Array, free: Array) -> Array:
        filled = parameters.copy()
        filled[..., self._places] = free
        return filled

    def _with_slopes(self, parameters: Array, x: Mapping[str, Array]) -> tuple[Array, Array]:
        """Log L, (..., runs), and its derivative by each free parameter, (..., free, runs).

        By complex steps (Squire and Trapp 1998), which are exact for an analytic function.
        """
        step = 1e-30
        points = np.repeat(parameters[..., None, :].astype(complex), len(self.free), axis=-2)
        points[..., range(len(self.free)), self._places] += 1j * step
        values = _log_loss(self.law, points, x)
        return np.real(values[..., 0, :]), np.imag(values) / step


def _huber(residuals: Array) -> Array:
    """The sum of the Huber loss over the last axis, in units of `DELTA` squared.

    A sum, and L-BFGS run to its end: a mean of such small numbers ends it early (Besiroglu et al. 2024, arXiv
    2404.10102).
    """
    r = np.abs(residuals) / DELTA
    return np.where(r <= 1, r**2 / 2, r - 0.5).sum(-1)


def _log_loss(law: Law, parameters: Array, x: Mapping[str, Array]) -> Array:
    """Log L of (..., parameters) at (runs,) sizes, (..., runs)."""
    by_name = {name: parameters[..., place, None] for place, name in enumerate(law.parameters)}
    return law.log_loss(by_name, x)


def _searched(law: Law, name: str, value: float) -> float:
    if not math.isfinite(value) or (law.parameters[name].is_log and value <= 0):
        raise ConfigError(f"{name}: must be a positive, finite number, got {show(value)}")
    return math.log(value) if law.parameters[name].is_log else float(value)


def _reported(law: Law, name: str, value: Any) -> Any:
    return np.exp(value) if law.parameters[name].is_log else value


def _names(names: Any) -> str:
    return ", ".join(names) or "nothing"
