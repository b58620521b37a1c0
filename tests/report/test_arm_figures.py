"""Figures of several arms, held to the numbers of a comparison made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from moe_ffn.report.drawing import style_of
from moe_ffn.report.figures import NotMeasuredError
from moe_ffn.report.studies import arm_figures as functions
from moe_ffn.report.studies.arm_figures import axes_of
from moe_ffn.studies.comparison import Arm, Comparison
from moe_ffn.studies.result import Curve
from moe_ffn.studies.statistics import mean_interval
from tests.helpers.results import make_result

figures: Any = functions
"""Without types: plotly's know nothing of what is in a figure."""


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    """swiglu is clearly better than gelu and costs twice as much; relu cannot be told from gelu."""
    curve = [[4.0 + seed, 3.0, 2.0] for seed in range(3)]
    results = [
        make_result(arm, seed, 2.0 + 0.1 * seed + shift, curve=curve[seed], flops_per_token=flops)
        for seed in range(3)
        for arm, shift, flops in (
            ("gelu", 0.0, 1000),
            ("swiglu", -0.5 + 0.01 * seed, 2000),
            ("relu", (0.1, -0.1, 0.05)[seed], 1100),
        )
    ]
    for arm, rate, loss in (("gelu", 0.01, 2.5), ("swiglu", 0.01, 1.2), ("swiglu", 0.1, 3.0)):
        own: dict[str, Any] = {"optimizer.learning_rate": rate}
        name = f"{arm},learning_rate={rate}"
        results.append(make_result(name, 0, loss, main_arm=arm, tuning=own, options=own))
    return Comparison.of(results, baseline="gelu")


def drawn(figure: Any) -> dict[str, Any]:
    """Name of each arm -> its line or point; bands are left out."""
    return {t.meta["name"]: t for t in figure.data if "colour" in t.meta}


def test_sixty_arms_have_colours_and_dashes_of_their_own() -> None:
    assert len({style_of(number) for number in range(60)}) == 60
    assert style_of(10) != style_of(0), "the colour comes again, the dash does not"


@pytest.mark.parametrize(
    ("over", "factor"), [("steps", 1), ("tokens", 10), ("seconds", 0.5), ("FLOPs", 3 * 1000 * 10)]
)
def test_a_loss_is_the_mean_of_the_seeds_with_its_interval(
    comparison: Comparison, over: Any, factor: float
) -> None:
    figure = figures.losses(comparison.arms, over)
    line = drawn(figure)["gelu"]
    (band,) = (t for t in figure.data if t.meta.get("fill") == 0)

    assert list(line.x) == [factor * step for step in (33, 67, 100)]
    assert list(line.y) == [5.0, 3.0, 2.1], "the means over three seeds"
    ends = {0: mean_interval([4.0, 5.0, 6.0]), 2: mean_interval([2.0, 2.1, 2.2])}
    for place, interval in ends.items():
        assert interval is not None
        drawn_here = band.y[place], band.y[-1 - place]
        assert drawn_here == pytest.approx((interval.high, interval.low), abs=1e-4)
    assert line.name == "gelu 2.1000", "the last value needs no pointer"


def test_of_two_seeds_each_is_a_line_and_there_is_no_band() -> None:
    results = [make_result(arm, seed, 2 + seed / 10) for arm in "ab" for seed in range(2)]
    results += [make_result("c", seed, 1 + seed) for seed in range(3)]
    found = Comparison.of(results, baseline="a")

    figure = figures.losses(found.arms)

    lines = [trace for trace in figure.data if trace.meta["name"] == "a"]
    assert [list(line.y) for line in lines] == [[4.0, 2.0], [4.0, 2.1]]
    assert [line.showlegend for line in lines] == [True, False]
    assert lines[0].name == "a 2.0500", "the mean of the last"
    assert {trace.meta["name"] for trace in figure.data if "fill" in trace.meta} == {"c"}
    note = figure.layout.meta["note"]
    assert "Arms with fewer than 3 seeds have a line per seed and no interval." in note
    assert note.startswith("Lines are means over seeds")
    (row,) = (t for t in figures.differences(found).data if t.meta["name"] == "b")
    assert (row.x, row.error_x.array) == ((0, 0), None)


