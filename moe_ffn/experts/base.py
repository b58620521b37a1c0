"""What every kind of expert is: (tokens, plan) -> weighted sums.

T tokens, D model width, E experts, O out, I in
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from moe_ffn.config import describe_options
from moe_ffn.dispatch.plan import Plan
from moe_ffn.experts.config import ExpertsConfig
from moe_ffn.initialization import init_linear_


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
