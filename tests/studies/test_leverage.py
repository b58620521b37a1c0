"""How much less compute one arm takes to the loss of another, by hand and of known curves."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moe_ffn.config.errors import ConfigError
from moe_ffn.studies.crossover import Point, crossover, loss_by_flops
from moe_ffn.studies.leverage import flops_at, leverage
from tests.helpers.results import make_result


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
