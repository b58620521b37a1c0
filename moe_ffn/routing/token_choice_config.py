"""The configs of the other routers in which each token goes by itself; torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from moe_ffn.config import MOST
from moe_ffn.routing.base_config import FixedKConfig, LinearRouterConfig
from moe_ffn.sizes import linear_params

if TYPE_CHECKING:
    from moe_ffn.routing.base import Router


class NoisyTopKRouterConfig(FixedKConfig, LinearRouterConfig, frozen=True):
    """Top-k of logits with learned Gaussian noise, softmax over the k (Shazeer et al. 2017).

    arXiv:1701.06538, section 2.1. The noise is added in training only.
    """

    type: Literal["noisy_top_k"] = "noisy_top_k"
    k: int = Field(default=2, ge=1, le=MOST)
    """Experts per token. At least 2: the softmax over a single one is a constant 1."""

    has_selection_probs: ClassVar[bool] = True

    @model_validator(mode="after")
    def _keep_the_router_gradient(self) -> NoisyTopKRouterConfig:
        if self.k == 1:
            raise ValueError(
                "k (1) makes every weight a constant 1, the softmax over a single expert, so the router "
                "would never learn; set k >= 2"
            )
        return self

    def num_params(self, d_model: int, num_experts: int) -> int:
        return super().num_params(d_model, num_experts) + linear_params(
            d_model, num_experts, bias=False
        )

    def flops_per_token(self, d_model: int, num_experts: int) -> int:
        return 2 * super().flops_per_token(d_model, num_experts)  # logits, and the noise's scale

    def build(self, d_model: int, num_experts: int) -> Router:
        from moe_ffn.routing.noisy_top_k import NoisyTopKRouter

        return NoisyTopKRouter(self, d_model, num_experts)


class TopPRouterConfig(LinearRouterConfig, frozen=True):
    """Top-p: the fewest most probable experts that together reach probability p.

    Huang et al. 2024, "Harder Tasks Need More Experts" (arXiv:2403.07652): an undecided token gets
    more experts. Without `objective.router_entropy` a router may stay undecided for ever.
    """

    type: Literal["top_p"] = "top_p"
    p: float = Field(default=0.4, gt=0, le=1)
    """The probability that a token's experts have to reach together."""
    max_k: int | None = Field(default=None, ge=1, le=MOST)
    """The most experts per token; num_experts by default."""
    renormalize: bool = False
    """Divide the weights of a token by their sum. Not for max_k = 1: it would be a constant 1."""

    @model_validator(mode="after")
    def _keep_the_router_gradient(self) -> TopPRouterConfig:
        if self.max_k == 1 and self.renormalize:
            raise ValueError(
                "renormalize (true) with max_k (1) makes every weight a constant 1, so the router "
                "would never learn; set renormalize: false or max_k >= 2"
            )
        return self

    def check_num_experts(self, num_experts: int) -> None:
        if self.max_k is not None and self.max_k > num_experts:
            raise ValueError(
                f"router.max_k ({self.max_k}) must not exceed num_experts ({num_experts}); "
                "lower router.max_k or raise num_experts"
            )
        # The most probable of E experts has at least 1 / E, which then is enough every time.
        if self.renormalize and self.p * num_experts <= 1:
            raise ValueError(
                f"router.renormalize (true) with router.p ({self.p:g}) not above 1 / num_experts "
                f"(1 / {num_experts}) gives every token a single expert with a constant weight 1, so "
                "the router would never learn; set router.renormalize: false or raise router.p"
            )

    def experts_per_token(self, num_experts: int) -> float:
        """The most there can be: how many there are depends on the data."""
        return self.max_k or num_experts

    def describe(self) -> str:
        return f"{self.type} p={self.p:g}"

    def build(self, d_model: int, num_experts: int) -> Router:
        from moe_ffn.routing.top_p import TopPRouter

        return TopPRouter(self, d_model, num_experts)


class ReLURouterConfig(FixedKConfig, LinearRouterConfig, frozen=True):
    """ReLU routing: every expert with a positive logit, weighted by it (Wang et al. 2024, ReMoE).

    arXiv:2412.14711. `objective.sparsity_rule` brings the average to k experts per token.
    """

    type: Literal["relu"] = "relu"
    k: float = Field(default=2.0, gt=0)
    """Experts per token that the sparsity rule aims at, on average; about half of all at the start."""

    def build(self, d_model: int, num_experts: int) -> Router:
        from moe_ffn.routing.relu import ReLURouter

        return ReLURouter(self, d_model, num_experts)


class HashRouterConfig(FixedKConfig, frozen=True):
    """Hash: the token's id decides; nothing is learned (Roller et al. 2021, arXiv:2106.04426)."""

    type: Literal["hash"] = "hash"
    k: int = Field(default=1, ge=1, le=MOST)
    """Experts per token, all different, each with weight 1 / k."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Chooses the hash function."""

    def num_params(self, d_model: int, num_experts: int) -> int:
        return 0

    def flops_per_token(self, d_model: int, num_experts: int) -> int:
        return 0

    def build(self, d_model: int, num_experts: int) -> Router:
        from moe_ffn.routing.hash import HashRouter

        return HashRouter(self, num_experts)


class ForcedRouterConfig(FixedKConfig, LinearRouterConfig, frozen=True):
    """Forced balance or imbalance, whatever the token: for benchmarks and tests.

    The k experts of a token are decided by its position; their weights are softmax probabilities, so
    the cost is that of `top_k`.
    """

    type: Literal["forced"] = "forced"
    k: int = Field(default=2, ge=1, le=MOST)
    """Experts per token."""
    skew: float = Field(default=0.0, ge=0, le=1)
    """Share of the tokens that go to experts 0 to k - 1; the rest take turns. 0 is perfect balance."""

    def describe(self) -> str:
        return f"{self.type} k={self.k} skew={self.skew:g}"

    def build(self, d_model: int, num_experts: int) -> Router:
        from moe_ffn.routing.forced import ForcedRouter

        return ForcedRouter(self, d_model, num_experts)
