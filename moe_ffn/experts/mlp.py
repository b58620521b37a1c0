"""Plain experts, down(act(up x)).

T tokens, D model width, E experts, F hidden width
"""

from __future__ import annotations

from torch import Tensor

from moe_ffn.dispatch.plan import Plan
from moe_ffn.experts.base import Experts, describe_experts, stacked_linear
from moe_ffn.experts.config import MLPExpertsConfig
from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.kernels.select import run_experts


class MLPExperts(Experts):
    def __init__(
        self,
        config: MLPExpertsConfig,
        d_model: int,
        num_experts: int,
        experts_per_token: float,
    ) -> None:
        super().__init__()
        self.config = config
        width = config.width(d_model, experts_per_token)
        self.up, self.up_bias = stacked_linear(num_experts, d_model, width, config.bias)
        self.down, self.down_bias = stacked_linear(num_experts, width, d_model, config.bias)

    def forward(self, x_TD: Tensor, plan: Plan) -> Tensor:
        weights = ExpertWeights(
            activation=self.config.activation,
            up_EHD=self.up,
            down_EDF=self.down,
            up_bias_EH=self.up_bias,
            down_bias_ED=self.down_bias,
            dropout=self.config.dropout if self.training else 0.0,
        )
        return run_experts(x_TD, plan, weights, self.config.backend)

    def extra_repr(self) -> str:
        activation = self.config.activation
        return describe_experts(self.down, activation, self.config)
