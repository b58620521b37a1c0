"""What the page says, read as text; test_report_browser.py looks at it in a browser."""

from __future__ import annotations

import base64
import json
import math
import re
import struct
import subprocess
import sys
from array import array
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from moe_ffn.balancing.losses import BALANCING_LOSSES
from moe_ffn.metrics.table import layer_measures
from moe_ffn.report.drawing import LIGHT, label
from moe_ffn.report.figures import describe_points
from moe_ffn.report.html import render
from moe_ffn.report.page import report_html, values_of_run, values_of_runs
from moe_ffn.report.plots import pack_shares
from moe_ffn.report.tables import best_runs, constant_measures, flatten, moving_measures
from moe_ffn.runs.reader import read_runs
from moe_ffn.runs.rows import Series
from tests.helpers.synthetic_run import MEASURES as KEYS_OF_MEASURES
from tests.helpers.synthetic_run import age, raise_alarms, write_metrics, write_run

REPOSITORY = Path(__file__).parents[2]


class Written:
    """A page as text without tags, and the figures in it by their titles."""

    def __init__(self, *folders: Path) -> None:
        self.html = report_html(read_runs(folders))
        found = re.search(r'id="plots">(.*?)</script>', self.html, re.DOTALL)
        assert found
        plots = json.loads(found[1])
        self.size_of_data = len(found[1])
        titles = re.findall(r'role="img" aria-label="([^"]*)"', self.html)
        self.figures: dict[str, list[dict[str, Any]]] = {
            unescape(title): figures for title, figures in zip(titles, plots.values(), strict=True)
        }
        body = self.html[self.html.index("<body>") : self.html.index('<script type="application')]
        self.body = body
        self.text = re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", body)))

    def traces(self, title: str) -> dict[str, dict[str, Any]]:
        (figure,) = self.figures[title]
        return {trace["name"]: trace for trace in figure["data"]}

    def of_one(self) -> dict[str, list[dict[str, Any]]]:
        """The plots without a choice."""
        return {title: figures for title, figures in self.figures.items() if len(figures) == 1}


def without_plots(*folders: Path) -> str:
    """The page without its plots, which take a second or two to draw."""
    runs = read_runs(folders)
    is_one = len(runs) == 1
    values = values_of_run(runs[0]) if is_one else values_of_runs(runs)
    values |= {"title": "", "reload_every": None, "light": {}, "figures": {}, "plotly": ""}
    values["plots"] = dict.fromkeys(("curves", "loads", "measures", "coactivation"), ())
    html = render("run.html" if is_one else "runs.html", **values)
    return html[html.index("<body>") : html.index('<script type="application')]


def row_of(text: str, cells: Sequence[object]) -> bool:
    return " ".join(map(str, cells)) in text


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs" / "moe")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody changes, beside its page."""
    return write_run(tmp_path_factory.mktemp("runs") / "moe")


@pytest.fixture(scope="module")
def page(folder: Path) -> Written:
    return Written(folder)


def test_the_head_of_a_page(folder: Path, page: Written) -> None:
    summary = json.loads((folder / "summary.json").read_text())

    assert "<title>moe</title>" in page.html
    for said in (
        "finished , step 600 of 600 · moe, 8 experts, top_k k = 2 · 4 layers of width 128",
        f"validation loss {summary['validation_loss']:.4f} nats per token",
        f"bits per byte {summary['validation_bits_per_byte']:.4f}",
        "unigram model 3.0800 nats per token",
        "parameters 2.45 M 870.00 k active",
        "throughput 41,207 tokens per second, mean of the run",
        "FLOPs 1.74 M per token, forward",
        "code 146dbad7166a-dirty , corpus sha256 66b795b1a032 , precision bf16-mixed",
        "No alarm was raised.",
    ):
        assert said in page.text


def test_alarms_stand_at_the_top_with_their_advice(moe: Path) -> None:
    raise_alarms(moe)
    page = Written(moe)

    assert "No alarm was raised" not in page.text
    assert (
        "2 alarms collapse step 300, layer 1 2 of 8 experts take 81% of the pairs. Raise "
        "objective.load_balance (0.01), or use router.type sigmoid_top_k. loss spike step 420 The loss "
        "rose from 1.61 to 2.90 within 10 steps."
    ) in page.text
    assert page.text.index("2 alarms") < page.text.index("Curves")


