"""What is tried: cases, in chapters that each keep one promise."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from unittest import SkipTest


@dataclass(frozen=True)
class Case:
    """One thing that is tried."""

    name: str
    check: Callable[[Path], str | None]
    """Tries it in an empty folder. Raises AssertionError with a sentence where the promise is broken, and
    SkipTest where this machine cannot try it; may return a figure to show, such as `12 MB at most`."""
    short: bool = False
    """Whether it belongs to the short version, which is part of the default tests."""


@dataclass(frozen=True)
class Chapter:
    """Cases that together keep a promise."""

    name: str
    """One word, by which it is chosen."""
    promise: str
    """One sentence, for a person who decides whether to trust it."""
    cases: Callable[[], Iterable[Case]]


@dataclass(frozen=True)
class Outcome:
    """What came of a case."""

    case: Case
    seconds: float
    figure: str = ""
    failure: str = ""
    """How the promise was broken; empty where it was not."""
    hindrance: str = ""
    """Why this machine cannot try it; empty where it can."""

    @property
    def verdict(self) -> str:
        """In one word or two."""
        return "NOT TRIED" if self.hindrance else "BROKEN" if self.failure else "kept"


def try_case(case: Case) -> Outcome:
    """Run a case in a folder of its own, which is removed afterwards."""
    start = time.perf_counter()
    figure = failure = hindrance = ""
    with tempfile.TemporaryDirectory(prefix="selftest-", ignore_cleanup_errors=True) as folder:
        try:
            figure = case.check(Path(folder)) or ""
        except SkipTest as error:
            hindrance = str(error)
        except AssertionError as error:
            failure = str(error) or _last_line(error)
        except Exception as error:  # a case that cannot be tried has not been passed
            failure = f"{type(error).__name__}: {error} ({_last_line(error)})"
    return Outcome(case, time.perf_counter() - start, figure, failure, hindrance)


def _last_line(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
