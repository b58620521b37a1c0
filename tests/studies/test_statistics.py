"""Intervals, p-values and what a study could have seen: by hand, and by scipy."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from moe_ffn.config.errors import ConfigError
from moe_ffn.studies import scaling_laws
from moe_ffn.studies.scaling_laws import CLARK, E_MAX, E_START, fit, power_law
from moe_ffn.studies.statistics import (
    SMALL_DIFFERENCE,
    Interval,
    bootstrap_interval,
    detectable_difference,
    estimate,
    holm,
    mean_interval,
    paired_differences,
    percentile_interval,
    resampled_residuals,
    seeds_needed,
)


def test_fewer_than_three_seeds_have_no_interval() -> None:
    assert mean_interval([2.5, 2.6]) is None
    assert mean_interval([2.5]) is None
    assert mean_interval([]) is None
    assert paired_differences({"a": ({0: 2.5}, {0: 2.4})}) == {}
    assert paired_differences({"a": ({0: 2.5, 1: 2.5}, {0: 2.4, 2: 2.4})}) == {}, "one of both"


def test_a_paired_difference_is_scipy_s() -> None:
    rng = random.Random(0)
    baseline = {seed: 2 + rng.gauss(0, 0.05) for seed in range(10)}
    values = {seed: loss - 0.01 + rng.gauss(0, 0.01) for seed, loss in baseline.items()}

    alone = paired_differences({"a": (values | {97: 0.0}, baseline | {98: 9.0})})["a"]
    others = dict.fromkeys("bcd", (baseline, baseline))
    found = paired_differences({"a": (values, baseline), **others})["a"]

    expected = stats.ttest_rel(list(values.values()), list(baseline.values()))
    limits = expected.confidence_interval(0.95)
    assert alone.p_value == pytest.approx(expected.pvalue)
    assert found.p_value == pytest.approx(4 * expected.pvalue), "Holm's, the smallest of four"
    assert found.interval is not None
    assert found.interval[1:] == pytest.approx((limits.low, limits.high))
    assert found.interval == alone.interval
    assert paired_differences({"a": (values, baseline), "apart": ({0: 2.0}, {1: 2.0})}) == {
        "a": alone
    }, "an arm without pairs makes no comparison"
    sd = stats.tstd([values[seed] - baseline[seed] for seed in values])
    assert found.detectable == pytest.approx(detectable_difference(sd, 10, alpha=0.05 / 4))


def test_equal_pairs_and_pairs_that_differ_by_the_same() -> None:
    baseline = {0: 1.0, 1: 2.0, 2: 3.0}
    equal = paired_differences({"equal": (baseline, baseline)})["equal"]
    shifted = paired_differences({"shifted": ({0: 1.5, 1: 2.5, 2: 3.5}, baseline)})["shifted"]
    assert (equal.p_value, equal.interval) == (1.0, Interval(0, 0, 0))
    assert (shifted.p_value, shifted.interval) == (0.0, Interval(0.5, 0.5, 0.5))


def test_two_pairs_have_a_mean_and_the_seeds_that_they_lack() -> None:
    two = ({0: 2.0, 1: 2.1}, {0: 2.1, 1: 2.1})
    three = ({0: 2.0, 1: 2.1, 2: 2.3}, {0: 2.1, 1: 2.1, 2: 2.1})

    alone = paired_differences({"three": three})["three"]
    found = paired_differences({"two": two, "three": three})

    pair = found["two"]
    assert (pair.mean, pair.num_pairs) == (pytest.approx(-0.05), 2)
    assert (pair.interval, pair.p_value, pair.detectable) == (None,) * 3
    assert not pair.is_claimed
    # s = 0.1 / sqrt(2); of two arms, each at 0.05 / 2.
    assert pair.seeds_needed == seeds_needed(0.1 / math.sqrt(2), alpha=0.05 / 2)
    assert found["three"] == alone, "corrected for only the arms that are judged"


def test_two_seeds_of_several_arms_have_the_error_of_a_block_design() -> None:
    """Least squares with an effect of each arm and of each seed is the oracle."""
    rng = np.random.default_rng(0)
    names, losses_AS = ["base", *"abc"], rng.normal(2, 0.02, (4, 2)) + rng.normal(0, 0.1, 2)
    rows = [(arm, seed) for arm in range(4) for seed in range(2)]
    design = np.array([[*(a == arm for a in range(4)), seed] for arm, seed in rows], dtype=float)
    observed = np.array([losses_AS[row] for row in rows])
    solved = np.linalg.lstsq(design, observed, rcond=None)
    contrast = np.array([-1, 1, 0, 0, 0])
    variance = solved[1][0] / 3 * contrast @ np.linalg.inv(design.T @ design) @ contrast
    effect, margin = contrast @ solved[0], stats.t.ppf(0.975, 3) * math.sqrt(variance)

    arms = {n: dict(enumerate(map(float, row))) for n, row in zip(names, losses_AS, strict=True)}
    pairs = {name: (arms[name], arms["base"]) for name in "abc"}
    found = paired_differences(pairs)["a"]

    assert found.is_pooled
    assert found.interval == pytest.approx((effect, effect - margin, effect + margin))
    assert estimate([1.0, 2.0]).degrees == 1
    reversed_a = dict(reversed(arms["a"].items()))
    assert paired_differences({**pairs, "a": (reversed_a, arms["base"])})["a"] == found, "any order"
    p_value = 2 * stats.t.sf(abs(effect) / math.sqrt(variance), 3)
    assert found.p_value is not None
    assert p_value <= found.p_value <= 3 * p_value + 1e-12, "Holm's"
    assert paired_differences({"a": pairs["a"], "b": pairs["b"]})["a"].interval is None, (
        "too few arms"
    )
    another = (arms["c"], arms["a"])
    assert paired_differences({**pairs, "c": another})["a"].interval is None, "another baseline"


def test_the_seeds_needed_are_the_fewest_that_find_the_difference() -> None:
    for sd, alpha in ((0.05, 0.05), (0.02, 0.01), (0.5, 0.05)):
        count = seeds_needed(sd, alpha=alpha)
        assert detectable_difference(sd, count, alpha=alpha) <= SMALL_DIFFERENCE
        assert detectable_difference(sd, count - 1, alpha=alpha) > SMALL_DIFFERENCE
    # The published table below: 0.5 standard deviations take 34 pairs.
    assert seeds_needed(1.0, 0.5, power=0.80778 - 1e-4) == 34
    assert seeds_needed(0.0) == 3, "two have no interval, whatever their difference"


def test_equality_is_scipy_s_two_one_sided_tests() -> None:
    rng = random.Random(0)
    for mean, sd in ((0.0, 0.01), (0.015, 0.01), (-0.015, 0.01), (0.03, 0.02)):
        d = [rng.gauss(mean, sd) for _ in range(8)]
        above: Any = stats.ttest_1samp(d, -0.02, alternative="greater")
        below: Any = stats.ttest_1samp(d, 0.02, alternative="less")
        assert estimate(d).equality_p_value(0.02) == pytest.approx(max(above.pvalue, below.pvalue))
        low, high = stats.t.interval(0.9, 7, np.mean(d), stats.sem(d))
        assert (estimate(d).equality_p_value(0.02) < 0.05) == (low > -0.02 and high < 0.02)
    assert estimate([0.01] * 3).equality_p_value(0.02) == 0
    assert estimate([0.02] * 3).equality_p_value(0.02) == 1, "the margin itself is no equality"


def test_equality_is_corrected_over_the_arms() -> None:
    d = [0.004, -0.006, 0.001, 0.002, -0.001]
    arm = (dict(enumerate(d)), dict.fromkeys(range(5), 0.0))
    alone = paired_differences({"a": arm}, margin=0.01)["a"]
    one_of_three = paired_differences(dict.fromkeys("abc", arm), margin=0.01)["a"]
    assert alone.margin == 0.01
    assert alone.p_equal == pytest.approx(estimate(d).equality_p_value(0.01))
    assert one_of_three.p_equal == pytest.approx(3 * estimate(d).equality_p_value(0.01))
    assert alone.is_equal
    assert not paired_differences({"a": arm}, margin=0.002)["a"].is_equal


def test_holm_s_correction_by_hand() -> None:
    # 4 x 0.01 = 0.04; 3 x 0.02 = 0.06; 2 x 0.03 = 0.06; 1 x 0.04, which may not be below 0.06.
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([0.03]) == [0.03]
    assert holm([]) == []


@pytest.mark.parametrize(("num_pairs", "alpha"), [(3, 0.05), (10, 0.005), (40, 0.05)])
def test_the_detectable_difference_is_found_with_a_power_of_80_percent(
    num_pairs: int, alpha: float
) -> None:
    difference = detectable_difference(0.02, num_pairs, alpha=alpha)
    degrees = num_pairs - 1
    quantile = stats.t.ppf(1 - alpha / 2, degrees)
    power = stats.nct.sf(quantile, degrees, difference / 0.02 * math.sqrt(num_pairs))
    assert power == pytest.approx(0.8, abs=1e-6)


def test_the_detectable_difference_of_a_published_table() -> None:
    # G*Power's own example of a paired test: d_z = 0.5 at alpha 0.05 takes 34 pairs for a power of 0.80778.
    assert detectable_difference(1.0, 34, power=0.80778) == pytest.approx(0.5, abs=1e-4)


def test_the_window_bootstrap_has_the_width_of_the_normal_interval() -> None:
    rng = random.Random(0)
    windows = [rng.gauss(-0.02, 0.1) for _ in range(400)]

    found = bootstrap_interval(windows)

    mean, error = stats.tmean(windows), stats.sem(windows)
    assert found.value == pytest.approx(mean)
    assert (found.low, found.high) == pytest.approx(
        (mean - 1.96 * error, mean + 1.96 * error), abs=0.1 * error
    )
    assert bootstrap_interval(windows) == found, "the same resamples each time"


def test_resampled_residuals_have_the_variance_of_the_noise_before_the_fit() -> None:
    # Mean 3, so centred -2, -1, 0, 3 with squares 14: of 4 runs and 2 parameters s^2 = 14 / (4 - 2) = 7.
    found = resampled_residuals(np.array([1.0, 2.0, 3.0, 6.0]), 2, 50, np.random.default_rng(0))
    assert found.shape == (50, 4)
    values = np.unique(found)
    assert values == pytest.approx(np.array([-2, -1, 0, 3]) * math.sqrt(2))
    assert np.mean(values**2) == pytest.approx(7)


def test_a_percentile_interval_leaves_a_fortieth_off_at_each_end() -> None:
    assert percentile_interval(3, np.arange(1001)) == pytest.approx((3, 25, 975))


# -- known parameters are found again within their intervals; failed fits give one sentence


POWER = power_law("C")


def grid(**values: Sequence[float]) -> dict[str, list[float]]:
    """Columns of all combinations of the values, by name."""
    columns = np.meshgrid(*(np.array(v, dtype=float) for v in values.values()))
    return {name: column.ravel().tolist() for name, column in zip(values, columns, strict=True)}


@pytest.fixture
def _few_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search from two starts, which is enough for one variable and takes a sixth of the time."""
    monkeypatch.setattr(scaling_laws, "NUM_STARTS", 2)


