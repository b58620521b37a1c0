"""ReLU routing, which is fully differentiable; a rule controls its sparsity.

T tokens, D model width, E experts
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from einops import repeat
from pydantic import Field
from torch import Tensor

from moe_ffn.outputs import Routing, SparsityTargetRouting, TokenContext
from moe_ffn.routing.base import (
    LinearRouter,
    LinearRouterConfig,
    MeanKConfig,
    Router,
    routing_of_pairs,
)


class ReLURouterConfig(MeanKConfig, LinearRouterConfig, frozen=True):
    """ReLU routing: choose every expert with a positive logit, and use the logit as its weight (ReMoE).

    Wang et al. 2024, arXiv:2412.14711. `objective.sparsity_rule` moves the mean to k experts per token.
    """

    type: Literal["relu"] = "relu"
    k: float = Field(default=2.0, gt=0)
    """Mean number of experts per token that the sparsity rule aims for; it starts near num_experts / 2."""

    is_tokenwise: ClassVar[bool] = True

    def build(self, d_model: int, num_experts: int) -> Router:
        return ReLURouter(self, d_model, num_experts)


class ReLURouter(LinearRouter):
    """s = relu(W x); experts with s > 0 are chosen, with weights s (equation 5)."""

    config: ReLURouterConfig

    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        logits_TE = self.logits(x_TD)
        scores_TE = logits_TE.relu()
        num_tokens, num_experts = logits_TE.shape
        ids_E = torch.arange(num_experts, device=x_TD.device)
        return routing_of_pairs(
            scores_TE,
            repeat(ids_E, "e -> t e", t=num_tokens),
            logits_TE,
            scores_TE,
            context,
            kind=SparsityTargetRouting,
            # Not `> 0`: a token with NaN logits must stay NaN.
            selected_N=~(logits_TE <= 0).flatten(),
            capacity_k=self.config.k,
            target_k=self.config.k,
        )
