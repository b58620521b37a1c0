"""Tables on the screen and figures of a run; test_arm_figures.py has the figures of several runs."""

from __future__ import annotations

import io
import math
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from moe_ffn.cli.command_line import parse_config
from moe_ffn.metrics.plotting import label
from moe_ffn.metrics.table import RUN_METRICS
from moe_ffn.notebook_cards import evenly_chosen
from moe_ffn.report import figures as functions
from moe_ffn.report.drawing import average, rounded
from moe_ffn.report.figures import NotMeasuredError
from moe_ffn.report.tables import load_table, model_table, print_results, unused_experts
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.json_files import Summary, plain_values
from moe_ffn.runs.reader import Run, read_run
from moe_ffn.runs.rows import Series
from moe_ffn.runs.train.ending import window_losses, write_summary
from tests.helpers.synthetic_run import MEASURES, write_run

VOCAB_SIZE = 257
UNIT = {"k": 1e3, "M": 1e6, "G": 1e9}


def number(text: str) -> float:
    value, _, unit = text.strip().partition(" ")
    return float(value) * UNIT.get(unit, 1)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--model.tie_embeddings", "false", "--model.ffn", "swiglu"],
        ["--model.positions", "learned", "--model.norm", "layer_norm", "--model.ffn", "dense"],
        ["--model.ffn_at", "{'0': dense, '2:': identity}", "--model.norm_placement", "post"],
    ],
    ids=["default", "untied", "learned positions", "pattern"],
)
def test_the_rows_add_up_to_the_total(options: list[str]) -> None:
    config: Any = parse_config(options, TrainConfig, command="train")
    table = model_table(config, VOCAB_SIZE)

    assert [column.header for column in table.columns][2:] == [
        "parameters",
        "active",
        "FLOPs/token",
    ]
    for column in table.columns[2:]:
        *rows, total = [number(str(cell)) for cell in column.cells]
        # Each cell is rounded to its second decimal.
        assert sum(rows) == pytest.approx(total, rel=0.01)


def measured(*load: float, dropped: float = 0.0) -> dict[str, Any]:
    return {"load": list(load), "max_violation": 1.5, "entropy": 0.25, "dropped_fraction": dropped}


def loads(*load: float, dropped: float = 0.0, width: int = 80) -> str:
    routing = measured(*load, dropped=dropped)
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(load_table({"layer_00": routing, "layer_01": routing}, width))
    _, header, rows = console.export_text().partition("layer ")
    return header + rows


def test_a_share_above_zero_is_never_shown_as_zero() -> None:
    assert loads(0.9, 0.0994, 0.0004, 0.0, dropped=0.0002) == (
        "layer     0     1     2     3  MaxVio  entropy  dropped\n"
        "    0  90.0   9.9  <0.1   0.0    1.50     0.25    <0.1%\n"
        "    1  90.0   9.9  <0.1   0.0    1.50     0.25    <0.1%\n"
    )


def test_experts_have_columns_as_far_as_they_fit() -> None:
    nine = [*[0.124] * 6, 0.2556, 0.0004, 0.0]

    assert loads(*[0.125] * 8).splitlines()[0] == (
        "layer     0     1     2     3     4     5     6     7  MaxVio  entropy  dropped"
    )
    assert loads(*nine, width=85).splitlines()[1] == (
        "    0  12.4  12.4  12.4  12.4  12.4  12.4  25.6  <0.1   0.0    1.50     0.25     0.0%"
    )
    assert loads(*nine, width=84) == (
        "layer  experts  busiest  median  idlest  unused  MaxVio  entropy  dropped\n"
        "    0        9  #6 25.6    12.4     0.0       1    1.50     0.25     0.0%\n"
        "    1        9  #6 25.6    12.4     0.0       1    1.50     0.25     0.0%\n"
    )


def test_a_small_even_share_has_a_digit_more() -> None:
    sixty_four = [1 / 64 + 0.001, *[1 / 64] * 62, 1 / 64 - 0.001]
    assert loads(*sixty_four).splitlines()[1] == (
        "    0       64  #0 1.66    1.56    1.46       0    1.50     0.25     0.0%"
    )


