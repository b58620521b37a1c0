"""What a run is computed on, and how much memory it takes there."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has had: on a GPU of tensors, else of everything, libraries included.

    0 where the system does not say (Windows).
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def num_cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_hardware() -> dict[str, Any]:
    """The name of the processor, how many cores this process may use, and the name of a GPU, if any."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):  # Linux alone has it
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else name
    return {
        "processor": name,
        "num_cpus": num_cores(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
