"""The fit recovers the best size of each budget within its interval, or reports why there is none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from moe_ffn.config.errors import ConfigError
from moe_ffn.studies.curves import Point, crossover, flops_at, leverage, loss_by_flops
from moe_ffn.studies.isoflop import IsoFlop, fit_isoflop, fit_parabola
from tests.helpers.synthetic_run import make_result
from tests.studies.test_statistics import noisy


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
def test_a_minimum_at_the_edge_is_rejected(best: float, end: str) -> None:
    sizes = [1e5, 2e5, 4e5, 8e5]
    found = fit_parabola(sizes, parabola(sizes, best))
    assert found.minimum is None
    assert found.problem == (
        f"the loss is lowest at {end}: the minimum lies beyond the sizes tried"
    )


def test_three_sizes_and_four_runs_are_enough() -> None:
    sizes = [1e5, 1e5, 4e5, 1.6e6]
    assert fit_parabola(sizes, parabola(sizes, 3e5)).minimum == pytest.approx((3e5,) * 3)


def test_a_parabola_that_opens_downwards_is_rejected() -> None:
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
    rejected, too_few = found.problems.values()
    assert "lies beyond the sizes tried" in rejected or "downwards" in rejected
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
def test_few_minima_give_no_power_law(num_minima: int, said: str) -> None:
    """Budgets with a rejected minimum are left out, like budgets with too few runs for a parabola."""
    sizes = [1e5, 2e5, 4e5, 8e5, 1.6e6]
    lowest = [4e5] * num_minima + [5e7]
    flops = [10.0 ** (13 + place) for place in range(len(lowest)) for _ in sizes]
    losses = [float(loss) for best in lowest for loss in parabola(sizes, best)]

    found = fit_isoflop([*flops, 1e18], [*sizes * len(lowest), 1e5], [*losses, 2.0])

    assert len(found.problems) == 2
    assert said in found.limits
    assert ("minima" in found.limits) == bool(said)
    assert (found.exponent is None) == (num_minima == 1)


def test_isoflop_rejects_invalid_sets_of_runs() -> None:
    with pytest.raises(ConfigError, match="there are 1 sizes for 2 budgets"):
        fit_isoflop([1e9, 1e9], [1e5], [2, 2])
    with pytest.raises(ConfigError, match="there are no runs to fit"):
        fit_isoflop([], [], [])
    with pytest.raises(ConfigError, match="FLOPs: must be positive and finite"):
        fit_isoflop([math.nan], [1e5], [2])


# -- how much less compute one arm takes to the loss of another, by hand and of known curves


def test_compute_is_read_between_the_points_of_a_curve() -> None:
    flops, losses = [1e10, 1e11, 1e12], [4.0, 3.0, 2.0]
    assert flops_at(3.0, flops, losses) == pytest.approx(1e11)
    assert flops_at(2.5, flops, losses) == pytest.approx(10**11.5)
    assert flops_at(4.0, flops, losses) == pytest.approx(1e10)
    assert flops_at(4.1, flops, losses) is None, "before the first point"
    assert flops_at(1.9, flops, losses) is None, "never reached"
    # A loss that rises again was reached when it was first low.
    assert flops_at(3.0, [*flops, 1e13], [4.0, 3.0, 3.5, 2.0]) == pytest.approx(1e11)
    # And the next lower loss lies on the line from the low one on, not from where it had risen to.
    assert flops_at(2.5, [*flops, 1e13], [4.0, 3.0, 3.5, 2.0]) == pytest.approx(10**12.5)


def curve(factor: float, seed: int = 0) -> tuple[list[float], list[float]]:
    """A model that reaches every loss with `factor` less FLOPs."""
    flops = np.geomspace(1e12, 1e15, 60)
    return flops.tolist(), (2 + 1e3 * (flops * factor) ** -0.25 + 1e-4 * seed).tolist()


@pytest.mark.parametrize("factor", [3.0, 0.4])
def test_leverage_is_how_much_less_compute_the_moe_takes(factor: float) -> None:
    found = leverage({0: curve(1)}, {0: curve(factor)})
    assert found.by_seed[0] == pytest.approx(factor, rel=0.01)
    assert found.interval is None, "of one seed"


def test_leverage_of_a_final_loss_is_read_from_the_final_losses_of_other_sizes() -> None:
    dense = ([1e12, 1e13, 1e14], [4.0, 3.0, 2.0])
    assert leverage({0: dense}, {0: ([1e12], [2.5])}).by_seed[0] == pytest.approx(10**1.5)
    assert leverage({0: dense}, {0: ([1e13], [3.5])}).by_seed[0] == pytest.approx(10**-0.5)
    with pytest.raises(ConfigError, match="no loss in common"):
        leverage({0: dense}, {0: ([1e13], [1.9])})


def test_leverage_has_an_interval_over_seeds() -> None:
    dense = {seed: curve(1, seed) for seed in range(4)}
    moe = {seed: curve(2 + 0.1 * seed, seed) for seed in range(5)}
    found = leverage(dense, moe)
    assert list(found.by_seed) == [0, 1, 2, 3]
    assert found.interval is not None
    low, high = found.interval[1:]
    assert low < found.interval.value < high
    assert found.interval.value == pytest.approx(2.147, abs=0.02)
    # By hand: t of 3 degrees of freedom is 3.182.
    logs = np.log(list(found.by_seed.values()))
    half = 3.1824 * logs.std(ddof=1) / 2
    assert math.log(high) == pytest.approx(logs.mean() + half, rel=1e-4)


def test_arms_without_anything_in_common_have_no_leverage() -> None:
    with pytest.raises(ConfigError, match="the two arms have no seed in common"):
        leverage({0: curve(1)}, {1: curve(2)})
    with pytest.raises(ConfigError, match="have no loss in common in 1 of 1 seeds"):
        leverage({0: ([1, 2], [9, 8])}, {0: ([1, 2], [5, 4])})
    # Without the seed in which the arm is best the mean of the others would be too low.
    beyond = {0: curve(1.5), 1: ([1e12], [0.1])}
    with pytest.raises(ConfigError, match="have no loss in common in 1 of 2 seeds"):
        leverage({0: curve(1), 1: curve(1)}, beyond)
    with pytest.raises(ConfigError, match="a curve needs rising FLOPs, and one loss for each"):
        leverage({0: ([2, 1], [9, 8])}, {0: curve(2)})
    with pytest.raises(ConfigError, match="loss: must be positive and finite"):
        leverage({0: ([1, 2], [9, math.nan])}, {0: curve(2)})


FOLDER = {"init_from": "models/x"}


def points(*values: tuple[float, float]) -> list[Point]:
    return [Point(flops, [loss]) for flops, loss in values]


def test_a_run_that_began_with_a_folder_has_its_flops_too() -> None:
    results = [
        make_result("up,max_steps=100", 0, 2.0, options=FOLDER, steps=100, main_arm="up,max_steps=100"),
        make_result("up,max_steps=100", 1, 2.2, options=FOLDER, steps=100, main_arm="up,max_steps=100"),
        make_result("new,max_steps=200", 0, 2.0, steps=200),
        make_result("new,max_steps=50", 0, 2.5, steps=50),
        make_result("new,max_steps=100", 0, None, steps=100),
        make_result("new,max_steps=50,k=1", 0, 9.0, steps=50, main_arm="new,max_steps=50", tuning={"k": 1}),
    ]  # fmt: skip
    found = loss_by_flops(results, initial_flops=1e6)

    (up,), (new, longer) = found["up"], found["new"]
    assert up.flops == 1e6 + 3 * 1000 * 100 * 10
    assert up.loss == pytest.approx(2.1)
    assert (new.flops, new.loss) == (3 * 1000 * 50 * 10, 2.5)
    assert (longer.flops, longer.loss) == (3 * 1000 * 200 * 10, 2.0), "by FLOPs, as given or not"


UP = points((1e3, 3.0), (1e5, 2.0))


@pytest.mark.parametrize(
    ("other", "wanted"),
    [
        (points((1e2, 4.0), (1e3, 3.5), (1e5, 1.5)), 1e4),  # halfway in log FLOPs
        (points((1e3, 3.5), (1e4, 2.0), (1e5, 2.5)), None),  # is above in the end
        (points((1e3, 2.5), (1e5, 1.5)), None),  # is below from the first
        (points((1e6, 1.5), (1e7, 1.0)), None),  # was never measured at so many
        (points((1e3, 3.5), (1e7, 1.0)), None),  # is below beyond what both have
        (points((1e3, 3.5), (1e5, 2.0)), 1e5),  # comes down to it at the end
        (points((1e3, 3.0), (1e5, 1.5)), None),  # begins at the same loss
        (points((1e3, 3.5), (10**3.5, 2.0), (1e4, 3.0), (10**4.5, 1.75), (1e5, 1.0)), 10**4.25),
    ],
    ids=[
        "once",
        "not at the end",
        "from the first",
        "elsewhere",
        "beyond",
        "equal at the end",
        "equal at first",
        "the last of several",
    ],
)
def test_an_arm_is_below_from_the_last_crossing_on(
    other: list[Point], wanted: float | None
) -> None:
    found = crossover(UP, other)
    assert found == (None if wanted is None else pytest.approx(wanted, rel=1e-6))
