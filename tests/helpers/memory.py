"""Memory that a process holds, as the kernel counts it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_M_MMAP_THRESHOLD = -3  # of malloc.h
_SECONDS_BETWEEN_LOOKS = 5e-4


def peak_above(function: Callable[[], Any]) -> int:
    """Bytes of memory of its own that the process holds at the most while `function` runs, above before.

    Pages of mapped files are not counted: the kernel takes and gives them as it likes. Linux alone counts so.
    What is freed is given back at once, from here on.
    """
    libc = ctypes.CDLL(None)
    assert libc.mallopt(_M_MMAP_THRESHOLD, 2**16) == 1
    libc.malloc_trim(0)  # or what is free already would be taken first, and not be seen
    before, seen, is_over = _held(), [0], threading.Event()

    def look() -> None:
        while not is_over.wait(_SECONDS_BETWEEN_LOOKS):
            seen.append(_held())

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        result = function()
        seen.append(_held())
    finally:
        is_over.set()
        looking.join()
    del result
    return max(seen) - before


def _held() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise LookupError("RssAnon")
