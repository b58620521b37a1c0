"""Gated experts, down(act(gate x) * up x).

T tokens, D model width, E experts, F hidden width
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from moe_ffn.activations import GATE_ACTIVATIONS, Activation, ClampedSwiGLU, GatedType
from moe_ffn.config import MAX_COUNT
from moe_ffn.experts.base import Experts, MatrixExperts, MatrixExpertsConfig, stacked_linear
from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.sizes import gated_width


class ThreeMatrixExpertsConfig(MatrixExpertsConfig, frozen=True):
    """What every kind of gated experts shares; the experts of a token share 8/3 * d_model."""

    num_matrices: ClassVar[int] = 3

    @property
    def clamped(self) -> ClampedSwiGLU | None:
        """Computes the hidden units instead of activation(gate) * up; None for that product."""
        return None

    @property
    @abstractmethod
    def gate_activation(self) -> Activation: ...

    def width(self, d_model: int, experts_per_token: float) -> int:
        return self.d_ff or gated_width(d_model / experts_per_token)

    def build(self, d_model: int, num_experts: int, experts_per_token: float) -> Experts:
        return GatedExperts(self, d_model, num_experts, experts_per_token)


class GatedExpertsConfig(ThreeMatrixExpertsConfig, frozen=True):
    """Gated experts: down(act(gate x) * up x). The experts of a token share 8/3 * d_model."""

    type: GatedType = "swiglu"

    @property
    def gate_activation(self) -> Activation:
        return GATE_ACTIVATIONS[self.type]


class ClampedSwiGLUExpertsConfig(ThreeMatrixExpertsConfig, frozen=True):
    """The gated experts of GPT-OSS (arXiv:2508.10925): clamped SwiGLU with 1 added to the linear part."""

    type: Literal["clamped_swiglu"] = "clamped_swiglu"
    alpha: float = Field(default=1.702, gt=0, le=MAX_COUNT)
    """Slope inside the sigmoid."""
    limit: float = Field(default=7.0, gt=0, le=MAX_COUNT)
    """Bound of the gate from above, and of the linear part on both sides."""

    @property
    def clamped(self) -> ClampedSwiGLU | None:
        return ClampedSwiGLU(self.alpha, self.limit)

    @property
    def gate_activation(self) -> Activation:
        return "silu"


class GatedExperts(MatrixExperts):
    """E networks down(act(gate x) * up x).

    `gate_up` (E, 2 F, D) holds gate's rows before up's; `gate` and `up` are views of it.
    """

    def __init__(
        self,
        config: ThreeMatrixExpertsConfig,
        d_model: int,
        num_experts: int,
        experts_per_token: float,
    ) -> None:
        super().__init__()
        self.config = config
        self.activation = config.gate_activation
        width = config.width(d_model, experts_per_token)
        self.gate_up, self.gate_up_bias = stacked_linear(
            num_experts, d_model, 2 * width, config.bias
        )
        self.down, self.down_bias = stacked_linear(num_experts, width, d_model, config.bias)

    def weights(self) -> ExpertWeights:
        return ExpertWeights(
            activation=self.activation,
            up_EHD=self.gate_up,
            down_EDF=self.down,
            gated=True,
            up_bias_EH=self.gate_up_bias,
            down_bias_ED=self.down_bias,
            dropout=self.dropout,
            clamped=self.config.clamped,
        )

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
