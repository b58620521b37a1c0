"""One process at a time trains a run, and others can tell whether one does."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from moe_ffn.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK_FILE = ".lock"
"""Holds the name of the machine on which the run was trained last."""

_PATIENCE_SECONDS = 1.0
"""A reader that asks whether the lock is held has it for a moment."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run in `folder`, until the block or the process ends, however it ends.

    Where the file system has no locks, or cannot be written, nothing is held.

    Raises:
        ConfigError: another process holds it.
    """
    try:
        file = (folder / LOCK_FILE).open("a+")
    except OSError:
        yield
        return
    with file:
        if not _take(file):
            raise ConfigError(
                f"'{folder}' is being trained by another process; stop that one, or start a new run"
            )
        with suppress(OSError):  # of a full disk; the lock is held all the same
            os.truncate(file.fileno(), 0)
            os.write(file.fileno(), platform.node().encode())  # nothing is left to write at the end
        yield


def is_trained_here(folder: Path) -> bool | None:
    """Whether a process of this machine trains the run now; None where that cannot be told."""
    try:
        with (folder / LOCK_FILE).open() as file:
            if fcntl is None or file.read() != platform.node():
                return None
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except (OSError, ValueError):  # a file of somebody else's
        return None


def _take(file: TextIO) -> bool:
    """Whether the lock is ours now, or there are no locks here."""
    if fcntl is None:
        return True
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        except OSError:
            return True
