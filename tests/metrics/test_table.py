"""The tables of metrics are complete; `moe_ffn.metrics` gives every measure by name."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_ffn
import moe_ffn.metrics as metrics
from moe_ffn.balancing.losses import BALANCING_LOSSES
from moe_ffn.metrics.measures import LayerBatch
from moe_ffn.metrics.table import (
    LAYER_METRICS,
    RUN_METRICS,
    Metric,
    compute,
    measured_in,
    result_columns,
    statistics_of,
)

ALL = [*LAYER_METRICS.values(), *RUN_METRICS.values()]


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.key)
def test_an_entry_says_all_that_readers_need(metric: Metric) -> None:
    table = RUN_METRICS if metric.rows else LAYER_METRICS
    assert table[metric.key] is metric
    assert all((metric.title, metric.formula, metric.healthy))
    assert metric.axis() or metric.per == "expert"
    assert "\n" not in metric.formula
    assert "|" not in metric.formula + metric.healthy
    assert not metric.formula.endswith(".")
    is_at_row_end = not metric.rows and metric.measured in ("row", "probe")
    assert (metric.row_end is not None) == is_at_row_end
    is_of_routings = not metric.rows and not is_at_row_end
    assert ((metric.measure or metric.pairs_only_measure) is not None) == is_of_routings


def test_titles_and_axes_tell_metrics_apart() -> None:
    titles = [metric.title for metric in ALL]
    assert len(set(titles)) == len(titles)
    assert not RUN_METRICS.keys() & BALANCING_LOSSES.keys(), "both stand in a row as train/NAME"
    assert all(metric.label for metric in result_columns())


def test_statistics_of_one_name_are_one_statistic() -> None:
    metrics = list(LAYER_METRICS.values())
    names = [statistic.name for statistic in statistics_of(metrics)]
    assert len(set(names)) == len(names)


def test_shapes_are_those_of_the_axes(make_routing: Any) -> None:
    metrics = measured_in("every batch", "last step", "validation")
    routing = make_routing([[0, 1], [2, 0]], 3)
    sums = {s.name: s.add(s.zeros(3), LayerBatch(routing)) for s in statistics_of(metrics)}
    for statistic in statistics_of(metrics):
        assert sums[statistic.name].shape == statistic.zeros(3).shape, statistic.name
        assert sums[statistic.name].dtype == statistic.dtype, statistic.name
    shapes = {"layer": (), "expert": (3,), "pair": (3, 3)}
    for key, value in compute(metrics, sums).items():
        assert value.shape == torch.Size(shapes[LAYER_METRICS[key].per]), key


ROOM = Path(metrics.__file__).parent
CLASSES = {
    *("CoactivationMetrics", "LanguageMetrics", "ListMetrics"),
    *("LoadMetrics", "TokenMetrics"),
}


def test_every_public_measure_of_the_room_is_exported() -> None:
    defined = {
        node.name
        for name in ("functional", "modular")
        for node in ast.parse((ROOM / f"{name}.py").read_text()).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    }
    assert set(metrics.__all__) == defined
    assert metrics.__all__ == sorted(metrics.__all__)
    for name in metrics.__all__:
        assert getattr(metrics, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(
        AttributeError, match=r"module 'moe_ffn\.metrics' has no attribute 'maxvio'"
    ):
        _ = metrics.maxvio


def test_without_torchmetrics_the_functions_work_and_the_classes_say_what_they_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A None in the place of a module stops every import of it.
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    for name in [name for name in sys.modules if name.startswith("moe_ffn.metrics")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(moe_ffn, "metrics", metrics)  # as it was, once this test is over
    anew = importlib.import_module("moe_ffn.metrics")

    assert anew is not metrics
    assert anew.max_violation(torch.tensor([0.5, 0.5])).item() == 0
    for name in metrics.__all__:
        if name not in CLASSES:
            assert getattr(anew, name).__name__ == name
            continue
        with pytest.raises(ModuleNotFoundError) as raised:
            getattr(anew, name)
        assert str(raised.value) == (
            f"moe_ffn.metrics.{name} needs torchmetrics: pip install torchmetrics (the "
            "functions of moe_ffn.metrics.functional need only torch)"
        )