@pytest.mark.parametrize("num_experts", [8, 32, 64, 256])
def test_the_loads_of_any_model_fit_an_80_column_terminal(num_experts: int) -> None:
    routing = {
        name: measured(*[0.0] * (num_experts - 1), 1.0, dropped=0.5)
        for name in ("layer_00", "layer_11", "layer_11/inner")
    }
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(load_table(routing, 80))
    console.print(unused_experts(routing))
    shown = console.export_text()

    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in shown
    # The table's title, its head and three rows; a line and three for what is not used.
    assert len(lines) == 5 + 4
    assert "100.0" in lines[2]


def test_an_unmeasured_load_is_neither_used_nor_unused() -> None:
    nan = float("nan")

    assert unused_experts({}) == ""
    assert unused_experts({"layer_00": measured(0.5, 0.5)}) == (
        "every expert is used on the validation split"
    )
    assert unused_experts({"layer_00": measured(0.5, 0.5), "layer_01": measured(nan, nan)}) == (
        "experts without a token on the validation split\n  layer 1: not measured"
    )
    assert "-" in loads(*[nan] * 32).splitlines()[1]


def test_the_first_unused_experts_are_named() -> None:
    many = [0.0] * 64
    many[3], many[6] = 0.5, 0.5

    assert unused_experts(
        {
            "layer_00": measured(0.5, 0.5),
            "layer_01": measured(1.0, 0.0),
            "layer_02": measured(*many),
        }
    ) == (
        "experts without a token on the validation split\n"
        "  layer 1: 1 of 2 (1)\n"
        "  layer 2: 62 of 64 (0, 1, 2, 4, 5, 7, ...)"
    )


def shown(
    tmp_path: Path, not_judged: Sequence[str] = (), loss_of_best: float = 2.5, **replaced: Any
) -> str:
    """The screen of a good run, with `replaced` fields."""
    summary: dict[str, Any] = {
        "validation_loss": 2.5,
        "validation_bits_per_byte": 3.6,
        "unigram_loss": 3.0,
        "ngram_loss": 2.6,
        "tokens_per_second": 1000.0,
        "num_tokens": 4000,
        "train_seconds": 4.0,
        "wall_seconds": 5.0,
        "peak_memory_bytes": 10**8,
        "window_losses": [],
        "num_alarms": 0,
        "num_skipped_steps": 0,
        "routing": {},
    }
    assert summary.keys() == Summary.model_fields.keys()
    callbacks: Any = SimpleNamespace(
        steps=SimpleNamespace(not_judged=lambda *, is_routed: not_judged if is_routed else ()),
        samples=SimpleNamespace(last="", prompt=""),
        checkpoints=SimpleNamespace(loss_of_best=loss_of_best),
    )
    console = Console(width=80, file=io.StringIO(), record=True)
    print_results(console, tmp_path, summary | replaced, callbacks)
    return console.export_text()


def test_a_run_worse_than_the_unigram_model_is_reported(tmp_path: Path) -> None:
    said = (
        "\nworse than the unigram model, which only counts tokens: the run is too short or broken\n"
    )
    assert said in shown(tmp_path, validation_loss=3.0001)
    assert "worse than" not in shown(tmp_path, validation_loss=3.0)
    assert "worse than" not in shown(tmp_path, validation_loss=math.nan)
    assert "training has diverged" in shown(tmp_path, validation_loss=math.nan)


def test_a_run_that_ends_above_its_lowest_loss_names_that_loss(tmp_path: Path) -> None:
    said = shown(tmp_path, loss_of_best=2.4)
    assert "\nbest validation 2.4000 nats per token; model/ has those weights\n" in said
    assert "best validation" not in shown(tmp_path, loss_of_best=2.49996)


def test_rules_that_need_more_steps_are_listed(tmp_path: Path) -> None:
    too_short = "collapse, dropped pairs and dead experts need 50 steps, this run has 30"
    routing = {"layer_00": measured(0.5, 0.5)}
    said = shown(tmp_path, not_judged=[too_short], routing=routing)
    assert f"\nnot judged yet: {too_short}\n" in said
    assert "not judged" not in shown(tmp_path, not_judged=[too_short])


