"""The page of one run, or of several beside each other: figures in their places, and the document."""

from __future__ import annotations

import base64
import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_ffn.balancing.losses import BALANCING_LOSSES
from moe_ffn.errors import ConfigError, reason
from moe_ffn.layer_names import short_name
from moe_ffn.metrics.table import RUN_METRICS, layer_measures
from moe_ffn.report import tables
from moe_ffn.report.html import render, write_page
from moe_ffn.runs.reader import Run, read_runs

if TYPE_CHECKING:  # without plotly the import of this module should still succeed
    import plotly.graph_objects as go

MAX_PLACES = 6
"""Load heat maps of more layers than this have one place, with a choice."""

MAX_PAIRS = 200_000
"""Of experts in all co-activation heat maps together; some of the layers are left out beyond it."""

NOT_COMPARED = ("objective", "skipped_steps")
"""An objective is a sum by weights that differ between runs; a skipped step is one run's own matter."""

NOT_MEASURED = 65535
"""In the packed shares of a heat map; the shares themselves end one below."""


def write_report(
    folders: Sequence[Path],
    output: Path,
    *,
    reload_every: float | None = None,
    has_ended: bool = False,
) -> list[Run]:
    """Write the page of these runs, whole or not at all; returns what it shows.

    Args:
        reload_every: seconds after which the page loads itself anew, while a run is going on; None
            for a page that stays as it is.
        has_ended: nobody trains these runs any more, which their files cannot say of an interrupted
            one until it has been silent for long.

    Raises:
        ConfigError: a folder is no run, plotly is not installed, or `output` cannot be written.
    """
    check_plotly()
    runs = read_runs(folders, has_ended=has_ended)
    html = report_html(runs, reload_every=reload_every)
    try:
        write_page(output, html)
    except OSError as error:
        raise ConfigError(
            f"'{output}' cannot be written ({reason(error)}); choose another file with --output"
        ) from error
    return runs


def check_plotly() -> None:
    """
    Raises:
        ConfigError: plotly is not installed.
    """
    try:
        importlib.import_module("plotly.graph_objects")
    except ImportError as error:
        raise ConfigError("the report needs plotly; install it with: pip install plotly") from error


def report_html(runs: Sequence[Run], *, reload_every: float | None = None) -> str:
    """The document, plotly's script in it."""
    from plotly.offline import get_plotlyjs

    from moe_ffn.report.drawing import LIGHT

    book = PlotBook()
    plots = plots_of_runs(runs, book) if len(runs) > 1 else plots_of_run(runs[0], book)
    values = values_of_runs(runs) if len(runs) > 1 else values_of_run(runs[0])
    title = ", ".join(run.name for run in runs)
    return render(
        "runs.html" if len(runs) > 1 else "run.html",
        title=title if len(title) <= 80 else f"{len(runs)} runs",
        reload_every=reload_every if any(run.is_going_on for run in runs) else None,
        light=LIGHT,
        figures=book.figures,
        plotly=get_plotlyjs(),
        plots=plots,
        **values,
    )


# -- what the templates show beside the plots


def values_of_run(run: Run) -> dict[str, Any]:
    """What `run.html` shows beside the plots."""
    revision = str(run.facts.git_revision or "unknown")
    commit, dash, rest = revision.partition("-")
    return {
        "run": run,
        "state": tables.STATES[run.state],
        "progress": tables.progress(run),
        "block": tables.ffn_type(run),
        "loss": tables.validation_loss(run),
        "best_loss": tables.best_loss(run),
        "bits_per_byte": tables.bits_per_byte(run),
        "tokens_per_second": tables.tokens_per_second(run),
        "throughput_span": tables.throughput_span(run),
        "revision": revision,
        "short_revision": commit[:12] + dash + rest,
        "corpus": str(run.facts.corpus_sha256 or "unknown"),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "concerns": tables.concerns(run),
        "alarm_groups": tables.alarm_groups(run),
        "constant": tables.constant_measures(run),
        "experts": tables.expert_rows(run),
        "result_headers": tables.result_headers(),
        "max_columns": tables.MAX_COLUMNS,
        "block_columns": [f"+{n}" for n in range(tables.MAX_COLUMNS)],
        "samples": tables.shown_samples(run),
        "num_samples": len(run.samples),
        "documents": tables.documents(run),
    }


def values_of_runs(runs: Sequence[Run]) -> dict[str, Any]:
    """What `runs.html` shows beside the plots."""
    return {
        "names": [run.name for run in runs],
        "columns": tables.RUN_COLUMNS,
        "measures": [metric.label for metric in tables.compared_measures()],
        "rows": tables.run_rows(runs),
        "best": tables.best_runs(runs),
        "precisions": tables.precisions(runs),
        "incomparable": tables.incomparable(runs),
        "differences": tables.differences(runs),
        "concerns": [concern for run in runs for concern in tables.concerns(run)],
        "alarm_groups": [group for run in runs for group in tables.alarm_groups(run)],
        "num_alarms": sum(len(run.alarms) for run in runs),
    }


# -- the plots


