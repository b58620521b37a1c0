"""Figures of an inspection: functions that return a plotly figure.

A figure of an unknown router or attribute raises a `NotMeasuredError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from moe_ffn.metrics.plotting import LOAD_OPTIONS, LOAD_SCALE, heat_figure
from moe_ffn.model.decoder import short_name
from moe_ffn.report.drawing import plain_rows
from moe_ffn.report.figures import NotMeasuredError, find
from moe_ffn.report.inspect import experts
from moe_ffn.report.inspect.inspection import Inspection


def agreements(found: Inspection) -> go.Figure:
    """Draw the share of the routers' first choice that each attribute explains, above chance."""
    if not found.routers:
        raise NotMeasuredError("no token is routed in these layers")
    routers = found.routers.values()
    names = [attribute.name for attribute in found.attributes]
    values = [[router.agreement[name].above_chance for router in routers] for name in names]
    return _heat(
        [short_name(router.name) for router in routers],
        names,
        values,
        ("layer", ""),
        title="Agreement of the first choice with what a token is",
        note="Mutual information of the first choice and the attribute, over the entropy of the choice; 0 is "
        "the value of a permuted attribute; at 100 %, the attribute determines the choice.",
        bar={"title": "of the choice, above chance", "tickformat": ".0%"},
        hover="layer %{x}, %{y}: <b>%{z:.1%}</b>",
        colorscale="Cividis",
        zmin=0,
        zmax=1,
    )


def taken(found: Inspection, router_name: str, attribute_name: str) -> go.Figure:
    """Draw the share of each label in the tokens of each expert, as a multiple of its share in the text.

    Args:
        router_name: such as `layer_03`.
        attribute_name: such as `byte class`; see `found.attributes`.
    """
    router = find(found.routers, router_name, "router")
    known = {one.name: one for one in found.attributes if one.names}
    attribute = find(known, attribute_name, "attribute")
    counts = experts.profile(router.assignment, attribute)
    occurs = np.flatnonzero(counts.sum(axis=0))
    lift = experts.lift(counts)[:, occurs].T
    shares = (counts[:, occurs] / np.maximum(counts.sum(axis=1, keepdims=True), 1)).T
    return _heat(
        router.assignment.expert_names,
        [_short(attribute.names[label]) for label in occurs],
        lift,
        ("expert", ""),
        title=f"By {attribute.name}",
        note="",
        hover=f"expert %{{x}}, {attribute.name} %{{y}}: <b>%{{z:.2f}}</b> times its part of the text,"
        "<br><b>%{customdata:.1%}</b> of what the expert takes",
        customdata=plain_rows(shares),
        meta={"stops": {role: place for role, (place, _) in LOAD_SCALE.items()}},
        **LOAD_OPTIONS | {"bar": LOAD_OPTIONS["bar"] | {"title": "times its part of the text"}},
    )


def _heat(
    columns: Sequence[str],
    rows: Sequence[int] | Sequence[str],
    values: Any,
    axes: tuple[str, str],
    **options: Any,
) -> go.Figure:
    """Return a heat map with named columns; if there are many, only some names are shown."""
    figure = heat_figure(range(len(columns)), rows, plain_rows(values), axes, **options)
    shown = range(0, len(columns), max(-(-len(columns) // 16), 1))
    axis: Any = figure.layout["xaxis"]
    axis.tickvals, axis.ticktext = list(shown), [columns[place] for place in shown]
    return figure


def _short(name: str, width: int = 22) -> str:
    return name if len(name) <= width else f"…{name[1 - width :]}"
