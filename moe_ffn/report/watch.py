"""A page that follows its runs until all of them have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from moe_ffn.errors import ConfigError
from moe_ffn.report.page import write_report
from moe_ffn.runs.reader import PATIENCE_SECONDS, WATCHED, Run, check_is_run

Stamp = tuple[tuple[int, int] | None, ...]


def watch(
    folders: Sequence[Path],
    output: Path,
    every: float,
    say: Callable[[str], None],
    sleep: Callable[[float], None] | None = None,
) -> None:
    """Write the page again whenever a file of a run changed; return when no run is going on.

    A run that has not begun is waited for. However it ends, the page that it leaves no longer loads
    itself anew.

    Raises:
        ConfigError: what is given is there and is no run, or the first page cannot be written.
    """
    sleep = sleep or time.sleep
    runs: list[Run] = []
    said = ""
    try:
        _wait_for_runs(folders, every, say, sleep)
        seen = stamp_of(folders)
        runs = write_report(folders, output, reload_every=every)
        say(f"{output} is kept current; Ctrl-C ends it")
        while any(run.is_going_on for run in runs):
            _wait_for_change(folders, seen, every, sleep)
            seen = stamp_of(folders)
            try:
                runs = write_report(folders, output, reload_every=every)
            except ConfigError as error:  # a folder that is being moved, a disk that is full
                if str(error) != said:
                    say(f"{error}; looking again every {every:g} s")
                said = str(error)
                seen = None
                sleep(every)
    except KeyboardInterrupt:
        if not runs:
            say(f"no longer waited for; {output} was not written")
            return
        write_report(folders, output)
        say(f"no longer followed: {output}")
    else:
        say(f"{_how_it_ended(runs)}: {output}")


def _how_it_ended(runs: Sequence[Run]) -> str:
    interrupted = [run.name for run in runs if run.state == "interrupted"]
    if len(interrupted) == len(runs):
        return "interrupted"
    return f"finished, but {', '.join(interrupted)} was interrupted" if interrupted else "finished"


def _wait_for_runs(
    folders: Sequence[Path],
    every: float,
    say: Callable[[str], None],
    sleep: Callable[[float], None],
) -> None:
    """Until every folder is that of a run: who starts a run and this together comes too early."""
    for folder in folders:
        if not _has_begun(folder):
            say(f"waiting for {folder}")
            while not _has_begun(folder):
                sleep(every)
        check_is_run(folder)


def _has_begun(folder: Path) -> bool:
    """Whether there is something to judge: a run's folder is made before the files in it."""
    try:
        return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError:  # which is judged as well, and said
        return True


def _wait_for_change(
    folders: Sequence[Path], seen: Stamp | None, every: float, sleep: Callable[[float], None]
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
        found = path.lstat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
