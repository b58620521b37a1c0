"""Memory of a process: what it has allocated, and the pages that it really has."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_M_MMAP_THRESHOLD = -3  # of malloc.h
_SECONDS_BETWEEN_LOOKS = 5e-4


def peak_above(function: Callable[[], Any]) -> int:
    """Bytes that are allocated at the most while `function` runs, above those before.

    Pages would count what was freed and not given back, as much as tests before have left of it, and mapped
    files. Only glibc counts so.
    """
    return _peak(function, _allocated)


def pages_above(function: Callable[[], Any]) -> int:
    """Peak of private memory, in bytes above the start, while `function` runs in a new process.

    Freed memory is returned to the system at once from here on. Only Linux counts this way.
    """
    libc = ctypes.CDLL(None)
    assert libc.mallopt(_M_MMAP_THRESHOLD, 2**16) == 1
    libc.malloc_trim(0)
    return _peak(function, _resident)


def _peak(function: Callable[[], Any], measure: Callable[[], int]) -> int:
    before, seen, is_over = measure(), [0], threading.Event()

    def look() -> None:
        while not is_over.wait(_SECONDS_BETWEEN_LOOKS):
            seen.append(measure())

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        result = function()
        seen.append(measure())
    finally:
        is_over.set()
        looking.join()
    del result
    return max(seen) - before


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise LookupError("RssAnon")


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _allocated() -> int:
    count = ctypes.CDLL(None).mallinfo2
    count.restype = _MallInfo
    found = count()
    return found.uordblks + found.hblkhd
