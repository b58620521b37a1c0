"""One process at a time trains a run, and others can tell whether one does."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from moe_ffn.errors import ConfigError
from moe_ffn.files import open_file

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

    What is locked is the folder, which nobody removes by mistake, and a file in it, since NFS locks files
    alone. Where the file system has no locks nothing is held.

    Raises:
        ConfigError: another process holds it.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            _hold(stack.enter_context(_opened(folder)), folder)
        with suppress(OSError):  # it cannot be written, or is no file of ours
            file = stack.enter_context(open_file(folder / LOCK_FILE, "ab")).fileno()
            _hold(file, folder)
            if os.fstat(file).st_nlink == 1:  # else what it holds belongs to another name too
                os.truncate(file, 0)
                os.write(file, platform.node().encode())  # nothing is left to write at the end
        yield


def is_trained_here(folder: Path) -> bool | None:
    """Whether a process trains the run now; None where that cannot be told from this machine."""
    with suppress(OSError), _opened(folder) as descriptor:
        if _is_held(descriptor):
            return True
    with suppress(OSError), open_file(folder / LOCK_FILE) as file:
        if _is_held(file.fileno()):
            return True
        if fcntl is not None and file.read() == platform.node().encode():
            return False
    return None


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _hold(descriptor: int, folder: Path) -> None:
    """ConfigError where another process holds it; nothing where there are no locks."""
    if fcntl is None:
        return
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"'{folder}' is being trained by another process; stop that one, or start a new run"
                ) from None
            time.sleep(0.05)
        except OSError:
            return


def _is_held(descriptor: int) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
