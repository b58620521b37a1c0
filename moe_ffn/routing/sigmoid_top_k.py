"""Sigmoid top-k routing.

T tokens, D model width, E experts, K experts per token
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ffn.outputs import Routing, TokenContext
from moe_ffn.routing.base import LinearRouter, routing_of_pairs
from moe_ffn.routing.config import SigmoidTopKRouterConfig
from moe_ffn.routing.selection import Selection


class SigmoidTopKRouter(LinearRouter):
    """s = sigmoid(W x); the k largest s + bias choose the experts, their s are the weights.

    DeepSeek-V3 (arXiv:2412.19437), equations 12 to 16.
    """

    def __init__(self, config: SigmoidTopKRouterConfig, d_model: int, num_experts: int) -> None:
        super().__init__(config, d_model, num_experts)
        self.select = Selection(config)
        if config.correction_bias:
            bias_E = torch.zeros(num_experts, dtype=torch.float32)  # whatever torch's default is
            self.register_buffer("correction_bias_E", bias_E)

    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        logits_TE = self.logits(x_TD)
        scores_TE = logits_TE.sigmoid()
        expert_ids_TK = self.select.experts(scores_TE, self.correction_bias_E)
        weights_TK = self.select.weights(scores_TE, expert_ids_TK)
        return routing_of_pairs(weights_TK, expert_ids_TK, logits_TE, scores_TE, context)
