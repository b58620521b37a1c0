"""Expert choice routing: the experts choose the tokens.

B groups of tokens, S tokens of a group, E experts, C tokens listed per expert and group, N = B*C*E pairs
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from einops import rearrange, repeat
from pydantic import Field
from torch import Tensor

from moe_ffn.config.sizes import ceil_of_share, share_of
from moe_ffn.outputs import Routing, TokenContext, VariableKRouting
from moe_ffn.routing.base import (
    LinearRouter,
    LinearRouterConfig,
    MeanKConfig,
    Router,
    constant_weight_error,
    rankable_tokens,
)


class ExpertChoiceRouterConfig(MeanKConfig, LinearRouterConfig, frozen=True):
    """Expert choice: each expert takes its k * tokens / num_experts most probable tokens.

    Zhou et al. 2022 (arXiv:2202.09368). The load is perfectly balanced. A token may get many experts. A token
    without experts has output 0.
    """

    type: Literal["expert_choice"] = "expert_choice"
    k: float = Field(default=2.0, gt=0)
    """Experts per token, on average; the paper's capacity factor."""
    among: Literal["sequence", "batch"] = "sequence"
    """Tokens that compete for an expert: those of one sequence, so that sequences are independent, or all
    tokens of the batch, as in the paper."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function from logits to weights: softmax over the experts, or sigmoid of each logit."""

    lookahead_reason: ClassVar[str] = "ranks tokens against later ones"

    def check_num_experts(self, num_experts: int) -> None:
        super().check_num_experts(num_experts)
        if num_experts == 1 and self.score == "softmax":
            cause = "router.score (softmax) with a single expert"
            raise constant_weight_error(cause, "router.score: sigmoid")

    def pairs_per_token(self, num_experts: int, seq_len: int) -> float:
        if self.among == "batch":
            return self.k
        return num_experts * ceil_of_share(seq_len, share_of(self.k, parts=num_experts)) / seq_len

    def build(self, d_model: int, num_experts: int) -> Router:
        return ExpertChoiceRouter(self, d_model, num_experts)


class ExpertChoiceRouter(LinearRouter):
    """Each expert takes its ceil(k * tokens / E) best tokens, weighted by their score (section 3.2)."""

    def __init__(self, config: ExpertChoiceRouterConfig, d_model: int, num_experts: int) -> None:
        super().__init__(config, d_model, num_experts)
        self.share = share_of(config.k, parts=num_experts)

    def max_tokens(self, sequence_length: int) -> int:
        if self.config.among == "batch":
            return sequence_length
        return ceil_of_share(sequence_length, self.share)

    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        logits_TE = self.logits(x_TD)
        is_softmax = self.config.score == "softmax"
        scores_TE = logits_TE.softmax(dim=-1) if is_softmax else logits_TE.sigmoid()
        num_tokens, num_experts = logits_TE.shape
        sequence_length = context.sequence_length or num_tokens
        group_size = max(sequence_length if self.config.among == "sequence" else num_tokens, 1)

        rankable_T = rankable_tokens(logits_TE, context.mask)
        ranking_TE = scores_TE.detach().masked_fill(~rankable_T.unsqueeze(-1), -1)
        ranking_BES = rearrange(ranking_TE, "(b s) e -> b e s", s=group_size)
        token_ids_BEC = ranking_BES.topk(ceil_of_share(group_size, self.share), dim=-1).indices
        num_groups, _, num_listed = token_ids_BEC.shape
        # Padding is listed last and not chosen, so that shapes do not depend on it.
        num_rankable_B = rearrange(rankable_T, "(b s) -> b s", s=group_size).sum(dim=-1)
        num_chosen_B = ceil_of_share(num_rankable_B, self.share)
        ranks_C = torch.arange(num_listed, device=x_TD.device)
        chosen_BC = ranks_C < num_chosen_B.unsqueeze(-1)

        starts_B11 = torch.arange(num_groups, device=x_TD.device).view(-1, 1, 1) * group_size
        token_indices_N = (token_ids_BEC + starts_B11).flatten()
        ids_E = torch.arange(num_experts, device=x_TD.device)
        expert_ids_N = repeat(ids_E, "e -> (b e c)", b=num_groups, c=num_listed)
        selected_N = repeat(chosen_BC, "b c -> (b e c)", e=num_experts)
        order_N = token_indices_N.argsort(stable=True)  # token-major, like every routing
        token_indices_N, expert_ids_N = token_indices_N[order_N], expert_ids_N[order_N]
        return VariableKRouting(
            token_indices_N=token_indices_N,
            expert_ids_N=expert_ids_N,
            weights_N=scores_TE[token_indices_N, expert_ids_N],
            dropped_N=torch.zeros_like(token_indices_N, dtype=torch.bool),
            num_tokens=num_tokens,
            num_experts=num_experts,
            sequence_length=sequence_length,
            mask_T=context.mask,
            logits_TE=logits_TE,
            scores_TE=scores_TE,
            selected_N=selected_N[order_N],
        )