WHOLE = Curve(steps=[1, 2], tokens=[10, 20], seconds=[0.1, 0.2], losses=[3.0, 2.0])
OF_STEPS = Curve(steps=[1, 2], losses=[3.0, None])
POINT = Curve(steps=[9], tokens=[90], seconds=[0.9], losses=[2.0])


def arms_of(*curves: Curve) -> list[Arm]:
    return [
        Arm(name, [make_result(name).model_copy(update={"validation": curve, "train": Curve()})])
        for name, curve in zip("ab", curves, strict=False)
    ]


@pytest.mark.parametrize(
    ("curves", "axes"),
    [
        ([WHOLE], ["tokens", "FLOPs", "seconds", "steps"]),
        ([WHOLE, OF_STEPS], ["steps"]),
        ([POINT], []),
    ],
    ids=["whole", "what both know", "a dot is no curve"],
)
def test_a_loss_is_drawn_over_what_every_arm_knows(curves: list[Curve], axes: list[str]) -> None:
    assert axes_of(arms_of(*curves), "validation") == axes
    assert axes_of(arms_of(*curves), "train") == []


def test_what_is_not_finite_is_a_gap_and_what_is_not_known_is_said() -> None:
    both = arms_of(WHOLE, OF_STEPS)
    assert list(drawn(figures.losses(both, "steps"))["b"].y) == [3.0]
    with pytest.raises(NotMeasuredError, match="no arm has a training loss over seconds"):
        figures.losses(both, "seconds", "train")
    alone = Comparison.of([make_result("a", 0), make_result("a", 1, step_seconds=0.5)])
    with pytest.raises(NotMeasuredError, match="no arm has a difference from a"):
        figures.differences(alone)


def test_the_frontier_joins_what_nothing_beats_in_loss_and_cost(comparison: Comparison) -> None:
    figure = figures.frontier(comparison, "FLOPs")
    points = drawn(figure)
    gelu, swiglu = comparison.arms[0], comparison.arms[1]

    assert list(points["frontier"].x) == [3 * 1000 * 1000, 3 * 2000 * 1000]
    assert list(points["frontier"].y) == pytest.approx([gelu.loss, swiglu.loss])
    assert list(points["relu"].y) == pytest.approx([comparison.arms[2].loss])
    assert gelu.interval is not None
    assert points["gelu"].error_y.array[0] == pytest.approx(gelu.interval.high - gelu.loss)
    assert points["gelu"].text == ("gelu",), "named without a pointer"


def test_differences_are_those_of_the_comparison(comparison: Comparison) -> None:
    rows = drawn(figures.differences(comparison))

    assert list(rows) == ["swiglu", "relu"]
    for arm in comparison.arms[1:]:
        assert arm.difference is not None
        row, interval = rows[arm.name], arm.difference.interval
        assert interval is not None
        assert row.x == (interval.value,)
        assert row.error_x.array[0] == pytest.approx(interval.high - interval.value)
        assert row.error_x.arrayminus[0] == pytest.approx(interval.value - interval.low)
        assert row.text == (f"{interval.value:+.4f}",)
    assert (rows["swiglu"].marker.symbol, rows["relu"].marker.symbol) == ("circle", "circle-open")
    assert rows["swiglu"].meta["colour"] == 1, "the colour that it has in every plot"


def test_tuning_is_drawn_by_value_with_the_best_one_large(comparison: Comparison) -> None:
    (found,) = comparison.tuning
    lines = drawn(figures.tuning(comparison, found))
    assert list(lines["swiglu"].x) == ["0.003", "0.01", "0.1"]
    assert list(lines["swiglu"].y) == pytest.approx([1.5, 1.2, 3.0])
    assert list(lines["swiglu"].marker.size) == [6, 11, 6]
    assert lines["gelu"].name == "gelu: 0.003"


def test_seconds_that_were_measured_apart_are_drawn_where_all_arms_have_them() -> None:
    results = [make_result(arm, 0, 2.0, step_seconds=9.0) for arm in ("a", "b")]
    timed = Comparison.of(results, step_seconds={"a": 1.0, "b": 2.0})
    lines = drawn(figures.losses(timed.arms, "seconds"))
    assert [list(lines[name].x) for name in ("a", "b")] == [[50, 100], [100, 200]]
