"""Where a measurement was taken: what has to stand beside a time for it to mean anything."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

import moe_ffn
from moe_ffn.errors import ConfigError


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is a GPU.

    Raises:
        ConfigError: CUDA is asked for and torch finds none.
    """
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise ConfigError(
            f"--device (cuda) needs a GPU, but torch {torch.__version__} finds none; use --device cpu"
        )
    return torch.device("cuda" if found and name != "cpu" else "cpu")


def describe_machine(device: torch.device) -> dict[str, str]:
    """The columns that every line of the results shares."""
    name = processor_name()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "device": device.type,
        "machine": name,
        "threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "moe_ffn": moe_ffn.__version__,
    }


def processor_name() -> str:
    """As the system calls it; `platform.processor` is empty on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
