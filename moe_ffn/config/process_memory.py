"""Memory of this process: its limit, errors for sizes above it, and pages to keep."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from moe_ffn.config.errors import ConfigError
from moe_ffn.config.numbers import gigabytes

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)

_OUT_OF_MEMORY = re.compile(r"can't allocate memory|out of memory|Cannot allocate memory")
_TRIED_BYTES = re.compile(r"tried to allocate (\d+) bytes")
_GPU_CAPACITY = re.compile(r"total capacity of ([\d.]+ \w+)")


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h


def keep_freed_memory() -> None:
    """Let glibc keep freed memory instead of returning it to the system.

    Every training step frees and allocates the same tensors, and the first write to a new page is slow. The
    process keeps up to a fifth more memory, until it ends.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # only glibc has it
        # A mapping always goes back to the system. A threshold cannot prevent that above 32 MiB, such as for
        # the logits of 2,048 tokens and 4,096 words.
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def memory_limit() -> int | None:
    """Return the bytes that the machine, the container and the process limit allow; None on Windows."""
    if not hasattr(os, "sysconf"):
        return None
    import resource

    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    container = [path.read_text().strip() for path in _CGROUP_LIMITS if path.is_file()]
    process, _ = resource.getrlimit(resource.RLIMIT_AS)
    limits = [machine, *(int(text) for text in container if text.isdigit())]  # `max`: no limit
    return min(limits if process == resource.RLIM_INFINITY else [*limits, process])


def out_of_memory(error: BaseException) -> str:
    """Return a message for an out-of-memory error, without a full stop; empty for any other error."""
    text = str(error)
    is_memory = (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(text))
    )
    if not is_memory:
        return ""
    limit = memory_limit()
    available = f", and this process may have {gigabytes(limit)}" if limit is not None else ""
    if found := _GPU_CAPACITY.search(text):
        available = f", and the GPU has {found[1]}"
    tried = _TRIED_BYTES.search(text)
    more = f"{gigabytes(int(tried[1]))} more" if tried else "the requested memory"
    return f"out of memory: could not allocate {more}{available}"


@contextmanager
def memory_errors_as_config_errors(what: str) -> Iterator[None]:
    """Turn out-of-memory and recursion errors into a ConfigError that begins with `what`, the part built."""
    try:
        yield
    except RecursionError as error:
        raise ConfigError(f"{what}: is nested too deep; nest fewer blocks in each other") from error
    except (MemoryError, RuntimeError) as error:
        if not (sentence := out_of_memory(error)):
            raise
        raise ConfigError(f"{what}: {sentence}; make it smaller") from error


def require_table_memory(num_rows: int, width: int, what: str, advice: str) -> None:
    """Raise if a table of the default dtype exceeds the memory limit, so that the system does not kill us.

    Args:
        num_rows, width: shape of the table.
        what: beginning of the message, such as `num_experts (16777216): experts of type 'value'`.
        advice: end of the message.

    Raises:
        ConfigError: the table is for the CPU and exceeds the limit.
    """
    if torch.get_default_device().type != "cpu":  # `meta` uses no memory, and a GPU has its own
        return
    limit, num_bytes = memory_limit(), num_rows * width * torch.get_default_dtype().itemsize
    if limit is not None and num_bytes > limit:
        raise ConfigError(
            f"{what} take {gigabytes(num_bytes)}, and this process may have {gigabytes(limit)} of memory; "
            f"{advice}"
        )
