"""A row of metrics: names, and the routing of a layer under `routing/layer_03/`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

Row = dict[str, float | list[float]]
"""Key -> value, or one value per expert; each logger writes such a vector in its own way."""


def routing_row(values: Mapping[str, Mapping[str, Tensor]], prefix: str = "") -> Row:
    """`{"layer_03": {"entropy": 1.2, "load": [...]}}` as `routing/layer_03/entropy`, `.../load`.

    nan, which says that a value does not exist (the capacity of a dropless layer), is left out, and so are
    matrices, which are no row's business.
    """
    row: Row = {}
    for layer, metrics in values.items():
        for name, value in metrics.items():
            key = f"{prefix}routing/{layer}/{name}"
            if value.ndim == 1:
                row[key] = value.tolist()
            elif value.ndim == 0 and not value.isnan():
                row[key] = float(value)
    return row
