"""Noisy top-k routing: logits with noise of a learned scale in training.

T tokens, D model width, E experts, K experts per token
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from moe_ffn.config.base import MAX_COUNT
from moe_ffn.config.sizes import linear_flops, linear_params
from moe_ffn.outputs import NoisyRouting, Routing, TokenContext
from moe_ffn.routing.base import (
    LinearRouter,
    LinearTopKConfig,
    Router,
    RouterLinear,
    constant_weight_error,
    routing_of_pairs,
)

MIN_NOISE = 1e-2
"""Minimum scale of the noise, added as in later implementations, so that the scale is never 0."""


class NoisyTopKRouterConfig(LinearTopKConfig, frozen=True):
    """Top-k of logits with learned Gaussian noise, softmax over the k (Shazeer et al. 2017).

    arXiv:1701.06538, section 2.1. The noise is added in training only.
    """

    type: Literal["noisy_top_k"] = "noisy_top_k"
    k: int = Field(default=2, ge=1, le=MAX_COUNT)
    """Experts per token. At least 2, because the softmax over a single expert is a constant 1."""

    has_selection_probs: ClassVar[bool] = True
    is_tokenwise: ClassVar[bool] = True

    @model_validator(mode="after")
    def _keep_the_router_gradient(self) -> NoisyTopKRouterConfig:
        if self.k == 1:
            raise constant_weight_error("k (1)", "k >= 2")
        return self

    def num_params(self, d_model: int, num_experts: int) -> int:
        noise = linear_params(d_model, num_experts, bias=False)
        return super().num_params(d_model, num_experts) + noise

    def flops_per_token(self, d_model: int, num_experts: int) -> int:
        noise = linear_flops(d_model, num_experts)
        return super().flops_per_token(d_model, num_experts) + noise

    def build(self, d_model: int, num_experts: int) -> Router:
        return NoisyTopKRouter(self, d_model, num_experts)


class NoisyTopKRouter(LinearRouter):
    """h = W x + noise * softplus(W_noise x); softmax over a token's k largest h (equations 3 to 5)."""

    def __init__(self, config: NoisyTopKRouterConfig, d_model: int, num_experts: int) -> None:
        super().__init__(config, d_model, num_experts)
        self.noise = RouterLinear(d_model, num_experts)
        nn.init.zeros_(self.noise.weight)  # section A: equal noise for all tokens at the start

    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        logits_TE = self.logits(x_TD)
        k = self.config.k
        noisy_TE, fields = logits_TE, {}
        if self.training:
            scale_TE = F.softplus(self.noise(x_TD)) + MIN_NOISE
            noisy_TE = logits_TE + torch.randn_like(logits_TE) * scale_TE
            probs_TE = selection_probabilities(logits_TE, noisy_TE, scale_TE, k)
            fields = {"kind": NoisyRouting, "selection_probs_TE": probs_TE}
        top_TK, expert_ids_TK = noisy_TE.topk(k, dim=-1)
        weights_TK, scores_TE = top_TK.softmax(dim=-1), noisy_TE.softmax(dim=-1)
        return routing_of_pairs(weights_TK, expert_ids_TK, logits_TE, scores_TE, context, **fields)


def selection_probabilities(
    logits_TE: Tensor, noisy_TE: Tensor, scale_TE: Tensor, k: int
) -> Tensor:
    """Return P(x, i), the probability that expert i is chosen if only its own noise is redrawn (equation 9).

    Its new logit must exceed the k-th largest of the other experts: for an expert that is chosen now, the
    (k+1)-th largest of all; otherwise the k-th largest of all. With k = E, P is 1.
    """
    num_experts = logits_TE.shape[-1]
    if k == num_experts:
        return torch.ones_like(logits_TE)
    top = noisy_TE.topk(k + 1, dim=-1).values
    last_in, first_out = top[:, k - 1 : k], top[:, k : k + 1]
    threshold_TE = torch.where(noisy_TE > first_out, first_out, last_in)
    return torch.special.ndtr((logits_TE - threshold_TE) / scale_TE)
