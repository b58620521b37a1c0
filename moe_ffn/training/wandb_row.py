"""A row of metrics as wandb draws it: the load of a layer as a histogram, that of all layers as a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np

from moe_ffn.training.load_figure import LOAD_FIGURE, load_heatmap

MAX_BINS = 512
"""Of one of wandb's histograms."""


def wandb_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """`row` with each list of numbers as one histogram over their places, and with a picture of the load
    on the validation split.

    One key per layer instead of one per expert: a project should hold less than 10,000.
    """
    values = {
        key: _histogram(value) if isinstance(value, list) else value for key, value in row.items()
    }
    prefix, suffix = "validation/routing/", "/load"
    loads = {
        key.removeprefix(prefix).removesuffix(suffix): value
        for key, value in row.items()
        if key.startswith(prefix) and key.endswith(suffix)
    }
    if loads and importlib.util.find_spec("plotly") is not None:
        import wandb

        values[LOAD_FIGURE] = wandb.Plotly(load_heatmap(loads))
    return values


def _histogram(values: list[float]) -> Any:
    import wandb

    num_bins = min(len(values), MAX_BINS)
    places = np.arange(len(values))
    heights = np.nan_to_num(np.asarray(values, dtype=float))
    return wandb.Histogram(
        np_histogram=np.histogram(places, num_bins, (0, len(values)), weights=heights)
    )
