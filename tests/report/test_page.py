"""The page of a run, read as text; a metric added to the table appears everywhere."""

from __future__ import annotations

import json
import math
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from moe_ffn.config.option_tree import flatten
from moe_ffn.ffn.base import ROUTING_SUFFIX
from moe_ffn.metrics.measures import per_token
from moe_ffn.metrics.modular import TokenMetrics
from moe_ffn.metrics.table import LAYER_METRICS, Metric
from moe_ffn.outputs import Routing
from moe_ffn.report import run_summary
from moe_ffn.report.dashboard import build_workspace, to_json
from moe_ffn.report.page import report_html
from moe_ffn.report.run_summary import duration
from moe_ffn.runs.reader import read_runs
from moe_ffn.training.monitoring.row_sums import RoutingByLayer, routing_row
from tests.helpers.synthetic_run import (
    Written,
    age,
    change,
    row_of,
    without_plots,
    write_metrics,
    write_run,
)


def test_the_head_of_a_page(folder: Path, page: Written) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    loss = summary["validation_loss"]
    below, above = 3.08 - loss, loss - 1.21

    assert "<title>moe</title>" in page.html
    for said in (
        "finished , step 600 of 600 · moe, 8 experts (swiglu), top_k k=2, capacity.factor 1.25 · "
        "4 layers of width 128",
        f"validation loss {summary['validation_loss']:.4f} nats per token",
        f"bits per byte {summary['validation_bits_per_byte']:.4f}",
        f"unigram model 3.0800 loss is {below:.4f} lower ({below / 3.08:.0%})",
        f"5-gram model 1.2100 loss is {above:.4f} higher ({above / 1.21:.0%})",
        "tokens seen 2.46 M step 600 of 600",
        "training FLOPs 12.83 T 1.74 M per token, forward",
        "wall time 1 min 16 s 1 min 0 s in training steps",
        "peak memory 1.50 GB of the process",
        "hardware 2 CPU cores Some CPU",
        "parameters 2.45 M 870.00 k active",
        "throughput 41,207 tokens per second, mean of the run",
        "code 146dbad7166a-dirty , corpus sha256 66b795b1a032 , precision bf16-mixed",
        "Out of the healthy range: Dead experts in layer 1.",
    ):
        assert said in page.text


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "-"),
        (math.nan, "-"),
        (12.34, "12.3 s"),
        (60, "1 min 0 s"),
        (245.4, "4 min 5 s"),
        (3599.6, "1 h 0 min"),
        (4980, "1 h 23 min"),
        (90_000, "25 h 0 min"),
    ],
)
def test_durations_are_given_in_two_units(seconds: float | None, said: str) -> None:
    assert duration(seconds) == said


def test_silence_is_no_good_news_where_no_alarm_could_have_rung(tmp_path: Path) -> None:
    short = write_run(tmp_path / "short", rows=20)
    lines = (short / "metrics.jsonl").read_text().splitlines(keepends=True)
    early = [line for line in lines if json.loads(line)["step"] <= 30]
    (short / "metrics.jsonl").write_text("".join(early))
    page = without_plots(short)

    assert "No alarm was raised" not in page.text
    assert (
        "Not judged yet: collapse, dropped pairs and dead experts need 50 steps, this run has 30. "
        "Not judged yet: loss spikes need 6 rows of metrics, this run has 3."
    ) in page.text
    assert page.body.index("Not judged yet") < page.body.index("<nav")

    change(short / "config.yaml", logging__alarms={"after_steps": 31})
    assert "dead experts need 31 steps, this run has 30" in without_plots(short).text
    change(short / "config.yaml", logging__alarms={"after_steps": 30})
    assert "dead experts need" not in without_plots(short).text


