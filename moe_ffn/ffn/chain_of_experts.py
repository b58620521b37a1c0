"""Chain of experts: several rounds through the same experts, each round with its own router.

D model width
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, cast

from pydantic import Field
from torch import Tensor, nn

from moe_ffn.config.errors import Unsupported, UseCase, first_unsupported
from moe_ffn.ffn.base import (
    FFNBlock,
    FFNConfig,
    RouterInfo,
    check_input,
    flatten_tokens,
    inner_configs,
    prefix_names,
    round_name,
    without_padding,
)
from moe_ffn.ffn.moe import MoEConfig, MoEFFN
from moe_ffn.outputs import FFNOutput, Routing, TokenContext
from moe_ffn.routing.base import Router


class ChainOfExpertsConfig(FFNConfig, frozen=True):
    """Chain of experts: each round feeds the output of the previous round to the same experts.

    In Wang et al. 2025 (arXiv:2506.18945), two rounds of 4 experts reach a loss of 1.12 on mathematics, one
    round of 8 experts 1.20. The rounds share everything in `ffn` except the router's weights.
    """

    type: Literal["chain_of_experts"] = "chain_of_experts"
    ffn: MoEConfig = MoEConfig()
    """The mixture of experts of every round; `router.k` counts experts per round."""
    rounds: int = Field(default=2, ge=1, le=100)
    """C, the number of passes of a token through the mixture."""

    def unsupported(self, use_case: UseCase) -> Unsupported | None:
        return first_unsupported(inner_configs(self), use_case)

    def router_infos(self) -> dict[str, RouterInfo]:
        (info,) = self.ffn.router_infos().values()
        return {round_name(number): info.inside("ffn") for number in range(self.rounds)}

    def build(self, d_model: int) -> FFNBlock:
        return ChainOfExpertsFFN(self, d_model)

    def num_params(self, d_model: int) -> int:
        return self.ffn.num_params(d_model) + self._params_of_later_routers(d_model)

    def num_active_params(self, d_model: int) -> int:
        """Return the active parameters of a token that goes to different experts in every round."""
        stack = self.ffn.expert_stack
        num_chosen = min(self.rounds * stack.experts_per_token, stack.num_experts)
        later = stack.params_of(num_chosen, d_model) - stack.num_active_params(d_model)
        return self.ffn.num_active_params(d_model) + later + self._params_of_later_routers(d_model)

    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        return self.rounds * self.ffn.flops_per_token(d_model, seq_len)

    def describe(self) -> str:
        return f"{self.rounds} rounds of ({self.ffn.describe()})"

    def _params_of_later_routers(self, d_model: int) -> int:
        return (self.rounds - 1) * self.ffn.router.num_params(d_model, self.ffn.num_routable)


class ChainOfExpertsFFN(FFNBlock):
    """x_0 = x, x_t = x_(t-1) + MoE_t(x_(t-1)), y = x_C, which includes x (arXiv:2506.18945, eq. 4 to 7)."""

    def __init__(self, config: ChainOfExpertsConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.d_model = d_model
        self.ffn = cast("MoEFFN", config.ffn.build(d_model))
        router, num_routable = config.ffn.router, config.ffn.num_routable
        self.later_routers = nn.ModuleList(
            router.build(d_model, num_routable) for _ in range(config.rounds - 1)
        )

    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        check_input(x, context, self.d_model, self)
        self.ffn.reject_vmap(x)
        hidden = without_padding(x, context)
        routings: dict[str, Routing] = {}
        shares: dict[str, Tensor] = {}
        for name, router, round_context in self.rounds(context):
            routing = router(*flatten_tokens(hidden, round_context))
            output = self.ffn.run_experts(routing, hidden, round_context)
            routings |= prefix_names(name, output.routings)
            shares |= prefix_names(name, output.shared_shares)
            hidden = hidden + output.hidden
        return FFNOutput(hidden, routings, shares)

    def rounds(
        self, context: TokenContext | None
    ) -> Iterator[tuple[str, Router, TokenContext | None]]:
        """Yield (name, router, context) of each round; only the first context has `expert_ids`."""
        for name, router in self.routers().items():
            yield name, router, context
            context = None if context is None else replace(context, expert_ids=None)

    def extra_repr(self) -> str:
        return f"rounds={1 + len(self.later_routers)}, d_model={self.d_model}"

    def routers(self) -> dict[str, Router]:
        routers = [self.ffn.router, *cast("list[Router]", list(self.later_routers))]
        return {round_name(number): router for number, router in enumerate(routers)}
