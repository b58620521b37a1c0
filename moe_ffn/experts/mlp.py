"""Plain experts, down(act(up x))."""

from __future__ import annotations

from typing import Literal

from moe_ffn.activations import Activation
from moe_ffn.experts.base import Experts, MatrixExperts, MatrixExpertsConfig, stacked_linear
from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.sizes import round_width


class MLPExpertsConfig(MatrixExpertsConfig, frozen=True):
    """Plain experts: down(act(up x)). The experts of a token share a width of 4 * d_model."""

    type: Literal["mlp"] = "mlp"
    activation: Activation = "gelu"
    """Element-wise function between the two matrices."""

    def width(self, d_model: int, experts_per_token: float) -> int:
        return self.d_ff or round_width(4 * d_model / experts_per_token)

    def build(self, d_model: int, num_experts: int, experts_per_token: float) -> Experts:
        return MLPExperts(self, d_model, num_experts, experts_per_token)


class MLPExperts(MatrixExperts):
    """E networks down(act(up x))."""

    def __init__(
        self, config: MLPExpertsConfig, d_model: int, num_experts: int, experts_per_token: float
    ) -> None:
        super().__init__()
        self.config = config
        self.activation = config.activation
        width = config.width(d_model, experts_per_token)
        self.up, self.up_bias = stacked_linear(num_experts, d_model, width, config.bias)
        self.down, self.down_bias = stacked_linear(num_experts, width, d_model, config.bias)

    def weights(self) -> ExpertWeights:
        return ExpertWeights(
            activation=self.activation,
            up_EHD=self.up,
            down_EDF=self.down,
            up_bias_EH=self.up_bias,
            down_bias_ED=self.down_bias,
            dropout=self.dropout,
        )