@dataclass(frozen=True)
class Plot:
    """A place on the page for one figure, or for several behind one choice, such as a heat map per layer."""

    name: str
    """Of its element."""
    title: str
    note: str
    """How to read it."""
    height: int
    choices: Sequence[str] = ("",)
    """What is chosen, a name for each figure."""
    choice: str = "layer"
    """What the choices are."""
    is_wide: bool = False


class PlotBook:
    """Collects the figures of a page while places for them are made."""

    def __init__(self) -> None:
        self.figures: dict[str, list[dict[str, Any]]] = {}
        """Name of a place -> its figures, as the page's script draws them."""

    def place(
        self,
        figures: Mapping[str, go.Figure],
        *,
        title: str | None = None,
        note: str | None = None,
        **options: Any,
    ) -> Plot:
        """
        Args:
            figures: what is chosen -> what is drawn.
            title, note: instead of those of the first figure.
            options: of `Plot`.
        """
        name = f"plot-{len(self.figures)}"
        plain = [plain_figure(figure) for figure in figures.values()]
        about = next(iter(figures.values())).layout.meta
        self.figures[name] = plain
        return Plot(
            name,
            about["title"] if title is None else title,
            about["note"] if note is None else note,
            plain[0]["layout"]["height"],
            list(figures),
            **options,
        )

    def one(self, figure: go.Figure, **options: Any) -> Plot:
        """A place for one figure."""
        return self.place({"": figure}, **options)


def plots_of_run(run: Run, book: PlotBook) -> dict[str, list[Plot]]:
    """Each section of `run.html` -> its plots, each only where it was measured."""
    from moe_ffn.report import figures

    curves = [
        book.one(figures.curve(run, key), is_wide=key == "loss")
        for key in RUN_METRICS
        if _is_telling(run, key)
    ]
    if any(run.series(f"train/{name}") for name in BALANCING_LOSSES):
        curves.append(book.one(figures.balancing_losses(run)))
    return {
        "curves": curves,
        "loads": _loads(run, book),
        "measures": [book.one(figures.measure(run, key)) for key in tables.moving_measures(run)],
        "coactivation": _coactivations(run, book),
    }


def _is_telling(run: Run, key: str) -> bool:
    """False where a metric was always 0, as the steps skipped, and of an objective that is the loss alone."""
    found = [run.series(f"{row}/{key}").values for row in RUN_METRICS[key].rows]
    if key == "objective" and found[0].tobytes() == run.series("train/loss").values.tobytes():
        return False
    return any(value for values in found for value in values)


def plots_of_runs(runs: Sequence[Run], book: PlotBook) -> dict[str, list[Plot]]:
    """Each section of `runs.html` -> its plots; the losses over training FLOPs too where all are known."""
    from moe_ffn.report import figures
    from moe_ffn.report.drawing import STEP

    curves: list[Plot] = []
    metrics = [metric for key, metric in RUN_METRICS.items() if key not in NOT_COMPARED]
    for metric, row in ((m, row) for m in metrics for row in reversed(m.rows)):
        key = f"{row}/{metric.key}"
        if not any(run.series(key) for run in runs):
            continue
        knows_flops = metric.key == "loss" and all(figures.flops_per_step(run) for run in runs)
        axes = [STEP, figures.FLOPS] if knows_flops else [STEP]
        found = {axis: figures.overlay(runs, key, axis) for axis in axes}
        note = found[axes[-1]].layout.meta["note"]
        curves.append(book.place(found, note=note, choice="over"))
    measures: list[Plot] = []
    for metric in layer_measures():
        means = [figures.mean_over_layers(run, metric) for run in runs]
        if len({value for series in means for value in series.values}) > 1:
            measures.append(book.one(figures.overlay_measure(runs, metric.key)))
    return {"curves": curves, "measures": measures}


def _loads(run: Run, book: PlotBook) -> list[Plot]:
    """A heat map per sparse layer; where the layers are many, one with a choice."""
    from moe_ffn.report import figures

    found = {f"layer {short_name(layer)}": figures.load(run, layer) for layer in run.loads}
    if len(found) <= MAX_PLACES:
        return [book.one(figure) for figure in found.values()]
    note = max((figure.layout.meta["note"] for figure in found.values()), key=len)
    return [book.place(found, title="Load of each expert", note=note, is_wide=True)]


def _coactivations(run: Run, book: PlotBook) -> list[Plot]:
    """One heat map with a choice of layer."""
    from moe_ffn.report import figures

    found = figures.coactivations(run)
    if not found:
        return []
    max_layers = max(MAX_PAIRS // max(len(matrix) ** 2 for matrix in found.values()), 2)
    chosen = tables.evenly_chosen(list(found), max_layers)
    drawn = {f"layer {short_name(layer)}": figures.coactivation(run, layer) for layer in chosen}
    note = next(iter(drawn.values())).layout.meta["note"]
    if len(chosen) < len(found):
        note += f" {len(chosen)} of {len(found)} layers, evenly chosen."
    return [book.place(drawn, title="Co-activation", note=note)]


# -- figures as the page's script draws them


def plain_figure(figure: go.Figure) -> dict[str, Any]:
    """A figure as plain values: without its title and template, since the page has a heading and colours.

    Shares go into the page packed, since there are by far the most of them; page.js unpacks them.
    """
    from moe_ffn.report.drawing import TITLE_HEIGHT

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
