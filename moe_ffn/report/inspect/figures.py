"""Figures of the contents of feed-forward blocks: functions that return a plotly figure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from moe_ffn.metrics.plotting import LOAD_OPTIONS, LOAD_SCALE, heat_figure
from moe_ffn.metrics.table import Metric
from moe_ffn.model.decoder import short_name
from moe_ffn.report.drawing import Line, line_figure
from moe_ffn.report.figures import MAX_LINES, MAX_TEXTS, NotMeasuredError
from moe_ffn.report.inspect import experts
from moe_ffn.report.inspect.experts import Attribute
from moe_ffn.report.inspect.inspection import Inspection, Router
from moe_ffn.report.inspect.units import AGREE, MAX_SUFFIX_LENGTH, LayerUnits
from moe_ffn.runs.rows import Series

_SUFFIX = Metric(
    key="suffix_share",
    title="Units that answer to the last n tokens",
    quantity="share of units",
    unit="share",
    formula="",
    healthy="",
)


def suffixes(units: Sequence[LayerUnits]) -> go.Figure:
    """Draw the share of units whose top inputs have the same last n tokens, by layer, and by chance."""
    note = (
        f"At least {AGREE:.0%} of a unit's top inputs end in the same n tokens. Chance: inputs drawn at "
        "random from those that the unit's network saw."
    )
    lengths = range(1, MAX_SUFFIX_LENGTH + 1)
    if len(units) > MAX_LINES:
        return heat_figure(
            lengths,
            [str(one.layer) for one in units],
            _plain([one.suffix_shares() for one in units]),
            ("n, tokens", "layer"),
            title=_SUFFIX.title,
            note=note,
            bar={"title": _SUFFIX.quantity, "tickformat": ".0%"},
            hover="layer %{y}, last %{x}: <b>%{z:.1%}</b>",
            colorscale="Cividis",
        )
    steps = array("q", lengths)
    lines = [
        Line(f"layer {one.layer}", Series(steps, array("d", one.suffix_shares())), number)
        for number, one in enumerate(units)
    ]
    chance = np.mean([one.suffix_chance for one in units], axis=0)
    lines.append(Line("chance", Series(steps, array("d", chance)), 7))
    figure: Any = line_figure(lines, _SUFFIX, MAX_SUFFIX_LENGTH, note=note)
    axis = figure.layout.xaxis
    axis.title.text, axis.unifiedhovertitle.text = "n, tokens", "last %{x}"
    for line in figure.data:  # the last value says nothing here
        line.name = line.meta["name"]
    return figure


def agreements(found: Inspection) -> go.Figure:
    """Draw the share of the router's first choice that each attribute of a token explains, above chance.

    Raises:
        NotMeasuredError: no block that was looked at routes.
    """
    routers = _routers(found)
    names = [attribute.name for attribute in found.attributes]
    values = [[router.agreement[name].above_chance for router in routers] for name in names]
    return _heat(
        [short_name(router.name) for router in routers],
        names,
        values,
        ("layer", ""),
        title="Agreement of the first choice with what a token is",
        note="Mutual information of the first choice and the attribute, over the entropy of the choice; 0 is "
        "what a permuted attribute gives, 100 % that the attribute alone decides.",
        bar={"title": "of the choice, above chance", "tickformat": ".0%"},
        hover="layer %{x}, %{y}: <b>%{z:.1%}</b>",
        colorscale="Cividis",
        zmin=0,
        zmax=1,
    )


def taken(found: Inspection, router_name: str, attribute_name: str) -> go.Figure:
    """Draw an expert's part of each label's tokens, as a multiple of its part of all tokens.

    Args:
        router_name: such as `layer_03`.
        attribute_name: such as `byte class`; see `found.attributes`.

    Raises:
        NotMeasuredError: there is no such router or attribute, or the attribute has too many labels.
    """
    router: Router = _one(found.routers, router_name, "router")
    known = {one.name: one for one in found.attributes if one.names}
    attribute: Attribute = _one(known, attribute_name, "attribute")
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
        customdata=_plain(shares),
        **_scaled("times its part of the text", "even"),
    )


def depth(found: Inspection) -> go.Figure:
    """Draw the mutual information of the first choices of two layers.

    Raises:
        NotMeasuredError: fewer than two routers were looked at.
    """
    routers = _routers(found)
    if len(routers) < 2:
        raise NotMeasuredError("there is one router alone, so no other to compare with")
    values = found.depth.copy()
    np.fill_diagonal(values, np.nan)
    known = values[np.isfinite(values)]
    low, high = (known.min(), known.max()) if np.unique(known).size > 1 else (0, 1)
    names = [short_name(router.name) for router in routers]
    return _heat(
        names,
        names,
        values,
        ("layer", "layer"),
        title="The same tokens together in two layers",
        note="2 I(a; b) / (H(a) + H(b)) of the first choices of two layers: 1 where one is a renaming of the "
        "other, about 0 where they know nothing of each other. The numbers of the experts do not matter.",
        bar={"title": "normalised mutual information", "tickformat": ".2f"},
        hover="layers %{y} and %{x}: <b>%{z:.3f}</b>",
        height=360,
        colorscale="Cividis",
        zmin=float(low),
        zmax=float(high),
        texttemplate="%{z:.2f}" if len(names) <= MAX_TEXTS else None,
    )


def _routers(found: Inspection) -> list[Router]:
    if not found.routers:
        raise NotMeasuredError("no token is routed in these layers")
    return list(found.routers.values())


def _one(known: Any, name: str, what: str) -> Any:
    if name not in known:
        raise NotMeasuredError(
            f"there is no {what} '{name}'; there are {', '.join(known) or 'none'}"
        )
    return known[name]


def _scaled(title: str, one: str) -> dict[str, Any]:
    """Return the colours of loads for multiples of something else."""
    bar = {**LOAD_OPTIONS["bar"], "title": title, "ticktext": ["0", f"1 = {one}", "2", "3", "≥ 4"]}
    stops = {role: place for role, (place, _) in LOAD_SCALE.items()}
    return {**LOAD_OPTIONS, "bar": bar, "meta": {"stops": stops}}


def _heat(
    columns: Sequence[str],
    rows: Sequence[int] | Sequence[str],
    values: Any,
    axes: tuple[str, str],
    **options: Any,
) -> go.Figure:
    """Return a heat map with named columns; of many columns a few have their name."""
    figure = heat_figure(range(len(columns)), rows, _plain(values), axes, **options)
    shown = range(0, len(columns), max(-(-len(columns) // 16), 1))
    axis: Any = figure.layout["xaxis"]
    axis.tickvals, axis.ticktext = list(shown), [columns[place] for place in shown]
    return figure


def _short(name: str, width: int = 22) -> str:
    return name if len(name) <= width else f"…{name[1 - width :]}"


def _plain(values: Any) -> list[list[float | None]]:
    return [
        [round(float(value), 4) if np.isfinite(value) else None for value in row] for row in values
    ]
