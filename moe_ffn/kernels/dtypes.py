"""In which dtype a product is computed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

NATIVE_ON_CPU = {
    torch.bfloat16: ("amx_bf16", "avx512_bf16", "bf16"),
    torch.float16: ("amx_fp16", "avx512_fp16"),
}
"""What a CPU must have, any of them, to multiply a reduced dtype faster than float32."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """Autocast's where it is on, which covers neither `grouped_mm` nor functions of our own."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def product_dtype_on_cpu(dtype: torch.dtype) -> torch.dtype:
    """float32 for a reduced dtype that this CPU would only emulate, at a fraction of float32's speed."""
    if dtype in NATIVE_ON_CPU and not any(_capabilities().get(c) for c in NATIVE_ON_CPU[dtype]):
        return torch.float32
    return dtype


@cache
def _capabilities() -> Mapping[str, Any]:
    return torch.cpu.get_capabilities()
