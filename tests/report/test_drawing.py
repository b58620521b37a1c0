"""Long series as few points."""

from __future__ import annotations

import math
from array import array

import pytest

from moe_ffn.report.drawing import average, rounded
from moe_ffn.report.run_summary import evenly_chosen
from moe_ffn.runs.rows import Series


def series(steps: list[int], values: list[float]) -> Series:
    return Series(array("q", steps), array("d", values))


def test_a_short_series_stays_as_it_is() -> None:
    grid = average([series([2, 4, 9], [1.0, math.nan, math.inf])], 3)

    assert (grid.steps, grid.values) == ([2, 4, 9], [[1, None, None]])


def test_a_long_series_becomes_means_over_equally_many_steps() -> None:
    # Steps 0 to 9 in 2 bins of 4.5 steps: 0 1 2 3 4 | 5 6 7 8 9.
    grid = average([series(list(range(10)), [float(step) for step in range(10)])], 2)

    assert (grid.steps, grid.values) == ([2, 7], [[2, 7]])


def test_the_mean_is_of_the_finite_values() -> None:
    # Bins of 1.5 steps: 0 1 | 2 3.
    grid = average([series([0, 1, 2, 3], [4.0, math.nan, math.inf, math.nan])], 2)

    assert grid.values == [[4, None]]


def test_a_bin_without_a_row_is_left_out() -> None:
    grid = average([series([0, 1, 100], [1.0, 3.0, 7.0])], 2)

    assert (grid.steps, grid.values) == ([0.5, 100], [[2, 7]])


def test_rows_share_their_steps_and_have_none_where_they_were_not_measured() -> None:
    grid = average([series([1, 2], [0.5, 0.25]), series([2, 3], [1.0, 2.0])], 10)

    assert grid.steps == [1, 2, 3]
    assert grid.values == [[0.5, 0.25, None], [None, 1, 2]]


@pytest.mark.parametrize("length", [1, 499, 500, 501, 12_345])
def test_there_are_never_more_points_than_asked_for(length: int) -> None:
    grid = average([series([10 * n for n in range(length)], [1.0] * length)], 500)

    assert len(grid.steps) == len(grid.values[0]) == min(length, 500)
    assert set(grid.values[0]) == {1}


def test_numbers_keep_seven_digits() -> None:
    assert rounded(1.23456789) == 1.234568
    assert repr(rounded(40.0)) == "40"


def test_some_of_many_are_evenly_chosen_with_the_first_and_the_last() -> None:
    assert evenly_chosen(list(range(9)), 3) == [0, 4, 8]
    assert evenly_chosen(list(range(32)), 2) == [0, 31]
    assert evenly_chosen([1, 2], 3) == [1, 2]
