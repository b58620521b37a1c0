"""Which backend runs: named by the user, or chosen from device, dtype and size."""

from __future__ import annotations

from torch import Tensor

from moe_ffn.dispatch.plan import Plan
from moe_ffn.kernels import grouped_mm as grouped
from moe_ffn.kernels.base import Backend, ExpertWeights
from moe_ffn.kernels.loop import loop
from moe_ffn.kernels.triton import backend as gpu

BACKENDS: dict[str, Backend] = {
    "loop": loop,
    "grouped_mm": grouped.grouped_mm,
    "triton": gpu.triton,
}
"""Every backend computes the same thing; a test holds each to the same double loop."""


def run_experts(x_TD: Tensor, plan: Plan, weights: ExpertWeights, backend: str) -> Tensor:
    """y_TD of the experts on a plan, by the backend called `backend`, or by the best for `auto`.

    Raises:
        ValueError: the named backend does not take this dtype or these widths.

    """
    if backend == "auto":
        backend = best(x_TD, weights)
    if backend == "triton" and (refusal := gpu.refusal(x_TD, weights)) is not None:
        raise ValueError(f"experts.backend 'triton' {refusal}; use 'auto'")
    if backend == "grouped_mm" and not grouped.supports(x_TD, weights):
        dtypes = ", ".join(str(dtype) for dtype in grouped.supported_dtypes())
        raise ValueError(
            f"experts.backend 'grouped_mm' takes {dtypes} and rows that are a multiple of "
            f"{grouped.ROW_BYTES} bytes, but got {grouped.compute_dtype(x_TD)} with "
            f"d_model {weights.d_model} and d_ff {weights.d_ff}; use 'loop'"
        )
    return BACKENDS[backend](x_TD, plan, weights)


def best(x_TD: Tensor, weights: ExpertWeights) -> str:
    """The fastest that takes these tokens where they are."""
    if x_TD.device.type != "cuda":
        return "loop"
    if gpu.supports(x_TD, weights):
        return "triton"
    return "grouped_mm" if grouped.supports(x_TD, weights) else "loop"
