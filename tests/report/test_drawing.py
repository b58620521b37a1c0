"""Long series as few points."""

from __future__ import annotations

import math
from array import array

import pytest

from moe_ffn.metrics.plotting import label
from moe_ffn.report.drawing import average, rounded
from moe_ffn.report.run_summary import evenly_chosen
from moe_ffn.runs.rows import Series


def series(steps: list[int], values: list[float]) -> Series:
    return Series(array("q", steps), array("d", values))


Points = tuple[list[int], list[float]]


@pytest.mark.parametrize(
    ("rows", "max_points", "steps", "values"),
    [
        ([([2, 4, 9], [1.0, math.nan, math.inf])], 3, [2, 4, 9], [[1, None, None]]),
        # Steps 0 to 9 in 2 bins of 4.5 steps: 0 1 2 3 4 | 5 6 7 8 9.
        ([([*range(10)], [float(step) for step in range(10)])], 2, [2, 7], [[2, 7]]),
        # Bins of 1.5 steps: 0 1 | 2 3.
        ([([0, 1, 2, 3], [4.0, math.nan, math.inf, math.nan])], 2, [0.5, 2.5], [[4, None]]),
        # Bins of 33.3 steps: 0 1 2 | | 100.
        ([([0, 1, 2, 100], [1.0, 3.0, 5.0, 7.0])], 3, [1, 100], [[3, 7]]),
        (
            [([1, 2], [0.5, 0.25]), ([2, 3], [1.0, 2.0])],
            10,
            [1, 2, 3],
            [[0.5, 0.25, None], [None, 1, 2]],
        ),
    ],
    ids=["few steps stay", "means of bins", "of finite values", "an empty bin", "rows share steps"],
)
def test_series_as_few_points(
    rows: list[Points], max_points: int, steps: list[float], values: list[list[float | None]]
) -> None:
    grid = average([series(*row) for row in rows], max_points)
    assert (grid.steps, grid.values) == (steps, values)


@pytest.mark.parametrize("length", [1, 499, 500, 501, 12_345])
def test_there_are_never_more_points_than_asked_for(length: int) -> None:
    grid = average([series([10 * n for n in range(length)], [1.0] * length)], 500)
    assert len(grid.steps) == len(grid.values[0]) == min(length, 500)
    assert set(grid.values[0]) == {1}


def test_numbers_keep_seven_digits_and_long_names_leave_room_for_the_plot() -> None:
    assert rounded(1.23456789) == 1.234568
    assert repr(rounded(40.0)) == "40"
    assert label("a" * 30 + "b" * 30) == "a" * 20 + "…" + "b" * 23
    assert label("a" * 44) == "a" * 44
    assert label("a" * 45) == "a" * 20 + "…" + "a" * 23


def test_some_of_many_are_evenly_chosen_with_the_first_and_the_last() -> None:
    assert evenly_chosen(list(range(9)), 3) == [0, 4, 8]
    assert evenly_chosen(list(range(32)), 2) == [0, 31]
    assert evenly_chosen([1, 2], 3) == [1, 2]
