"""SparseMixer-v2: experts picked one by one, each weighted by a softmax over those that are near the best.

T tokens, D model width, E experts, K experts per token
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moe_ffn.outputs import Routing, TokenContext
from moe_ffn.routing.base import LinearRouter, LinearTopKConfig, Router, routing_of_pairs


class SparseMixerRouterConfig(LinearTopKConfig, frozen=True):
    """SparseMixer-v2 (Liu et al. 2024, GRIN, arXiv:2409.12136), the router of Phi-3.5-MoE.

    For each of the k picks: the experts not yet picked whose logit is near the largest compete, by a softmax
    among them. Evaluation picks the largest; training samples, and corrects the gradient for it.
    """

    type: Literal["sparse_mixer"] = "sparse_mixer"
    threshold: float = Field(default=0.02, gt=0, lt=2)
    """An expert competes where (largest - logit) / max(|logit|, largest) is at most this."""

    by_token: ClassVar[bool] = True

    def build(self, d_model: int, num_experts: int) -> Router:
        return SparseMixerRouter(self, d_model, num_experts)


class SparseMixerRouter(LinearRouter):
    """w = softmax over the competing experts; with k = 1 an expert alone weighs 1."""

    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        logits_TE = self.logits(x_TD)
        scores_TE = logits_TE.softmax(dim=-1)
        # What is not a number can be neither ranked nor drawn; its weights stay what they are.
        left_TE = logits_TE.nan_to_num(nan=0.0)
        picks = list[tuple[Tensor, Tensor]]()
        for _ in range(self.config.k):
            weight_T1, expert_T1 = self.pick(logits_TE, left_TE)
            picks.append((weight_T1, expert_T1))
            left_TE = left_TE.scatter(-1, expert_T1, -torch.inf)
        weights_TK, expert_ids_TK = (
            torch.cat(values, dim=-1) for values in zip(*picks, strict=True)
        )
        return routing_of_pairs(weights_TK, expert_ids_TK, logits_TE, scores_TE, context)

    def pick(self, logits_TE: Tensor, left_TE: Tensor) -> tuple[Tensor, Tensor]:
        """The weight and the number of the next expert, (T, 1) each.

        Args:
            left_TE: the logits, -inf for those that are picked.
        """
        with torch.no_grad():
            largest_T1, best_T1 = left_TE.max(dim=-1, keepdim=True)
            distance_TE = (largest_T1 - logits_TE) / logits_TE.abs().maximum(largest_T1)
            far_TE = distance_TE > self.config.threshold
        near_TE = left_TE.masked_fill(far_TE, -torch.inf)
        shares_TE = near_TE.softmax(dim=-1)
        if not self.training:
            return shares_TE.gather(-1, best_T1), best_T1
        # The largest of logits with Gumbel noise is a sample of their softmax.
        noise_TE = torch.empty_like(near_TE).exponential_().log()
        expert_T1 = (near_TE - noise_TE).argmax(dim=-1, keepdim=True)
        weight_T1 = shares_TE.gather(-1, expert_T1)
        is_best_T1 = expert_T1 == shares_TE.argmax(dim=-1, keepdim=True)
        is_whole_T1 = is_best_T1 | (torch.rand_like(weight_T1) > 0.75)
        factor_T1 = torch.where(is_whole_T1, 1.0, 0.3333)  # as the published code rounds a third
        weight_T1 = _MidpointGradient.apply(logits_TE, weight_T1, expert_T1, shares_TE, factor_T1)
        return weight_T1, expert_T1


class _MidpointGradient(torch.autograd.Function):
    """The weight times its factor; its gradient without the factor, which by Heun's method gives an unbiased
    one of third order in the mean over samples (arXiv:2310.00811, section 3).
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: Tensor,
        weight_T1: Tensor,
        expert_T1: Tensor,
        shares_TE: Tensor,
        factor_T1: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(weight_T1, expert_T1, shares_TE)
        return weight_T1 * factor_T1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight_T1, expert_T1, shares_TE = ctx.saved_tensors
        grad_T1 = grads[0] * weight_T1
        grad_TE = (-grad_T1 * shares_TE).scatter_add(-1, expert_T1, grad_T1)
        return grad_TE, None, None, None, None
