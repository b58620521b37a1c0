"""Experts of tensors that have shapes and no numbers (torch's FakeTensor), as memory is planned with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ffn.dispatch import Plan
from moe_ffn.kernels.base import ExpertWeights, compute_dtype


def shapes(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> Tensor:
    """An output without numbers; for the backward pass it keeps what `cpu` and `triton` keep."""
    given = (weight for weight in weights.parameters if weight is not None)
    return _Shapes.apply(x_TD, plan.weights_N, *given)


class _Shapes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_N: Tensor, *parameters: Tensor) -> Tensor:
        # Before its activation.
        up_NH = x_TD.new_empty(len(weights_N), parameters[0].shape[1], dtype=compute_dtype(x_TD))
        ctx.save_for_backward(x_TD, weights_N, *parameters, up_NH)
        return torch.empty_like(x_TD)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        *inputs, _ = ctx.saved_tensors
        return tuple(torch.empty_like(value) for value in inputs)
