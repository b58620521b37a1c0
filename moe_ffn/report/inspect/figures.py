"""Plotly figures of an inspection. An unknown router or attribute raises `NotMeasuredError`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from moe_ffn.ffn.base import short_name
from moe_ffn.metrics.plotting import LOAD_OPTIONS, LOAD_SCALE, heat_figure
from moe_ffn.report.drawing import rounded_rows
from moe_ffn.report.figures import NotMeasuredError, find
from moe_ffn.report.inspect import experts
from moe_ffn.report.inspect.inspection import Inspection


def agreements(inspection: Inspection) -> go.Figure:
    """Draw the share of the routers' first choice that each attribute explains, above chance."""
    if not inspection.routers:
        raise NotMeasuredError("no token is routed in these layers")
    routers = inspection.routers.values()
    names = [attribute.name for attribute in inspection.attributes]
    values = [[router.agreement[name].above_chance for router in routers] for name in names]
    return _heat(
        [short_name(router.name) for router in routers],
        names,
        values,
        ("layer", ""),
        title="Share of the first choice that each attribute explains",
        note="Mutual information of the first choice and the attribute, over the entropy of the choice; at "
        "0 %, a permuted attribute explains as much; at 100 %, the attribute determines the choice.",
        bar={"title": "of the choice, above chance", "tickformat": ".0%"},
        hover="layer %{x}, %{y}: <b>%{z:.1%}</b>",
        colorscale="Cividis",
        zmin=0,
        zmax=1,
    )


def taken(inspection: Inspection, router_name: str, attribute_name: str) -> go.Figure:
    """Draw the share of each label in the tokens of each expert, as a multiple of its share of the text.

    A router is named like `layer_03`, an attribute like `byte class`; see `inspection.attributes`.
    """
    router = find(inspection.routers, router_name, "router")
    known = {attribute.name: attribute for attribute in inspection.attributes if attribute.names}
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
        hover=f"expert %{{x}}, {attribute.name} %{{y}}: <b>%{{z:.2f}}</b> times its share of the text,"
        "<br><b>%{customdata:.1%}</b> of the expert's tokens",
        customdata=rounded_rows(shares),
        meta={"stops": {role: place for role, (place, _) in LOAD_SCALE.items()}},
        **LOAD_OPTIONS | {"bar": LOAD_OPTIONS["bar"] | {"title": "times its share of the text"}},
    )


def _heat(
    columns: Sequence[str],
    rows: Sequence[int] | Sequence[str],
    values: Any,
    axes: tuple[str, str],
    **options: Any,
) -> go.Figure:
    """Return a heat map with named columns; if there are many, only some names are shown."""
    figure = heat_figure(range(len(columns)), rows, rounded_rows(values), axes, **options)
    ticks = range(0, len(columns), max(-(-len(columns) // 16), 1))
    axis: Any = figure.layout["xaxis"]
    axis.tickvals, axis.ticktext = list(ticks), [columns[tick] for tick in ticks]
    return figure


def _short(name: str, width: int = 22) -> str:
    return name if len(name) <= width else f"…{name[1 - width :]}"
