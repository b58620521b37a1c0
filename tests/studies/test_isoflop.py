"""The best size of each budget is found again within its interval, or it is said why there is none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from moe_ffn.config.errors import ConfigError
from moe_ffn.studies.isoflop import IsoFlop, fit_isoflop, fit_parabola
from tests.studies.test_scaling_laws import noisy


def parabola(sizes: Sequence[float], best: float) -> Any:
    return 2 + 0.05 * np.log(np.array(sizes) / best) ** 2


def test_the_minimum_of_a_parabola_lies_in_its_interval() -> None:
    sizes = [1e5, 2e5, 4e5, 8e5, 1.6e6] * 3
    found = fit_parabola(sizes, noisy(parabola(sizes, 5e5), 0.002))

    assert found.minimum is not None
    assert found.minimum.low < found.minimum.value < found.minimum.high
    assert 1.02 < found.minimum.high / found.minimum.low < 1.1
    assert float(found.curve(np.array(5e5))) == pytest.approx(2, abs=0.01)
    assert found.problem == ""


@pytest.mark.parametrize(("best", "end"), [(5e4, "the smallest size"), (5e7, "the largest size")])
def test_a_minimum_at_the_edge_is_refused(best: float, end: str) -> None:
    sizes = [1e5, 2e5, 4e5, 8e5]
    found = fit_parabola(sizes, parabola(sizes, best))
    assert found.minimum is None
    assert found.problem == (
        f"the loss is lowest at {end}: the minimum lies beyond the sizes tried"
    )


def test_three_sizes_and_four_runs_are_enough() -> None:
    sizes = [1e5, 1e5, 4e5, 1.6e6]
    assert fit_parabola(sizes, parabola(sizes, 3e5)).minimum == pytest.approx((3e5,) * 3)


def test_a_parabola_that_opens_downwards_is_refused() -> None:
    found = fit_parabola([1e5, 2e5, 4e5, 8e5], [2.0, 2.1, 2.11, 2.05])
    assert found.minimum is None
    assert found.problem == "the parabola opens downwards: it has no minimum"


def test_a_minimum_that_the_noise_moves_out_of_the_sizes_is_not_certain() -> None:
    sizes = [1e5, 2e5, 4e5, 8e5] * 2
    found = fit_parabola(sizes, noisy(parabola(sizes, 6e5), 0.02, seed=3))
    assert found.minimum is None
    assert "is not certain" in found.problem


def test_95_percent_intervals_of_a_minimum_hold_the_truth_about_as_often() -> None:
    sizes = [1e5, 2e5, 4e5, 8e5, 1.6e6] * 3
    hits = 0
    for seed in range(100):
        found = fit_parabola(sizes, noisy(parabola(sizes, 5e5), 0.002, seed), seed=seed)
        assert found.minimum is not None
        hits += found.minimum.low <= 5e5 <= found.minimum.high
    assert 85 <= hits <= 100


def isoflop_runs(noise: float) -> tuple[list[float], list[float], list[float]]:
    """Best size 0.1 C^0.5 at four budgets."""
    flops: list[float] = []
    sizes: list[float] = []
    losses: list[float] = []
    for number, budget in enumerate([1e13, 3e13, 1e14, 3e14]):
        best = 0.1 * budget**0.5
        tried = [best * factor for factor in (0.3, 0.6, 1.1, 2, 4)]
        flops += [budget * 1.01, budget, budget * 0.99, budget, budget]
        sizes += tried
        losses += noisy(parabola(tried, best), noise, number)
    return flops, sizes, losses


def minima(found: IsoFlop) -> list[float]:
    return [p.minimum.value for p in found.parabolas.values() if p.minimum is not None]


def test_the_power_law_of_the_minima_is_found_again() -> None:
    found = fit_isoflop(*isoflop_runs(0.001))

    assert len(found.parabolas) == 4
    assert found.problems == {}
    assert found.exponent is not None
    assert found.exponent.low < 0.5 < found.exponent.high
    assert found.exponent.high - found.exponent.low < 0.1
    assert minima(found) == pytest.approx([0.1 * c**0.5 for c in (1e13, 3e13, 1e14, 3e14)], rel=0.1)
    assert found.limits.startswith("The fit is valid for budgets from 1e+13 to 3e+14 FLOPs")


def test_budgets_without_a_minimum_are_named_and_left_out() -> None:
    flops, sizes, losses = isoflop_runs(0.0005)
    flops += [1e15] * 4 + [3e15] * 2
    sizes += [1e5, 2e5, 4e5, 8e5, 1e5, 2e5]
    losses += [2.4, 2.3, 2.2, 2.1, 2.0, 1.9]

    found = fit_isoflop(flops, sizes, losses)

    assert [f"{budget:.0e}" for budget in found.problems] == ["1e+15", "3e+15"]
    refused, too_few = found.problems.values()
    assert "lies beyond the sizes tried" in refused or "downwards" in refused
    assert too_few.startswith("2 runs at 2 sizes cannot determine 3 parameters")
    assert minima(found) == pytest.approx([0.1 * c**0.5 for c in (1e13, 3e13, 1e14, 3e14)], rel=0.1)


@pytest.mark.parametrize(("factor", "num_budgets"), [(1.04, 1), (1.06, 2), (1.4, 2)])
def test_flops_less_than_5_percent_apart_are_one_budget(factor: float, num_budgets: int) -> None:
    sizes = [1e5, 2e5, 4e5, 8e5, 1.6e6] * 2
    flops = [1e14, 1e14 * factor] * 5
    assert len(fit_isoflop(flops, sizes, parabola(sizes, 4e5)).parabolas) == num_budgets


def test_the_resamples_of_two_budgets_are_independent() -> None:
    """The same runs at ten times the FLOPs: drawn alike, both minima would move together."""
    sizes = [1e5, 2e5, 4e5, 8e5, 1.6e6]
    losses = noisy(parabola(sizes, 4e5), 0.001)

    found = fit_isoflop([1e14] * 5 + [1e15] * 5, sizes * 2, losses * 2)

    first, second = (p.resampled for p in found.parabolas.values())
    assert found.exponent is not None
    assert found.exponent.value == pytest.approx(0, abs=1e-9)
    # The slope through two points is their difference over log 10.
    spread = math.sqrt(first.var() + second.var()) / math.log(10)
    assert found.exponent.high - found.exponent.low == pytest.approx(2 * 1.96 * spread, rel=0.2)
    # Of four runs a parabola leaves one residual: s^2 is the sum of squares / (4 - 3), here to first order
    # in the vertex -b / 2a, whose slopes by a and b are b / 2a^2 and -1 / 2a.
    one = fit_parabola(sizes[:4], losses[:4])
    design = np.vander(np.log(sizes[:4]), 3)
    residuals = np.array(losses[:4]) - design @ one.coefficients
    a, b, _ = one.coefficients
    slopes = np.array([b / (2 * a**2), -1 / (2 * a), 0])
    variance = slopes @ np.linalg.inv(design.T @ design) @ slopes * (residuals**2).sum()
    assert one.resampled.std() == pytest.approx(math.sqrt(variance), rel=0.15)


@pytest.mark.parametrize(
    ("num_minima", "said"),
    [
        (1, "with fewer than two minima there is no power law"),
        (2, "a line through two minima cannot show"),
        (3, ""),
    ],
)
def test_few_minima_are_said_to_show_no_power_law(num_minima: int, said: str) -> None:
    """A budget whose minimum is refused counts as little as one with too few runs for a parabola."""
    sizes = [1e5, 2e5, 4e5, 8e5, 1.6e6]
    lowest = [4e5] * num_minima + [5e7]
    flops = [10.0 ** (13 + place) for place in range(len(lowest)) for _ in sizes]
    losses = [float(loss) for best in lowest for loss in parabola(sizes, best)]

    found = fit_isoflop([*flops, 1e18], [*sizes * len(lowest), 1e5], [*losses, 2.0])

    assert len(found.problems) == 2
    assert said in found.limits
    assert ("minima" in found.limits) == bool(said)
    assert (found.exponent is None) == (num_minima == 1)


def test_isoflop_refuses_what_is_no_set_of_runs() -> None:
    with pytest.raises(ConfigError, match="there are 1 sizes for 2 budgets"):
        fit_isoflop([1e9, 1e9], [1e5], [2, 2])
    with pytest.raises(ConfigError, match="there are no runs to fit"):
        fit_isoflop([], [], [])
    with pytest.raises(ConfigError, match="FLOPs: must be positive and finite"):
        fit_isoflop([math.nan], [1e5], [2])
