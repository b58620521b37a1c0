"""SparseMixer-v2: picks experts one by one, each weighted by a softmax over the experts near the best one.

T tokens, D model width, E experts, K experts per token
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moe_ffn.outputs import Routing, TokenContext
from moe_ffn.routing.base import LinearRouter, LinearTopKConfig, Router, routing_of_pairs

TINY = 1e-20
"""Lower bound of uniform noise, because log(0) is infinite."""


class SparseMixerRouterConfig(LinearTopKConfig, frozen=True):
    """SparseMixer-v2 (Liu et al. 2024, GRIN, arXiv:2409.12136), the router of Phi-3.5-MoE.

    Each of the k picks takes a softmax over the competing experts: the remaining experts with logits near the
    largest. Evaluation picks the most probable expert; training samples, with a corrected gradient.
    """

    type: Literal["sparse_mixer"] = "sparse_mixer"
    threshold: float = Field(default=0.2, gt=0, lt=2)
    """An expert competes if (largest - logit) / max(|logit|, largest) is at most this; 0.02 in Phi-3.5-MoE.
    An expert without competitors has weight 1 and gives the router no gradient."""

    is_tokenwise: ClassVar[bool] = True

    def build(self, d_model: int, num_experts: int) -> Router:
        return SparseMixerRouter(self, d_model, num_experts)


class SparseMixerRouter(LinearRouter):
    """Weights each picked expert by its softmax probability among the competing experts."""

    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        logits_TE = self.logits(x_TD)
        scores_TE = logits_TE.softmax(dim=-1)
        # NaN cannot be ranked or sampled. `logits_TE` keeps it, so the weights stay NaN.
        remaining_TE = logits_TE.nan_to_num(nan=0.0)
        picks: list[tuple[Tensor, Tensor]] = []
        for _ in range(self.config.k):
            weight_T1, expert_T1 = self.pick(logits_TE, remaining_TE)
            picks.append((weight_T1, expert_T1))
            remaining_TE = remaining_TE.scatter(-1, expert_T1, -torch.inf)
        weights_TK, expert_ids_TK = (
            torch.cat(values, dim=-1) for values in zip(*picks, strict=True)
        )
        return routing_of_pairs(weights_TK, expert_ids_TK, logits_TE, scores_TE, context)

    def pick(self, logits_TE: Tensor, remaining_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next expert's weight and id, (T, 1) each; earlier picks are -inf in `remaining_TE`."""
        with torch.no_grad():
            largest_T1, best_T1 = remaining_TE.max(dim=-1, keepdim=True)
            distance_TE = (largest_T1 - logits_TE) / logits_TE.abs().maximum(largest_T1)
            far_TE = distance_TE > self.config.threshold
        near_TE = remaining_TE.masked_fill(far_TE, -torch.inf)
        shares_TE = near_TE.softmax(dim=-1)
        if not self.training:
            return shares_TE.gather(-1, best_T1), best_T1
        # The argmax of logits with Gumbel noise is a sample of their softmax.
        uniform_TE = torch.empty_like(near_TE).uniform_().clamp(min=TINY)
        expert_T1 = (near_TE - (-uniform_TE.log()).log()).argmax(dim=-1, keepdim=True)
        weight_T1 = shares_TE.gather(-1, expert_T1)
        is_best_T1 = expert_T1 == shares_TE.argmax(dim=-1, keepdim=True)
        is_full_T1 = is_best_T1 | (torch.empty_like(weight_T1).uniform_() > 0.75)
        # Heun's method (arXiv:2310.00811, section 3): the value is a third of the weight, the gradient that
        # of the full weight. The published code rounds a third to 0.3333.
        value_T1 = torch.where(is_full_T1, weight_T1, 0.3333 * weight_T1).detach()
        return weight_T1 + (value_T1 - weight_T1.detach()), expert_T1
