"""Table of backends, and the choice of `auto`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_ffn.kernels import cpu
from moe_ffn.kernels.base import (
    Backend,
    ExpertWeights,
    check_dtype,
    has_no_data,
    is_transform_on,
    reject_vmap,
)
from moe_ffn.kernels.torch_products import grouped_mm, grouped_mm_unsupported_reason, loop
from moe_ffn.kernels.triton import backend as triton
from moe_ffn.outputs import Plan

BACKENDS: dict[str, Backend] = {
    "loop": loop,
    "cpu": cpu.cpu,
    "grouped_mm": grouped_mm,
    "triton": triton.triton,
}
"""Backends by name; a test compares each with a double loop over tokens and experts."""

_UNSUPPORTED_REASONS: dict[str, Callable[[Tensor, ExpertWeights], str | None]] = {
    "cpu": cpu.unsupported_reason,
    "grouped_mm": grouped_mm_unsupported_reason,
    "triton": triton.unsupported_reason,
}
"""Backend -> function that returns why it cannot run these tokens and weights, or None if it can."""

BACKEND_DEVICES = {"cpu": "cpu", "triton": "cuda"}
"""Device type of each backend that supports only one."""


def run_experts(x_TD: Tensor, plan: Plan, weights: ExpertWeights, backend: str) -> Tensor:
    """Run the experts on a plan with a backend of this name, or with the best one for `auto`; return (T, D).

    Raises:
        ValueError: the named backend does not support this device, dtype or width; `x_TD` and the weights
            differ in dtype, without autocast; or a tensor is batched by `torch.func.vmap`.
    """
    check_dtype(x_TD, weights.up_EHD)
    if is_transform_on():
        reject_vmap(x_TD, (plan.weights_N, *weights.parameters))
    if has_no_data(x_TD) and not torch.compiler.is_exporting():
        return cpu.run_operator(x_TD, plan, weights)  # all backends have equal output shapes
    if backend == "auto":
        backend = best_backend(x_TD, plan, weights)
    elif (reason := unsupported_reason(backend, x_TD, weights)) is not None:
        raise ValueError(f"experts.backend '{backend}' {reason}")
    return BACKENDS[backend](x_TD, plan, weights)


def unsupported_reason(backend: str, x_TD: Tensor, weights: ExpertWeights) -> str | None:
    reason = _UNSUPPORTED_REASONS.get(backend)
    return None if reason is None else reason(x_TD, weights)


def best_backend(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> str:
    """Return the name of the backend that `auto` chooses."""
    if is_transform_on():
        return "loop"
    if x_TD.device.type == "cpu":
        return "cpu"
    if x_TD.device.type == "cuda":
        for name in ("triton", "grouped_mm"):
            if unsupported_reason(name, x_TD, weights) is None:
                return name
    return "loop"
