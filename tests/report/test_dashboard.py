"""The workspace's JSON, built offline: sections, metrics, axes, groups; and the library reads it back."""

from __future__ import annotations

import json
import re
import socket
from itertools import product
from typing import Any

import pytest

from moe_ffn.report.dashboard import LOAD_FIGURE, build_workspace, to_json
from moe_ffn.training.monitoring.json_lines import STEP_SECONDS, TRAIN_SECONDS
from moe_ffn.training.objective import ObjectiveConfig
from tests.helpers.layer_measures import MEASURES

STEP = "trainer/global_step"

LAYERS = ("layer_00", "layer_03", "layer_03/inner", "layer_03/round_2", "layer_117")

# What training rows have; co-activation is measured in validation alone.
OF_A_LAYER = set(MEASURES) - {"coactivation_max"}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def view() -> dict[str, Any]:
    return json.loads(to_json(build_workspace("team", "project")))


def sections() -> dict[str, list[dict[str, Any]]]:
    """Section -> its panels."""
    found = view()["spec"]["section"]["panelBankConfig"]["sections"]
    return {section["name"]: section["panels"] for section in found}


def line_plots() -> list[dict[str, Any]]:
    """The settings of every panel over the steps."""
    panels = [panel for of_section in sections().values() for panel in of_section]
    return [p["config"] for p in panels if p["viewType"] == "Run History Line Plot"]


def drawn(key: str) -> list[str]:
    """The titles of the panels that draw a metric."""
    return [
        plot["chartTitle"]
        for plot in line_plots()
        if key in plot["metrics"] or re.search(plot.get("metricRegex", "(?!)"), key)
    ]


def test_sections_stand_in_this_order_and_are_open() -> None:
    found = view()["spec"]["section"]["panelBankConfig"]["sections"]

    assert [section["name"] for section in found] == ["Training", "Efficiency", "Routing"]
    for section in found:
        page = section["flowConfig"]
        assert section["isOpen"]
        assert page["columnsPerPage"] * page["rowsPerPage"] >= len(section["panels"]), "one page"


def test_wandb_adds_no_panels_of_its_own_and_draws_twice_as_many_lines_as_by_default() -> None:
    settings = view()["spec"]["section"]["settings"]

    assert settings["shouldAutoGeneratePanels"] is False
    assert settings["maxRuns"] == 20


def test_every_line_runs_over_the_optimizer_step_unsmoothed_with_titled_axes() -> None:
    section = view()["spec"]["section"]
    wider = [section["settings"]] + [
        part["localPanelSettings"] for part in section["panelBankConfig"]["sections"]
    ]

    for settings in wider:
        assert settings["xAxis"] == STEP
        assert settings["smoothingType"] == "none"
        assert not settings["smoothingActive"]
    assert len(line_plots()) > 25
    for plot in line_plots():
        assert plot["xAxis"] == STEP
        assert plot["xAxisTitle"] == "optimizer step"
        assert plot["yAxisTitle"]
        assert plot["chartTitle"]
        assert plot["smoothingType"] == "none"


def test_a_panel_that_picks_by_expression_says_so() -> None:
    by_expression = [plot for plot in line_plots() if not plot["metrics"]]

    assert by_expression
    assert all(plot["metricRegex"] and plot["useMetricRegex"] is True for plot in by_expression)


def test_every_metric_of_a_layer_is_in_one_panel_whatever_the_depth() -> None:
    for layer, key in product(LAYERS, OF_A_LAYER):
        assert len(drawn(f"routing/{layer}/{key}")) == 1, key


def test_a_panel_draws_no_other_metric_than_its_own() -> None:
    for plot in line_plots():
        regex = plot.get("metricRegex", "(?!)")
        keys = {key for key in OF_A_LAYER if re.search(regex, f"routing/layer_00/{key}")}
        assert len(keys) <= 1, plot["chartTitle"]


def test_what_validation_alone_measures_has_a_panel() -> None:
    assert len(drawn("validation/routing/layer_03/coactivation_max")) == 1


