"""The hidden units of a block and their gradient, written into reused buffers.

N rows of a block, F hidden width, H rows of the first matrix: F, or 2 F where there is a gate
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_ffn.activations import Activation
from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.kernels.cpu.products import Workspace

aten: Any = torch.ops.aten


class BlockActivation(ABC):
    """`hidden`, then once `gradient` of the same block, which may overwrite what `hidden` returned."""

    def __init__(self, weights: ExpertWeights, workspace: Workspace) -> None:
        self.weights = weights
        self.workspace = workspace

    @abstractmethod
    def hidden(self, up_NH: Tensor) -> Tensor:
        """(N, F) from the first product."""

    @abstractmethod
    def gradient(self, grad_NF: Tensor, up_NH: Tensor) -> Tensor:
        """(N, H), the gradient of the first product, from that of the hidden units (overwritten)."""


class PlainActivation(BlockActivation):
    def __init__(self, weights: ExpertWeights, workspace: Workspace) -> None:
        super().__init__(weights, workspace)
        self.function, self.derivative = IN_PLACE[weights.activation]

    def hidden(self, up_NH: Tensor) -> Tensor:
        self.hidden_NF = self.workspace("hidden", *up_NH.shape)
        return self.function(up_NH, self.hidden_NF)

    def gradient(self, grad_NF: Tensor, up_NH: Tensor) -> Tensor:
        return self.derivative(grad_NF, up_NH, self.workspace("grad_up", *up_NH.shape))


class GatedActivation(BlockActivation):
    def __init__(self, weights: ExpertWeights, workspace: Workspace) -> None:
        super().__init__(weights, workspace)
        self.function, self.derivative = IN_PLACE[weights.activation]

    def hidden(self, up_NH: Tensor) -> Tensor:
        gate_NF, up_NF = up_NH.chunk(2, dim=-1)
        self.activated_NF = self.function(gate_NF, self.workspace("activated", *gate_NF.shape))
        return torch.mul(self.activated_NF, up_NF, out=self.workspace("hidden", *gate_NF.shape))

    def gradient(self, grad_NF: Tensor, up_NH: Tensor) -> Tensor:
        gate_NF, up_NF = up_NH.chunk(2, dim=-1)
        grad_up_NH = self.workspace("grad_up", *up_NH.shape)
        grad_of_gate_NF, grad_of_up_NF = grad_up_NH.chunk(2, dim=-1)
        torch.mul(grad_NF, self.activated_NF, out=grad_of_up_NF)
        self.derivative(grad_NF.mul_(up_NF), gate_NF, grad_of_gate_NF)
        return grad_up_NH


class TracedActivation(BlockActivation):
    """By autograd, for activations without a derivative in `IN_PLACE`."""

    def hidden(self, up_NH: Tensor) -> Tensor:
        with torch.enable_grad():
            self.up_NH = up_NH.detach().requires_grad_()
            self.hidden_NF = self.weights.activate(self.up_NH)
        return self.hidden_NF.detach().clone()

    def gradient(self, grad_NF: Tensor, up_NH: Tensor) -> Tensor:
        (grad_up_NH,) = torch.autograd.grad(self.hidden_NF, self.up_NH, grad_NF)
        return grad_up_NH


def block_activation(weights: ExpertWeights, workspace: Workspace) -> BlockActivation:
    if weights.clamped is not None:
        # The backend applies dropout, since it needs the mask again in backward.
        return TracedActivation(replace(weights, dropout=0.0), workspace)
    kind = GatedActivation if weights.gated else PlainActivation
    return kind(weights, workspace)


# ------------------------------------------------------- (x, out) and (gradient, x, out) -> out


def relu_squared(x: Tensor, out: Tensor) -> Tensor:
    return aten.relu.out(x, out=out).square_()


def relu_squared_gradient(grad: Tensor, x: Tensor, out: Tensor) -> Tensor:
    return aten.relu.out(x, out=out).mul_(grad).mul_(2)


def sigmoid_gradient(grad: Tensor, x: Tensor, out: Tensor) -> Tensor:
    return aten.sigmoid_backward.grad_input(grad, torch.sigmoid(x, out=out), grad_input=out)


Function = Callable[[Tensor, Tensor], Tensor]
Derivative = Callable[[Tensor, Tensor, Tensor], Tensor]

IN_PLACE: dict[Activation, tuple[Function, Derivative]] = {
    "relu": (
        lambda x, out: aten.relu.out(x, out=out),
        lambda grad, x, out: aten.threshold_backward.grad_input(grad, x, 0, grad_input=out),
    ),
    "gelu": (
        lambda x, out: aten.gelu.out(x, out=out),
        lambda grad, x, out: aten.gelu_backward.grad_input(grad, x, grad_input=out),
    ),
    "silu": (
        lambda x, out: aten.silu.out(x, out=out),
        lambda grad, x, out: aten.silu_backward.grad_input(grad, x, grad_input=out),
    ),
    "relu_squared": (relu_squared, relu_squared_gradient),
    "sigmoid": (lambda x, out: torch.sigmoid(x, out=out), sigmoid_gradient),
    "identity": (lambda x, out: out.copy_(x), lambda grad, x, out: out.copy_(grad)),
}
