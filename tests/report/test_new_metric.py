"""A metric that somebody adds to the table is in rows, in torchmetrics, on the dashboard and on the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ffn.ffn.base import ROUTING_SUFFIX
from moe_ffn.metrics.measures import per_token
from moe_ffn.metrics.modular import TokenMetrics
from moe_ffn.metrics.table import LAYER_METRICS, Metric
from moe_ffn.outputs import Routing
from moe_ffn.report.dashboard import build_workspace, to_json
from moe_ffn.training.monitoring.routing_window import RoutingByLayer, routing_row
from tests.helpers.synthetic_run import write_metrics
from tests.helpers.written_page import Written


def heaviest_weight(routing: Routing) -> torch.Tensor:
    return routing.weights_N.max()


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_it_is_in_rows_and_in_torchmetrics(make_routing: Any) -> None:
    batches = [make_routing([[0, 1]], 2, weights_N=torch.tensor([w, 0.1])) for w in (0.4, 0.8)]
    found, metrics = RoutingByLayer("every batch", "last step"), TokenMetrics(2)
    for routing in batches:
        found.update({"layer_03": routing})
        metrics.update(routing)

    row = routing_row(found.close())

    assert row["routing/layer_03/heaviest_weight"] == pytest.approx(0.6)
    assert metrics.compute()["heaviest_weight"].item() == pytest.approx(0.6)


def test_it_has_a_panel() -> None:
    text = to_json(build_workspace("team", "project"))
    assert '"chartTitle": "Heaviest weight"' in text
    assert '"yAxisTitle": "weight (dimensionless)"' in text
    assert f"^routing/layer_[0-9]+{ROUTING_SUFFIX}/heaviest_weight$" in text


def test_it_has_a_plot_or_a_word_on_the_page(tmp_path: Path) -> None:
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