def test_silence_is_no_good_news_where_no_alarm_could_have_rung(tmp_path: Path) -> None:
    short = write_run(tmp_path / "short", rows=20)
    rows = short / "metrics.jsonl"
    table = [json.loads(line) for line in rows.read_text().splitlines()]
    write_metrics(rows, [row for row in table if row["step"] <= 30])
    page = Written(short)

    assert "No alarm was raised" not in page.text
    assert (
        "Not judged yet: imbalance, drops and dead experts need 50 steps, this run has 30. "
        "Not judged yet: jumps of the loss need 6 rows, this run has 3."
    ) in page.text
    assert page.body.index("Not judged yet") < page.body.index("<nav")

    config = yaml.safe_load((short / "config.yaml").read_text())
    config["logging"]["alarms"] = {"after_steps": 31}
    (short / "config.yaml").write_text(yaml.safe_dump(config))
    assert "dead experts need 31 steps, this run has 30" in Written(short).text
    config["logging"]["alarms"] = {"after_steps": 30}
    (short / "config.yaml").write_text(yaml.safe_dump(config))
    assert "dead experts need" not in Written(short).text


def test_a_page_without_a_row_is_not_called_good(tmp_path: Path) -> None:
    run = write_run(tmp_path / "begun", is_finished=False)
    (run / "metrics.jsonl").unlink()

    page = Written(run)

    assert "No alarm was raised" not in page.text
    assert "Not judged yet: jumps of the loss need 6 rows, this run has 0." in page.text


@pytest.mark.parametrize("is_worse", [True, False])
def test_a_run_worse_than_the_unigram_model_is_told_so(moe: Path, is_worse: bool) -> None:
    summary = json.loads((moe / "summary.json").read_text())
    difference = -1e-3 if is_worse else 1e-3
    summary["unigram_loss"] = summary["validation_loss"] + difference
    (moe / "summary.json").write_text(json.dumps(summary))
    page = Written(moe)

    said = (
        '<p class="bad">The validation loss is worse than the unigram model, which only counts tokens: too '
        "short, or broken.</p>"
    )
    assert (said in page.body) == is_worse
    assert ("No alarm was raised" in page.text) != is_worse


def test_a_run_whose_loss_is_no_number_is_told_so(moe: Path) -> None:
    summary = json.loads((moe / "summary.json").read_text())
    (moe / "summary.json").write_text(json.dumps({**summary, "validation_loss": None}))
    page = Written(moe)

    assert "The validation loss is not a finite number: training has diverged." in page.text
    assert "No alarm was raised" not in page.text


def test_of_several_runs_those_that_give_concern_are_named(moe: Path, tmp_path: Path) -> None:
    summary = json.loads((moe / "summary.json").read_text())
    (moe / "summary.json").write_text(json.dumps({**summary, "unigram_loss": 0.5}))
    page = Written(moe, write_run(tmp_path / "runs" / "fine"))

    assert "moe: The validation loss is worse than the unigram model" in page.text
    assert "fine: " not in page.text
    assert "No alarm was raised" not in page.text


def test_a_load_that_was_not_measured_is_not_shown_as_no_pair(moe: Path) -> None:
    summary = json.loads((moe / "summary.json").read_text())
    summary["routing"]["layer_00"]["load"] = [None] * 8
    (moe / "summary.json").write_text(json.dumps(summary))

    assert row_of(Written(moe).text, [0, *["-"] * 8])


