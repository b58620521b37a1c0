"""Neuron top-k: each expert is scored by the activation of one of its hidden units.

T tokens, D model width, E experts, K experts per token
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn

from moe_ffn.config.sizes import linear_params
from moe_ffn.outputs import Routing, TokenContext
from moe_ffn.routing.base import (
    LinearRouter,
    LinearTopKConfig,
    Router,
    RouterLinear,
    routing_of_pairs,
)


class NeuronTopKRouterConfig(LinearTopKConfig, frozen=True):
    """Top-k of |silu(gate x) * up x|, the activation of one SwiGLU unit per expert (CMoE).

    Pei et al. 2025 (arXiv:2502.04416) carve a dense block into experts. The router's unit for an expert is a
    copy of one of the expert's hidden units, so the router needs no training.
    """

    type: Literal["neuron_top_k"] = "neuron_top_k"
    correction_bias: bool = False
    """Select by score + bias; `objective.bias_rule` moves the bias towards balance."""

    is_tokenwise: ClassVar[bool] = True
    rejected_options: ClassVar[frozenset[str]] = frozenset(
        {"input_norm", "mlp", "logit_scale", "logit_cap"}
    )

    @model_validator(mode="after")
    def _reject_options_of_projections(self) -> NeuronTopKRouterConfig:
        for option in sorted(self.rejected_options):
            if getattr(self, option) != type(self).model_fields[option].default:
                raise ValueError(
                    f"{option} is for routers whose logits are a projection of the token, but the logits of "
                    f"'neuron_top_k' are hidden units of the experts; leave {option} out"
                )
        return self

    def num_params(self, d_model: int, num_experts: int) -> int:
        gate = linear_params(d_model, num_experts, bias=False)
        return super().num_params(d_model, num_experts) + gate + num_experts

    def flops_per_token(self, d_model: int, num_experts: int) -> int:
        return 2 * super().flops_per_token(d_model, num_experts)

    def build(self, d_model: int, num_experts: int) -> Router:
        return NeuronTopKRouter(self, d_model, num_experts)


class NeuronTopKRouter(LinearRouter):
    """s = softmax(|silu(gate x) * up x|); the k largest s + bias are chosen, with weights 1 + u s.

    u is learned per expert and initialised to 1. A carved block starts with u = 0, so that the sum of all its
    experts equals the dense block.
    """

    def __init__(self, config: NeuronTopKRouterConfig, d_model: int, num_experts: int) -> None:
        super().__init__(config, d_model, num_experts)
        self.gate = RouterLinear(d_model, num_experts)
        self.slope_E = nn.Parameter(torch.ones(num_experts))

    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        unit_TE = F.silu(self.gate(x_TD)) * self.logits(x_TD)
        # The product of two large numbers overflows, and softmax of two infinities is NaN.
        logits_TE = unit_TE.abs().clamp(max=torch.finfo(unit_TE.dtype).max)
        scores_TE = logits_TE.softmax(dim=-1)
        expert_ids_TK = self.ranking(scores_TE).topk(self.config.k, dim=-1).indices
        # A very negative slope would make the weight negative.
        weights_TE = (1 + self.slope_E.to(scores_TE.dtype) * scores_TE).clamp(min=0)
        weights_TK = weights_TE.gather(-1, expert_ids_TK)
        return routing_of_pairs(weights_TK, expert_ids_TK, logits_TE, scores_TE, context)
