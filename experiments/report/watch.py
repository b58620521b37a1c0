"""A page that follows its runs until all of them have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.report.page import write_report
from experiments.report.record import WATCHED, Run, check_is_run

Stamp = tuple[tuple[int, int] | None, ...]


def watch(
    folders: Sequence[Path],
    output: Path,
    every: float,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Write the page again whenever a file of a run changed; return when every run has finished.

    However it ends, the page that it leaves no longer loads itself anew.
    """
    for folder in folders:
        check_is_run(folder)
    seen: Stamp | None = None
    written = False
    try:
        while True:
            stamp = stamp_of(folders)
            if stamp != seen:
                runs = write_report(folders, output, reload_every=every)
                if not written:
                    say(f"{output} follows {_names(runs)}; Ctrl-C ends it")
                seen, written = stamp, True
                if all(run.state == "finished" for run in runs):
                    break
            sleep(every)
    finally:
        if written:
            write_report(folders, output)
    say(f"finished: {output}")


def stamp_of(folders: Sequence[Path]) -> Stamp:
    """Time and size of every file that the page is made of; None for one that is absent."""
    return tuple(_stamp(folder / name) for folder in folders for name in WATCHED)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size


def _names(runs: Sequence[Run]) -> str:
    return ", ".join(run.name for run in runs)
