"""Page of a run; the page of a run or of several is written to a file, and can follow runs in progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from moe_ffn.config.errors import explaining
from moe_ffn.report import run_summary
from moe_ffn.report.html import write_page
from moe_ffn.runs.reader import Run, read_runs


def write_report(
    html_of: Callable[..., str],
    folders: Sequence[Path],
    output: Path,
    *,
    reload_every: float | None = None,
    has_ended: bool = False,
) -> list[Run]:
    """Write the page of these runs, made by `html_of`, atomically, and return the runs.

    The page reloads itself every `reload_every` seconds while a run is in progress. Training has certainly
    ended if `has_ended`; otherwise a run counts as interrupted only after its files have not changed for a
    long time. Raises ConfigError if a folder is not a run, or `output` cannot be written.
    """
    runs = read_runs(folders, has_ended=has_ended)
    reload_every = reload_every if any(run.is_running for run in runs) else None
    html = html_of(runs, reload_every=reload_every, output=output)
    with explaining(f"'{output}' cannot be written", "choose another file with --output"):
        write_page(output, html)
    return runs


def report_html(
    runs: Sequence[Run], *, reload_every: float | None = None, output: Path | None = None
) -> str:
    """Return the page of one run, which at `output` links to a shared script near it, if there is one."""
    (run,) = runs
    # Imported here, because training imports this module and should not load plotly.
    from moe_ffn.report import expert_tokens
    from moe_ffn.report.plots import plots_of_run, render_plots, shared_script
    from moe_ffn.report.trace_view import PALETTE

    return render_plots(
        "run.html",
        plots_of_run(run),
        script=None if output is None else shared_script(output),
        title=run.name,
        runs=runs,
        run_summary=run_summary,
        reload_every=reload_every,
        routed_text=expert_tokens.text_for_page(run),
        expert_tokens=expert_tokens,
        palette=PALETTE,
        time=time.strftime("%Y-%m-%d %H:%M:%S"),
    )


# -- a page that follows its runs


def follow_runs(
    html_of: Callable[..., str],
    folders: Sequence[Path],
    output: Path,
    every: float,
    say: Callable[[str], None],
) -> None:
    """Rewrite the page `every` so many seconds until no run is in progress.

    Waits for runs that have not begun. The last page never reloads itself. Raises ConfigError if a path
    exists but is not a run, or the page cannot be written.
    """
    write = partial(write_report, html_of, folders, output)
    runs: list[Run] = []
    try:
        for folder in folders:
            if not _has_begun(folder):
                say(f"waiting for {folder}")
            while not _has_begun(folder):
                time.sleep(every)
        runs = write(reload_every=every)
        say(f"{output} is kept current; press Ctrl-C to stop")
        while any(run.is_running for run in runs):
            time.sleep(every)
            runs = write(reload_every=every)
    except KeyboardInterrupt:
        if not runs:
            say(f"stopped waiting; {output} was not written")
            return
        write()
        say(f"stopped: {output}")
    else:
        interrupted = [run.name for run in runs if run.state == "interrupted"]
        ended = f"{', '.join(interrupted)} was interrupted" if interrupted else "finished"
        say(f"{ended}: {output}")


def _has_begun(folder: Path) -> bool:
    """Return True if the folder has files, or the path is not a folder."""
    try:
        return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError:  # `write_report` gives the reason
        return True
