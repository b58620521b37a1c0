"""Known parameters are found again within their intervals; what cannot be fitted is said in one sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from moe_ffn.errors import ConfigError
from moe_ffn.studies import fits
from moe_ffn.studies.fits import (
    CHINCHILLA,
    CLARK,
    GRANULARITY,
    Fit,
    IsoFlop,
    Law,
    compute_at,
    fit,
    fit_isoflop,
    fit_parabola,
    leverage,
    power_law,
)

POWER = power_law("C", "training FLOPs")


def grid(**values: Sequence[float]) -> dict[str, list[float]]:
    """Every combination, as one column for each name."""
    columns = np.meshgrid(*(np.array(v, dtype=float) for v in values.values()))
    return {name: column.ravel().tolist() for name, column in zip(values, columns, strict=True)}


def noisy(losses: Any, share: float, seed: int = 0) -> list[float]:
    noise = np.random.default_rng(seed).normal(0, share, len(losses))
    return (losses * np.exp(noise)).tolist()


def chinchilla(variables: dict[str, list[float]], **p: float) -> Any:
    n, d = np.array(variables["N"]), np.array(variables["D"])
    return p["E"] + p["A"] / n ** p["alpha"] + p["B"] / d ** p["beta"]


def clark(variables: dict[str, list[float]], **p: float) -> Any:
    n, e = np.log10(variables["N"]), np.array(variables["E"])
    shift = 1 / (1 / p["E_start"] - 1 / p["E_max"])
    saturated = np.log10(1 / (1 / (e - 1 + shift) + 1 / p["E_max"]))
    return 10 ** (p["a"] * n + p["b"] * saturated + p["c"] * n * saturated + p["d"])


def krajewski(variables: dict[str, list[float]], **p: float) -> Any:
    g, n, d = (np.array(variables[name]) for name in "GND")
    return p["c"] + (p["g"] / g ** p["gamma"] + p["a"]) / n ** p["alpha"] + p["b"] / d ** p["beta"]


SIZES = grid(N=[1e7, 3e7, 1e8, 3e8, 1e9], D=[3e8, 1e9, 3e9, 1e10])
EXPERTS = grid(N=[15e6, 55e6, 370e6, 1.3e9], E=[1, 2, 4, 8, 32, 128, 512])
GRAINS = grid(G=[1, 2, 4, 8, 16], N=[1e7, 1e8, 1e9], D=[1e9, 1e10, 1e11])

PUBLISHED: dict[str, tuple[Law, dict[str, list[float]], Any, Mapping[str, float]]] = {
    "chinchilla": (CHINCHILLA, SIZES, chinchilla, CHINCHILLA.published),
    "clark": (CLARK, EXPERTS, clark, CLARK.published),
    "krajewski": (GRANULARITY, GRAINS, krajewski, GRANULARITY.published),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameters_are_found_again_without_noise(name: str) -> None:
    law, variables, formula, true = PUBLISHED[name]
    losses = formula(variables, **true)

    found = fit(law, variables, losses, num_resamples=2)

    assert np.exp(found.residuals) == pytest.approx(1, abs=1e-4)
    at = {name: values[-1] * 1.5 for name, values in variables.items()}
    expected = formula({name: [value] for name, value in at.items()}, **true)[0]
    assert found.predict(**at).value == pytest.approx(expected, rel=1e-3)
    assert found.held_out_error == pytest.approx(0, abs=2e-3)
    for parameter in ("alpha", "beta", "a", "b", "gamma"):
        if parameter in true and not law.parameters[parameter].is_log:
            assert found.parameters[parameter].value == pytest.approx(true[parameter], rel=0.03)


def test_95_percent_intervals_hold_the_truth_about_as_often() -> None:
    """Of an exponent and of a prediction, over twenty noisy studies."""
    sizes = grid(C=np.geomspace(1e12, 1e15, 12).tolist())
    exact = 2 + 1e5 / np.array(sizes["C"]) ** 0.4
    exponents = predictions = 0
    for seed in range(20):
        found = fit(POWER, sizes, noisy(exact, 0.002, seed), seed=seed)
        low, high = found.parameters["alpha"][1:]
        exponents += low <= 0.4 <= high
        low, high = found.predict(C=1e14)[1:]
        predictions += low <= 2 + 1e5 / 1e14**0.4 <= high
    assert 16 <= exponents <= 20
    assert 16 <= predictions <= 20


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameters_lie_in_the_intervals_of_noisy_runs(name: str) -> None:
    law, variables, formula, true = PUBLISHED[name]
    losses = noisy(formula(variables, **true), 0.001)

    found = fit(law, variables, losses, num_resamples=100)

    for parameter, interval in found.parameters.items():
        width = interval.high - interval.low
        assert interval.low - width < true[parameter] < interval.high + width, parameter
        assert interval.low < interval.value < interval.high
    assert np.std(found.residuals) == pytest.approx(0.001, rel=0.4)
    assert found.held_out_error is not None
    assert found.held_out_error < 0.02


def test_the_largest_runs_are_held_out_and_the_error_is_theirs() -> None:
    sizes = grid(C=[1e12, 3e12, 1e13, 3e13, 1e14, 1e15])
    losses = 2 + 1e5 / np.array(sizes["C"]) ** 0.4
    losses[-1] *= 1.1  # the last run lies 10 % above what the others say

    found = fit(POWER, sizes, losses.tolist(), num_resamples=2)

    assert found.num_held_out == 1
    assert found.held_out_error == pytest.approx(1 - 1 / 1.1, abs=0.005)


def test_of_too_few_runs_none_is_held_out() -> None:
    sizes = grid(C=[1e12, 1e13, 1e14, 1e15])
    found = fit(POWER, sizes, [3.0, 2.6, 2.4, 2.3], num_resamples=2)
    assert (found.num_held_out, found.held_out_error) == (1, None)


def test_the_huber_loss_is_not_led_by_one_bad_run() -> None:
    sizes = grid(C=np.geomspace(1e12, 1e15, 12).tolist())
    clean = 2 + 1e5 / np.array(sizes["C"]) ** 0.4
    spoiled = clean.copy()
    spoiled[4] *= 1.2

    found = fit(POWER, sizes, spoiled.tolist(), num_resamples=2)

    assert found.parameters["alpha"].value == pytest.approx(0.4, abs=0.02)
    assert found.residuals[4] == pytest.approx(math.log(1.2), abs=0.01)


def test_intervals_are_the_same_each_time_and_another_seed_draws_others() -> None:
    sizes = grid(C=np.geomspace(1e12, 1e15, 8).tolist())
    losses = noisy(2 + 1e5 / np.array(sizes["C"]) ** 0.4, 0.003)
    first, again, other = (fit(POWER, sizes, losses, num_resamples=20, seed=s) for s in (0, 0, 1))
    assert first.parameters == again.parameters
    assert first.parameters != other.parameters


def test_what_is_fixed_is_not_fitted() -> None:
    _, variables, formula, true = PUBLISHED["clark"]
    few = {name: values[:20] for name, values in variables.items()}
    losses = noisy(formula(few, **true), 0.001)

    found = fit(CLARK, few, losses, fixed={"E_max": 314.478}, num_resamples=10)

    assert found.parameters["E_max"] == pytest.approx((314.478,) * 3)
    assert found.parameters["b"].value == pytest.approx(-0.108, abs=0.05)


def test_a_fit_says_what_it_may_not_be_used_for() -> None:
    sizes = grid(C=np.geomspace(1e12, 1e15, 8).tolist())
    straight = noisy(1e5 / np.array(sizes["C"]) ** 0.4, 0.001)

    found = fit(POWER, sizes, straight, num_resamples=10)

    assert found.limits.startswith("Not for sizes outside of those fitted (C from 1e+12 to 1e+15)")
    assert found.limits.endswith(".")


def test_parameters_that_the_runs_do_not_determine_are_named() -> None:
    """Up to four experts say nothing of where their gain ends."""
    variables = grid(N=[1e7, 1e8, 1e9], E=[1, 2, 3, 4])
    losses = noisy(clark(variables, **PUBLISHED["clark"][3]), 0.003)
    found = fit(CLARK, variables, losses, num_resamples=20)
    assert "E_max" in found.undetermined
    assert "the runs do not determine" in found.limits


def test_parameters_that_make_up_for_each_other_have_no_interval() -> None:
    """Of two numbers of tokens, the floor and the fall to it cannot be told apart."""
    _, _, formula, true = PUBLISHED["krajewski"]
    variables = grid(G=[1, 2, 4, 8], N=[1e7, 1e8, 1e9], D=[1e9, 1e10])
    found = fit(GRANULARITY, variables, noisy(formula(variables, **true), 0.001), num_resamples=20)
    assert found.undetermined == ("c", "b", "beta")
    assert found.parameters["beta"][1:] == (-math.inf, math.inf)
    assert found.parameters["b"][1:] == (0, math.inf)
    at = {"G": 3.0, "N": 3e8, "D": 1e9}
    assert found.predict(**at).value == pytest.approx(
        formula({name: [v] for name, v in at.items()}, **true)[0], rel=0.003
    )


def test_resamples_are_fitted_as_by_l_bfgs() -> None:
    sizes = grid(C=np.geomspace(1e12, 1e15, 10).tolist())
    x = {"C": np.log(sizes["C"])}
    settings = fits._Settings(POWER, list(POWER.parameters), {})
    y = np.log([noisy(2 + 1e5 / np.array(sizes["C"]) ** 0.4, 0.003, seed) for seed in range(5)])
    start = settings.best(x, y[0])
    for found, losses in zip(settings.refit(x, y, start), y, strict=True):
        expected = settings.best(x, losses)
        assert found == pytest.approx(expected, rel=2e-3)


def test_95_percent_intervals_of_a_minimum_hold_the_truth_about_as_often() -> None:
    sizes = [1e5, 2e5, 4e5, 8e5, 1.6e6] * 3
    hits = 0
    for seed in range(100):
        found = fit_parabola(sizes, noisy(parabola(sizes, 5e5), 0.002, seed), seed=seed)
        assert found.minimum is not None
        hits += found.minimum.low <= 5e5 <= found.minimum.high
    assert 85 <= hits <= 100


def predicted(found: Fit, **variables: float) -> float:
    return found.predict(**variables).value


def test_a_fit_predicts_only_from_the_variables_it_has() -> None:
    found = fit(POWER, grid(C=[1, 10, 100, 1000]), [4, 3, 2.5, 2.3], num_resamples=2)
    with pytest.raises(ConfigError, match="the fit predicts from C, got N"):
        predicted(found, N=3)
    with pytest.raises(ConfigError, match="C: must be positive and finite in all runs, got 0"):
        predicted(found, C=0)


@pytest.mark.parametrize(
    ("variables", "losses", "message"),
    [
        (
            {"C": [1, 2, 4]},
            [3, 2, 1],
            "3 runs at 3 sizes cannot determine 3 parameters; it takes 3",
        ),
        ({"C": [1, 1, 2, 2]}, [3, 3, 2, 1], "4 runs at 2 sizes cannot determine 3 parameters"),
        ({"C": []}, [], "0 runs at 0 sizes cannot determine 3 parameters"),
        ({"C": [1, 2, 4, 8]}, [2, 2, 2, 2], "the loss is the same in all runs, so that nothing"),
        ({"C": [1, 2, 4, 8]}, [3, math.nan, 2, 1], "loss: must be positive and finite in all"),
        (
            {"C": [1, 2, 4, math.inf]},
            [3, 2, 1, 1],
            "C: must be positive and finite in all runs, got",
        ),
        ({"C": [1, 2, 4, 8]}, [3, 2, 1], "there are 4 values of C for 3 losses"),
        ({"N": [1, 2, 4, 8]}, [3, 2, 1, 1], r"takes C, got N"),
        ({}, [3, 2, 1, 1], r"takes C, got nothing"),
    ],
)
def test_runs_that_cannot_be_fitted_are_refused(
    variables: dict[str, list[float]], losses: list[float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        fit(POWER, variables, losses)
    assert "\n" not in str(caught.value)


def test_a_variable_that_does_not_vary_is_refused() -> None:
    variables = {"N": [1e6, 2e6, 4e6, 8e6, 1e7, 2e7], "D": [1e9] * 6}
    with pytest.raises(ConfigError, match="D is the same in all runs"):
        fit(CHINCHILLA, variables, [4, 3.5, 3.2, 3, 2.9, 2.8])
    with pytest.raises(ConfigError, match="has no parameter gamma"):
        fit(CHINCHILLA, variables, [4, 3.5, 3.2, 3, 2.9, 2.8], fixed={"gamma": 1})


# -- parabolas


def parabola(sizes: Sequence[float], best: float) -> Any:
    return 2 + 0.05 * np.log(np.array(sizes) / best) ** 2


def test_the_minimum_of_a_parabola_lies_in_its_interval() -> None:
    sizes = [1e5, 2e5, 4e5, 8e5, 1.6e6] * 3
    found = fit_parabola(sizes, noisy(parabola(sizes, 5e5), 0.002))

    assert found.minimum is not None
    assert found.minimum.low < found.minimum.value < found.minimum.high
    assert 1.02 < found.minimum.high / found.minimum.low < 1.1
    assert float(found.curve(np.array(5e5))) == pytest.approx(2, abs=0.01)
    assert found.refusal == ""


@pytest.mark.parametrize(("best", "end"), [(5e4, "the smallest size"), (5e7, "the largest size")])
def test_a_minimum_at_the_edge_is_refused(best: float, end: str) -> None:
    sizes = [1e5, 2e5, 4e5, 8e5]
    found = fit_parabola(sizes, parabola(sizes, best))
    assert found.minimum is None
    assert found.refusal == (
        f"the loss is lowest at {end}: the minimum lies beyond the sizes tried"
    )


def test_a_parabola_that_opens_downwards_is_refused() -> None:
    found = fit_parabola([1e5, 2e5, 4e5, 8e5], [2.0, 2.1, 2.11, 2.05])
    assert found.minimum is None
    assert found.refusal == "the parabola opens downwards: it has no minimum"


def test_a_minimum_that_the_noise_moves_out_of_the_sizes_is_not_certain() -> None:
    sizes = [1e5, 2e5, 4e5, 8e5] * 2
    found = fit_parabola(sizes, noisy(parabola(sizes, 6e5), 0.02, seed=3))
    assert found.minimum is None
    assert "is not certain" in found.refusal


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
    assert found.refusals == {}
    assert found.exponent is not None
    assert found.exponent.low < 0.5 < found.exponent.high
    assert found.exponent.high - found.exponent.low < 0.1
    assert minima(found) == pytest.approx([0.1 * c**0.5 for c in (1e13, 3e13, 1e14, 3e14)], rel=0.1)
    assert found.limits.startswith("Not for budgets outside of 1e+13 to 3e+14 FLOPs")


def test_budgets_without_a_minimum_are_named_and_left_out() -> None:
    flops, sizes, losses = isoflop_runs(0.0005)
    flops += [1e15] * 4 + [3e15] * 2
    sizes += [1e5, 2e5, 4e5, 8e5, 1e5, 2e5]
    losses += [2.4, 2.3, 2.2, 2.1, 2.0, 1.9]

    found = fit_isoflop(flops, sizes, losses)

    assert [f"{budget:.0e}" for budget in found.refusals] == ["1e+15", "3e+15"]
    refused, too_few = found.refusals.values()
    assert "lies beyond the sizes tried" in refused or "downwards" in refused
    assert too_few.startswith("2 runs at 2 sizes cannot determine 3 parameters")
    assert minima(found) == pytest.approx([0.1 * c**0.5 for c in (1e13, 3e13, 1e14, 3e14)], rel=0.1)


def test_of_one_budget_there_is_no_power_law() -> None:
    sizes = [1e5, 2e5, 4e5, 8e5, 1.6e6]
    found = fit_isoflop([1e14] * 5, sizes, noisy(parabola(sizes, 4e5), 0.0003))
    assert found.exponent is None
    assert "with fewer than two minima there is no power law" in found.limits


def test_isoflop_refuses_what_is_no_set_of_runs() -> None:
    with pytest.raises(ConfigError, match="there are 1 sizes for 2 budgets"):
        fit_isoflop([1e9, 1e9], [1e5], [2, 2])
    with pytest.raises(ConfigError, match="there are no runs to fit"):
        fit_isoflop([], [], [])
    with pytest.raises(ConfigError, match="FLOPs: must be positive and finite"):
        fit_isoflop([math.nan], [1e5], [2])


# -- leverage


def test_compute_is_read_between_the_points_of_a_curve() -> None:
    flops, losses = [1e10, 1e11, 1e12], [4.0, 3.0, 2.0]
    assert compute_at(3.0, flops, losses) == pytest.approx(1e11)
    assert compute_at(2.5, flops, losses) == pytest.approx(10**11.5)
    assert compute_at(4.0, flops, losses) == pytest.approx(1e10)
    assert compute_at(4.1, flops, losses) is None, "before the first point"
    assert compute_at(1.9, flops, losses) is None, "never reached"
    # A loss that rises again was reached when it was first low.
    assert compute_at(3.0, [*flops, 1e13], [4.0, 3.0, 3.5, 2.0]) == pytest.approx(1e11)


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
    with pytest.raises(ConfigError, match="a loss for each of its FLOPs, which rise"):
        leverage({0: ([2, 1], [9, 8])}, {0: curve(2)})
    with pytest.raises(ConfigError, match="loss: must be positive and finite"):
        leverage({0: ([1, 2], [9, math.nan])}, {0: curve(2)})


def test_a_power_law_without_a_floor_is_fitted_though_the_floor_changes_nothing() -> None:
    sizes = grid(C=[1, 2, 4, 8, 16])
    # Lowest in the middle: no power law falls and rises.
    losses = [2.1, 2.02, 2.0, 2.02, 2.1]
    found = fit(POWER, sizes, losses, num_resamples=50)
    assert np.isfinite(found.residuals).all()
    assert found.undetermined