def test_the_screen_names_skipped_steps_and_alarms(tmp_path: Path) -> None:
    said = shown(tmp_path, num_skipped_steps=3)
    assert "skipped steps   3\n" in said
    assert "alarms" not in said.partition("\nResults in ")[0]
    said = shown(tmp_path, num_alarms=2)
    assert "alarms          2; see " in said
    assert "skipped steps" not in said


def test_a_summary_keeps_the_pairs_of_up_to_64_experts() -> None:
    kept = plain_values(
        {str(n): torch.full((n, n), 1 / 3) for n in (64, 65)} | {"load": torch.ones(65)}
    )
    assert [*kept] == ["64", "load"]
    assert kept["64"][0][0] == 0.3333
    assert plain_values([math.nan, torch.tensor(math.inf), 1.5]) == [None, None, 1.5]


def test_the_profile_of_an_earlier_part_of_a_run_is_not_kept(tmp_path: Path) -> None:
    samples = SimpleNamespace(last="", prompt="")
    for text in ("slow", ""):
        callbacks: Any = SimpleNamespace(samples=samples, profile=SimpleNamespace(text=text))
        write_summary(tmp_path, {"validation_loss": 2.5}, callbacks)
        assert (tmp_path / "profile.txt").exists() == bool(text)


def test_neighbouring_windows_are_one_where_there_are_very_many() -> None:
    assert window_losses(torch.tensor([0.5, 1.25, 2.0])) == [0.5, 1.25, 2.0]
    found = window_losses(torch.arange(2500.0))
    assert len(found) == 834
    assert found[:2] == [1.0, 4.0]
    assert found[-1] == 2499.0


# -- figures of a run, as a notebook asks for them


