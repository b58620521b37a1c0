"""From scores to a token's k experts and their weights: what softmax and sigmoid top-k share.

T tokens, E experts, K experts per token, G groups, M experts of a group
"""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from torch import Tensor

from moe_ffn.routing.top_k_config import GroupsConfig, TopKOptionsConfig


class Selection:
    """Top-k by score + correction bias, within the best groups; weights from the scores alone."""

    def __init__(self, config: TopKOptionsConfig) -> None:
        self.k = config.k
        self.groups = config.groups
        self.renormalize = config.renormalize
        self.scale = config.scale

    def experts(self, scores_TE: Tensor, correction_bias_E: Tensor | None) -> Tensor:
        """int64 (T, K), the best expert first."""
        ranking_TE = scores_TE.detach()
        if correction_bias_E is not None:
            ranking_TE = ranking_TE + correction_bias_E
        if self.groups is not None:
            allowed_TE = experts_of_best_groups(ranking_TE, self.groups, self.k)
            # -inf and not 0, under which a negative bias would let the masked experts win.
            ranking_TE = ranking_TE.masked_fill(~allowed_TE, -torch.inf)
        return ranking_TE.topk(self.k, dim=-1).indices

    def weights(self, scores_TE: Tensor, expert_ids_TK: Tensor) -> Tensor:
        """(T, K), divided by their sum if asked, times the scale."""
        weights_TK = scores_TE.gather(-1, expert_ids_TK)
        if self.renormalize:
            tiny = torch.finfo(weights_TK.dtype).tiny
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True).clamp(min=tiny)
        return weights_TK if self.scale == 1 else weights_TK * self.scale


def experts_of_best_groups(ranking_TE: Tensor, groups: GroupsConfig, k: int) -> Tensor:
    """Bool (T, E): True in the `keep` groups with the highest scores (DeepSeek-V3, section 2.1.2).

    A group's score is the sum over its best experts: two of them in DeepSeek-V3 and its copies in
    torchtitan and Hugging Face, k / keep of them in Megatron-LM.
    """
    ranking_TGM = rearrange(ranking_TE, "t (g m) -> t g m", g=groups.num_groups)
    best_TGM = ranking_TGM.topk(groups.experts_scored(k), dim=-1).values
    best_groups = best_TGM.sum(dim=-1).topk(groups.keep, dim=-1).indices
    kept_TG = torch.zeros_like(ranking_TGM[..., 0], dtype=torch.bool).scatter_(1, best_groups, True)
    return repeat(kept_TG, "t g -> t (g m)", m=ranking_TGM.shape[-1])
