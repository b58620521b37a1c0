"""The page of several runs beside each other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from moe_ffn.report.page import report_html
from moe_ffn.report.tables import RUN_NUMBERS, best_runs
from moe_ffn.runs.reader import read_runs
from tests.helpers.synthetic_run import raise_alarms, write_metrics, write_run
from tests.helpers.written_page import Written, row_of, without_plots


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs" / "moe")


def test_of_several_runs_those_that_give_concern_are_named(moe: Path, tmp_path: Path) -> None:
    summary = json.loads((moe / "summary.json").read_text())
    (moe / "summary.json").write_text(json.dumps({**summary, "unigram_loss": 0.5}))
    page = without_plots(moe, write_run(tmp_path / "runs" / "fine"))

    assert "moe: The validation loss is worse than the unigram model" in page.text
    assert "fine: " not in page.text
    assert "No alarm was raised" not in page.text


def test_runs_side_by_side(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "small", experts=8),
        write_run(tmp_path / "wide", experts=16, learning_rate=0.001),
        write_run(tmp_path / "dense", experts=0),
    ]
    raise_alarms(folders[1])
    page = Written(*folders)

    loss = json.loads((folders[2] / "summary.json").read_text())["validation_loss"]
    cells = [f"{loss:.4f}", "finished", "600 of 600", "swiglu"]
    assert row_of(page.text, ["dense", *cells])
    assert " - - - 2.45 0.87 1.74 " in page.text
    assert row_of(page.text, ["optimizer.learning_rate", "0.003", "0.001", "0.003"])
    assert row_of(page.text, ["model.ffn.num_experts", "8", "16", "-"])
    assert "trainer.max_steps" not in page.text
    assert "run.name" not in page.text
    assert "2 alarms collapse wide, step 300" in page.text

    colours = {"small": 0, "wide": 1, "dense": 2}
    for title, (figure, *_) in page.figures.items():
        for trace in figure["data"]:
            assert trace["meta"]["colour"] == colours[trace["meta"]["name"]], title
    assert page.traces("MaxVio").keys() == {"small", "wide"}


def test_a_measure_of_runs_side_by_side_is_the_mean_of_their_layers(tmp_path: Path) -> None:
    """Of the layers: a block inside the block of one is none."""
    for name, shift in (("a", 0.0), ("b", 1.0)):
        (tmp_path / name).mkdir()
        values = {"layer_00": 1.0 + shift, "layer_01": 2.0, "layer_01/inner": 99.0}
        rows = [
            {"step": step}
            | {f"routing/{layer}/max_violation": step * v for layer, v in values.items()}
            for step in (1, 2)
        ]
        write_metrics(tmp_path / name / "metrics.jsonl", rows)
    page = Written(tmp_path / "a", tmp_path / "b")

    drawn = page.traces("MaxVio")
    assert {name: (trace["x"], trace["y"]) for name, trace in drawn.items()} == {
        "a": ([1, 2], [1.5, 3]),
        "b": ([1, 2], [2, 4]),
    }


def test_balance_of_runs_side_by_side_is_the_mean_of_their_layers(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", layers=2, experts=4, rows=20)
    summary = json.loads((folder / "summary.json").read_text())
    first, second = summary["routing"].values()
    first |= {"max_violation": 1.0}
    second |= {"max_violation": 2.0}
    summary["routing"]["layer_01/inner"] = {**first, "max_violation": 99.0}
    (folder / "summary.json").write_text(json.dumps(summary))
    runs = read_runs([folder, write_run(tmp_path / "b", experts=0)])

    assert [RUN_NUMBERS["MaxVio"].text(run) for run in runs] == ["1.50", "-"]


def test_the_lowest_loss_of_runs_side_by_side_is_bold(tmp_path: Path) -> None:
    folders = []
    for name, loss in (("a", 1.5), ("b", 1.25), ("c", 1.75)):
        folder = write_run(tmp_path / name, experts=0)
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps({**summary, "validation_loss": loss}))
        folders.append(folder)

    assert re.findall(r"<b>(.*?)</b>", without_plots(*folders).body) == ["1.2500"]
    assert best_runs(read_runs(folders[:1])) == [False], "of one run nothing is the best"


def test_names_and_logging_are_no_difference(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", experts=0), write_run(tmp_path / "b", experts=0)
    config = yaml.safe_load((b / "config.yaml").read_text())
    config["logging"]["every_n_steps"] = 99
    (b / "config.yaml").write_text(yaml.safe_dump(config))

    said = "<p>All options are the same, but for names and logging.</p>\n</section>"
    assert f'<section id="options"><h2>What differs</h2>\n{said}' in without_plots(a, b).body


@pytest.mark.parametrize(("is_finished", "reloads"), [((True, False), True), ((True, True), False)])
def test_a_page_loads_itself_anew_while_any_of_its_runs_goes_on(
    tmp_path: Path, is_finished: tuple[bool, bool], reloads: bool
) -> None:
    runs = [
        write_run(tmp_path / str(number), experts=0, is_finished=ended)
        for number, ended in enumerate(is_finished)
    ]

    assert ('id="reload"' in report_html(read_runs(runs), reload_every=5)) == reloads


def test_losses_are_drawn_over_training_flops_too(tmp_path: Path) -> None:
    page = Written(write_run(tmp_path / "a"), write_run(tmp_path / "b"))
    over_steps, over_flops = page.figures["Validation loss"]

    # 3 passes x 1,740,000 FLOPs x 16 sequences x 256 tokens, a step.
    assert over_steps["data"][0]["x"][0] == 100
    assert over_flops["data"][0]["x"][0] == 100 * 3 * 1_740_000 * 16 * 256
    assert over_flops["layout"]["xaxis"]["title"]["text"] == "training FLOPs"
    assert "FLOPs are 3 (forward and backward) x flops_per_token x batch_size" in page.text


@pytest.mark.parametrize(
    ("fact", "said"),
    [
        ("corpus_sha256", "These runs read different corpora: their losses do not compare."),
        (
            "precision",
            "These runs differ in precision, which by itself moves a loss in its second decimal.",
        ),
    ],
)
def test_runs_with_other_data_or_precision_are_said_to_differ(
    tmp_path: Path, fact: str, said: str
) -> None:
    a, b = write_run(tmp_path / "a", experts=0), write_run(tmp_path / "b", experts=0)
    assert "These runs" not in without_plots(a, b).body
    facts = json.loads((b / "facts.json").read_text())
    (b / "facts.json").write_text(json.dumps({**facts, fact: "32-true"}))

    shown = without_plots(a, b).body
    assert said in shown
    assert shown.count("These runs") == 1
    precision = "bf16-mixed, 32-true" if fact == "precision" else "bf16-mixed"
    assert f"Precision: {precision}." in shown
