"""Top-p routing, which gives more experts to tokens with less certain probabilities.

T tokens, D model width, E experts, K listed experts per token
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from moe_ffn.config.base import MAX_COUNT
from moe_ffn.outputs import Routing, TokenContext, VariableKRouting
from moe_ffn.routing.base import (
    LinearRouter,
    LinearRouterConfig,
    Router,
    constant_weight_error,
    routing_of_pairs,
)


class TopPRouterConfig(LinearRouterConfig, frozen=True):
    """Top-p: the fewest experts whose probabilities add up to at least p.

    Huang et al. 2024, "Harder Tasks Need More Experts" (arXiv:2403.07652): tokens with uncertain routing get
    more experts. Without `objective.router_entropy` routing may stay uncertain.
    """

    type: Literal["top_p"] = "top_p"
    p: float = Field(default=0.4, gt=0, le=1)
    """Minimum total probability of a token's experts."""
    max_k: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Maximum number of experts per token; num_experts by default."""
    renormalize: bool = False
    """Divide the weights of a token by their sum. Not for max_k = 1: the weight would be a constant 1."""

    is_tokenwise: ClassVar[bool] = True

    @model_validator(mode="after")
    def _keep_the_router_gradient(self) -> TopPRouterConfig:
        if self.max_k == 1 and self.renormalize:
            cause = "renormalize (true) with max_k (1)"
            raise constant_weight_error(cause, "renormalize: false or max_k >= 2")
        return self

    def check_num_experts(self, num_experts: int) -> None:
        if self.max_k is not None and self.max_k > num_experts:
            raise ValueError(
                f"router.max_k ({self.max_k}) must not exceed num_experts ({num_experts}); "
                "lower router.max_k or raise num_experts"
            )
        # The most probable of E experts has at least 1 / E, so with p <= 1 / E it is always enough.
        if self.renormalize and self.p * num_experts <= 1:
            raise ValueError(
                f"router.renormalize (true) with router.p ({self.p:g}) not above 1 / num_experts "
                f"(1 / {num_experts}) gives every token a single expert with a constant weight 1, so "
                "the router would never learn; set router.renormalize: false or raise router.p"
            )

    def experts_per_token(self, num_experts: int) -> float:
        """Return the maximum number of experts, since the number depends on the data."""
        return self.max_k or num_experts

    def describe(self) -> str:
        return f"{self.type} p={self.p:g}"

    def build(self, d_model: int, num_experts: int) -> Router:
        return TopPRouter(self, d_model, num_experts)


class TopPRouter(LinearRouter):
    """Chooses the fewest experts whose probabilities add up to p, at most `max_k` (section 3.1)."""

    def __init__(self, config: TopPRouterConfig, d_model: int, num_experts: int) -> None:
        super().__init__(config, d_model, num_experts)
        self.max_k = config.max_k or num_experts

    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        logits_TE = self.logits(x_TD)
        scores_TE = logits_TE.softmax(dim=-1)
        weights_TK, expert_ids_TK = scores_TE.topk(self.max_k, dim=-1)
        # Sum over more probable experts; it is 0 for the first, which is therefore always chosen.
        before_TK = weights_TK.detach().cumsum(dim=-1) - weights_TK.detach()
        chosen_TK = ~(before_TK >= self.config.p)
        weights_TK = torch.where(chosen_TK, weights_TK, 0)
        if self.config.renormalize:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return routing_of_pairs(
            weights_TK,
            expert_ids_TK,
            logits_TE,
            scores_TE,
            context,
            kind=VariableKRouting,
            selected_N=chosen_TK.flatten(),
            capacity_k=self.max_k,
        )
