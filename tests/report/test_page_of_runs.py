"""The page of several runs: the comparison, and the curves of each run."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from moe_ffn.report.dashboard import build_workspace, to_json
from moe_ffn.report.studies.comparison_page import comparison_html, html_of_runs
from moe_ffn.runs.reader import read_runs
from moe_ffn.studies.comparison import Comparison
from moe_ffn.studies.gather import gather
from moe_ffn.training.monitoring.json_lines import STEP_SECONDS, TRAIN_SECONDS
from tests.helpers.synthetic_run import (
    MEASURES,
    Written,
    change,
    raise_alarms,
    row_of,
    without_plots,
    write_run,
)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three seeds of two blocks; the dense one is worse by 0.2 in each."""
    folder = tmp_path_factory.mktemp("study")
    return [
        write_run(folder / f"{name}-seed{seed}", experts=experts, seed=seed, worse_by=loss)
        for name, experts, loss in (("moe", 4, 0.0), ("dense", 0, 0.2))
        for seed in range(3)
    ]


@pytest.fixture(scope="module")
def page(study: list[Path]) -> Written:
    return Written(*study)


def names_in(page: Written, title: str) -> set[str]:
    """Names of the lines in the first figure of a plot with a choice."""
    return {trace["meta"]["name"] for trace in page.figures[title][0]["data"]}


def test_seeds_are_one_arm_and_the_verdict_is_what_their_intervals_allow(page: Written) -> None:
    assert "<h1>moe · dense</h1>" in page.body
    assert re.search(
        r"from moe dense is worse than moe by 0\.[12]\d+ \[0\.\d+, 0\.\d+\] nats per token \(3 seeds",
        page.text,
    )
    assert (
        "dense: model.ffn: moe, 4 experts (swiglu), top_k k=2, capacity.factor 1.25 -> swiglu"
        in page.text
    )
    assert list(page.figures) == [
        *("Difference from moe", "Final loss against cost", "Validation loss", "Training loss"),
        *("MaxVio", "Dropped", "Entropy per token", "Largest router logit", "Churn"),
        "Dead experts",
    ]


def test_an_arm_has_one_colour_in_its_table_and_in_every_plot(page: Written) -> None:
    colours = {"moe": 0, "dense": 1, "frontier": "quiet"}
    for title, figures in page.figures.items():
        for trace in (trace for figure in figures for trace in figure["data"]):
            colour = trace["meta"].get("colour", trace["meta"].get("fill"))
            assert colour == colours[trace["meta"]["name"]], title
    assert re.search(r'series-1\)"/></svg> dense</th>', page.body)
    assert page.traces("MaxVio").keys() == {"moe"}


def test_a_loss_is_drawn_over_tokens_flops_seconds_and_steps(page: Written) -> None:
    axes = [f["layout"]["xaxis"]["title"]["text"] for f in page.figures["Validation loss"]]
    first = ["tokens trained on", "training FLOPs", "seconds of training steps"]
    assert axes == [*first, "optimizer steps"]


def test_a_page_made_only_from_results_has_the_same_content(
    study: list[Path], page: Written, tmp_path: Path
) -> None:
    gathered = gather(study)
    comparison = Comparison.of(gathered.results, question="Is a <b> better?")
    html = comparison_html(gathered, comparison, tmp_path / "page.html")

    assert "<title>Is a &lt;b&gt; better?</title>" in html
    assert "<h1>Is a &lt;b&gt; better?</h1>" in html
    table = page.body[page.body.index("<h3>Loss</h3>") :].split("</table>")[0]
    assert table in html
    loss = gathered.results[4].outcome.validation_loss
    cells = f"<td>{loss:.4f}</td><td>finished</td><td>600 of 600</td><td>0</td><td>swiglu</td>"
    assert f"dense-seed1</th>{cells}<td>2.45 M</td>" in html