figures: Any = functions
"""The module without types, because plotly's types do not describe the content of a figure."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return read_run(write_run(tmp_path_factory.mktemp("runs") / "moe", layers=2, experts=4))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return read_run(write_run(tmp_path_factory.mktemp("runs") / "dense", experts=0))


def lines(figure: Any) -> dict[str, Any]:
    """Name of each line -> it."""
    return {trace.meta["name"]: trace for trace in figure.data}


CURVES = {
    "loss": ("Loss", {"training": "train/loss", "validation": "validation/loss"}),
    "bits_per_byte": ("Bits per byte", {"validation": "validation/bits_per_byte"}),
    "tokens": ("Tokens read", {"tokens": "train/tokens"}),
    "tokens_per_second": ("Throughput", {"training": "train/tokens_per_second"}),
    "learning_rate": ("Learning rate", {"learning rate": "train/learning_rate"}),
    "distillation": ("Distillation loss", {"KL divergence": "train/distillation"}),
    "coupling": ("Expert-router coupling", {"loss, before its weight": "train/coupling"}),
    "gradient_norm": ("Gradient norm", {"gradient norm": "train/gradient_norm"}),
    "objective": ("Objective", {"objective": "train/objective"}),
    "skipped_steps": ("Skipped steps", {"optimizer steps": "train/skipped_steps"}),
}


@pytest.mark.parametrize("key", RUN_METRICS)
def test_a_curve_has_the_rows_of_its_columns(run: Run, key: str) -> None:
    title, columns = CURVES[key]
    if key in ("skipped_steps", "distillation", "coupling"):
        with pytest.raises(NotMeasuredError, match=f"run 'moe' has no train/{key}"):
            figures.curve(run, key)
        return
    check_curves(figures.curve(run, key), title, columns, run)


def check_line(trace: Any, series: Series) -> None:
    assert list(trace.x) == list(series.steps)
    assert trace.y == pytest.approx(list(series.values), rel=1e-6)


def check_curves(figure: Any, title: str, columns: dict[str, str], run: Run) -> None:
    assert figure.layout.title.text == figure.layout.meta["title"] == title
    drawn = lines(figure)
    for name, key in columns.items():
        check_line(drawn.pop(name), run.series(key))
    assert list(drawn) == (["unigram model", "5-gram model"] if title == "Loss" else [])


def test_the_balancing_losses_are_in_one_figure(run: Run) -> None:
    columns = {"load balance": "train/load_balance", "router z": "train/router_z"}
    check_curves(figures.balancing_losses(run), "Balancing losses", columns, run)


@pytest.mark.parametrize("layer", [1, "layer_01"])
def test_a_load_is_shown_as_multiples_of_the_even_share(run: Run, layer: int | str) -> None:
    figure = figures.load(run, layer)
    (trace,) = figure.data

    shares = [list(series.values) for series in run.loads["layer_01"]]
    assert figure.layout.title.text == "Load, layer 1"
    assert list(trace.x) == list(run.loads["layer_01"][0].steps)
    np.testing.assert_allclose(trace.z, 4 * np.array(shares), atol=1e-4)
    assert dict(trace.colorscale)[1 / 4] == "#f7f7f5", "even is the middle of the colours"
    assert (trace.zmin, trace.zmax) == (0, 4), "as its colour bar says"


@pytest.mark.parametrize("key", MEASURES)
def test_a_measure_has_a_line_for_each_layer(run: Run, key: str) -> None:
    figure = figures.measure(run, key)

    layers = run.validated_layers if key == "coactivation_max" else run.layers
    drawn = lines(figure)
    for number in (0, 1):
        check_line(drawn.pop(f"layer {number}"), layers[f"layer_{number:02d}"][key])
    assert list(drawn) == (["log 4"] if key.startswith("entropy") else [])
    if drawn:
        assert drawn["log 4"].y == pytest.approx([math.log(4)] * 2)


def test_a_measure_of_many_layers_has_a_row_for_each(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "deep", layers=7, experts=2, rows=20))
    (trace,) = figures.measure(run, "max_violation").data
    assert list(trace.y) == list("0123456")
    values = [list(layer["max_violation"].values) for layer in run.layers.values()]
    np.testing.assert_allclose(np.array(trace.z, dtype=float), values, rtol=1e-6)


def test_co_activation_is_that_of_the_summary(run: Run) -> None:
    figure = figures.coactivation(run, 1)

    expected_EE = np.array(run.validated["layer_01"]["coactivation"])
    assert figure.layout.title.text == "Co-activation, layer 1"
    titles = figure.layout.xaxis.title.text, figure.layout.yaxis.title.text
    assert titles == ("expert j", "expert i"), "a row is of the tokens of expert i"
    np.fill_diagonal(expected_EE, np.nan)
    drawn_EE = np.array(figure.data[0].z, dtype=float)
    np.testing.assert_allclose(drawn_EE, expected_EE, atol=1e-4)
    assert (
        "If all pairs were equally frequent, every cell would be 33.3%."
        in figure.layout.meta["note"]
    )


def test_a_measure_of_several_runs_is_the_mean_of_their_layers(run: Run, dense: Run) -> None:
    figure = figures.overlay_measure({"moe": [run, run], "dense": [dense]}, "max_violation")
    means = np.mean([layer["max_violation"].values for layer in run.layers.values()], axis=0)
    (trace,) = figure.data
    assert trace.meta["name"] == "moe"
    assert trace.y == pytest.approx(means, rel=1e-6)
    assert "Mean over the layers and seeds." in figure.layout.meta["note"]


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (
            lambda run, _: figures.load(run, 7),
            "run 'moe' has this figure for layer_00, layer_01, not",
        ),
        (
            lambda _, dense: figures.load(dense, 0),
            "run 'dense' has this figure for no layer, not for",
        ),
        (lambda run, _: figures.measure(run, "none"), "there is no metric 'none'; there are "),
        (lambda _, dense: figures.measure(dense, "churn"), "run 'dense' has no churn for any"),
        (lambda _, dense: figures.balancing_losses(dense), "'dense' has no balancing losses"),
        (lambda _, dense: figures.overlay_measure({"a": [dense]}, "churn"), "no run has 'Churn'"),
    ],
)
def test_figures_without_measurements_raise_not_measured(
    run: Run, dense: Run, draw: Callable[[Run, Run], Any], said: str
) -> None:
    with pytest.raises(NotMeasuredError, match=said):
        draw(run, dense)


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
    assert average([series(*row) for row in rows], max_points) == (steps, values)


@pytest.mark.parametrize("length", [1, 499, 500, 501, 12_345])
def test_there_are_never_more_points_than_asked_for(length: int) -> None:
    steps, (values,) = average([series([10 * n for n in range(length)], [1.0] * length)], 500)
    assert len(steps) == len(values) == min(length, 500)
    assert set(values) == {1}


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
