"""How a shared expert's output joins the routed one; torch-free (see `moe_ffn.config`)."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Literal

from moe_ffn.config import TaggedConfig
from moe_ffn.sizes import linear_flops, linear_params

if TYPE_CHECKING:
    from moe_ffn.ffn.combine import Combine


class CombineConfig(TaggedConfig, frozen=True):
    """How the output of the shared expert joins that of the routed experts."""

    @abstractmethod
    def build(self, d_model: int, experts_per_token: float) -> Combine: ...

    def num_params(self, d_model: int) -> int:
        return 0

    def flops_per_token(self, d_model: int) -> int:
        """Forward FLOPs of the matrix products for one token."""
        return 0


class SumConfig(CombineConfig, frozen=True):
    """routed + shared (DeepSeekMoE, arXiv:2401.06066)."""

    type: Literal["sum"] = "sum"

    def build(self, d_model: int, experts_per_token: float) -> Combine:
        from moe_ffn.ffn.combine import Sum

        return Sum()


class SigmoidGateConfig(CombineConfig, frozen=True):
    """routed + sigmoid(w x) * shared (Qwen2-MoE, arXiv:2407.10671)."""

    type: Literal["sigmoid_gate"] = "sigmoid_gate"

    def num_params(self, d_model: int) -> int:
        return d_model

    def flops_per_token(self, d_model: int) -> int:
        return linear_flops(d_model, 1)

    def build(self, d_model: int, experts_per_token: float) -> Combine:
        from moe_ffn.ffn.combine import SigmoidGate

        return SigmoidGate(d_model)


class AverageConfig(CombineConfig, frozen=True):
    """(k * routed + shared) / (k + 1): the shared expert counts as one more (OLMo-core)."""

    type: Literal["average"] = "average"

    def build(self, d_model: int, experts_per_token: float) -> Combine:
        from moe_ffn.ffn.combine import Average

        return Average(experts_per_token)


class ResidualConfig(CombineConfig, frozen=True):
    """c_1 * routed + c_2 * shared, c = softmax(W x + b): residual MoE (PR-MoE, arXiv:2201.05596)."""

    type: Literal["residual"] = "residual"

    def num_params(self, d_model: int) -> int:
        return linear_params(d_model, 2, bias=True)

    def flops_per_token(self, d_model: int) -> int:
        return linear_flops(d_model, 2)

    def build(self, d_model: int, experts_per_token: float) -> Combine:
        from moe_ffn.ffn.combine import Residual

        return Residual(d_model)
