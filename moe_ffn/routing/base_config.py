"""What the config of every router is; torch-free (see `moe_ffn.config`)."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from moe_ffn.config import TaggedConfig
from moe_ffn.sizes import linear_flops, linear_params

if TYPE_CHECKING:
    from moe_ffn.routing.base import Router


class RouterConfig(TaggedConfig, frozen=True):
    """Chooses which experts each token goes to, and with what weight."""

    has_selection_probs: ClassVar[bool] = False
    """True where `Routing.selection_probs_TE` is given, which the load loss of noisy top-k needs."""

    @property
    def not_causal_because(self) -> str | None:
        """Why a later token can change where an earlier one goes, and what to use instead."""
        return None

    @property
    def is_causal(self) -> bool:
        return self.not_causal_because is None

    @property
    def has_correction_bias(self) -> bool:
        """True where the router has a bias that `objective.bias_rule` moves."""
        return False

    def check_num_experts(self, num_experts: int) -> None:
        """ValueError, in one sentence, when this router cannot serve `num_experts` experts."""

    @abstractmethod
    def build(self, d_model: int, num_experts: int) -> Router: ...

    @abstractmethod
    def experts_per_token(self, num_experts: int) -> float:
        """How many experts a token goes to, on average; the most there can be where the data decide."""

    @abstractmethod
    def num_params(self, d_model: int, num_experts: int) -> int: ...

    @abstractmethod
    def flops_per_token(self, d_model: int, num_experts: int) -> int:
        """Forward FLOPs of the matrix products for one token."""

    def describe(self) -> str:
        """A few words for tables."""
        return self.type


class LinearRouterConfig(RouterConfig, frozen=True):
    """A router whose logits are a projection of the token."""

    bias: bool = False
    """Add a learned bias to the logits, as GPT-OSS does."""
    jitter: float = Field(default=0.0, ge=0, lt=1)
    """In training, multiply what the router sees by noise from U(1 - jitter, 1 + jitter) (Switch)."""

    def num_params(self, d_model: int, num_experts: int) -> int:
        return linear_params(d_model, num_experts, self.bias)

    def flops_per_token(self, d_model: int, num_experts: int) -> int:
        return linear_flops(d_model, num_experts)


class FixedKConfig(RouterConfig, frozen=True):
    """A router that is told how many experts a token goes to."""

    k: float = Field(default=2.0, gt=0)
    """Experts per token."""

    def check_num_experts(self, num_experts: int) -> None:
        if self.k > num_experts:
            raise ValueError(
                f"router.k ({self.k:g}) must not exceed num_experts ({num_experts}); "
                "lower router.k or raise num_experts"
            )

    def experts_per_token(self, num_experts: int) -> float:
        return self.k

    def describe(self) -> str:
        return f"{self.type} k={self.k:g}"
