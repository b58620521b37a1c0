"""The routed Mixture of Experts: where routing, capacity, dispatch and experts meet.

T tokens, D model width
"""

from __future__ import annotations

from torch import Tensor

from moe_ffn.capacity import limit_by_position
from moe_ffn.dispatch.plan import make_plan
from moe_ffn.ffn.base import FFNBlock
from moe_ffn.ffn.config import MoEConfig
from moe_ffn.outputs import FFNOutput, TokenContext, flatten_tokens


class MoEFFN(FFNBlock):
    """Each token's output is the weighted sum of a few experts (Shazeer et al. 2017, arXiv:1701.06538).

    flatten -> route -> limit -> plan -> experts -> unflatten -> add shared
    """

    def __init__(self, config: MoEConfig, d_model: int) -> None:
        super().__init__()
        self.capacity = config.capacity
        self.router = config.router.build(d_model, config.num_experts)
        self.experts = config.experts.build(d_model, config.num_experts, config.experts_per_token)
        shared = config.shared_expert
        self.shared_expert = None if shared is None else shared.build(d_model)

    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        x_TD, flat_context = flatten_tokens(x, context)
        routing = self.router(x_TD, flat_context)
        routing = limit_by_position(routing, self.capacity_factor)
        plan = make_plan(routing)
        y_TD = self.experts(x_TD, plan)
        hidden = y_TD.view_as(x)
        if self.shared_expert is not None:
            hidden = hidden + self.shared_expert(x, context).hidden
        return FFNOutput(hidden, routing)

    @property
    def capacity_factor(self) -> float | None:
        """Training and evaluation each have their own; None drops nothing."""
        return self.capacity.factor if self.training else self.capacity.eval_factor
