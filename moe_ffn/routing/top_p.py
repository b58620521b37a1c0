"""Top-p routing: as many experts as a token's doubt asks for.

T tokens, D model width, E experts, K experts listed per token
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ffn.outputs import Routing, TokenContext
from moe_ffn.routing.base import LinearRouter, routing_of_pairs
from moe_ffn.routing.config import TopPRouterConfig


class TopPRouter(LinearRouter):
    """The fewest experts whose probabilities add up to p, at most `max_k`; the probabilities weigh.

    Huang et al. 2024 (arXiv:2403.07652), section 3.1.
    """

    def __init__(self, config: TopPRouterConfig, d_model: int, num_experts: int) -> None:
        super().__init__(config, d_model, num_experts)
        self.p = config.p
        self.max_k = config.max_k or num_experts
        self.renormalize = config.renormalize

    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        logits_TE = self.logits(x_TD)
        scores_TE = logits_TE.softmax(dim=-1)
        weights_TK, expert_ids_TK = scores_TE.topk(self.max_k, dim=-1)
        # What the more probable ones reach without it; the first one always counts.
        before_TK = weights_TK.detach().cumsum(dim=-1) - weights_TK.detach()
        chosen_TK = ~(before_TK >= self.p)
        weights_TK = torch.where(chosen_TK, weights_TK, 0)
        if self.renormalize:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return routing_of_pairs(
            weights_TK,
            expert_ids_TK,
            logits_TE,
            scores_TE,
            context,
            chosen_TK=chosen_TK,
            capacity_k=self.max_k,
        )
