"""The page of one run, or of several together; it can follow runs in progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from moe_ffn.report import run_summary
from moe_ffn.report.html import write_page
from moe_ffn.runs.folder import explaining
from moe_ffn.runs.reader import PATIENCE_SECONDS, WATCHED, Run, check_is_run, read_runs

Stamp = list[tuple[int, int] | None]


def write_report(
    folders: Sequence[Path],
    output: Path,
    *,
    reload_every: float | None = None,
    has_ended: bool = False,
) -> list[Run]:
    """Write the page of these runs, atomically; return the runs.

    Args:
        reload_every: seconds after which the page reloads itself while a run is in progress; None for a
            page that never reloads.
        has_ended: these runs are not being trained; the files of an interrupted run show that only after
            a long silence.

    Raises:
        ConfigError: a folder is no run, or `output` cannot be written.
    """
    runs = read_runs(folders, has_ended=has_ended)
    html = report_html(runs, reload_every=reload_every, output=output)
    with explaining(f"'{output}' cannot be written", "choose another file with --output"):
        write_page(output, html)
    return runs


def report_html(
    runs: Sequence[Run], *, reload_every: float | None = None, output: Path | None = None
) -> str:
    """Return the page.

    Args:
        output: its path; a script that is shared there is left out of the page, see `shared_script`.
    """
    # Only now: training imports this module, and should not wait for plotly.
    from moe_ffn.report import expert_tokens
    from moe_ffn.report.plots import plots_of_run, render_plots, shared_script
    from moe_ffn.report.trace_view import PALETTE

    reload_every = reload_every if any(run.is_going_on for run in runs) else None
    if len(runs) > 1:
        from moe_ffn.report.comparison_page import html_of_runs

        return html_of_runs(runs, output, reload_every)
    return render_plots(
        "run.html",
        plots_of_run(runs[0]),
        script=None if output is None else shared_script(output),
        title=runs[0].name,
        runs=runs,
        run_summary=run_summary,
        reload_every=reload_every,
        takes=expert_tokens.of_page(runs[0]),
        expert_tokens=expert_tokens,
        grounds=PALETTE,
        time=time.strftime("%Y-%m-%d %H:%M:%S"),
    )


# -- a page that follows its runs


def watch(
    folders: Sequence[Path],
    output: Path,
    every: float,
    say: Callable[[str], None],
    sleep: Callable[[float], None] | None = None,
) -> None:
    """Write the page again whenever a file of a run changes; return when no run is in progress.

    A run that has not begun is waited for. However it ends, the last page no longer reloads.

    Args:
        every: seconds between two looks.

    Raises:
        ConfigError: a path exists and is no run, or the page cannot be written.
    """
    sleep = sleep or time.sleep
    runs: list[Run] = []
    try:
        for folder in folders:
            if not _has_begun(folder):
                say(f"waiting for {folder}")
            while not _has_begun(folder):
                sleep(every)
            check_is_run(folder)
        seen = stamp_of(folders)
        runs = write_report(folders, output, reload_every=every)
        say(f"{output} is kept current; Ctrl-C ends it")
        while any(run.is_going_on for run in runs):
            start = time.monotonic()
            # Until a file changed, or until silence may mean that a run was interrupted.
            while stamp_of(folders) == seen and time.monotonic() - start < PATIENCE_SECONDS:
                sleep(every)
            seen = stamp_of(folders)
            runs = write_report(folders, output, reload_every=every)
    except KeyboardInterrupt:
        if not runs:
            say(f"stopped waiting; {output} was not written")
            return
        write_report(folders, output)
        say(f"stopped: {output}")
    else:
        interrupted = [run.name for run in runs if run.state == "interrupted"]
        ended = f"{', '.join(interrupted)} was interrupted" if interrupted else "finished"
        say(f"{ended}: {output}")


def _has_begun(folder: Path) -> bool:
    """Return whether a run's folder has files, or something else is in its place."""
    try:
        return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError:  # `check_is_run` gives the reason
        return True


def stamp_of(folders: Sequence[Path]) -> Stamp:
    """Return time and size of every file that the page is made of; None for an absent file."""
    stamps: Stamp = []
    for path in (folder / name for folder in folders for name in WATCHED):
        try:
            found = path.stat()
        except OSError:
            stamps.append(None)
        else:
            stamps.append((found.st_mtime_ns, found.st_size))
    return stamps