def test_red_cells_of_the_health_table_are_listed_above(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", layers=3)
    rows = run / "metrics.jsonl"
    table = [json.loads(line) for line in rows.read_text().splitlines()]
    calm = without_plots(write_run(tmp_path / "calm", layers=1))
    table[-1] |= {f"routing/layer_{layer:02d}/max_violation": 1.25 for layer in (0, 2)}
    write_metrics(rows, table)
    page = without_plots(run)

    assert "No alarm was raised." in calm.text
    assert 'class="bad">' not in calm.body.partition('class="health"')[2].partition("</table>")[0]
    assert "No alarm was raised" not in page.text
    said = "Out of the healthy range: MaxVio in layers 0, 2; Dead experts in layer 1."
    assert f'<p class="bad">{said}</p>' in page.body


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (
            2.001,
            "The model is worse than the unigram model, which only counts tokens: the run is too short "
            "or broken.",
        ),
        (1.999, ""),
        (None, "The validation loss is not a finite number: training has diverged."),
    ],
)
def test_a_worrying_loss_has_a_warning(tmp_path: Path, loss: float | None, said: str) -> None:
    moe = write_run(tmp_path / "moe", layers=1)
    change(moe / "summary.json", validation_loss=loss, unigram_loss=2.0)
    page = without_plots(moe)
    assert (f'<p class="bad">{said}</p>' in page.body) == bool(said)
    assert ("No alarm was raised" not in page.text) == bool(said)


@pytest.mark.parametrize(
    ("load", "cells"),
    [
        ([None] * 4, "<td>-</td>" * 4),
        (
            [0.6, 0.25, 0.15, 0.0],
            '<td class="high">60.0</td><td>25.0</td><td class="low">15.0</td><td class="none">0.0</td>',
        ),
    ],
    ids=["not measured", "by its ratio to the even share"],
)
def test_a_share_is_shaded_and_one_that_was_not_measured_is_a_dash(
    tmp_path: Path, load: list[float | None], cells: str
) -> None:
    folder = write_run(tmp_path / "a", layers=1, experts=4, rows=20)
    change(folder / "summary.json", routing__layer_00__load=load)
    assert f'<th scope="row">0</th>{cells}' in without_plots(folder).body


def test_alarms_are_at_the_top_grouped_by_kind_and_step(moe: Path) -> None:
    alarms = [
        {"step": step, "kind": "dead_experts", "layer": layer, "message": said, "advice": "Do."}
        for step, layer, said in (
            (50, "layer_00", "2 of 8 are dead."),
            (50, "layer_01", "1 of 8 is dead."),
            (50, "layer_05/inner", "3 of 8 are dead."),
            (60, None, "The loss rose."),
        )
    ]
    (moe / "alarms.jsonl").write_text("".join(json.dumps(alarm) + "\n" for alarm in alarms))
    body = without_plots(moe).body

    assert "<h2>4 alarms</h2>" in body
    assert "No alarm was raised" not in body
    assert re.findall(r"<li>.*?</li>", body[: body.index("<nav")]) == [
        f'<li><strong>dead experts</strong> <span class="quiet">step {place}</span>'
        f"<br>{said}<br><em>Do.</em></li>"
        for place, said in (
            ("50, layers 0, 1, 5 inner", "2 of 8 are dead."),
            ("60", "The loss rose."),
        )
    ]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "training , step 300 of 600"), (5000, "interrupted , step 300 of 600")],
)
def test_a_run_without_an_end(tmp_path: Path, seconds: float, said: str) -> None:
    folder = write_run(tmp_path / "a", is_finished=False)
    age(folder, seconds)
    page = without_plots(folder)

    assert said in page.text
    assert "unigram model - nats per token" in page.text
    assert " tokens per second, last row hardware" in page.text
    assert "wall time" not in page.text


def test_a_nan_in_the_results_is_a_dash(moe: Path) -> None:
    pairs = [[0, math.nan], [1, 0]]
    change(moe / "summary.json", unigram_loss=math.nan, routing__layer_00__coactivation=pairs)
    assert "NaN" in (moe / "summary.json").read_text()
    page = Written(moe)
    assert "unigram model - nats per token" in page.text
    assert list(page.traces("Loss")) == ["training", "validation"]


