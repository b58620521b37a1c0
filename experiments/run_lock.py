"""One process at a time trains a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_ffn.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK_FILE = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run in `folder`, until the block or the process ends, however it ends.

    Where the file system has no locks, or cannot be written, nothing is held.

    Raises:
        ConfigError: another process holds it.
    """
    try:
        file = (folder / LOCK_FILE).open("a")
    except OSError:
        yield
        return
    with file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"'{folder}' is being trained by another process; stop that one, or start a new run"
                ) from error
            except OSError:
                pass
        yield


def is_locked(folder: Path) -> bool:
    """Whether a process on this machine trains the run now."""
    try:
        with locked(folder):
            return False
    except ConfigError:
        return True
