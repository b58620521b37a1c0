"""How wandb draws a row."""

from __future__ import annotations

import importlib.util

import pytest

from moe_ffn.training.monitoring.wandb import wandb_row


def test_a_list_is_one_histogram_with_a_bin_per_expert() -> None:
    row = wandb_row({"train/loss": 2.5, "routing/layer_03/load": [0.25, 0.75, 0.0]})

    assert row.keys() == {"train/loss", "routing/layer_03/load"}
    assert row["train/loss"] == 2.5
    histogram = row["routing/layer_03/load"]
    assert histogram.histogram == [0.25, 0.75, 0.0]
    assert histogram.bins == [0, 1, 2, 3]


def test_more_experts_than_wandb_has_bins_for_share_them() -> None:
    histogram = wandb_row({"load": [1.0] * 1024})["load"]

    assert histogram.histogram == [2.0] * 512
    assert histogram.bins[-1] == 1024


def test_a_share_that_does_not_exist_is_drawn_as_none() -> None:
    assert wandb_row({"load": [float("nan"), 1.0]})["load"].histogram == [0.0, 1.0]


VALIDATION = {
    "validation/loss": 2.0,
    "validation/routing/layer_00/load": [0.25, 0.75],
    "validation/routing/layer_01/inner/load": [1.0],
}


def test_a_validation_adds_the_picture_of_all_layers() -> None:
    row = wandb_row(VALIDATION)

    assert row.keys() == {*VALIDATION, "routing/load_heatmap"}
    assert type(row["routing/load_heatmap"]).__name__ == "Plotly"


def test_the_picture_s_layers_are_named_as_in_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr("wandb.Plotly", lambda figure: drawn.append(figure))

    wandb_row(VALIDATION)

    assert list(drawn[0].data[0].y) == ["layer_00", "layer_01/inner"]


def test_without_plotly_there_is_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    assert wandb_row(VALIDATION).keys() == VALIDATION.keys()
