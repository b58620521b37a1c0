"""The backend `cpu`: compiled kernels where there is a compiler, else torch's own products."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ffn.kernels.base import NOT_BY_TRANSFORMS, ExpertWeights
from moe_ffn.kernels.blocks import blocks
from moe_ffn.kernels.cpu_operator import run_operator
from moe_ffn.kernels.native.build import why_unavailable
from moe_ffn.kernels.native.experts import has_kernel, native
from moe_ffn.kernels.torch_modes import is_dispatch_mode_on, is_transform_on
from moe_ffn.kernels.torch_products import loop
from moe_ffn.outputs import Plan

MAX_LOOP_PAIRS = 64
"""Up to this number, without gradients, `loop` is quicker than preparing the blocks of `blocks`."""


def cpu(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> Tensor:
    """Any dtype; reads the offsets on the host. An expert without tokens gets a zero gradient."""
    if torch.compiler.is_compiling():
        return run_operator(x_TD, plan, weights)
    if not is_dispatch_mode_on() and has_kernel(weights) and why_unavailable() is None:
        return native(x_TD, plan, weights)
    if not torch.is_grad_enabled() and len(plan.token_ids_N) <= MAX_LOOP_PAIRS:
        return loop(x_TD, plan, weights)
    return blocks(x_TD, plan, weights)


def refusal(x_TD: Tensor, weights: ExpertWeights) -> str | None:
    """Why `cpu` does not take these tokens; None where it does."""
    if x_TD.device.type == "cpu":
        return NOT_BY_TRANSFORMS if is_transform_on() else None
    return f"is for tensors on the CPU, but x is on {x_TD.device}; use 'auto'"
