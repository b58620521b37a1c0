"""Losses by the FLOPs of all training, and from where one arm is below another."""

from __future__ import annotations

import pytest

from moe_ffn.studies.crossover import Point, crossover, loss_by_flops
from tests.helpers.results import make_result

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
