"""The load of every expert of every layer as one picture, for a logger that shows pictures over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

LOAD_FIGURE = "routing/load_heatmap"
"""The key under which each validation logs it; its panel has a slider over the steps."""

FULL_COLOR = 2.0
"""Times the even share from which on a colour is the strongest: the same in every picture, so that the
pictures of a run can be compared."""

COLORS = [[0.0, "#2166ac"], [0.5, "#f7f7f7"], [1.0, "#b2182b"]]
"""Blue for experts that starve, white for the even share, red for those that are crowded."""


def load_heatmap(loads: Mapping[str, Sequence[float]]) -> Figure:
    """A heat map, a row for each layer and a column for each expert.

    The colour is the load over the even share: 1 where an expert gets what balance would give it, 0
    where it gets nothing. Layers may differ in their number of experts; a load that is not finite,
    of a layer that no token reached, is left blank.

    Args:
        loads: layer -> share of the layer's pairs that went to each expert, summing to 1.

    Raises:
        ValueError: without a layer.
    """
    from plotly.graph_objects import Figure, Heatmap

    if not loads:
        raise ValueError("a heat map of the load needs at least one layer")
    num_columns = max(len(load) for load in loads.values())
    # Plain lists: plotly packs arrays into a form that older viewers cannot read.
    ratios = [
        _padded([_over_even_share(p, load) for p in load], num_columns) for load in loads.values()
    ]
    shares = [_padded([_finite(p) for p in load], num_columns) for load in loads.values()]
    heatmap = Heatmap(
        x=list(range(num_columns)),
        y=list(loads),
        z=ratios,
        customdata=shares,
        zmin=0.0,
        zmax=FULL_COLOR,
        colorscale=COLORS,
        colorbar={
            "title": {"text": "load / even share"},
            "tickvals": [0.0, 0.5, 1.0, 1.5, FULL_COLOR],
            "ticktext": ["0, dead", "0.5", "1, even", "1.5", "2 or more"],
        },
        hoverongaps=False,
        hovertemplate=(
            "%{y}, expert %{x}<br>%{z:.2f} times the even share"
            "<br>%{customdata:.1%} of the pairs<extra></extra>"
        ),
        xgap=1,
        ygap=1,
    )
    return Figure(
        heatmap,
        layout={
            "template": {},
            "title": {"text": "Load of each expert"},
            "xaxis": {
                "title": {"text": "expert"},
                "tickformat": "d",
                "showgrid": False,
                "zeroline": False,
            },
            # The first layer on top, every one named.
            "yaxis": {
                "title": {"text": "layer", "standoff": 12},
                "type": "category",
                "autorange": "reversed",
                "automargin": True,
                "showgrid": False,
            },
        },
    )


def _over_even_share(share: float, load: Sequence[float]) -> float | None:
    value = _finite(share)
    return None if value is None else value * len(load)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _padded(row: list[float | None], length: int) -> list[float | None]:
    return row + [None] * (length - len(row))
