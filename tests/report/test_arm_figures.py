"""Figures of several arms, compared with the numbers of a hand-made comparison."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from moe_ffn.metrics.table import PAIRS_ONLY, metrics_per_layer
from moe_ffn.report.drawing import style_of
from moe_ffn.report.figures import NotMeasuredError
from moe_ffn.report.run_summary import changing_metrics, constant_metrics
from moe_ffn.report.studies import arm_figures as functions
from moe_ffn.report.studies.arm_figures import axes_of
from moe_ffn.runs.reader import read_runs
from moe_ffn.studies.comparison import Arm, Comparison
from moe_ffn.studies.result import Curve
from moe_ffn.studies.statistics import mean_interval
from tests.helpers.synthetic_run import MEASURES as KEYS_OF_MEASURES
from tests.helpers.synthetic_run import (
    Written,
    change,
    make_result,
    row_of,
    write_metrics,
    write_run,
)

figures: Any = functions
"""The module without types, because plotly's types do not describe the content of a figure."""


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    """swiglu is clearly better than gelu and costs twice as much; relu is indistinguishable from gelu."""
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


def test_two_seeds_are_lines_without_a_band() -> None:
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
def test_a_loss_is_drawn_over_axes_that_every_arm_has(curves: list[Curve], axes: list[str]) -> None:
    assert axes_of(arms_of(*curves), "validation") == axes
    assert axes_of(arms_of(*curves), "train") == []


def test_nonfinite_values_are_gaps_and_missing_ones_raise() -> None:
    both = arms_of(WHOLE, OF_STEPS)
    assert list(drawn(figures.losses(both, "steps"))["b"].y) == [3.0]
    with pytest.raises(NotMeasuredError, match="no arm has a training loss over seconds"):
        figures.losses(both, "seconds", "train")
    alone = Comparison.of([make_result("a", 0), make_result("a", 1, step_seconds=0.5)])
    with pytest.raises(NotMeasuredError, match="no arm has a difference from a"):
        figures.differences(alone)


def test_the_frontier_leaves_out_arms_that_predict_other_tokens() -> None:
    options = {"model.causal": False}
    arms = [
        make_result("gelu", 0, 2.0, flops_per_token=1000),
        make_result("swiglu", 0, 1.5, flops_per_token=2000),
        make_result("bert", 0, 3.0, flops_per_token=3000, options=options),
    ]
    line = drawn(figures.frontier(Comparison.of(arms, baseline="gelu"), "FLOPs"))["frontier"]

    assert list(line.y) == [2.0, 1.5]


def test_the_frontier_joins_the_pareto_optimal_arms(comparison: Comparison) -> None:
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


def test_arms_whose_short_names_are_equal_have_rows_of_their_own() -> None:
    names = [f"moe_experts_{count}_topk_2_scale_0.25" for count in ("8_wide", "4")]
    results = [make_result(arm, seed) for arm in ("dense", *names) for seed in range(2)]
    found = Comparison.of(results, baseline="dense")
    figure = figures.differences(found)
    (first, second), axis = figure.data, figure.layout.yaxis
    assert (first.y, second.y, axis.tickvals) == ((0, 0), (1, 1), (0, 1))
    assert axis.ticktext == ("moe_experts…2_scale_0.25",) * 2


def test_labels_of_differences_fit_between_the_ends_of_the_axis() -> None:
    losses = {"base": 2.0, "better": 1.8, "equal": 2.0}
    results = [make_result(arm, seed, losses[arm]) for arm in losses for seed in range(3)]
    low, high = figures.differences(Comparison.of(results, baseline="base")).layout.xaxis.range
    assert (low, high) == pytest.approx((-0.23, 0.03))


def test_the_title_of_an_axis_of_differences_fits_on_a_phone() -> None:
    base = "a_baseline_with_a_long_name"
    results = [make_result(arm, seed) for arm in (base, "other") for seed in range(2)]
    found = Comparison.of(results, baseline=base)
    assert len(figures.differences(found).layout.xaxis.title.text) <= 24


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


# -- which plots a page has, and what they draw; test_page_browser.py looks at them in a browser


