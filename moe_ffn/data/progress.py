"""How a person sees that the data are being prepared."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from moe_ffn.data.corpus import Document

Report = Callable[[str, int, int | None], None]
"""Called with the stage, the bytes of text done, and the bytes in all or None where not known
yet."""

_SECONDS_BETWEEN_REDRAWS = 0.1


@contextlib.contextmanager
def showing(progress: bool | Report) -> Iterator[Report]:
    """Reports to stderr (True), to nowhere (False), or to the caller's own function."""
    if callable(progress):
        yield progress
    elif not progress:
        yield _nowhere
    elif sys.stderr.isatty():
        with _bar() as report:
            yield report
    else:
        yield _lines()


def watched(
    documents: Iterable[Document], report: Report, stage: str, total: int | None = None
) -> Iterator[Document]:
    """The same documents, reporting how many bytes of them have been read."""
    done = 0

    def counted(blocks: Iterable[bytes]) -> Iterator[bytes]:
        nonlocal done
        for block in blocks:
            yield block
            done += len(block)
            report(stage, done, total)

    for document in documents:
        yield replace(document, blocks=counted(document.blocks))


def _nowhere(stage: str, done: int, total: int | None) -> None:
    pass


def _lines() -> Report:
    """Says at once that the corpus is read and, once that is known, how much there is to prepare; for log
    files.
    """
    print("data: reading the corpus", file=sys.stderr, flush=True)
    said = False

    def report(stage: str, done: int, total: int | None) -> None:
        nonlocal said
        if total is not None and not said:
            print(f"data: preparing {total / 1e6:.1f} MB of text", file=sys.stderr, flush=True)
            said = True

    return report


@contextlib.contextmanager
def _bar() -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("data: {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None)
        shown_stage, shown_at = "", 0.0

        def report(stage: str, done: int, total: int | None) -> None:
            nonlocal shown_stage, shown_at
            now = time.monotonic()
            if stage != shown_stage:
                bar.reset(task, description=stage, total=total)
            elif now - shown_at < _SECONDS_BETWEEN_REDRAWS:
                return
            shown_stage, shown_at = stage, now
            bar.update(task, completed=done)

        yield report
