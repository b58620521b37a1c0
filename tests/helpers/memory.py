"""Memory that a process holds, as the kernel counts it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

_M_MMAP_THRESHOLD = -3  # of malloc.h


def peak_above(function: Callable[[], Any]) -> int:
    """Bytes that the process holds at the most while `function` runs, above what it held before.

    Linux alone counts so. What is freed is given back at once, from here on.
    """
    libc = ctypes.CDLL(None)
    assert libc.mallopt(_M_MMAP_THRESHOLD, 2**16) == 1
    libc.malloc_trim(0)  # or what is free already would be taken first, and not be seen
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now
    before = _held("VmRSS")
    result = function()
    peak = _held("VmHWM")
    del result
    return peak - before


def _held(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise LookupError(name)