def test_alarms_of_one_kind_at_one_step_are_one_entry(moe: Path) -> None:
    alarms = [
        {"step": 50, "kind": "dead_experts", "layer": layer, "message": said, "advice": "Do."}
        for layer, said in (
            ("layer_00", "2 of 8 are dead."),
            ("layer_01", "1 of 8 is dead."),
            ("layer_05/inner", "3 of 8 are dead."),
        )
    ]
    old = {"step": 60, "kind": "dead_experts", "layer": "layer_02", "message": "4 are."}
    alarms += [{**old, "advice": "Do."}]
    (moe / "alarms.jsonl").write_text("".join(json.dumps(alarm) + "\n" for alarm in alarms))
    body = Written(moe).body

    first, second = re.findall(r"<li>.*?</li>", body[: body.index("<nav")])
    assert "<h2>4 alarms</h2>" in body
    assert first == (
        '<li><strong>dead experts</strong> <span class="quiet">step 50, layers 0, 1, 5 inner</span>'
        "<br>2 of 8 are dead.<br><em>Do.</em></li>"
    )
    assert second == (
        '<li><strong>dead experts</strong> <span class="quiet">step 60, layer 2</span>'
        "<br>4 are.<br><em>Do.</em></li>"
    )


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "training , step 300 of 600"), (5000, "interrupted , step 300 of 600")],
)
def test_a_run_without_an_end(tmp_path: Path, seconds: float, said: str) -> None:
    folder = write_run(tmp_path / "a", is_finished=False)
    age(folder, seconds)
    page = Written(folder)

    assert said in page.text
    assert "unigram model - nats per token" in page.text
    assert " tokens per second, last row FLOPs" in page.text


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


def test_loss_is_drawn_beside_that_of_the_unigram_model(page: Written) -> None:
    traces = page.traces("Loss")

    assert list(traces) == ["training", "validation", "unigram model"]
    assert traces["training"]["x"] == list(range(10, 601, 10))
    assert traces["validation"]["x"] == list(range(100, 601, 100))
    assert traces["validation"]["line"]["dash"] == "dash"
    assert set(traces["unigram model"]["y"]) == {3.08}
    assert traces["unigram model"]["x"] == [10, 600], "from the first row to the last"


@pytest.mark.parametrize(
    ("title", "name", "key"),
    [
        ("Loss", "training", "train/loss"),
        ("Loss", "validation", "validation/loss"),
        ("Bits per byte", "validation", "validation/bits_per_byte"),
        ("Throughput", "training", "train/tokens_per_second"),
        ("Learning rate", "learning rate", "train/learning_rate"),
        ("Gradient norm", "gradient norm", "train/gradient_norm"),
    ],
)
def test_a_curve_is_of_its_own_column(
    folder: Path, page: Written, title: str, name: str, key: str
) -> None:
    series = read_runs([folder])[0].series(key)

    assert page.traces(title)[name]["y"] == pytest.approx(list(series.values), rel=1e-6)


def test_the_objective_is_drawn_where_it_is_more_than_the_loss(page: Written) -> None:
    traces = page.traces("Objective")

    assert list(traces) == ["objective", "training loss"]
    above = np.subtract(traces["objective"]["y"], traces["training loss"]["y"])
    assert above == pytest.approx(np.full(60, 0.012))


def test_every_balancing_loss_of_a_run_is_drawn(tmp_path: Path) -> None:
    losses = {f"train/{name}": 1.0 + place for place, name in enumerate(BALANCING_LOSSES)}
    others = (
        "loss",
        "objective",
        "learning_rate",
        "gradient_norm",
        "skipped_steps",
        "tokens_per_second",
    )
    row = losses | {f"train/{name}": 1.0 for name in others}
    write_metrics(tmp_path / "metrics.jsonl", [{"step": step, **row} for step in (1, 2)])
    page = Written(tmp_path)

    drawn = {name: trace["y"][0] for name, trace in page.traces("Balancing losses").items()}
    assert drawn == {key[6:].replace("_", " "): value for key, value in losses.items()}
    assert "Router entropy is in nats. Router z is in squared nats." in page.text


def test_every_measure_of_a_run_has_its_plot_or_its_word(folder: Path) -> None:
    run = read_runs([folder])[0]
    keys = {key for layer in run.layers.values() for key in layer if not key.startswith("load/")}
    keys |= {key for layer in run.validated_layers.values() for key in layer if "/" not in key}

    assert {metric.key for metric in layer_measures()} == keys == set(KEYS_OF_MEASURES)
    assert len(moving_measures(run)) + len(constant_measures(run)) == len(layer_measures())


def test_what_only_validation_measures_is_drawn_over_its_steps(page: Written) -> None:
    traces = page.traces("Strongest pair of experts")
    assert traces["layer 2"]["x"] == list(range(100, 601, 100))
    assert "went to one other, on the validation split." in page.text


