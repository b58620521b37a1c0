"""Gated experts, down(act(gate x) * up x).

T tokens, D model width, E experts, F hidden width
"""

from __future__ import annotations

from torch import Tensor

from moe_ffn.dispatch.plan import Plan
from moe_ffn.experts.base import Experts, describe_experts, stacked_linear
from moe_ffn.experts.config import ThreeMatrixExpertsConfig
from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.kernels.select import run_experts


class GatedExperts(Experts):
    """`gate_up` (E, 2 F, D) holds gate's rows before up's; `gate` and `up` are views of it."""

    def __init__(
        self,
        config: ThreeMatrixExpertsConfig,
        d_model: int,
        num_experts: int,
        experts_per_token: float,
    ) -> None:
        super().__init__()
        self.config = config
        width = config.width(d_model, experts_per_token)
        self.gate_up, self.gate_up_bias = stacked_linear(
            num_experts, d_model, 2 * width, config.bias
        )
        self.down, self.down_bias = stacked_linear(num_experts, width, d_model, config.bias)

    def forward(self, x_TD: Tensor, plan: Plan) -> Tensor:
        weights = ExpertWeights(
            activation=self.config.gate_activation,
            up_EHD=self.gate_up,
            down_EDF=self.down,
            gated=True,
            up_bias_EH=self.gate_up_bias,
            down_bias_ED=self.down_bias,
            dropout=self.config.dropout if self.training else 0.0,
            clamped=self.config.clamped,
        )
        return run_experts(x_TD, plan, weights, self.config.backend)

    def extra_repr(self) -> str:
        activation = self.config.gate_activation
        return describe_experts(self.down, activation, self.config)

    @property
    def gate(self) -> Tensor:
        """(E, F, D)"""
        return self.gate_up.chunk(2, dim=1)[0]

    @property
    def up(self) -> Tensor:
        """(E, F, D)"""
        return self.gate_up.chunk(2, dim=1)[1]

    @property
    def gate_bias(self) -> Tensor | None:
        """(E, F)"""
        return None if self.gate_up_bias is None else self.gate_up_bias.chunk(2, dim=1)[0]

    @property
    def up_bias(self) -> Tensor | None:
        """(E, F)"""
        return None if self.gate_up_bias is None else self.gate_up_bias.chunk(2, dim=1)[1]
