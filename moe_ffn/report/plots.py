"""Plots of a page, in order and in the form that the script of the page draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from moe_ffn.balancing.losses import BALANCING_LOSSES
from moe_ffn.config.files import write_atomically
from moe_ffn.metrics.plotting import TITLE_HEIGHT
from moe_ffn.metrics.table import RUN_METRICS
from moe_ffn.notebook_cards import evenly_chosen
from moe_ffn.report import figures, run_summary
from moe_ffn.report.drawing import LIGHT
from moe_ffn.report.html import layer_title, render
from moe_ffn.runs.reader import Run

MAX_PAIRS = 100_000
"""Maximum pairs of experts in all co-activation heat maps; beyond it, some layers are left out."""

NOT_DRAWN = {
    "bits_per_byte": "the loss in another unit",
    "objective": "the loss plus the weighted balancing losses, whose note gives their sum",
    "tokens": "the step times the tokens of a step",
    "load_cv": "the same imbalance as MaxVio",
    "entropy_of_mean": "the same imbalance as MaxVio",
}
"""Metric without a plot -> the same information in another plot."""

FOLDED = {"tokens_per_second", "learning_rate"}
"""Curves that are folded until the reader opens them."""

OPEN_MEASURES = (
    "max_violation",
    "dropped_fraction",
    "entropy",
    "logit_max",
    "churn",
    "dead_experts",
)
"""Layer metrics whose plots are open; the plots of the other metrics are folded."""


@dataclass
class Plot:
    """Plot of one figure, or of several from which the reader chooses one."""

    figures: Sequence[dict[str, Any]]
    """Figures in the form that the script draws."""
    choices: Sequence[str]
    """Name of each figure in the list of choices."""
    title: str
    note: str
    """Explanation below the plot."""
    choice: str = "layer"
    """Label of the choices."""
    is_wide: bool = False
    element_id: str = ""
    """Id of the HTML element, set by `numbered`."""


def plots_of_run(run: Run) -> dict[str, list[Plot]]:
    """Return section of `run.html` -> its plots."""
    keys = [key for key in RUN_METRICS if key not in NOT_DRAWN and _has_values(run, key)]
    curves = [
        plot_of(figures.curve(run, key), is_wide=key == "loss") for key in keys if key not in FOLDED
    ]
    if any(run.series(f"train/{name}") for name in BALANCING_LOSSES):
        curves.append(plot_of(figures.balancing_losses(run)))
    # A balancing loss that is drawn for the model is not drawn again for each layer.
    drawn = {name for name in BALANCING_LOSSES if run.series(f"train/{name}")} | NOT_DRAWN.keys()
    moving = [key for key in run_summary.changing_metrics(run) if key not in drawn]
    opened = [key for key in OPEN_MEASURES if key in moving]
    return numbered(
        curves=curves,
        more_curves=[plot_of(figures.curve(run, key)) for key in keys if key in FOLDED],
        loads=_loads(run),
        coactivation=_coactivations(run),
        measures=[plot_of(figures.measure(run, key)) for key in opened],
        more_measures=[plot_of(figures.measure(run, key)) for key in moving if key not in opened],
    )


def numbered(**sections: list[Plot]) -> dict[str, list[Plot]]:
    """Number the plots of all sections, and return the sections."""
    for number, plot in enumerate(plot for plots in sections.values() for plot in plots):
        plot.element_id = f"plot-{number}"
    return sections


def plot_of(figure: Any, **options: Any) -> Plot:
    return choice_of({"": figure}, **options)


def choice_of(figures: Mapping[Any, Any], **options: Any) -> Plot:
    """Return a plot of several figures; title and note come from `options` or from the first figure."""
    drawn = [plain_figure(figure) for figure in figures.values()]
    title_and_note = next(iter(figures.values())).layout.meta
    return Plot(drawn, list(figures), **{**title_and_note, **options})


def _has_values(run: Run, key: str) -> bool:
    """Return False if a metric is missing or always 0, such as the skipped steps."""
    return any(any(run.series(f"{row}/{key}").values) for row in RUN_METRICS[key].rows)


def _loads(run: Run) -> list[Plot]:
    if not run.loads:
        return []
    by_layer: dict[str, Any] = {layer_title(layer): figures.load(run, layer) for layer in run.loads}
    note = max((figure.layout.meta["note"] for figure in by_layer.values()), key=len)
    return [choice_of(by_layer, title="Load of each expert", note=note)]


def _coactivations(run: Run) -> list[Plot]:
    matrices = figures.coactivations(run)
    if not matrices:
        return []
    max_layers = max(MAX_PAIRS // max(len(matrix) ** 2 for matrix in matrices.values()), 2)
    chosen = evenly_chosen(list(matrices), max_layers)
    by_layer = {layer_title(layer): figures.coactivation(run, layer) for layer in chosen}
    plot = choice_of(by_layer, title="Co-activation")
    if len(chosen) < len(matrices):
        plot.note += f" {len(chosen)} of {len(matrices)} layers, evenly chosen."
    return [plot]


# -- pages with plots, and the script that draws them

SHARED_SCRIPT = "plotly.min.js"
"""File with plotly's script, which pages in its folder and in the folders one level below can share."""


def render_plots(
    template: str, plots: Mapping[str, Sequence[Plot]], *, script: str | None = None, **values: Any
) -> str:
    """Return a page with plots and, without the relative URL of a script, plotly's script; see `render`."""
    return render(
        template,
        plots=plots,
        figures={plot.element_id: plot.figures for section in plots.values() for plot in section},
        light=LIGHT,
        script=script,
        plotly="" if script else get_plotlyjs(),
        **values,
    )


def figures_page(title: str, figures: Sequence[Any], script: str | None = None) -> str:
    """Return a page of plotly figures; for `script`, see `render_plots`."""
    plots = numbered(figures=[plot_of(f, is_wide=len(figures) == 1) for f in figures])
    return render_plots("figures.html", plots, script=script, title=title, reload_every=None)


def share_script(folder: Path) -> None:
    """Write plotly's script for pages in a folder and one level below; raises OSError."""
    write_atomically(folder / SHARED_SCRIPT, get_plotlyjs())


def shared_script(page: Path) -> str | None:
    """Return the relative URL of a shared script in the folder of a page or one above; None if missing."""
    for address in (SHARED_SCRIPT, f"../{SHARED_SCRIPT}"):
        path = page.resolve().parent / address
        # A script of another size is another version of plotly, which might draw figures differently.
        if path.is_file() and path.stat().st_size == len(get_plotlyjs().encode()):
            return address
    return None


# -- figures as the page's script draws them


def plain_figure(figure: Any) -> dict[str, Any]:
    """Return a figure as plain values, without title and template, which the page replaces."""
    plain = figure.to_plotly_json()
    layout = plain["layout"]
    for key in ("title", "template", "meta"):
        del layout[key]
    layout["height"] -= TITLE_HEIGHT
    layout["margin"]["t"] -= TITLE_HEIGHT
    return plain
