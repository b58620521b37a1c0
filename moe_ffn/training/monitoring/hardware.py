"""Hardware of a run and its peak memory."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of tensors on a GPU, otherwise of this process; 0 on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_hardware() -> dict[str, Any]:
    """Return the name of the processor, the number of usable cores, and the name of the GPU, if any."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):  # the file exists on Linux only
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else name
    return {
        "processor": name,
        "num_cpus": num_cores(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
