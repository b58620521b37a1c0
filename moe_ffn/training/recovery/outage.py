"""A disk that cannot be written for a while: training goes on, and says so once."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_ffn.errors import reason

QUIET_SECONDS = 600.0
"""A disk that fails, recovers and fails again within so long is one trouble, and said once."""


class Outage:
    """What one writer has to say of its file: a line when it begins to fail, and one when that is over."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._said_at = float("-inf")
        self._is_open = False  # said to fail, and not yet to be written again

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
        now = time.monotonic()
        if not self._is_open and now - self._said_at > QUIET_SECONDS:
            self._is_open = True
            self._say(f"cannot be written ({reason(error)}); training goes on and tries again")
        self._said_at = now

    def succeeded(self) -> None:
        if self._is_open:
            self._is_open = False
            self._say("is written again")

    def _say(self, what: str) -> None:
        print(f"disk: '{self.path}' {what}", file=sys.stderr, flush=True)
