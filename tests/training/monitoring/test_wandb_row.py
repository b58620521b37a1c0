"""How wandb draws a row, and the picture of the load: its cells, axes and colours."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import pytest

from moe_ffn.training.monitoring.loggers import load_heatmap, wandb_row


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


def test_a_validation_adds_the_picture_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr("wandb.Plotly", lambda figure: drawn.append(figure))
    row = wandb_row(VALIDATION)
    assert row.keys() == {*VALIDATION, "routing/load_heatmap"}
    assert list(drawn[0].data[0].y) == ["layer_00", "layer_01/inner"]


# Two experts at 1/4 and 3/4 of the pairs get 0.5 and 1.5 times the even share of 1/2; of four
# experts at 1/4, each gets what is even.
RAGGED = {"layer_00": [0.25, 0.75], "layer_03/inner": [0.25, 0.25, 0.25, 0.25]}


def plain(loads: dict[str, list[float]]) -> dict:
    """The figure as a viewer gets it."""
    return json.loads(load_heatmap(loads).to_json() or "")


def test_the_picture_has_a_row_for_each_layer_and_a_fixed_scale() -> None:
    figure = plain(RAGGED)
    (heatmap,) = figure["data"]

    assert heatmap["type"] == "heatmap"
    assert heatmap["y"] == ["layer_00", "layer_03/inner"]
    assert heatmap["x"] == [0, 1, 2, 3]
    assert heatmap["z"] == [[0.5, 1.5, None, None], [1.0, 1.0, 1.0, 1.0]]
    assert figure["layout"]["xaxis"]["title"]["text"] == "expert"
    assert figure["layout"]["yaxis"]["title"]["text"] == "layer"
    assert figure["layout"]["yaxis"]["autorange"] == "reversed", "the first layer stands on top"
    assert heatmap["colorbar"]["title"]["text"] == "load, times the even share 1/E"
    assert (heatmap["zmin"], heatmap["zmax"]) == (0, 4)
    assert heatmap["colorscale"][2] == [0.25, "#f7f7f5"], "white is even"


def test_a_layer_that_no_token_reached_is_blank() -> None:
    (heatmap,) = plain({"layer_00": [math.nan, math.nan], "layer_01": [1.0, 0.0]})["data"]
    assert heatmap["z"] == [[None, None], [2.0, 0.0]]


def test_wandb_stores_plain_numbers_and_little_else() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import wandb
    figure = load_heatmap({f"layer_{layer:02d}": [1 / 64] * 64 for layer in range(4)})

    stored = Path(wandb.Plotly(figure)._path or "").read_text()

    assert json.loads(stored)["data"][0]["z"] == [[1.0] * 64] * 4
    assert "bdata" not in stored, "a packed array, which older viewers cannot read"
    assert len(stored) < 5_000