def test_text_from_a_run_is_escaped(tmp_path: Path) -> None:
    """Markup in each value of the config and in every name of the results."""
    moe = write_run(tmp_path / "runs" / "moe", layers=1, rows=10)
    evil = "<script>alert(1)</script>"
    config = yaml.safe_load((moe / "config.yaml").read_text())
    paths = list(flatten(config))
    assert "model.num_layers" in paths
    other = write_run(moe.parent / "other", layers=1, rows=10)
    for path in paths:
        (moe / "config.yaml").write_text(yaml.safe_dump(config))
        change(moe / "config.yaml", **{path.replace(".", "__"): evil})
        for html in (without_plots(moe).body, without_plots(moe, other).body):
            assert "<script" not in html, path
    summary = json.loads((moe / "summary.json").read_text())
    summary["routing"] = {evil: summary["routing"]["layer_00"]}
    (moe / "summary.json").write_text(json.dumps(summary))
    alarm = {"step": 1, "kind": evil, "layer": evil, "message": evil, "advice": evil}
    (moe / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    facts = dict.fromkeys(json.loads((moe / "facts.json").read_text()), evil)
    (moe / "facts.json").write_text(json.dumps(facts))
    (moe / "config.yaml").write_text(yaml.safe_dump({**config, evil: {evil: evil}}))
    for page in (Written(moe), Written(moe, other)):
        assert "<script" not in page.body
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page.body


def test_the_experts_as_a_table(folder: Path, page: Written) -> None:
    values = json.loads((folder / "summary.json").read_text())["routing"]["layer_01"]
    shares = [f"{100 * share:.1f}" for share in values["load"]]
    ends = f"{values['max_violation']:.2f}", f"{values['entropy']:.2f}"
    assert row_of(page.text, [1, *shares, *ends, f"{values['dropped_fraction']:.1%}"])
    assert '<td class="none">0.0</td>' in page.body


def test_many_experts_are_summed_up_and_listed_below(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "wide", layers=2, experts=256, rows=10)
    page = without_plots(folder)
    load = json.loads((folder / "summary.json").read_text())["routing"]["layer_01"]["load"]

    busiest = f"#{load.index(max(load))} {100 * max(load):.2f}"
    middle = f"{100 * sorted(load)[128]:.2f}"
    assert row_of(page.text, [1, 256, busiest, middle, "0.00", 1])
    assert row_of(page.text, ["240 to 255", *(f"{100 * share:.2f}" for share in load[240:])])


def test_the_samples_are_in_order_with_the_prompt_in_bold(moe: Path) -> None:
    texts = ["<script>alert(1)</script>", "\x1b[2J\x00\x7f\u202e\ud800", "plain\n\ttext"]
    lines = [{"step": 100 * n, "prompt": "a<b", "text": text} for n, text in enumerate(texts)]
    (moe / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    body = without_plots(moe).body

    def control(shown: str) -> str:
        return f'<span class="control">{shown}</span>'

    assert "<pre><b>a&lt;b</b>&lt;script&gt;alert(1)&lt;/script&gt;</pre>" in body
    escape = control(r"\x1b") + "[2J" + control(r"\x00") + control(r"\x7f") + control(r"\u202e")
    surrogate = control(r"\ud800")
    assert f"<b>a&lt;b</b>{escape}{surrogate}</pre>" in body
    assert "<b>a&lt;b</b>plain\n\ttext</pre>" in body
    places = [body.index(f"<summary>step {step}</summary>") for step in (0, 100, 200)]
    assert places == sorted(places)


def test_only_some_of_many_samples_are_shown(moe: Path) -> None:
    lines = [{"step": step, "prompt": "", "text": "x"} for step in range(400)]
    (moe / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = without_plots(moe)

    assert "40 of 400, evenly chosen." in page.text
    assert page.body.count("<summary>step ") == 40
    opened = re.findall(r"<details open><summary>step (\d+)", page.body)
    assert opened == ["0", "378", "388", "399"], "the first and the last three"
    assert "<summary>step 0</summary>" in page.body
    assert "<summary>step 399</summary>" in page.body


def test_the_config_is_there_as_it_was_written(folder: Path, page: Written) -> None:
    assert (folder / "config.yaml").read_text().strip() in unescape(page.body)
    assert '"flops_per_token": 1740000' in page.text
    facts = page.body.split("facts.json, beyond the options</summary><pre>")[1].split("</pre>")[0]
    options_of_run = yaml.safe_load((folder / "config.yaml").read_text()).keys()
    assert json.loads(unescape(facts)).keys().isdisjoint(options_of_run)


def test_nothing_in_a_run_can_end_the_script_that_holds_the_plots(tmp_path: Path) -> None:
    first = write_run(tmp_path / "x" / "<script>&")
    page = Written(first, write_run(tmp_path / "y", experts=0))
    drawn = page.figures["Validation loss"][0]["data"]
    assert [trace["meta"]["name"] for trace in drawn] == ["&lt;script&gt;&amp;", "y"]
    assert "<h1>&lt;script&gt;&amp; · y</h1>" in page.body


def test_a_dense_run_has_no_word_of_routing(tmp_path: Path) -> None:
    page = Written(write_run(tmp_path / "dense", experts=0))
    assert "Routing" not in page.text
    assert "Experts" not in page.text
    assert list(page.figures) == ["Loss", "Gradient norm", "Throughput", "Learning rate"]


def test_the_page_of_a_run_without_rows_shows_that_it_waits(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("trainer: {max_steps: 5}\n")
    page = Written(tmp_path)
    assert "waiting for the first row , step 0 of 5" in page.text
    assert "No alarm was raised" not in page.text
    assert "Fewer than two points were measured yet." in page.text
    assert page.figures == {}


def test_plotly_s_script_is_in_the_page_once(moe: Path) -> None:
    html = report_html(read_runs([moe, moe.parent / "moe"]))
    assert html.count("* plotly.js v") == 1
    assert len(html) < 5_500_000


def heaviest_weight(routing: Routing) -> torch.Tensor:
    return routing.weights_N.max()


@pytest.fixture
def new_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    metric = Metric(
        key="heaviest_weight",
        title="Heaviest weight",
        quantity="weight",
        unit="dimensionless",
        formula="largest weight of a batch, mean over batches",
        healthy="1 at most",
        measured="last step",
        measure=per_token("heaviest_weights", heaviest_weight),
    )
    monkeypatch.setitem(LAYER_METRICS, metric.key, metric)


@pytest.mark.usefixtures("new_metric")
def test_a_new_metric_is_in_rows_and_in_torchmetrics(make_routing: Any) -> None:
    batches = [make_routing([[0, 1]], 2, weights_N=torch.tensor([w, 0.1])) for w in (0.4, 0.8)]
    found, metrics = RoutingByLayer("every batch", "last step"), TokenMetrics(2)
    for routing in batches:
        found.update({"layer_03": routing})
        metrics.update(routing)

    row = routing_row(found.close())

    assert row["routing/layer_03/heaviest_weight"] == pytest.approx(0.6)
    assert metrics.compute()["heaviest_weight"].item() == pytest.approx(0.6)


@pytest.mark.usefixtures("new_metric")
def test_a_new_metric_has_a_panel() -> None:
    text = to_json(build_workspace("team", "project"))
    assert '"chartTitle": "Heaviest weight"' in text
    assert '"yAxisTitle": "weight (dimensionless)"' in text
    assert f"^routing/layer_[0-9]+{ROUTING_SUFFIX}/heaviest_weight$" in text


@pytest.mark.usefixtures("new_metric")
def test_a_new_metric_has_a_plot_or_a_word_on_the_page(tmp_path: Path) -> None:
    key = "routing/layer_00/heaviest_weight"
    rows = [{"step": step, key: step / 10} for step in (1, 2, 3)]
    for name, written in (("moving", rows), ("constant", [{**row, key: 0.5} for row in rows])):
        (tmp_path / name).mkdir()
        write_metrics(tmp_path / name / "metrics.jsonl", written)

    moving, constant = (Written(tmp_path / name) for name in ("moving", "constant"))

    assert "Heaviest weight" in moving.figures
    assert "Largest weight of a batch, mean over batches. Healthy: 1 at most." in moving.text
    axis = moving.figures["Heaviest weight"][0]["layout"]["yaxis"]["title"]["text"]
    assert axis == "weight (dimensionless)"
    assert "Constant over all steps and layers: heaviest weight 0.5." in constant.text


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"ffn": {"type": "dense", "activation": "gelu"}}, "dense"),
        ({"ffn": {"type": "moe", "router": {"type": "parts:MyRouter"}}}, "moe"),
        ({"ffn": {"type": "moe", "of_a_later_version": 1}, "ffn_at": {"0": {}}}, "moe"),
        ({"ffn_at": 5}, "unknown block"),
    ],
)
def test_a_block_that_cannot_be_described_has_its_type(model: dict[str, Any], said: str) -> None:
    options = {"model": model, **{f"model.{key}": value for key, value in model.items()}}
    assert run_summary.block(options.get).startswith(said)
