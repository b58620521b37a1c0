"""The backend `cpu`: compiled kernels where there is a compiler, else torch's own products."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ffn.dispatch import Plan
from moe_ffn.kernels.base import NOT_BY_TRANSFORMS, ExpertWeights
from moe_ffn.kernels.blocks import blocks
from moe_ffn.kernels.cpu_operator import in_graph
from moe_ffn.kernels.native import native, takes
from moe_ffn.kernels.torch_products import loop
from moe_ffn.native.build import why_not
from moe_ffn.torch_modes import is_watched, transforms_at_work

FEW_PAIRS = 64
"""Up to this number, without gradients, `loop` is quicker than preparing the blocks of `blocks`."""


def cpu(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> Tensor:
    """Any dtype; reads the offsets on the host. An expert without tokens gets a zero gradient."""
    if torch.compiler.is_compiling():
        return in_graph(x_TD, plan, weights)
    if not is_watched() and takes(weights) and why_not() is None:
        return native(x_TD, plan, weights)
    if not torch.is_grad_enabled() and len(plan.token_ids_N) <= FEW_PAIRS:
        return loop(x_TD, plan, weights)
    return blocks(x_TD, plan, weights)


def refusal(x_TD: Tensor, weights: ExpertWeights) -> str | None:
    """Why `cpu` does not take these tokens; None where it does."""
    if x_TD.device.type == "cpu":
        return NOT_BY_TRANSFORMS if transforms_at_work() else None
    return f"is for tensors on the CPU, but x is on {x_TD.device}; use 'auto'"