def test_every_plot_has_axes_with_titles_a_legend_or_colour_bar_and_values_on_hover(
    page: Written,
) -> None:
    figures = [figure for choices in page.figures.values() for figure in choices]

    assert len(figures) > 20
    for figure in figures:
        layout = figure["layout"]
        assert layout["xaxis"]["title"]["text"]
        assert layout["yaxis"]["title"]["text"]
        assert "template" not in layout
        for trace in figure["data"]:
            assert trace["hovertemplate"]
            if trace["type"] == "heatmap":
                assert trace["colorbar"]["title"]["text"]
            else:
                assert layout["showlegend"]
                assert trace["name"]


def test_loss_is_drawn_with_those_of_ngram_models(page: Written) -> None:
    traces = page.traces("Loss")

    assert list(traces) == ["training", "validation", "unigram model", "5-gram model"]
    assert traces["training"]["x"] == list(range(10, 601, 10))
    assert traces["validation"]["x"] == list(range(100, 601, 100))
    assert traces["validation"]["line"]["dash"] == "dash"
    assert set(traces["unigram model"]["y"]) == {3.08}
    assert set(traces["5-gram model"]["y"]) == {1.21}
    dashes = [traces[name]["line"]["dash"] for name in ("unigram model", "5-gram model")]
    assert dashes == ["dot", "dashdot"], "they can be told apart without colours"
    assert traces["unigram model"]["x"] == [10, 600], "from the first row to the last"


def test_redundant_metrics_have_no_plot(folder: Path, page: Written) -> None:
    """The objective lies on the loss, bits per byte are the loss, a balancing loss is of the whole model."""
    again = {"Objective", "Bits per byte", "Variation of the load", "Entropy of the mean"}
    again |= {"Load-balancing loss", "Router z-loss", "Tokens read"}
    assert again.isdisjoint(page.figures)
    assert "Balancing losses" in page.figures
    assert "At the end, the weighted balancing losses add 0.0120 nats to the loss." in page.text
    bits = json.loads((folder / "summary.json").read_text())["validation_bits_per_byte"]
    assert f"bits per byte {bits:.4f}" in page.text


def test_every_measure_of_a_run_has_its_plot_or_its_word(folder: Path) -> None:
    run = read_runs([folder])[0]
    keys = {key for layer in run.layers.values() for key in layer if not key.startswith("load/")}
    keys |= {key for layer in run.validated_layers.values() for key in layer if "/" not in key}
    pairs_only = {metric.key for metric in metrics_per_layer() if metric.requires == PAIRS_ONLY}
    assert (
        {metric.key for metric in metrics_per_layer()} - pairs_only == keys == set(KEYS_OF_MEASURES)
    )
    assert len(changing_metrics(run)) + len(constant_metrics(run)) == len(keys)


def test_units_notes_and_the_place_of_expert_0(page: Written) -> None:
    axis = {title: f["layout"]["yaxis"]["title"]["text"] for title, (f,) in page.of_one().items()}
    assert axis["Largest router logit"] == "largest absolute logit (dimensionless)"
    assert axis["MaxVio"] == "MaxVio (dimensionless)"
    assert "Experts without a token for logging.alarms.after_steps steps." in page.text
    drawn = [f for title in ("Load of each expert", "Co-activation") for f in page.figures[title]]
    assert [f["layout"]["yaxis"]["autorange"] for f in drawn] == ["reversed"] * 8


def test_the_axis_of_a_single_validation_begins_at_0(tmp_path: Path) -> None:
    """Plotly's own axis of one point runs from 99 to 101."""
    write_metrics(tmp_path / "metrics.jsonl", [{"step": 100, "validation/loss": 2.0}])
    (figure,) = Written(tmp_path).figures["Loss"]
    assert figure["data"][0]["x"] == [100]
    assert figure["layout"]["xaxis"]["rangemode"] == "tozero"


