"""Softmax top-k routing.

T tokens, D model width, E experts, K experts per token, N = T*K pairs
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from moe_ffn.outputs import Routing, TokenContext
from moe_ffn.routing.base import Router, RouterLinear
from moe_ffn.routing.config import TopKRouterConfig


class TopKRouter(Router):
    """p = softmax(W x); a token's k largest p choose its experts and are their weights."""

    def __init__(self, config: TopKRouterConfig, d_model: int, num_experts: int) -> None:
        super().__init__()
        self.k = config.k
        self.renormalize = config.renormalize
        self.projection = RouterLinear(d_model, num_experts)

    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        logits_TE = self.projection(x_TD)
        scores_TE = logits_TE.softmax(dim=-1)
        weights_TK, expert_ids_TK = scores_TE.topk(self.k, dim=-1)
        if self.renormalize:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return token_choice(weights_TK, expert_ids_TK, logits_TE, scores_TE, context)


def token_choice(
    weights_TK: Tensor,
    expert_ids_TK: Tensor,
    logits_TE: Tensor,
    scores_TE: Tensor,
    context: TokenContext,
) -> Routing:
    """The Routing of a router in which every token picks K experts: N = T*K pairs, token-major."""
    num_tokens, k = expert_ids_TK.shape
    token_ids_T = torch.arange(num_tokens, device=expert_ids_TK.device)
    return Routing(
        token_ids_N=token_ids_T.repeat_interleave(k),
        expert_ids_N=rearrange(expert_ids_TK, "t k -> (t k)"),
        weights_N=rearrange(weights_TK, "t k -> (t k)"),
        dropped_N=torch.zeros(num_tokens * k, dtype=torch.bool, device=expert_ids_TK.device),
        logits_TE=logits_TE,
        scores_TE=scores_TE,
        mask_T=context.mask,
        sequence_length=context.sequence_length or num_tokens,
    )
