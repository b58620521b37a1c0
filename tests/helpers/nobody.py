"""A user without any rights, and a folder that such a user may enter."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def nobody() -> Iterator[None]:
    """Within this the process is that of a user without any rights, unless it is one already.

    What is imported late has to be imported before: nobody may not be allowed to read it.
    """
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@contextmanager
def open_place() -> Iterator[Path]:
    """A folder that all may enter, which pytest's own is not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)
