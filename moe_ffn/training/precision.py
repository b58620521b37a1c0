"""Which number format this machine computes fastest in."""

from __future__ import annotations

import time

import torch

WORTH_SWITCHING = 1.5
"""bfloat16 has to be this many times faster than float32 in a matrix product."""


def resolve_precision(precision: str, device: str) -> str:
    """`auto` as what is fastest on `device`, `bf16-mixed` or `32-true`; anything else as it is.

    Measured, not looked up: many CPUs accept bfloat16 and emulate it slowly, and only some have the
    tiles (AMX) that make it several times faster than float32.
    """
    if precision != "auto":
        return precision
    if device == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return "bf16-mixed" if native else "32-true"
    if device == "cpu" and bfloat16_speedup_on_cpu() >= WORTH_SWITCHING:
        return "bf16-mixed"
    return "32-true"


def bfloat16_speedup_on_cpu(size: int = 512, repeats: int = 5) -> float:
    """Seconds of a float32 product divided by those of a bfloat16 one; the best of interleaved runs."""
    matrices = {
        dtype: torch.ones(size, size, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    }
    seconds = dict.fromkeys(matrices, float("inf"))
    for _ in range(repeats):
        for dtype, matrix in matrices.items():
            start = time.perf_counter()
            torch.mm(matrix, matrix)
            seconds[dtype] = min(seconds[dtype], time.perf_counter() - start)
    return seconds[torch.float32] / seconds[torch.bfloat16]
