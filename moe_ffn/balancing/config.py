"""The configs of the rules that steer a router between optimizer steps; torch-free."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from moe_ffn.config import Config, TaggedConfig

if TYPE_CHECKING:
    from moe_ffn.balancing.bias_rules import BiasRule


class BiasRuleConfig(TaggedConfig, frozen=True):
    """Moves the correction bias of routers towards balance, once per optimizer step, without a loss."""

    @abstractmethod
    def build(self) -> BiasRule: ...


class SignRuleConfig(BiasRuleConfig, frozen=True):
    """bias += rate * sign(mean(pairs) - pairs): DeepSeek-V3's loss-free balancing.

    Wang et al. 2024 (arXiv:2408.15664), algorithm 1.
    """

    type: Literal["sign"] = "sign"
    rate: float = Field(default=1e-3, gt=0)
    """How far a bias moves per optimizer step."""
    centre: bool = False
    """Subtract the mean from each step's move, as torchtitan does."""

    def build(self) -> BiasRule:
        from moe_ffn.balancing.bias_rules import SignRule

        return SignRule(self)


class QuantileRuleConfig(BiasRuleConfig, frozen=True):
    """Quantile balancing: the bias at which each expert would have taken its even share (Megatron-LM)."""

    type: Literal["quantile"] = "quantile"
    ema: float = Field(default=0.9, ge=0, lt=1)
    """How much of the old bias is kept at each step."""

    def build(self) -> BiasRule:
        from moe_ffn.balancing.bias_rules import QuantileRule

        return QuantileRule(self)


class SparsityRuleConfig(Config, frozen=True):
    """ReMoE's rule for the weight of the ReLU sparsity loss; only 'relu' routers are concerned.

    Wang et al. 2024 (arXiv:2412.14711), equation 8: one weight for the whole model.
    """

    initial_weight: float = Field(default=1e-8, gt=0)
    """The weight before the first step."""
    factor: float = Field(default=1.2, gt=1)
    """What it is multiplied by after a step with too many experts per token, or divided by."""
