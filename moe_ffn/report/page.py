"""The whole page of one run, or of several beside each other."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moe_ffn.errors import ConfigError, reason
from moe_ffn.report.headline import alarms, headline, options, samples
from moe_ffn.report.html import html_page, write_page
from moe_ffn.report.markup import text
from moe_ffn.report.tables import comparison, differences, expert_table
from moe_ffn.runs.reader import Run, read_runs

if TYPE_CHECKING:
    from moe_ffn.report.figures import PlotBook

HERE = Path(__file__).parent


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
    try:
        importlib.import_module("plotly.graph_objects")
    except ImportError as error:
        raise ConfigError("the report needs plotly; install it with: pip install plotly") from error


def report_html(runs: Sequence[Run], *, reload_every: float | None = None) -> str:
    """The document, plotly's script in it."""
    # Only now: without plotly the import of this module should still succeed.
    from plotly.offline import get_plotlyjs

    from moe_ffn.report.figures import PlotBook

    book = PlotBook()
    body = _several(runs, book) if len(runs) > 1 else _one(runs[0], book)
    if reload_every is not None and any(run.is_going_on for run in runs):
        body = (
            f'<label class="reload"><input type="checkbox" id="reload" checked '
            f'data-seconds="{reload_every:g}"> reload every {reload_every:g} s</label>\n{body}'
        )
    # `<` is the one character that could end the element.
    data = json.dumps(book.content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    script = (HERE / "page.js").read_text(encoding="utf-8")
    title = ", ".join(run.name for run in runs)
    return html_page(
        title if len(title) <= 80 else f"{len(runs)} runs",
        f'{body}<script type="application/json" id="plots">{data}</script>',
        script=f"{get_plotlyjs()}\n{script}",
        head=f"<style>\n{(HERE / 'report.css').read_text(encoding='utf-8')}</style>\n",
    )


def _one(run: Run, book: PlotBook) -> str:
    from moe_ffn.report.curves import curve_plots
    from moe_ffn.report.routing import (
        coactivation_plots,
        constant_measures,
        load_plots,
        measure_plots,
    )

    curves = book.place(curve_plots(run)) or '<p class="quiet">Nothing was measured yet.</p>\n'
    routing = book.place(load_plots(run)) + book.place(measure_plots(run))
    constant = constant_measures(run)
    if constant:
        routing += f'<p class="quiet">At all steps, in all layers: {"; ".join(constant)}.</p>\n'
    experts = expert_table(run) + book.place(coactivation_plots(run))
    sections = [
        ("curves", "Curves", curves),
        ("routing", "Routing over time", routing),
        ("experts", "Experts", experts),
        ("samples", "Text samples", samples(run)),
        ("config", "Config", options(run)),
    ]
    return headline(run) + alarms([run]) + _sections(sections)


def _several(runs: Sequence[Run], book: PlotBook) -> str:
    from moe_ffn.report.overlay import overlay_measures, overlay_plots

    names = " · ".join(text(run.name) for run in runs)
    curves = book.place(overlay_plots(runs)) or '<p class="quiet">Nothing was measured yet.</p>\n'
    sections = [
        ("runs", "Runs", comparison(runs)),
        ("options", "What differs", differences(runs)),
        ("curves", "Curves", curves),
        ("routing", "Routing", book.place(overlay_measures(runs))),
    ]
    return f"<header><h1>{names}</h1></header>\n{alarms(runs)}{_sections(sections)}"


def _sections(sections: Sequence[tuple[str, str, str]]) -> str:
    """Those (id, title, content) that have content, and links to them."""
    shown = [section for section in sections if section[2]]
    links = " ".join(f'<a href="#{name}">{title}</a>' for name, title, _ in shown)
    return f'<nav aria-label="sections">{links}</nav>\n' + "".join(
        f'<section id="{name}"><h2>{title}</h2>\n{content}</section>\n'
        for name, title, content in shown
    )
