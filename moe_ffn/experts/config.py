"""The configs of the experts; torch-free (see `moe_ffn.config`)."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from moe_ffn.activations import GATE_ACTIVATIONS, Activation, ClampedSwiGLU, GatedType
from moe_ffn.config import MOST, TaggedConfig
from moe_ffn.sizes import gated_params, gated_width, linear_flops, mlp_params, round_width

if TYPE_CHECKING:
    from moe_ffn.experts.base import Experts


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


class _MatrixExpertsConfig(ExpertsConfig, frozen=True):
    """The options that plain and gated experts share."""

    d_ff: int | None = Field(default=None, ge=1, le=MOST)
    """Hidden width of one expert; by default the dense block's, divided by the experts per token."""
    bias: bool = False
    """Add a bias to every matrix."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of zeroing an activated hidden unit, in training."""
    backend: Literal["auto", "loop", "bmm", "cpu", "grouped_mm", "triton"] = "auto"
    """How the products are computed; every backend gives the same result."""


class MLPExpertsConfig(_MatrixExpertsConfig, frozen=True):
    """Plain experts: down(act(up x)). The experts of a token share a width of 4 * d_model."""

    type: Literal["mlp"] = "mlp"
    activation: Activation = "gelu"
    """Element-wise function between the two matrices."""

    def width(self, d_model: int, experts_per_token: float) -> int:
        return self.d_ff or round_width(4 * d_model / experts_per_token)

    def params_per_expert(self, d_model: int, experts_per_token: float) -> int:
        return mlp_params(d_model, self.width(d_model, experts_per_token), self.bias)

    def flops_per_pair(self, d_model: int, experts_per_token: float) -> int:
        return 2 * linear_flops(d_model, self.width(d_model, experts_per_token))

    def build(self, d_model: int, num_experts: int, experts_per_token: float) -> Experts:
        from moe_ffn.experts.mlp import MLPExperts

        return MLPExperts(self, d_model, num_experts, experts_per_token)


class ThreeMatrixExpertsConfig(_MatrixExpertsConfig, frozen=True):
    """What every kind of gated experts shares; the experts of a token share 8/3 * d_model."""

    @property
    def clamped(self) -> ClampedSwiGLU | None:
        """What stands for activation(gate) * up; None where that is what is computed."""
        return None

    @property
    @abstractmethod
    def gate_activation(self) -> Activation: ...

    def width(self, d_model: int, experts_per_token: float) -> int:
        return self.d_ff or gated_width(d_model / experts_per_token)

    def params_per_expert(self, d_model: int, experts_per_token: float) -> int:
        return gated_params(d_model, self.width(d_model, experts_per_token), self.bias)

    def flops_per_pair(self, d_model: int, experts_per_token: float) -> int:
        return 3 * linear_flops(d_model, self.width(d_model, experts_per_token))

    def build(self, d_model: int, num_experts: int, experts_per_token: float) -> Experts:
        from moe_ffn.experts.gated import GatedExperts

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
    alpha: float = Field(default=1.702, gt=0, le=MOST)
    """Slope inside the sigmoid."""
    limit: float = Field(default=7.0, gt=0, le=MOST)
    """Bound of the gate from above, and of the linear part on both sides."""

    @property
    def clamped(self) -> ClampedSwiGLU | None:
        return ClampedSwiGLU(self.alpha, self.limit)

    @property
    def gate_activation(self) -> Activation:
        return "silu"
