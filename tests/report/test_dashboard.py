"""The workspace's JSON, built offline: sections, metrics, axes, groups; and the library reads it back."""

from __future__ import annotations

import json
import re
import socket
from itertools import product
from typing import Any

import pytest

from moe_ffn.report.dashboard import build_workspace, to_json
from moe_ffn.training.monitoring.json_lines import STEP_SECONDS, TRAIN_SECONDS
from tests.helpers.synthetic_run import MEASURES

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


def test_every_metric_of_a_layer_is_in_one_panel_whatever_the_depth() -> None:
    for layer, key in product(LAYERS, OF_A_LAYER):
        assert len(drawn(f"routing/{layer}/{key}")) == 1, key


def test_a_panel_draws_no_other_metric_than_its_own() -> None:
    for plot in line_plots():
        regex = plot.get("metricRegex", "(?!)")
        keys = {key for key in OF_A_LAYER if re.search(regex, f"routing/layer_00/{key}")}
        assert len(keys) <= 1, plot["chartTitle"]


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


def test_runs_are_grouped_by_ffn_type_and_none_is_left_out() -> None:
    (runs,) = view()["spec"]["section"]["runSets"]

    assert runs["grouping"] == [{"section": "config", "name": "ffn_type.value"}]
    assert runs["filters"]["filters"] == []
    assert runs["search"]["query"] == ""
    for section in view()["spec"]["section"]["panelBankConfig"]["sections"]:
        assert section["localPanelSettings"]["useRunsTableGroupingInPanels"]
