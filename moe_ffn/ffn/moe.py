"""The routed Mixture of Experts: where routing, capacity, dispatch and experts meet.

T tokens, D model width
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from moe_ffn.capacity import DROP_POLICIES, Priority, limit
from moe_ffn.config import describe_options
from moe_ffn.dispatch.plan import make_plan
from moe_ffn.ffn.base import FFNBlock
from moe_ffn.ffn.combine import share_of_norms
from moe_ffn.ffn.sparse_config import MoEConfig
from moe_ffn.ffn.zero_computation import ZeroComputationExperts
from moe_ffn.outputs import FFNOutput, TokenContext, check_input, flatten_tokens
from moe_ffn.routing.base import Router


class MoEFFN(FFNBlock):
    """Each token's output is the weighted sum of a few experts (Shazeer et al. 2017, arXiv:1701.06538).

    flatten -> route -> limit -> plan -> experts -> unflatten -> add shared
    """

    def __init__(self, config: MoEConfig, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model
        self.num_experts = config.num_experts
        self.capacity = config.capacity
        self.router = config.router.build(d_model, config.num_routable)
        self.experts = config.experts.build(d_model, config.num_experts, config.experts_per_token)
        self.zero_computation = self.shared_expert = None
        if config.zero_computation.total:
            self.zero_computation = ZeroComputationExperts(config.zero_computation, d_model)
        if config.shared_expert is not None:
            self.shared_expert = config.shared_expert.build(d_model)
            self.combine = config.combine.build(d_model, config.experts_per_token)

    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        check_input(x, context, self.d_model)
        x_TD, flat_context = flatten_tokens(x, context)
        routing = self.router(x_TD, flat_context)
        routing = limit(
            routing, self.capacity_factor, self.drop, renormalize=self.capacity.renormalize
        )
        plan = make_plan(routing, self.num_experts)
        y_TD = self.experts(x_TD, plan)
        if self.zero_computation is not None:
            y_TD = y_TD + self.zero_computation(x_TD, routing, first=self.num_experts)
        hidden = y_TD.view_as(x)
        if self.shared_expert is not None:
            clean = x_TD.view(x.shape)  # zero where it is padding
            shared = self.shared_expert(clean, context).hidden
            routed, shared = self.combine(hidden, shared, clean)
            share = share_of_norms(shared, routed, routing.mask_T)
            hidden, routing = routed + shared, replace(routing, shared_share=share)
        return FFNOutput(hidden, routing)

    def extra_repr(self) -> str:
        sizes = f"num_experts={self.num_experts}, d_model={self.d_model}"
        capacity = "dropless"
        if self.capacity.is_limited:
            capacity = f"capacity=({describe_options(self.capacity)})"
        return f"{sizes}, {capacity}"

    def routers(self) -> dict[str, Router]:
        return {"routing": self.router}

    @property
    def capacity_factor(self) -> float | None:
        """Training and evaluation each have their own; None drops nothing."""
        return self.capacity.factor if self.training else self.capacity.eval_factor

    @property
    def drop(self) -> Priority:
        """Whom an expert serves first; nothing is random in evaluation."""
        if self.capacity.drop == "random" and not self.training:
            return DROP_POLICIES["position"]
        return DROP_POLICIES[self.capacity.drop]
