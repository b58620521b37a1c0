"""Sinkhorn routing: scores are balanced over the experts before each token chooses.

T tokens, D model width, E experts, K experts per token
"""

from __future__ import annotations

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
    comparable,
    routing_of_pairs,
)


class SinkhornRouterConfig(LinearTopKConfig, frozen=True):
    """Sinkhorn: in training, top-k of the scores after they were made balanced by Sinkhorn's rule.

    Clark et al. 2022, S-BASE (arXiv:2202.01169), as Megatron-LM has it. Weights are of the plain
    scores, sigmoid for k = 1 and softmax otherwise; evaluation is plain top-k.
    """

    type: Literal["sinkhorn"] = "sinkhorn"
    k: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Experts per token."""
    tolerance: float = Field(default=1e-4, gt=0)
    """Stop when no column's factor changes by more than this share of itself."""
    max_iterations: int = Field(default=100, ge=1, le=MAX_COUNT)
    """Stop after this many rounds at the latest; logits in the hundreds are not balanced by then."""

    looks_ahead: ClassVar[str] = "balances tokens against later ones"
    by_token: ClassVar[bool] = True

    def build(self, d_model: int, num_experts: int) -> Router:
        return SinkhornRouter(self, d_model, num_experts)


class SinkhornRouter(LinearRouter):
    """Experts are selected by balanced scores and weighted by plain ones; the balancing has no gradient."""

    config: SinkhornRouterConfig

    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        config, logits_TE = self.config, self.logits(x_TD)
        scores_TE = logits_TE.sigmoid() if config.k == 1 else logits_TE.softmax(dim=-1)
        ranking_TE = scores_TE.detach()
        if self.training:
            counted_T = comparable(logits_TE, context.mask)
            balance = sinkhorn_operator if needs_static_shapes(x_TD) else sinkhorn
            ranking_TE = balance(
                logits_TE.detach(), counted_T, config.tolerance, config.max_iterations
            )
        expert_ids_TK = ranking_TE.topk(config.k, dim=-1).indices
        weights_TK = scores_TE.gather(-1, expert_ids_TK)
        return routing_of_pairs(weights_TK, expert_ids_TK, logits_TE, scores_TE, context)


def sinkhorn(
    logits_TE: Tensor, counted_T: Tensor, tolerance: float = 1e-4, max_iterations: int = 100
) -> Tensor:
    """Log of exp(logits) scaled until each row and column sums to its share, up to a constant per row.

    A choice within rows does not see that constant. Logarithms, so that large logits do not overflow.

    Args:
        logits_TE: the router's logits; the result is float32, or float64 where they are.
        counted_T: False for tokens that take no part, such as padding; their rows come back as they are.
        tolerance: stop when no column's factor changes by more than this share of itself.
        max_iterations: stop at the latest after this many rounds.
    """
    # In bfloat16 a column's sum over a few hundred tokens is off by more than the tolerance.
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
        new_E = new_E - new_E.logsumexp(dim=0)  # fixes the constant that rows and columns can trade
        # In logarithms too: beside one huge factor, a small one could move by any ratio unseen.
        moved = (new_E - column_E).abs().max()
        column_E = new_E
        if moved < tolerance:
            break
    return torch.where(counted_T1, logits_TE + column_E, logits_TE)


@torch.library.custom_op("moe_ffn::sinkhorn", mutates_args=())
def sinkhorn_operator(
    logits_TE: Tensor, counted_T: Tensor, tolerance: float, max_iterations: int
) -> Tensor:
    """`sinkhorn`, which stops by what it reads, for graphs and for tensors without data."""
    return sinkhorn(logits_TE, counted_T, tolerance, max_iterations).clone()


@sinkhorn_operator.register_fake
def _(logits_TE: Tensor, *_: object) -> Tensor:
    return torch.empty_like(logits_TE, dtype=torch.promote_types(logits_TE.dtype, torch.float32))
