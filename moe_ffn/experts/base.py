"""The interface of every kind of expert: (tokens, plan) -> weighted sums.

T tokens, D model width, E experts, O out, I in
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from moe_ffn.config import MAX_COUNT, TaggedConfig, describe_options
from moe_ffn.dispatch import Plan
from moe_ffn.errors import Refusal
from moe_ffn.kernels.select import BACKEND_DEVICES
from moe_ffn.sizes import init_linear_


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

    d_ff: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Hidden width of one expert; by default the dense block's, divided by the experts per token."""
    bias: bool = False
    """Add a bias to every matrix."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of zeroing an activated hidden unit, in training."""
    backend: Literal["auto", "loop", "cpu", "grouped_mm", "triton"] = "auto"
    """How the products are computed; every backend gives the same result."""

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


def stacked_linear(
    num_experts: int, d_in: int, d_out: int, bias: bool
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """E matrices (E, out, in), and biases (E, out) if asked, each initialised as `nn.Linear` is."""
    weight_EOI = nn.Parameter(torch.empty(num_experts, d_out, d_in))
    bias_EO = nn.Parameter(torch.empty(num_experts, d_out)) if bias else None
    init_linear_(weight_EOI, bias_EO)
    return weight_EOI, bias_EO


def describe_experts(down_EDF: Tensor, activation: str, config: ExpertsConfig) -> str:
    """What a module of experts prints of itself: sizes, and the options that are set."""
    num_experts, d_model, d_ff = down_EDF.shape
    sizes = f"num_experts={num_experts}, d_model={d_model}, d_ff={d_ff}, activation={activation}"
    return f"{sizes}, {describe_options(config, without=['d_ff', 'activation'])}"