def test_validation_is_drawn_beside_training() -> None:
    assert drawn("train/loss") == drawn("validation/loss") == ["Loss"]
    for key in ("max_violation", "dropped_fraction", "entropy"):
        (training,) = drawn(f"routing/layer_00/{key}")
        assert drawn(f"validation/routing/layer_00/{key}") == [f"{training}, validation"]


def test_every_column_that_a_run_writes_in_training_has_a_panel(moe_run: Any) -> None:
    """But for its clocks, which are an axis of losses and no curve."""
    written = {
        column
        for column in moe_run.columns - {"step", STEP, TRAIN_SECONDS, STEP_SECONDS}
        if not column.startswith("validation/routing/")
    }
    assert any(column.startswith("routing/layer_01/") for column in written)

    # Loads go to wandb as one histogram for each layer, and as one figure of all of them.
    loads = {column for column in written if "/load/expert_" in column}
    assert {re.sub("/expert_[0-9]+$", "", column) for column in loads} == {
        "routing/layer_00/load",
        "routing/layer_01/load",
    }
    assert drawn("routing/layer_00/load") == ["Load of layer 0"]
    assert [column for column in sorted(written - loads) if not drawn(column)] == []


def test_every_loss_that_can_be_weighted_is_among_the_balancing_losses() -> None:
    weights = {
        name for name, field in ObjectiveConfig.model_fields.items() if field.annotation is float
    } - {"masked_fraction"}

    assert len(weights) == 8
    assert {name for name in weights if drawn(f"train/{name}") == ["Balancing losses"]} == weights


def test_load_comes_first_in_routing_as_heat_maps() -> None:
    figure, *rest = sections()["Routing"]

    assert figure["viewType"] == "Media Browser"
    assert figure["config"]["mediaKeys"] == [LOAD_FIGURE] == ["routing/load_heatmap"]
    # Of a layer that every model has; of any other a model of two layers would have an empty panel.
    assert [panel["config"]["metrics"] for panel in rest[:2]] == [["routing/layer_00/load"], []]


def test_efficiency_has_speed_and_the_loss_against_what_a_run_costs() -> None:
    speed, bars, *scatters = sections()["Efficiency"]

    assert speed["config"]["metrics"] == ["train/tokens_per_second"]
    assert speed["config"]["yAxisTitle"] == "tokens per second"
    assert bars["viewType"] == "Bar Chart"
    assert bars["config"]["metrics"] == ["train/tokens_per_second"]
    assert bars["config"]["xAxisTitle"] == "tokens per second"
    assert bars["config"]["yAxisTitle"] == "runs, by FFN type"
    assert [plot["viewType"] for plot in scatters] == ["Scatter Plot"] * 3
    assert {plot["config"]["yAxis"] for plot in scatters} == {"summary:validation/loss"}
    assert [plot["config"]["xAxis"] for plot in scatters] == [
        "config:num_active_params.value",
        "config:num_params.value",
        "config:flops_per_token.value",
    ]


def test_what_runs_are_compared_by_is_among_their_facts(moe_run: Any) -> None:
    facts = json.loads((moe_run.folder / "facts.json").read_text())

    assert {"num_active_params", "num_params", "flops_per_token"} <= set(facts)


def test_runs_are_grouped_by_ffn_type_and_none_is_left_out() -> None:
    (runs,) = view()["spec"]["section"]["runSets"]

    assert runs["grouping"] == [{"section": "config", "name": "ffn_type.value"}]
    assert runs["filters"]["filters"] == []
    assert runs["search"]["query"] == ""
    for section in view()["spec"]["section"]["panelBankConfig"]["sections"]:
        assert section["localPanelSettings"]["useRunsTableGroupingInPanels"]


def test_what_runs_are_filtered_by_stands_in_their_list() -> None:
    (runs,) = view()["spec"]["section"]["runSets"]
    columns = [
        "run:displayName",
        "tags:__ALL__",
        "config:ffn_type.value",
        "config:num_params.value",
        "config:num_active_params.value",
        "config:flops_per_token.value",
        "summary:validation/loss",
        "summary:train/tokens_per_second",
    ]

    assert runs["runFeed"]["columnOrder"] == columns
    assert runs["runFeed"]["columnPinned"] == dict.fromkeys(columns, True)