def test_it_links_to_the_pages_of_its_runs(study: list[Path], tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "runs" / name, seed=k) for k, name in enumerate(["a#1", "b"])]
    (folders[0] / "report.html").write_text("its page")
    gathered = gather(folders)
    output = tmp_path / "pages" / "page.html"
    output.parent.mkdir()

    html = comparison_html(gathered, gathered.compare(), output)

    (link,) = re.findall(r'<a href="([^"]*)">a#1</a>', html)
    assert (output.parent / unquote(link)).read_text() == "its page"
    assert "</svg> b</th>" in html
    whole = html_of_runs(read_runs(folders), output=tmp_path / "page.html")
    assert '<a href="runs/a%231/report.html">a#1</a>' in whole


def test_runs_with_problems_are_named(moe: Path, tmp_path: Path) -> None:
    change(moe / "summary.json", unigram_loss=0.5)
    page = without_plots(moe, write_run(tmp_path / "runs" / "fine", layers=1))
    assert "moe: The model is worse than the unigram model" in page.text
    head = page.text[: page.text.index("Final loss")]
    assert "fine: " not in head
    assert "No alarm was raised" not in page.text


def test_each_run_has_its_progress_alarms_and_parameters(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "small", experts=8),
        write_run(tmp_path / "wide", experts=16, learning_rate=0.001),
        write_run(tmp_path / "dense", experts=0),
    ]
    raise_alarms(folders[1])
    page = without_plots(*folders)

    loss = json.loads((folders[2] / "summary.json").read_text())["validation_loss"]
    cells = [f"{loss:.4f}", "finished", "600 of 600", 0, "swiglu", "2.45 M"]
    assert row_of(page.text, ["dense", *cells])
    assert "finished 600 of 600 2 moe, 16 experts" in page.text
    assert "optimizer.learning_rate: 0.003 -> 0.001" in page.text
    assert "trainer.max_steps" not in page.text
    assert "run.name" not in page.text
    assert "2 alarms collapse wide, step 300" in page.text


def test_an_unfinished_run_is_drawn_but_not_compared(tmp_path: Path) -> None:
    ended = [write_run(tmp_path / name, experts=n) for name, n in (("a", 4), ("b", 0))]
    runs = [*ended, write_run(tmp_path / "c", experts=2, is_finished=False)]
    page = Written(*runs)

    assert 'id="reload"' in html_of_runs(read_runs(runs), reload_every=5)
    assert names_in(page, "Training loss") == {"a", "b", "c"}
    assert re.search("Left out: .*is not finished: it is at step 300 of 600", page.text)
    assert "c 1." in page.text, "its loss so far"
    assert "training 300 of 600" in page.text
    assert "b: " in page.text


