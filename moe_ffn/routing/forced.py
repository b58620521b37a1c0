"""Forced routing with prescribed loads, for benchmarks and tests.

T tokens, D model width, E experts, K experts per token
"""

from __future__ import annotations

from fractions import Fraction
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moe_ffn.config.errors import Unsupported, UseCase
from moe_ffn.outputs import Routing, TokenContext
from moe_ffn.routing.base import LinearRouter, LinearTopKConfig, Router, routing_of_pairs


class ForcedRouterConfig(LinearTopKConfig, frozen=True):
    """Forced balance or imbalance, independent of the tokens' values, for benchmarks and tests.

    A token's position decides its k experts. Weights are softmax probabilities, so the router costs as much
    as `top_k`.
    """

    type: Literal["forced"] = "forced"
    skew: float = Field(default=0.0, ge=0, le=1)
    """Share of the tokens for experts 0 to k - 1; the rest cycle through all experts. 0 balances them."""

    learns: ClassVar[bool] = False

    def unsupported(self, use_case: UseCase) -> Unsupported | None:
        if use_case.cached:
            return Unsupported("type 'forced' routes by position", "use 'top_k'")
        return None

    def describe(self) -> str:
        return f"{self.type} k={self.k} skew={self.skew:g}"

    def build(self, d_model: int, num_experts: int) -> Router:
        return ForcedRouter(self, d_model, num_experts)


class ForcedRouter(LinearRouter):
    """Sends a `skew` share of the tokens to the first k experts; the rest cycle through all experts."""

    def __init__(self, config: ForcedRouterConfig, d_model: int, num_experts: int) -> None:
        super().__init__(config, d_model, num_experts)
        self.skew = Fraction(config.skew).limit_denominator(1_000_000)

    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        logits_TE = self.logits(x_TD)
        scores_TE = logits_TE.softmax(dim=-1)
        num_experts, k = logits_TE.shape[-1], self.config.k
        mask_T = context.mask
        # Padding does not advance the cycle, so that real tokens are as balanced as without padding.
        real_T = torch.ones_like(logits_TE[:, 0], dtype=torch.bool) if mask_T is None else mask_T
        number_T = real_T.cumsum(0)
        # Skewed tokens are spread evenly: floor(skew * n) of the first n tokens.
        num_skewed_T = number_T * self.skew.numerator // self.skew.denominator
        skewed_T = num_skewed_T > (number_T - 1) * self.skew.numerator // self.skew.denominator
        turn_T = number_T - num_skewed_T - 1
        first_T1 = torch.where(skewed_T, 0, turn_T * k).unsqueeze(-1)
        expert_ids_TK = (first_T1 + torch.arange(k, device=x_TD.device)) % num_experts
        weights_TK = scores_TE.gather(-1, expert_ids_TK)
        return routing_of_pairs(weights_TK, expert_ids_TK, logits_TE, scores_TE, context)
