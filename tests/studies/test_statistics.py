"""Intervals, p-values and what a study could have seen: by hand, and by scipy."""

from __future__ import annotations

import math
import random
import sys
from typing import Any

import numpy as np
import pytest
from scipy import stats

from moe_ffn.config.errors import ConfigError
from moe_ffn.studies.statistics import (
    SMALL_DIFFERENCE,
    Interval,
    bootstrap_interval,
    detectable_difference,
    equality_p_value,
    holm,
    mean_interval,
    paired_differences,
    percentile_interval,
    resampled_residuals,
    seeds_needed,
)


def test_the_interval_of_five_seeds_by_hand() -> None:
    # Mean 3, standard deviation sqrt(2.5), t(0.975, 4) = 2.7764 from the tables.
    margin = 2.7764 * math.sqrt(2.5) / math.sqrt(5)
    found = mean_interval([1, 2, 3, 4, 5])
    assert found == pytest.approx((3, 3 - margin, 3 + margin), abs=1e-4)


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
    assert found.detectable == detectable_difference(sd, 10, alpha=0.05 / 4)


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
    assert found["three"] == alone, "corrected for the arms that are judged alone"


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
        assert equality_p_value(d, 0.02) == pytest.approx(max(above.pvalue, below.pvalue))
        low, high = stats.t.interval(0.9, 7, np.mean(d), stats.sem(d))
        assert (equality_p_value(d, 0.02) < 0.05) == (low > -0.02 and high < 0.02)
    assert equality_p_value([0.01, 0.01, 0.01], 0.02) == 0
    assert equality_p_value([0.02, 0.02, 0.02], 0.02) == 1, "the margin itself is no equality"


def test_equality_is_corrected_over_the_arms() -> None:
    d = [0.004, -0.006, 0.001, 0.002, -0.001]
    arm = (dict(enumerate(d)), dict.fromkeys(range(5), 0.0))
    alone = paired_differences({"a": arm}, margin=0.01)["a"]
    one_of_three = paired_differences(dict.fromkeys("abc", arm), margin=0.01)["a"]
    assert alone.margin == 0.01
    assert alone.p_equal == pytest.approx(equality_p_value(d, 0.01))
    assert one_of_three.p_equal == pytest.approx(3 * equality_p_value(d, 0.01))
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


def test_without_scipy_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ConfigError, match=r"^intervals over seeds need scipy: pip install scipy$"):
        mean_interval([1.0, 2.0, 3.0])