def test_runs_that_do_not_compare_have_no_verdict_and_their_curves(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", experts=0), write_run(tmp_path / "b", experts=4)
    change(b / "facts.json", corpus_sha256="32")
    page = Written(a, b)

    assert (
        "No verdict: the runs were trained on different text (data.corpus), so their losses"
        in page.text
    )
    assert names_in(page, "Validation loss") == {"a", "b"}
    assert "Difference from a" not in page.figures
    block = "moe, 4 experts (swiglu), top_k k=2, capacity.factor 1.25"
    assert f"What differs From a. b: model.ffn: swiglu -> {block} Balance" in page.text


# -- the workspace's JSON, built offline: sections, metrics, axes, groups; and the library reads it back


STEP = "trainer/global_step"

LAYERS = ("layer_00", "layer_03", "layer_03/inner", "layer_03/round_2", "layer_117")

# What training rows have; co-activation is measured only in validation.
OF_A_LAYER = set(MEASURES) - {"coactivation_max"}


@pytest.fixture(scope="module")
def view() -> dict[str, Any]:
    """The view, made without the network."""

    def reject(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was used")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "socket", reject)
        patch.setattr(socket, "getaddrinfo", reject)
        return json.loads(to_json(build_workspace("team", "project")))["spec"]["section"]


@pytest.fixture(scope="module")
def sections(view: dict[str, Any]) -> list[dict[str, Any]]:
    return view["panelBankConfig"]["sections"]


@pytest.fixture(scope="module")
def line_plots(sections: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The settings of every panel over the steps."""
    panels = [panel for section in sections for panel in section["panels"]]
    return [p["config"] for p in panels if p["viewType"] == "Run History Line Plot"]


Drawn = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def drawn(line_plots: list[dict[str, Any]]) -> Drawn:
    """The titles of the panels that draw a metric."""
    return lambda key: [
        plot["chartTitle"]
        for plot in line_plots
        if key in plot["metrics"] or re.search(plot.get("metricRegex", "(?!)"), key)
    ]


def test_sections_are_in_order_and_open(
    view: dict[str, Any], sections: list[dict[str, Any]]
) -> None:
    assert [section["name"] for section in sections] == ["Training", "Efficiency", "Routing"]
    for section in sections:
        page = section["flowConfig"]
        assert section["isOpen"]
        assert page["columnsPerPage"] * page["rowsPerPage"] >= len(section["panels"]), "one page"
        assert section["localPanelSettings"]["useRunsTableGroupingInPanels"]
    (runs,) = view["runSets"]
    assert runs["grouping"] == [{"section": "config", "name": "ffn_type.value"}]
    assert runs["filters"]["filters"] == []
    assert runs["search"]["query"] == ""


def test_every_line_runs_over_the_optimizer_step_unsmoothed_with_titled_axes(
    view: dict[str, Any], sections: list[dict[str, Any]], line_plots: list[dict[str, Any]]
) -> None:
    for settings in [view["settings"], *(part["localPanelSettings"] for part in sections)]:
        assert settings["xAxis"] == STEP
        assert settings["smoothingType"] == "none"
        assert not settings["smoothingActive"]
    assert len(line_plots) > 25
    for plot in line_plots:
        assert plot["xAxis"] == STEP
        assert plot["xAxisTitle"] == "optimizer step"
        assert plot["yAxisTitle"]
        assert plot["chartTitle"]
        assert plot["smoothingType"] == "none"


def test_each_metric_has_one_panel_for_all_layers(
    drawn: Drawn,
) -> None:
    for layer, key in product(LAYERS, OF_A_LAYER):
        assert len(drawn(f"routing/{layer}/{key}")) == 1, key
    titles = [title for key in OF_A_LAYER for title in drawn(f"routing/layer_00/{key}")]
    assert len(set(titles)) == len(OF_A_LAYER)


def test_validation_is_drawn_with_training(drawn: Drawn) -> None:
    assert drawn("train/loss") == drawn("validation/loss") == ["Loss"]
    for key in ("max_violation", "dropped_fraction", "entropy"):
        (training,) = drawn(f"routing/layer_00/{key}")
        assert drawn(f"validation/routing/layer_00/{key}") == [f"{training}, validation"]


def test_every_column_that_a_run_writes_in_training_has_a_panel(moe_run: Any, drawn: Drawn) -> None:
    """Clocks are excepted: they are an axis of losses, not a curve."""
    clocks = {"step", STEP, TRAIN_SECONDS, STEP_SECONDS}
    written = {c for c in moe_run.columns - clocks if not c.startswith("validation/routing/")}
    assert any(column.startswith("routing/layer_01/") for column in written)

    # Loads go to wandb as one histogram for each layer, and as one figure of all of them.
    loads = {column for column in written if "/load/expert_" in column}
    histograms = {re.sub("/expert_[0-9]+$", "", column) for column in loads}
    assert histograms == {"routing/layer_00/load", "routing/layer_01/load"}
    assert drawn("routing/layer_00/load") == ["Load of layer 0"]
    assert [column for column in sorted(written - loads) if not drawn(column)] == []
