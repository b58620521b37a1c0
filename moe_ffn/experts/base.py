"""The interface of every kind of expert: (tokens, plan) -> weighted sums.

T tokens, D model width, E experts, O out, I in
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from moe_ffn.activations import Activation
from moe_ffn.config import MAX_COUNT, TaggedConfig, describe_options
from moe_ffn.dispatch import Plan
from moe_ffn.errors import Refusal
from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.kernels.select import BACKEND_DEVICES, run_experts
from moe_ffn.sizes import init_linear_, linear_flops, linear_params


class ExpertsConfig(TaggedConfig, frozen=True):
    """What one expert is; all E of a layer are alike.

    By default the `experts_per_token` experts of a token share the width of the dense block, so that
    a layer costs what the dense block costs.
    """

    @abstractmethod
    def build(self, d_model: int, num_experts: int, experts_per_token: float) -> Experts: ...

    @abstractmethod
    def params_per_expert(self, d_model: int, experts_per_token: float) -> int: ...

    @abstractmethod
    def flops_per_pair(self, d_model: int, experts_per_token: float) -> int:
        """Forward FLOPs of one expert on one token."""

    def refusal_on(self, device: str) -> Refusal | None:
        """Why the experts do not run on a kind of device, `cpu` or `cuda`; None where they do."""
        return None


class MatrixExpertsConfig(ExpertsConfig, frozen=True):
    """The options that plain and gated experts share."""

    num_matrices: ClassVar[int] = 2

    d_ff: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Hidden width of one expert; by default the dense block's, divided by the experts per token."""
    bias: bool = False
    """Add a bias to every matrix."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of zeroing an activated hidden unit, in training."""
    backend: Literal["auto", "loop", "cpu", "grouped_mm", "triton"] = "auto"
    """How the products are computed; every backend gives the same result."""

    @abstractmethod
    def width(self, d_model: int, experts_per_token: float) -> int:
        """F, the hidden width of one expert."""

    def params_per_expert(self, d_model: int, experts_per_token: float) -> int:
        width = self.width(d_model, experts_per_token)
        into = (self.num_matrices - 1) * linear_params(d_model, width, self.bias)
        return into + linear_params(width, d_model, self.bias)

    def flops_per_pair(self, d_model: int, experts_per_token: float) -> int:
        return self.num_matrices * linear_flops(d_model, self.width(d_model, experts_per_token))

    def refusal_on(self, device: str) -> Refusal | None:
        needed = BACKEND_DEVICES.get(self.backend, device)
        if needed == device:
            return None
        return Refusal(
            f"backend ({self.backend}) runs on {needed}, but this run is on {device}", "use auto"
        )


class Experts(nn.Module, ABC):
    """E parallel networks of the same shape, their weights stacked along the first axis."""

    @abstractmethod
    def forward(self, x_TD: Tensor, plan: Plan) -> Tensor:
        """Gather, compute, weight and add up as `plan` says; the shape and dtype of `x_TD`."""


class MatrixExperts(Experts):
    """Experts whose weights a backend of `moe_ffn.kernels` takes."""

    config: Any
    """The config that built them, of their own class."""

    activation: Activation
    down: nn.Parameter
    """(E, D, F)"""

    @abstractmethod
    def weights(self) -> ExpertWeights: ...

    def forward(self, x_TD: Tensor, plan: Plan) -> Tensor:
        return run_experts(x_TD, plan, self.weights(), self.config.backend)

    @property
    def dropout(self) -> float:
        """The probability that is in force now."""
        return self.config.dropout if self.training else 0.0

    def extra_repr(self) -> str:
        num_experts, d_model, d_ff = self.down.shape
        sizes = f"num_experts={num_experts}, d_model={d_model}, d_ff={d_ff}"
        options = describe_options(self.config, without=["d_ff", "activation"])
        return f"{sizes}, activation={self.activation}, {options}"


def stacked_linear(
    num_experts: int, d_in: int, d_out: int, bias: bool
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """E matrices (E, out, in), and biases (E, out) if asked, each initialised as `nn.Linear` is."""
    weight_EOI = nn.Parameter(torch.empty(num_experts, d_out, d_in))
    bias_EO = nn.Parameter(torch.empty(num_experts, d_out)) if bias else None
    init_linear_(weight_EOI, bias_EO)
    return weight_EOI, bias_EO
