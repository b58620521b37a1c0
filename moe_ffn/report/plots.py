"""The plots of a page: which figures of a run it shows, in what order, and as its script draws them."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_ffn.balancing.losses import BALANCING_LOSSES
from moe_ffn.metrics.plotting import TITLE_HEIGHT
from moe_ffn.metrics.table import RUN_METRICS, layer_measures
from moe_ffn.model.decoder import short_name
from moe_ffn.report import figures, tables
from moe_ffn.report.drawing import STEP_AXIS
from moe_ffn.runs.reader import Run

MAX_PAIRS = 200_000
"""Of experts in all co-activation heat maps together; some of the layers are left out beyond it."""

NOT_COMPARED = ("objective", "skipped_steps")
"""An objective is a sum by weights that differ between runs; a skipped step is one run's own matter."""

NOT_DRAWN = {
    "bits_per_byte": "the loss in another unit",
    "objective": "the loss, and what balancing adds to it, which is said beside the balancing losses",
    "load_cv": "as MaxVio",
    "entropy_of_mean": "as MaxVio",
}
"""Metrics that say what another one does; the page has no plot of them, the rows have them."""

FOLDED = {"tokens_per_second", "learning_rate"}
"""Curves that the reader unfolds: a card has the throughput, the config the schedule."""

FIRST = ("max_violation", "dropped_fraction", "entropy", "logit_max", "churn", "dead_experts")
"""The metrics of layers that the page shows at once; the others are below them, folded."""

NOT_MEASURED = 65535
"""In the packed shares of a heat map; the shares themselves end one below."""


@dataclass
class Plot:
    """A place on the page for one figure, or for several behind one choice, such as a heat map per layer."""

    figures: Sequence[dict[str, Any]]
    """The figures, as the page's script draws them."""
    choices: Sequence[str]
    """What is chosen, a name for each figure."""
    title: str
    note: str
    """How to read it."""
    choice: str = "layer"
    """What the choices are."""
    is_wide: bool = False
    name: str = ""
    """The id of its element, once all are on the page."""


def plots_of_run(run: Run) -> dict[str, list[Plot]]:
    """Each section of `run.html`, in its order -> its plots, each only where it was measured."""
    keys = [key for key in RUN_METRICS if key not in NOT_DRAWN and _has_values(run, key)]
    curves = [
        _plot(figures.curve(run, key), is_wide=key == "loss") for key in keys if key not in FOLDED
    ]
    if any(run.series(f"train/{name}") for name in BALANCING_LOSSES):
        curves.append(_plot(figures.balancing_losses(run)))
    # A balancing loss that is drawn of the whole model is not drawn again of each layer.
    drawn = {name for name in BALANCING_LOSSES if run.series(f"train/{name}")} | NOT_DRAWN.keys()
    moving = [key for key in tables.moving_measures(run) if key not in drawn]
    first = [key for key in FIRST if key in moving]
    return _named(
        curves=curves,
        more_curves=[_plot(figures.curve(run, key)) for key in keys if key in FOLDED],
        loads=_loads(run),
        coactivation=_coactivations(run),
        measures=[_plot(figures.measure(run, key)) for key in first],
        more_measures=[_plot(figures.measure(run, key)) for key in moving if key not in first],
    )


def plots_of_runs(runs: Sequence[Run]) -> dict[str, list[Plot]]:
    """Each section of `runs.html` -> its plots; the losses over training FLOPs too where all are known."""
    curves: list[Plot] = []
    metrics = [metric for key, metric in RUN_METRICS.items() if key not in NOT_COMPARED]
    for metric, row in ((m, row) for m in metrics for row in reversed(m.rows)):
        key = f"{row}/{metric.key}"
        if any(run.series(key) for run in runs):
            knows_flops = metric.key == "loss" and all(figures.flops_per_step(run) for run in runs)
            axes = [STEP_AXIS, figures.FLOPS] if knows_flops else [STEP_AXIS]
            found: dict[str, Any] = {axis: figures.overlay(runs, key, axis) for axis in axes}
            curves.append(_choice(found, note=found[axes[-1]].layout.meta["note"], choice="over"))
    measures: list[Plot] = []
    for metric in layer_measures():
        means = [figures.mean_over_layers(run, metric) for run in runs]
        if len({value for series in means for value in series.values}) > 1:
            measures.append(_plot(figures.overlay_measure(runs, metric.key)))
    return _named(curves=curves, measures=measures)


def _named(**sections: list[Plot]) -> dict[str, list[Plot]]:
    for number, plot in enumerate(plot for plots in sections.values() for plot in plots):
        plot.name = f"plot-{number}"
    return sections


def _plot(figure: Any, **options: Any) -> Plot:
    return _choice({"": figure}, **options)


def _choice(found: Mapping[str, Any], **options: Any) -> Plot:
    """What is chosen -> what is drawn; title and note are those of the first figure, or in `options`."""
    plain = [plain_figure(figure) for figure in found.values()]
    about = next(iter(found.values())).layout.meta
    return Plot(plain, list(found), **{**about, **options})


def _has_values(run: Run, key: str) -> bool:
    """False where a metric was always 0, as the steps skipped."""
    found = [run.series(f"{row}/{key}").values for row in RUN_METRICS[key].rows]
    return any(value for values in found for value in values)


def _loads(run: Run) -> list[Plot]:
    """One heat map with a choice of sparse layer."""
    found: dict[str, Any] = {_layer(layer): figures.load(run, layer) for layer in run.loads}
    if not found:
        return []
    note = max((figure.layout.meta["note"] for figure in found.values()), key=len)
    return [_choice(found, title="Load of each expert", note=note)]


def _coactivations(run: Run) -> list[Plot]:
    """One heat map with a choice of layer."""
    found = figures.coactivations(run)
    if not found:
        return []
    max_layers = max(MAX_PAIRS // max(len(matrix) ** 2 for matrix in found.values()), 2)
    chosen = tables.evenly_chosen(list(found), max_layers)
    drawn: dict[str, Any] = {_layer(layer): figures.coactivation(run, layer) for layer in chosen}
    plot = _choice(drawn, title="Co-activation")
    if len(chosen) < len(found):
        plot.note += f" {len(chosen)} of {len(found)} layers, evenly chosen."
    return [plot]


def _layer(name: str) -> str:
    return f"layer {short_name(name)}"


# -- figures as the page's script draws them


def plain_figure(figure: Any) -> dict[str, Any]:
    """A figure as plain values: without its title and template, since the page has a heading and colours.

    Shares go into the page packed, since there are by far the most of them; page.js unpacks them.
    """
    found = figure.to_plotly_json()
    layout = found["layout"]
    for key in ("title", "template", "meta"):
        del layout[key]
    layout["height"] -= TITLE_HEIGHT
    layout["margin"]["t"] -= TITLE_HEIGHT
    for trace, drawn in zip(found["data"], figure.data, strict=True):
        if trace.get("meta", {}).pop("is_packed", False):
            trace.pop("customdata", None)
            shares = drawn.z if drawn.customdata is None else drawn.customdata
            del trace["z"]
            trace["meta"] |= {"rows": len(shares), "shares": pack_shares(shares)}
    return found


def pack_shares(shares: Any) -> str:
    """Shares of 1 as base64 of little-endian 16-bit integers, row after row; NaN is `NOT_MEASURED`."""
    values = np.asarray(shares, dtype=float)
    packed = np.rint(np.clip(values, 0, 1) * (NOT_MEASURED - 1))
    packed = np.where(np.isnan(values), NOT_MEASURED, packed)
    return base64.b64encode(packed.astype("<u2").tobytes()).decode()
