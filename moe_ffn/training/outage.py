"""A disk that cannot be written for a while: training goes on, and says so once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Outage:
    """What one writer has to say of its file: a line when it begins to fail, and one when that is over."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._goes_on = False

    @contextmanager
    def expected(self) -> Iterator[None]:
        """An OSError within ends here; whoever writes keeps what could not be written, for the next time."""
        try:
            yield
        except OSError as error:
            self.failed(error)
        else:
            self.succeeded()

    def failed(self, error: OSError) -> None:
        if not self._goes_on:
            self._goes_on = True
            self._say(
                f"cannot be written ({error.strerror or error}); training goes on and tries again"
            )

    def succeeded(self) -> None:
        if self._goes_on:
            self._goes_on = False
            self._say("is written again")

    def _say(self, what: str) -> None:
        print(f"disk: '{self.path}' {what}", file=sys.stderr, flush=True)