def test_the_last_values_and_the_healthy_ranges_need_no_pointer(
    folder: Path, page: Written
) -> None:
    run = read_runs([folder])[0]
    (loss,) = page.figures["Loss"]
    assert [trace["name"] for trace in loss["data"]] == [
        f"training {run.series('train/loss').last:.4f}",
        f"validation {run.series('validation/loss').last:.4f}",
        "unigram model 3.0800",
        "5-gram model 1.2100",
    ]
    (max_violation,) = page.figures["MaxVio"]
    (band,) = max_violation["layout"]["shapes"]
    assert (band["y0"], band["y1"]) == (0, 1)
    last = [run.layers[f"layer_{n:02d}"]["max_violation"].last or 0 for n in range(4)]
    cells = [f"{value:.2f}" for value in last]
    assert row_of(
        page.text, ["MaxVio", *cells, "0 at perfect balance; healthy below 1; at most E / k - 1"]
    )
    logits = [run.layers[f"layer_{n:02d}"]["logit_max"].last or 0 for n in range(4)]
    assert max(logits) < 20
    dead = '<th scope="row">Dead experts</th><td>0</td><td class="bad">1</td><td>0</td>'
    assert dead in page.body, "expert 1 of layer 1 is dead"


CONSTANT = """
    MaxVio 0.125; variation of the load 0.125; dropped 12.5%; entropy per token 0.125;
    entropy of the mean 0.125; dead experts 0.125; churn 12.5%; largest router logit 0.125;
    top-1 margin 0.125; shared share 12.5%; capacity used 12.5%; experts per token 0.125;
    MaxVio within sequences 0.125; MaxVio over ranks 0.125; strongest pair of experts 12.5%;
    spread of the correction bias 0.125; load-balancing loss 0.125; router z-loss 0.125;
    tokens with non-finite logits 0.125
"""


def test_the_word_of_a_measure_has_its_unit(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for step in (1, 2):
        for prefix in ("", "validation/"):
            keys = [
                f"{prefix}routing/layer_{n:02d}/{key}" for n in (0, 1) for key in KEYS_OF_MEASURES
            ]
            rows.append({"step": step, **dict.fromkeys(keys, 0.125)})
    write_metrics(tmp_path / "metrics.jsonl", rows)

    run = read_runs([tmp_path])[0]

    assert constant_metrics(run) == " ".join(CONSTANT.split()).split("; ")
    write_metrics(
        tmp_path / "metrics.jsonl",
        [{"step": step, "routing/layer_00/entropy": -0.0} for step in (1, 2)],
    )
    assert constant_metrics(read_runs([tmp_path])[0]) == ["entropy per token 0"]


def test_many_layers_become_one_heat_map_with_a_choice(tmp_path: Path) -> None:
    page = Written(write_run(tmp_path / "big", layers=12, experts=16, rows=20))
    assert len(page.figures["Load of each expert"]) == 12
    assert '<select aria-label="layer" data-plot="plot-5">' in page.body
    (max_violation,) = page.figures["MaxVio"]
    assert max_violation["layout"]["yaxis"]["autorange"] == "reversed", "layer 0 is on top"
    assert len(page.figures) < 30


def test_a_long_run_is_averaged_to_a_small_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "long", layers=1, experts=16, rows=1500)
    page = Written(folder)
    assert len(page.traces("Loss")["training"]["x"]) == 500
    last = read_runs([folder])[0].series("train/loss").last
    assert page.traces("Loss")["training"]["name"] == f"training {last:.4f}", "no mean of rows"
    assert "Each point is the mean of about 3 rows." in page.text
    assert "Each column is the mean of about 8 rows." in page.text
    assert page.size_of_data < 500_000


def test_a_diverged_run_has_gaps_and_a_note(tmp_path: Path) -> None:
    rows = [{"step": step, "train/loss": 1.0 if step < 3 else math.nan} for step in range(1, 6)]
    write_metrics(tmp_path / "metrics.jsonl", [*rows, {"step": 6, "validation/loss": math.nan}])
    page = Written(tmp_path)
    assert page.traces("Loss")["training"]["y"] == [1, 1, None, None, None]
    assert "NaN and infinite values are not drawn." in page.text
    assert "validation loss NaN nats per token" in page.text


def test_only_some_of_many_co_activation_matrices_are_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", layers=3, experts=4, rows=20)
    large = [[0.25] * 300] * 300
    layers = [f"layer_{layer:02d}" for layer in range(3)]
    change(
        folder / "summary.json", **{f"routing__{layer}__coactivation": large for layer in layers}
    )
    page = Written(folder)

    first, last = page.figures["Co-activation"]
    assert "2 of 3 layers, evenly chosen." in page.text
    assert (len(first["data"][0]["z"]), last["data"][0]["z"][0][1]) == (300, 0.25)
    assert page.size_of_data < 1_300_000
