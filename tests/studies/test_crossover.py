"""Losses by the FLOPs of all training, and from where one arm is below another."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from moe_ffn.studies.crossover import Point, crossover, loss_by_flops
from moe_ffn.studies.result import add_results
from tests.helpers.arms import change, write_arm
from tests.helpers.results import make_result
from tests.helpers.tiny_runs import run_here

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
    assert up.sd == pytest.approx(math.sqrt(0.02))
    assert (new.flops, new.loss, new.sd) == (3 * 1000 * 50 * 10, 2.5, None)
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


def test_the_program_shows_it(tmp_path: Path) -> None:
    results = [
        make_result(f"{arm},max_steps={steps}", 0, loss, options=options, steps=steps)
        for arm, options, lengths in (
            ("up", FOLDER, {50: 3.0, 450: 2.9}),
            ("new", {}, {150: 3.5, 550: 2.5}),
        )
        for steps, loss in lengths.items()
    ]
    (tmp_path / "study").mkdir()
    add_results(tmp_path / "study", results)
    write_arm(tmp_path, "dense", [2.0])
    base = tmp_path / "dense-seed0"  # 200 steps of 5 tokens at 3 * 1000 FLOPs: 3 M
    change(base / "config.yaml", data__batch_size=1, data__seq_len=5)
    change(base / "facts.json", flops_per_token=1000)
    done = run_here(
        str(tmp_path / "study"), "--base", str(base), program="moe_ffn.cli.crossover"
    )  # fmt: skip

    assert done.code == 0, done.stderr
    # Both are measured at 4.5 M and 16.5 M, where new is 0.5 above and 0.4 below.
    assert "new is at or below up from 9.26e+06 FLOPs" in done.stdout
    # 3 x 1000 FLOPs for each of 50 x 10 tokens, and the 100 x 10 of the model that it began with.
    # So it stands where the other does with 150 x 10.
    assert done.stdout.count(f" {3 * 1000 * (500 + 1000):.3g} ") == 2
    assert "up is at or below" not in done.stdout
    add_results(tmp_path / "study", [make_result("late", 0, is_finished=False)])
    done = run_here(
        str(tmp_path / "study"), "--base", str(base), program="moe_ffn.cli.crossover"
    )  # fmt: skip
    assert done.code == 1
    assert "left out: " in done.stderr
    none = run_here(
        str(base), "--base", str(base), program="moe_ffn.cli.crossover"
    )  # fmt: skip
    assert none.code == 2
    assert "none of these runs has init_from" in none.stderr
