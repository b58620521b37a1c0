"""The page of one run, or of several beside each other, written whole."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_ffn.errors import ConfigError, reason
from moe_ffn.report import tables
from moe_ffn.report.html import render, write_page
from moe_ffn.runs.reader import Run, read_runs


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
    # Only now: without plotly the import of this module should still succeed.
    from plotly.offline import get_plotlyjs

    from moe_ffn.report.drawing import LIGHT
    from moe_ffn.report.plots import PlotBook, plots_of_run, plots_of_runs

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