def test_units_and_notes_of_the_measures(page: Written) -> None:
    axis = {title: f["layout"]["yaxis"]["title"]["text"] for title, (f,) in page.of_one().items()}

    assert axis["Router z-loss"] == "loss (squared nats)"
    assert axis["Variation of the load"] == "CV (dimensionless)"
    assert "Experts without a token for logging.alarms.after_steps steps." in page.text


def test_a_nan_in_the_results_is_a_dash(moe: Path) -> None:
    summary = json.loads((moe / "summary.json").read_text())
    summary["unigram_loss"] = math.nan
    summary["routing"]["layer_00"]["coactivation"][0][1] = math.nan
    (moe / "summary.json").write_text(json.dumps(summary))
    assert "NaN" in (moe / "summary.json").read_text()
    page = Written(moe)

    assert "unigram model - nats per token" in page.text
    assert list(page.traces("Loss")) == ["training", "validation"]


def test_expert_0_stands_at_the_top_of_every_heat_map(page: Written) -> None:
    titles = [f"Load, layer {layer}" for layer in range(4)] + ["Co-activation"]
    for title in titles[:4]:
        ((load,),) = [figure["data"] for figure in page.figures[title]]
        assert (load["zmin"], load["zmax"]) == (0, 4), "as its colour bar says"
    ranges = [f["layout"]["yaxis"]["autorange"] for title in titles for f in page.figures[title]]
    assert ranges == ["reversed"] * 8


def test_nothing_that_a_run_says_is_markup(moe: Path) -> None:
    """Each value of the config in turn, and every name in the results."""
    evil = "<script>alert(1)</script>"
    config = yaml.safe_load((moe / "config.yaml").read_text())
    paths = list(flatten(config))
    assert "model.num_layers" in paths
    other = write_run(moe.parent / "other", layers=2)
    for path in paths:
        changed = json.loads(json.dumps(config))
        *parents, last = path.split(".")
        inner = changed
        for part in parents:
            inner = inner[part]
        inner[last] = evil
        (moe / "config.yaml").write_text(yaml.safe_dump(changed))
        for html in (without_plots(moe), without_plots(moe, other)):
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


def test_the_load_goes_into_the_page_as_two_bytes_a_share(folder: Path, page: Written) -> None:
    ((trace,),) = [figure["data"] for figure in page.figures["Load, layer 0"]]
    packed = base64.b64decode(trace["meta"]["shares"])
    shares = struct.unpack(f"<{len(packed) // 2}H", packed)
    run = read_runs([folder])[0]

    assert trace["meta"]["rows"] == 8
    assert len(shares) == 8 * len(trace["x"]) == 8 * 60
    assert shares[60] / 65534 == pytest.approx(run.loads["layer_00"][1].values[0], abs=1e-5)


def test_packed_shares_keep_what_was_not_measured_apart() -> None:
    packed = base64.b64decode(pack_shares([[0.0, 1.0], [None, 0.5]]))
    assert struct.unpack("<4H", packed) == (0, 65534, 65535, 32767)


def test_a_layer_has_one_colour_and_one_dash_in_every_plot(page: Written) -> None:
    for title in ("MaxVio", "Entropy per token", "Strongest pair of experts"):
        traces = page.traces(title)
        looks = [(traces[f"layer {n}"]["meta"], traces[f"layer {n}"]["line"]) for n in range(4)]
        assert looks == [
            ({"colour": number}, {"dash": dash, "width": 2, "color": LIGHT[f"series-{number}"]})
            for number, dash in enumerate(("solid", "dash", "dot", "dashdot"))
        ], title


def test_entropy_has_that_of_an_even_choice_beside_it(page: Written) -> None:
    for title in ("Entropy per token", "Entropy of the mean"):
        traces = page.traces(title)
        assert list(traces) == ["layer 0", "layer 1", "layer 2", "layer 3", "log 8"]
        assert traces["log 8"]["y"] == pytest.approx([math.log(8)] * 2)
    assert "low where it is sure. An even choice has log 8 = 2.079." in page.text


