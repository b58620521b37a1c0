"""A disk that cannot be written for a while: training goes on, and says so once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Outage:
    """What one writer has to say of its file, however often it fails.

    The first failure is a line on standard error, and the first success after it another; no more.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_failures = 0
        self._has_recovered = False

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
        self.num_failures += 1
        if self.num_failures == 1:
            self._say(
                f"cannot be written ({error.strerror or error}); training goes on and tries again"
            )

    def succeeded(self) -> None:
        if self.num_failures and not self._has_recovered:
            self._has_recovered = True
            self._say("is written again")

    def _say(self, what: str) -> None:
        print(f"disk: '{self.path}' {what}", file=sys.stderr, flush=True)
