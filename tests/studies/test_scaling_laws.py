"""Known parameters are found again within their intervals; what cannot be fitted is said in one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from moe_ffn.config.errors import ConfigError
from moe_ffn.studies import scaling_laws
from moe_ffn.studies.scaling_laws import CLARK, E_MAX, E_START, fit, power_law

POWER = power_law("C")


def grid(**values: Sequence[float]) -> dict[str, list[float]]:
    """Every combination, as one column for each name."""
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
def test_of_too_few_runs_none_is_held_out() -> None:
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
def test_runs_that_cannot_be_fitted_are_refused(
    variables: dict[str, list[float]], losses: list[float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        fit(POWER, variables, losses)
    assert "\n" not in str(caught.value)


def test_a_variable_that_does_not_vary_is_refused() -> None:
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