def noisy(losses: Any, share: float, seed: int = 0) -> list[float]:
    noise = np.random.default_rng(seed).normal(0, share, len(losses))
    return (losses * np.exp(noise)).tolist()


def clark(variables: dict[str, list[float]], **p: float) -> Any:
    n, e = np.log10(variables["N"]), np.array(variables["E"])
    shift = 1 / (1 / p["E_start"] - 1 / p["E_max"])
    saturated = np.log10(1 / (1 / (e - 1 + shift) + 1 / p["E_max"]))
    return 10 ** (p["a"] * n + p["b"] * saturated + p["c"] * n * saturated + p["d"])


EXPERTS = grid(N=[15e6, 55e6, 370e6, 1.3e9], E=[1, 2, 4, 8, 32, 128, 512])
PUBLISHED = {**CLARK.published, "E_start": E_START, "E_max": E_MAX}


def test_published_parameters_are_found_again_without_noise() -> None:
    found = fit(CLARK, EXPERTS, clark(EXPERTS, **PUBLISHED), num_resamples=2)
    assert np.exp(found.residuals) == pytest.approx(1, abs=1e-4)
    assert found.held_out_error == pytest.approx(0, abs=2e-3)
    assert found.num_held_out == 7, "the largest N with any number of experts"
    for parameter in "abcd":
        assert found.parameters[parameter].value == pytest.approx(PUBLISHED[parameter], rel=0.03)


