"""A page that follows its runs until all of them have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.report.page import write_report
from experiments.report.record import PATIENCE_SECONDS, WATCHED

Stamp = tuple[tuple[int, int] | None, ...]


def watch(
    folders: Sequence[Path],
    output: Path,
    every: float,
    say: Callable[[str], None],
    sleep: Callable[[float], None] | None = None,
) -> None:
    """Write the page again whenever a file of a run changed; return when every run has finished.

    However it ends, the page that it leaves no longer loads itself anew.
    """
    seen = stamp_of(folders)
    runs = write_report(folders, output, reload_every=every)
    say(f"{output} is kept current; Ctrl-C ends it")
    try:
        while not all(run.state == "finished" for run in runs):
            _wait(folders, seen, every, sleep or time.sleep)
            seen = stamp_of(folders)
            runs = write_report(folders, output, reload_every=every)
    except KeyboardInterrupt:
        write_report(folders, output)
        say(f"no longer followed: {output}")
    else:
        say(f"finished: {output}")


def _wait(
    folders: Sequence[Path], seen: Stamp, every: float, sleep: Callable[[float], None]
) -> None:
    """Until a file changed, or until silence may mean that a run was interrupted."""
    start = time.monotonic()
    while stamp_of(folders) == seen and time.monotonic() - start < PATIENCE_SECONDS:
        sleep(every)


def stamp_of(folders: Sequence[Path]) -> Stamp:
    """Time and size of every file that the page is made of; None for one that is absent."""
    return tuple(_stamp(folder / name) for folder in folders for name in WATCHED)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size
