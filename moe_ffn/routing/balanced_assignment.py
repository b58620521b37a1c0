"""Balanced assignment of tokens to experts, the routing of BASE layers.

T tokens, D model width, E experts, C capacity of each expert
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from moe_ffn.kernels.base import needs_static_shapes
from moe_ffn.outputs import Routing, TokenContext
from moe_ffn.routing.base import (
    LinearRouter,
    LinearRouterConfig,
    Router,
    rankable_tokens,
    routing_of_pairs,
)


class BalancedAssignmentRouterConfig(LinearRouterConfig, frozen=True):
    """BASE: in training, the assignment of highest total score that gives every expert equally many tokens.

    Lewis et al. 2021, BASE layers (arXiv:2103.16716): one expert per token, weighted by the sigmoid of its
    score. In evaluation each token goes to the expert with the highest score.
    """

    type: Literal["balanced_assignment"] = "balanced_assignment"

    lookahead_reason: ClassVar[str] = "balances tokens against later ones"
    is_tokenwise: ClassVar[bool] = True

    def experts_per_token(self, num_experts: int) -> float:
        return 1

    def build(self, d_model: int, num_experts: int) -> Router:
        return BalancedAssignmentRouter(self, d_model, num_experts)


class BalancedAssignmentRouter(LinearRouter):
    """One expert per token, and in training at most ceil(tokens / E) tokens per expert."""

    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        logits_TE = self.logits(x_TD)
        scores_TE = logits_TE.sigmoid()
        expert_ids_T = logits_TE.detach().nan_to_num(nan=0.0).argmax(dim=-1)
        if self.training:
            rankable_T = rankable_tokens(logits_TE, context.mask)
            function = assign_operator if needs_static_shapes(x_TD) else assign_rankable
            expert_ids_T = function(logits_TE.detach(), expert_ids_T, rankable_T)
        expert_ids_T1 = expert_ids_T.unsqueeze(-1)
        weights_T1 = scores_TE.gather(-1, expert_ids_T1)
        return routing_of_pairs(weights_T1, expert_ids_T1, logits_TE, scores_TE, context)


def assign_rankable(values_TE: Tensor, expert_ids_T: Tensor, rankable_T: Tensor) -> Tensor:
    """Return int64 (T,): `assign` for the tokens in `rankable_T`, `expert_ids_T` for all others."""
    expert_ids_T = expert_ids_T.clone()
    expert_ids_T[rankable_T] = assign(values_TE[rankable_T])
    return expert_ids_T


@torch.library.custom_op("moe_ffn::assign", mutates_args=())
def assign_operator(values_TE: Tensor, expert_ids_T: Tensor, rankable_T: Tensor) -> Tensor:
    """Run `assign_rankable` as one operator of a graph, because its loop depends on the data."""
    return assign_rankable(values_TE, expert_ids_T, rankable_T)


@assign_operator.register_fake
def _(values_TE: Tensor, expert_ids_T: Tensor, _: Tensor) -> Tensor:
    return torch.empty_like(expert_ids_T)


def assign(values_TE: Tensor, precision: float = 0.02) -> Tensor:
    """Return the assignment (T,) of highest total value with at most C = ceil(T / E) tokens per expert.

    This is the auction algorithm of Bertsekas and Castanon (1989). Each unassigned token bids for its best
    expert as much as makes its second-best expert equally good. An expert keeps its C highest bids; once it
    has C, its price is the lowest of them. The total value is within T * precision * (largest difference
    between two values of a token) of the optimum.
    """
    num_tokens, num_experts = values_TE.shape
    if num_tokens == 0 or num_experts == 1:
        return torch.zeros(num_tokens, dtype=torch.int64, device=values_TE.device)
    capacity = -(-num_tokens // num_experts)
    # Scale values to [0, 1], which does not change the optimum. Otherwise rounding would absorb a step added
    # to a large value, and the auction would never end.
    values_TE = values_TE.double()
    values_TE = values_TE - values_TE.amin(dim=-1, keepdim=True)
    values_TE = values_TE / values_TE.max().clamp(min=torch.finfo(torch.float64).tiny)
    step = precision

    unassigned = -1
    expert_ids_T = torch.full((num_tokens,), unassigned, device=values_TE.device)
    bids_T = torch.zeros(num_tokens, dtype=torch.float64, device=values_TE.device)
    prices_E = torch.zeros(num_experts, dtype=torch.float64, device=values_TE.device)
    while bool((waiting_T := expert_ids_T == unassigned).any()):
        gains, best = (values_TE[waiting_T] - prices_E).topk(2, dim=-1)
        bids_T[waiting_T] = prices_E[best[:, 0]] + gains[:, 0] - gains[:, 1] + step
        expert_ids_T[waiting_T] = best[:, 0]
        for expert in best[:, 0].unique().tolist():
            bidders = (expert_ids_T == expert).nonzero().squeeze(-1)
            if len(bidders) < capacity:
                continue
            kept = bids_T[bidders].topk(capacity)
            prices_E[expert] = kept.values[-1]
            rejected = torch.ones_like(bidders, dtype=torch.bool).index_fill(0, kept.indices, False)
            expert_ids_T[bidders[rejected]] = unassigned
    return expert_ids_T