@pytest.mark.slow
def test_95_percent_intervals_hold_the_truth_about_as_often() -> None:
    """Count over twenty noisy studies."""
    sizes = grid(C=np.geomspace(1e12, 1e15, 12).tolist())
    exact = 2 + 1e5 / np.array(sizes["C"]) ** 0.4
    num_held = 0
    for seed in range(20):
        found = fit(POWER, sizes, noisy(exact, 0.002, seed), seed=seed, num_resamples=200)
        low, high = found.parameters["alpha"][1:]
        num_held += low <= 0.4 <= high
    assert 16 <= num_held <= 20


def test_published_parameters_lie_in_the_intervals_of_noisy_runs() -> None:
    losses = noisy(clark(EXPERTS, **PUBLISHED), 0.001)

    found = fit(CLARK, EXPERTS, losses, num_resamples=100)

    for parameter, interval in found.parameters.items():
        width = interval.high - interval.low
        assert interval.low - width < PUBLISHED[parameter] < interval.high + width, parameter
        assert interval.low < interval.value < interval.high
    assert np.std(found.residuals) == pytest.approx(0.001, rel=0.4)
    assert found.held_out_error is not None
    assert found.held_out_error < 0.02


@pytest.mark.usefixtures("_few_starts")
@pytest.mark.parametrize(("last", "num_held_out"), [(1.015e15, 2), (1.03e15, 1)])
def test_sizes_that_were_solved_to_be_equal_are_held_out_together(
    last: float, num_held_out: int
) -> None:
    sizes = grid(C=[1e12, 3e12, 1e13, 3e13, 1e14, 1e15, last])
    losses = 2 + 1e5 / np.array(sizes["C"]) ** 0.4
    losses[-1] *= 1.1

    found = fit(POWER, sizes, losses.tolist(), num_resamples=2)

    # The Huber loss is not led by one bad run.
    assert found.parameters["alpha"].value == pytest.approx(0.4, abs=0.02)
    assert found.residuals[-1] == pytest.approx(math.log(1.1), abs=0.01)
    assert found.num_held_out == num_held_out
    # Root of the mean square: one run is 1 - 1 / 1.1 off, the other, if it is held out too, by nothing.
    expected = (1 - 1 / 1.1) / math.sqrt(num_held_out)
    assert found.held_out_error == pytest.approx(expected, abs=0.003)


