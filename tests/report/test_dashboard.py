"""The workspace's JSON, built offline: sections, metrics, axes, groups; and the library reads it back."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
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


@pytest.fixture(scope="module")
def view() -> dict[str, Any]:
    """The view, made without the network."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was used")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "socket", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
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


def test_sections_stand_in_this_order_and_are_open(
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


def test_every_metric_of_a_layer_is_in_one_panel_of_its_own_whatever_the_depth(
    drawn: Drawn,
) -> None:
    for layer, key in product(LAYERS, OF_A_LAYER):
        assert len(drawn(f"routing/{layer}/{key}")) == 1, key
    titles = [title for key in OF_A_LAYER for title in drawn(f"routing/layer_00/{key}")]
    assert len(set(titles)) == len(OF_A_LAYER)


def test_validation_is_drawn_beside_training(drawn: Drawn) -> None:
    assert drawn("train/loss") == drawn("validation/loss") == ["Loss"]
    for key in ("max_violation", "dropped_fraction", "entropy"):
        (training,) = drawn(f"routing/layer_00/{key}")
        assert drawn(f"validation/routing/layer_00/{key}") == [f"{training}, validation"]


def test_every_column_that_a_run_writes_in_training_has_a_panel(moe_run: Any, drawn: Drawn) -> None:
    """But for its clocks, which are an axis of losses and no curve."""
    clocks = {"step", STEP, TRAIN_SECONDS, STEP_SECONDS}
    written = {c for c in moe_run.columns - clocks if not c.startswith("validation/routing/")}
    assert any(column.startswith("routing/layer_01/") for column in written)

    # Loads go to wandb as one histogram for each layer, and as one figure of all of them.
    loads = {column for column in written if "/load/expert_" in column}
    histograms = {re.sub("/expert_[0-9]+$", "", column) for column in loads}
    assert histograms == {"routing/layer_00/load", "routing/layer_01/load"}
    assert drawn("routing/layer_00/load") == ["Load of layer 0"]
    assert [column for column in sorted(written - loads) if not drawn(column)] == []
