"""Outputs and gradients of a backend, and their comparison."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe_ffn.kernels.base import Backend, ExpertWeights
from moe_ffn.outputs import Plan

NAMES = (
    *("x", "weights", "up", "down", "up_bias", "down_bias"),
    *("up_a", "up_b", "down_a", "down_b"),
)

Given = tuple[Tensor, Plan, ExpertWeights]
"""Arguments of a backend."""


def leaves_of(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> dict[str, Tensor]:
    """The tensors that may have gradients, by NAMES, without absent biases and adapters."""
    tensors = zip(NAMES, (x_TD, plan.weights_N, *weights.parameters), strict=True)
    return {name: tensor for name, tensor in tensors if tensor is not None}


def derive(run: Backend, *given: *Given) -> dict[str, Tensor]:
    """The output, and the gradients of a sum of it with uneven weights."""
    y_TD = run(*given)
    probe = torch.arange(y_TD.numel(), device=y_TD.device).view_as(y_TD).cos().to(y_TD.dtype)
    leaves = {name: leaf for name, leaf in leaves_of(*given).items() if leaf.requires_grad}
    found = torch.autograd.grad(y_TD, list(leaves.values()), probe)
    return {"y": y_TD.detach(), **dict(zip(leaves, found, strict=True))}


def exact(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> Given:
    """The same arguments in float64, as other leaves."""

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().double().requires_grad_(tensor.requires_grad)

    parameters = (None if weight is None else leaf(weight) for weight in weights.parameters)
    plan = replace(plan, weights_N=leaf(plan.weights_N))
    return leaf(x_TD), plan, weights.with_parameters(*parameters)


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    """Differ by at most `tolerance` times the largest value of each tensor."""
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        difference = (got[name].double() - value.double()).abs()
        assert not difference.isnan().any(), name
        largest = value.abs().max().item() if value.numel() else 0.0
        error = difference.max().item() if value.numel() else 0.0
        assert error <= tolerance * largest, f"{name}: {error} of {largest}"