def test_a_measure_that_never_moved_is_a_word_and_no_plot(page: Written) -> None:
    assert "At all steps, in all layers: experts per token 2; tokens without a finite score 0." in (
        page.text
    )
    assert "Experts per token" not in page.figures
    assert {"MaxVio", "Dropped", "Dead experts", "Churn", "Top-1 margin"} <= page.figures.keys()


CONSTANT = """
    MaxVio 0.125; variation of the load 0.125; dropped 12.5%; entropy per token 0.125;
    entropy of the mean 0.125; dead experts 0.125; churn 12.5%; largest router logit 0.125;
    top-1 margin 0.125; shared share 12.5%; capacity used 12.5%; experts per token 0.125;
    MaxVio within sequences 0.125; MaxVio over ranks 0.125; strongest pair of experts 12.5%;
    spread of the correction bias 0.125; load-balancing loss 0.125; router z-loss 0.125;
    tokens without a finite score 0.125
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

    assert constant_measures(run) == " ".join(CONSTANT.split()).split("; ")


def test_of_series_that_are_averaged_the_longest_is_told() -> None:
    long, short = (Series(array("q", range(rows)), array("d", [1.0] * rows)) for rows in (1500, 10))
    assert describe_points([short, long], 500) == "Each point is the mean of about 3 rows."
    assert describe_points([short], 500) == ""


def test_many_layers_become_one_heat_map_with_a_choice(tmp_path: Path) -> None:
    page = Written(write_run(tmp_path / "big", layers=12, experts=16, rows=20))

    assert len(page.figures["Load of each expert"]) == 12
    assert '<select aria-label="layer" data-plot="plot-7">' in page.body
    (max_violation,) = page.figures["MaxVio"]
    assert max_violation["data"][0]["type"] == "heatmap"
    assert max_violation["data"][0]["y"] == [str(layer) for layer in range(12)]
    assert max_violation["layout"]["yaxis"]["autorange"] == "reversed", "layer 0 is on top"
    assert len(page.figures) < 30


def test_a_long_run_stays_light_and_says_that_it_was_averaged(tmp_path: Path) -> None:
    page = Written(write_run(tmp_path / "long", layers=1, experts=16, rows=1500))

    assert len(page.traces("Loss")["training"]["x"]) == 500
    assert "Each point is the mean of about 3 rows." in page.text
    assert "Each column is the mean of about 8 rows." in page.text
    assert page.size_of_data < 500_000


def test_the_experts_as_a_table(folder: Path, page: Written) -> None:
    values = json.loads((folder / "summary.json").read_text())["routing"]["layer_01"]

    shares = [f"{100 * share:.1f}" for share in values["load"]]
    ends = f"{values['max_violation']:.2f}", f"{values['entropy']:.2f}"
    assert row_of(page.text, [1, *shares, *ends, f"{values['dropped_fraction']:.1%}"])
    assert '<td class="none">0.0</td>' in page.body


def test_a_share_is_shaded_by_its_ratio_to_the_even_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", layers=1, experts=4, rows=20)
    summary = json.loads((folder / "summary.json").read_text())
    summary["routing"]["layer_00"]["load"] = [0.6, 0.25, 0.15, 0.0]
    (folder / "summary.json").write_text(json.dumps(summary))

    assert (
        '<td class="high">60.0</td><td>25.0</td><td class="low">15.0</td><td class="none">0.0</td>'
    ) in Written(folder).body


def test_many_experts_are_summed_up_and_listed_below(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "wide", layers=2, experts=256, rows=20)
    page = Written(folder)
    load = json.loads((folder / "summary.json").read_text())["routing"]["layer_01"]["load"]

    busiest = f"{100 * max(load):.2f} (expert {load.index(max(load))})"
    middle = f"{100 * sorted(load)[128]:.2f}"
    assert row_of(page.text, [1, 256, busiest, middle, "0.00", 1])
    assert row_of(page.text, ["240 to 255", *(f"{100 * share:.2f}" for share in load[240:])])


def test_the_samples_are_in_order_with_the_prompt_in_bold(moe: Path) -> None:
    texts = ["<script>alert(1)</script>", "\x1b[2J\x00\x7f\u202e\ud800", "plain\n\ttext"]
    lines = [{"step": 100 * n, "prompt": "a<b", "text": text} for n, text in enumerate(texts)]
    (moe / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    body = Written(moe).body

    def control(shown: str) -> str:
        return f'<span class="control">{shown}</span>'

    assert "<pre><b>a&lt;b</b>&lt;script&gt;alert(1)&lt;/script&gt;</pre>" in body
    escape = control("␛") + "[2J" + control("␀") + control("U+007F") + control("U+202E")
    assert f"<b>a&lt;b</b>{escape}{control('U+D800')}</pre>" in body
    assert "<b>a&lt;b</b>plain\n\ttext</pre>" in body
    places = [body.index(f"<summary>step {step}</summary>") for step in (0, 100, 200)]
    assert places == sorted(places)


def test_of_many_samples_some_are_shown(moe: Path) -> None:
    lines = [{"step": step, "prompt": "", "text": "x"} for step in range(400)]
    (moe / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = Written(moe)

    assert "40 of 400, evenly chosen." in page.text
    assert page.body.count("<summary>step ") == 40
    opened = re.findall(r"<details open><summary>step (\d+)", page.body)
    assert opened == ["0", "379", "389", "399"], "the first and the last three"
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
    page = Written(first, write_run(tmp_path / "y"))

    assert page.traces("Bits per byte").keys() == {"&lt;script&gt;&amp;", "y"}
    assert "<h1>&lt;script&gt;&amp; · y</h1>" in page.body


def test_a_long_name_leaves_room_for_the_plot() -> None:
    assert label("a" * 30 + "b" * 30) == "a" * 20 + "…" + "b" * 23
    assert label("a" * 44) == "a" * 44


def test_a_dense_run_has_no_word_of_routing(tmp_path: Path) -> None:
    page = Written(write_run(tmp_path / "dense", experts=0))

    assert "Routing" not in page.text
    assert "Experts" not in page.text
    assert list(page.figures) == [
        "Loss",
        "Bits per byte",
        "Throughput",
        "Learning rate",
        "Gradient norm",
    ]


def test_a_run_that_has_only_begun_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("trainer: {max_steps: 5}\n")
    page = Written(tmp_path)

    assert "waiting for the first row , step 0 of 5" in page.text
    assert "Nothing was measured yet." in page.text
    assert page.figures == {}


def test_an_old_run_shows_what_it_has(tmp_path: Path) -> None:
    row = {"step": 1, "train/loss": 2.0, "routing/layer_00/load/expert_00": 1.0}
    write_metrics(tmp_path / "metrics.jsonl", [row])
    page = Written(tmp_path)

    assert list(page.figures) == ["Loss", "Load, layer 0"]
    assert "unknown block" in page.text


def test_a_run_that_diverged_has_gaps_and_says_so(tmp_path: Path) -> None:
    rows = [{"step": step, "train/loss": 1.0 if step < 3 else math.nan} for step in range(1, 6)]
    write_metrics(tmp_path / "metrics.jsonl", [*rows, {"step": 6, "validation/loss": math.nan}])
    page = Written(tmp_path)

    assert page.traces("Loss")["training"]["y"] == [1, 1, None, None, None]
    assert "Where a value was NaN or infinite, nothing is drawn." in page.text
    assert "validation loss NaN nats per token" in page.text


def test_runs_side_by_side(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "small", experts=8),
        write_run(tmp_path / "wide", experts=16, learning_rate=0.001),
        write_run(tmp_path / "dense", experts=0),
    ]
    raise_alarms(folders[1])
    page = Written(*folders)

    loss = json.loads((folders[2] / "summary.json").read_text())["validation_loss"]
    cells = ["finished", "600 of 600", "swiglu", "2.45 M", "870.00 k", "1.74 M"]
    assert row_of(page.text, ["dense", f"{loss:.4f}", *cells])
    assert row_of(page.text, ["optimizer.learning_rate", "0.003", "0.001", "0.003"])
    assert row_of(page.text, ["model.ffn.num_experts", "8", "16", "-"])
    assert "trainer.max_steps" not in page.text
    assert "run.name" not in page.text
    assert "2 alarms collapse wide, step 300" in page.text

    colours = {"small": 0, "wide": 1, "dense": 2}
    for title, (figure, *_) in page.figures.items():
        for trace in figure["data"]:
            assert trace["meta"]["colour"] == colours[trace["name"]], title
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


def test_balance_and_drops_of_runs_side_by_side_are_means_of_their_layers(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", layers=2, experts=4, rows=20)
    summary = json.loads((folder / "summary.json").read_text())
    first, second = summary["routing"].values()
    first |= {"max_violation": 1.0, "dropped_fraction": 0.25}
    second |= {"max_violation": 2.0, "dropped_fraction": 0.15}
    inner = {**first, "max_violation": 99.0, "dropped_fraction": 0.9}
    summary["routing"]["layer_01/inner"] = inner
    (folder / "summary.json").write_text(json.dumps(summary))

    html = without_plots(folder, write_run(tmp_path / "b", experts=0))

    table = html[html.index('class="runs"') : html.index('class="options"')]
    rows = re.findall(r"<td>([^<]*)</td><td>([^<]*)</td></tr>", table)
    assert rows == [("1.50", "20.0%"), ("-", "-")]


def test_the_lowest_loss_of_runs_side_by_side_is_bold(tmp_path: Path) -> None:
    folders = []
    for name, loss in (("a", 1.5), ("b", 1.25), ("c", 1.75)):
        folder = write_run(tmp_path / name, experts=0)
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps({**summary, "validation_loss": loss}))
        folders.append(folder)

    assert re.findall(r"<b>(.*?)</b>", without_plots(*folders)) == ["1.2500"]
    assert best_runs(read_runs(folders[:1])) == [False], "of one run nothing is the best"


def test_names_and_logging_are_no_difference(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", experts=0), write_run(tmp_path / "b", experts=0)
    config = yaml.safe_load((b / "config.yaml").read_text())
    config["logging"]["every_n_steps"] = 99
    (b / "config.yaml").write_text(yaml.safe_dump(config))

    said = "<p>All options are the same, but for names and logging.</p>\n</section>"
    assert f'<section id="options"><h2>What differs</h2>\n{said}' in without_plots(a, b)


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
    assert "These runs" not in without_plots(a, b)
    facts = json.loads((b / "facts.json").read_text())
    (b / "facts.json").write_text(json.dumps({**facts, fact: "32-true"}))

    shown = without_plots(a, b)
    assert said in shown
    assert shown.count("These runs") == 1
    precision = "bf16-mixed, 32-true" if fact == "precision" else "bf16-mixed"
    assert f"Precision: {precision}." in shown


def test_plotly_s_script_is_in_the_page_once(moe: Path) -> None:
    html = Written(moe, moe.parent / "moe").html
    assert html.count("* plotly.js v") == 1
    assert len(html) < 5_500_000


def test_writing_a_page_loads_neither_lightning_nor_wandb(moe: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from moe_ffn.report.page import write_report;"
        f"write_report([Path({str(moe)!r})], Path({str(moe / 'report.html')!r}));"
        "print(sorted({'lightning', 'wandb', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
    assert (moe / "report.html").is_file()


def test_co_activation_is_packed_and_of_many_large_matrices_some_are_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", layers=3, experts=4, rows=20)
    figures = Written(folder).figures["Co-activation"]
    assert len(figures) == 3
    summary = json.loads((folder / "summary.json").read_text())
    pairs = summary["routing"]["layer_00"]["coactivation"]
    shares = struct.unpack("<16H", base64.b64decode(figures[0]["data"][0]["meta"]["shares"]))
    assert np.divide(shares, 65534) == pytest.approx(np.ravel(pairs), abs=1e-4), "row by row"
    axes = {axis: figures[0]["layout"][axis]["title"]["text"] for axis in ("xaxis", "yaxis")}
    assert axes == {"xaxis": "expert j", "yaxis": "expert i"}, "a row is of the tokens of expert i"

    large = [[0.25] * 300] * 300
    for values in summary["routing"].values():
        values["coactivation"] = large
    (folder / "summary.json").write_text(json.dumps(summary))
    page = Written(folder)

    first, last = page.figures["Co-activation"]
    assert "2 of 3 layers, evenly chosen." in page.text
    assert first["data"][0]["meta"]["rows"] == 300
    assert base64.b64decode(last["data"][0]["meta"]["shares"])[:2] == struct.pack("<H", 16384)
    assert page.size_of_data < 700_000
