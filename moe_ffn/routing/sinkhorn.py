"""Sinkhorn routing: in training, scores are balanced over the experts before the top-k.

T tokens, D model width, E experts, K experts per token
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moe_ffn.config.base import MAX_COUNT
from moe_ffn.kernels.base import needs_static_shapes
from moe_ffn.outputs import Routing, TokenContext
from moe_ffn.routing.base import (
    LinearRouter,
    LinearTopKConfig,
    Router,
    rankable_tokens,
    routing_of_pairs,
)


class SinkhornRouterConfig(LinearTopKConfig, frozen=True):
    """Sinkhorn: in training, top-k of scores balanced by Sinkhorn's algorithm.

    Clark et al. 2022, S-BASE (arXiv:2202.01169), as implemented in Megatron-LM. Weights are the unbalanced
    scores: sigmoid for k = 1, softmax otherwise. Evaluation is plain top-k.
    """

    type: Literal["sinkhorn"] = "sinkhorn"
    k: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Experts per token."""
    tolerance: float = Field(default=1e-4, gt=0)
    """Stop if no column's factor changes by more than this fraction."""
    max_iterations: int = Field(default=100, ge=1, le=MAX_COUNT)
    """Maximum number of iterations; logits in the hundreds need more than 100."""

    lookahead_reason: ClassVar[str] = "balances tokens against later ones"
    is_tokenwise: ClassVar[bool] = True

    def build(self, d_model: int, num_experts: int) -> Router:
        return SinkhornRouter(self, d_model, num_experts)


class SinkhornRouter(LinearRouter):
    """Selects experts by balanced scores and weights them by unbalanced scores; balancing has no gradient."""

    config: SinkhornRouterConfig

    def __init__(self, config: SinkhornRouterConfig, d_model: int, num_experts: int) -> None:
        super().__init__(config, d_model, num_experts)
        # Not in `forward`: `with_k` gives a trained router another k.
        self.score = torch.sigmoid if config.k == 1 else partial(torch.softmax, dim=-1)

    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        config, logits_TE = self.config, self.logits(x_TD)
        scores_TE = self.score(logits_TE)
        ranking_TE = scores_TE.detach()
        if self.training:
            rankable_T = rankable_tokens(logits_TE, context.mask)
            function = sinkhorn_operator if needs_static_shapes(x_TD) else sinkhorn
            ranking_TE = function(
                logits_TE.detach(), rankable_T, config.tolerance, config.max_iterations
            )
        expert_ids_TK = ranking_TE.topk(config.k, dim=-1).indices
        weights_TK = scores_TE.gather(-1, expert_ids_TK)
        return routing_of_pairs(weights_TK, expert_ids_TK, logits_TE, scores_TE, context)


def sinkhorn(
    logits_TE: Tensor, counted_T: Tensor, tolerance: float = 1e-4, max_iterations: int = 100
) -> Tensor:
    """Scale rows and columns of exp(logits) to equal sums, without tokens not counted; return the logarithm,
    float32 or wider. It is exact up to a constant per row, which keeps the order in a row; logarithms avoid
    overflow. Stop if no column's factor changes by more than `tolerance`, a fraction.
    """
    # A bfloat16 sum over a few hundred tokens has an error above the tolerance.
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    num_experts = logits_TE.shape[-1]
    counted_T1 = counted_T.unsqueeze(-1)
    safe_TE = logits_TE.masked_fill(~counted_T1, 0)
    column_E = torch.zeros(num_experts, dtype=logits_TE.dtype, device=logits_TE.device)
    if not bool(counted_T.any()):
        return logits_TE
    for _ in range(max_iterations):
        row_T1 = -(safe_TE + column_E).logsumexp(dim=-1, keepdim=True)
        filled_TE = (safe_TE + row_T1).masked_fill(~counted_T1, -torch.inf)
        new_E = -filled_TE.logsumexp(dim=0)
        new_E = new_E - new_E.logsumexp(dim=0)  # rows and columns are unique only up to a constant
        # Compare logarithms: next to one huge factor, the change of a small factor would not be visible.
        moved = (new_E - column_E).abs().max()
        column_E = new_E
        if moved < tolerance:
            break
    return torch.where(counted_T1, logits_TE + column_E, logits_TE)


@torch.library.custom_op("moe_ffn::sinkhorn", mutates_args=())
def sinkhorn_operator(
    logits_TE: Tensor, counted_T: Tensor, tolerance: float, max_iterations: int
) -> Tensor:
    """Run `sinkhorn` as one operator of a graph, because its loop depends on the data."""
    return sinkhorn(logits_TE, counted_T, tolerance, max_iterations).clone()


@sinkhorn_operator.register_fake
def _(logits_TE: Tensor, *_: object) -> Tensor:
    return torch.empty_like(logits_TE, dtype=torch.promote_types(logits_TE.dtype, torch.float32))
