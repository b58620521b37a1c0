"""The configs of the routers; torch-free (see `moe_ffn.config`)."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from moe_ffn.config import TaggedConfig

if TYPE_CHECKING:
    from moe_ffn.routing.base import Router


class RouterConfig(TaggedConfig, frozen=True):
    """Chooses which experts each token goes to, and with what weight."""

    @property
    def is_causal(self) -> bool:
        """False where a later token can change where an earlier one goes."""
        return True

    def check_num_experts(self, num_experts: int) -> None:
        """ValueError, in one sentence, when this router cannot serve `num_experts` experts."""

    @abstractmethod
    def build(self, d_model: int, num_experts: int) -> Router: ...

    @abstractmethod
    def experts_per_token(self, num_experts: int) -> float:
        """How many experts a token goes to, on average."""

    def num_params(self, d_model: int, num_experts: int) -> int:
        return d_model * num_experts

    def describe(self) -> str:
        """A few words for tables."""
        return self.type


class TopKRouterConfig(RouterConfig, frozen=True):
    """Softmax top-k: each token goes to its k most probable experts.

    k = 1 is Switch (Fedus et al. 2021, arXiv:2101.03961); k = 2 with `renormalize` is Mixtral
    (arXiv:2401.04088), without it OLMoE (arXiv:2409.02060).
    """

    type: Literal["top_k"] = "top_k"
    k: int = Field(default=2, ge=1)
    """Experts per token."""
    renormalize: bool = False
    """Divide the k weights by their sum. Not for k = 1: the weight would be a constant 1."""

    @model_validator(mode="after")
    def _keep_the_router_gradient(self) -> TopKRouterConfig:
        if self.k == 1 and self.renormalize:
            raise ValueError(
                "renormalize (true) with k (1) makes every weight a constant 1, so the router would "
                "never learn; set renormalize: false or k >= 2"
            )
        return self

    def check_num_experts(self, num_experts: int) -> None:
        if self.k > num_experts:
            raise ValueError(
                f"router.k ({self.k}) must not exceed num_experts ({num_experts}); "
                "lower router.k or raise num_experts"
            )

    def experts_per_token(self, num_experts: int) -> float:
        return self.k

    def describe(self) -> str:
        return f"{self.type} k={self.k}"

    def build(self, d_model: int, num_experts: int) -> Router:
        from moe_ffn.routing.top_k import TopKRouter

        return TopKRouter(self, d_model, num_experts)
