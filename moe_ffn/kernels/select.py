"""Which backend runs: named by the user, or chosen from device, dtype and size."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ffn.dispatch.plan import Plan
from moe_ffn.kernels import grouped_mm as grouped
from moe_ffn.kernels.base import Backend, ExpertWeights
from moe_ffn.kernels.bmm import bmm
from moe_ffn.kernels.cpu import cpu
from moe_ffn.kernels.dtypes import compute_dtype
from moe_ffn.kernels.loop import loop

BACKENDS: dict[str, Backend] = {
    "loop": loop,
    "bmm": bmm,
    "cpu": cpu,
    "grouped_mm": grouped.grouped_mm,
}
"""Every backend computes the same thing; a test holds each to the same double loop."""

FEW_PAIRS = 64
"""Up to here, and without gradients, `loop` is quicker on a CPU than preparing the blocks of `cpu`."""


def run_experts(x_TD: Tensor, plan: Plan, weights: ExpertWeights, backend: str) -> Tensor:
    """y_TD of the experts on a plan, by the backend called `backend`, or by the best for `auto`.

    Raises:
        ValueError: the named backend does not take this device, this dtype or these widths.

    """
    if backend == "auto":
        backend = best_backend(x_TD, plan, weights)
    if backend == "cpu" and x_TD.device.type != "cpu":
        raise ValueError(
            f"experts.backend 'cpu' is for tensors on the CPU, but x is on {x_TD.device}; use 'auto'"
        )
    if backend == "grouped_mm" and not grouped.supports(x_TD, weights):
        dtypes = ", ".join(str(dtype) for dtype in grouped.supported_dtypes())
        raise ValueError(
            f"experts.backend 'grouped_mm' takes {dtypes} and rows that are a multiple of "
            f"{grouped.ROW_BYTES} bytes, but got {compute_dtype(x_TD)} with "
            f"d_model {weights.d_model} and d_ff {weights.d_ff}; use 'loop'"
        )
    return BACKENDS[backend](x_TD, plan, weights)


def best_backend(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> str:
    """What `auto` stands for."""
    if x_TD.device.type == "cpu":
        decodes = not torch.is_grad_enabled() and len(plan.token_ids_N) <= FEW_PAIRS
        return "loop" if decodes else "cpu"
    if x_TD.device.type == "cuda" and grouped.supports(x_TD, weights):
        return "grouped_mm"
    return "loop"
