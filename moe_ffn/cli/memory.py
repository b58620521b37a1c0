"""How much memory there is, and an error that says there was not enough."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_TORCH_SAYS = re.compile(r"can't allocate memory|out of memory|Cannot allocate memory")
_TRIED = re.compile(r"tried to allocate (\d+) bytes")
_GPU_HAS = re.compile(r"total capacity of ([\d.]+ \w+)")


def memory_limit() -> int | None:
    """Bytes that this process may have: those of the machine, or of its container or its own limit.

    None where the system does not say (Windows).
    """
    if not hasattr(os, "sysconf"):
        return None
    import resource

    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    container = [path.read_text().strip() for path in _CGROUP_LIMITS if path.is_file()]
    own, _ = resource.getrlimit(resource.RLIMIT_AS)
    limits = [machine, *(int(text) for text in container if text.isdigit())]  # `max`: no limit
    return min(limits if own == resource.RLIM_INFINITY else [*limits, own])


def out_of_memory(error: BaseException) -> str:
    """What could not be had, as a sentence without its full stop; empty for an error of another kind."""
    text = str(error)
    is_memory = (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and _TORCH_SAYS.search(text))
    )
    if not is_memory:
        return ""
    limit = memory_limit()
    has = f", and this process may have {gigabytes(limit)}" if limit is not None else ""
    if found := _GPU_HAS.search(text):
        has = f", and the GPU has {found[1]}"
    more = (
        f"{gigabytes(int(found[1]))} more"
        if (found := _TRIED.search(text))
        else "what it asked for"
    )
    return f"out of memory: the program did not get {more}{has}"


def gigabytes(num_bytes: int) -> str:
    """`1.2 GB`, or `0.63 MB` of what is small."""
    size, unit = (num_bytes / 1e9, "GB") if num_bytes >= 1e8 else (num_bytes / 1e6, "MB")
    return f"{size:,.0f} {unit}" if size >= 10 else f"{size:.2g} {unit}"
