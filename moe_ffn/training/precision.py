"""The number format of a run whose config leaves the choice to the device."""

from __future__ import annotations

import torch


def resolve_precision(precision: str, device: str) -> str:
    """The format that `auto` stands for on a kind of device; any other name as it is.

    bfloat16 on a GPU that multiplies it natively, float32 everywhere else. The kind of device decides,
    and never a measurement: the format changes the result of a run, and a timing differs from one
    minute to the next.

    Args:
        precision: `auto`, or a name that `lightning.Trainer` takes.
        device: `torch.device.type`.
    """
    if precision != "auto":
        return precision
    if device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16-mixed"
    return "32-true"