@pytest.mark.usefixtures("_few_starts")
def test_no_run_is_held_out_of_too_few() -> None:
    sizes = grid(C=[1e12, 1e13, 1e14, 1e15])
    found = fit(POWER, sizes, [3.0, 2.6, 2.4, 2.3], num_resamples=2)
    assert (found.num_held_out, found.held_out_error) == (1, None)


@pytest.mark.parametrize(
    ("variables", "losses", "message"),
    [
        (
            {"C": [1, 2, 4]},
            [3, 2, 1],
            "3 runs at 3 sizes cannot determine 3 parameters; give at least 3",
        ),
        ({"C": [1, 1, 2, 2]}, [3, 3, 2, 1], "4 runs at 2 sizes cannot determine 3 parameters"),
        ({"C": []}, [], "0 runs at 0 sizes cannot determine 3 parameters"),
        (
            {"C": [1, 2, 4, 8]},
            [2, 2, 2, 2],
            "the loss is the same in all runs, so no fit can show its effect",
        ),
        (
            {"C": [1, 2, 4, math.inf]},
            [3, 2, 1, 1],
            "C: must be positive and finite in all runs, got",
        ),
        ({"C": [1, 2, 4, 8]}, [3, 2, 1], "there are 4 values of C for 3 losses"),
    ],
)
def test_runs_that_cannot_be_fitted_are_rejected(
    variables: dict[str, list[float]], losses: list[float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        fit(POWER, variables, losses)
    assert "\n" not in str(caught.value)


def test_a_variable_that_does_not_vary_is_rejected() -> None:
    variables = {"N": [1e6, 2e6, 4e6, 8e6, 1e7, 2e7, 3e7], "E": [4] * 7}
    losses = [4, 3.5, 3.2, 3, 2.9, 2.8, 2.7]
    with pytest.raises(ConfigError, match="E is the same in all runs"):
        fit(CLARK, variables, losses)


@pytest.mark.usefixtures("_few_starts")
def test_a_power_law_without_a_floor_is_fitted_though_the_floor_changes_nothing() -> None:
    sizes = grid(C=[1, 2, 4, 8, 16])
    # Lowest in the middle: no power law falls and rises.
    losses = [2.1, 2.02, 2.0, 2.02, 2.1]
    found = fit(POWER, sizes, losses, num_resamples=10)
    assert np.isfinite(found.residuals).all()
    assert found.limits.startswith("The fit is valid for the fitted sizes (C from 1 to 16)")
    assert "the runs do not determine " in found.limits
    assert found.limits.endswith(".")
