"""The routed Mixture of Experts, made of a router, a capacity limit, a dispatcher and experts.

T tokens, D model width, N (token, expert) pairs, R rows
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from moe_ffn.config.base import MAX_COUNT, describe_options, errors_at
from moe_ffn.config.errors import Unsupported, UseCase, first_unsupported
from moe_ffn.config.option_tree import show_value
from moe_ffn.experts.base import ExpertsConfig, without_adapters
from moe_ffn.experts.matrices import GatedExpertsConfig
from moe_ffn.ffn.base import (
    OWN_ROUTING,
    ExpertStack,
    FFNBlock,
    FFNConfig,
    PlaceExperts,
    RouterInfo,
    check_input,
    flatten_tokens,
    inner_configs,
    without_padding,
)
from moe_ffn.ffn.dispatch import Dispatcher, LocalDispatcher, make_plan, unsorted_plan
from moe_ffn.ffn.shared_expert import CombineConfig, SumConfig, share_of_norms
from moe_ffn.ffn.zero_computation import ZeroComputationConfig, ZeroComputationExperts
from moe_ffn.kernels.base import is_transform_on, reject_vmap
from moe_ffn.outputs import FFNOutput, Routing, TokenContext
from moe_ffn.routing import RouterConfig, TopKRouterConfig
from moe_ffn.routing.base import Router
from moe_ffn.routing.capacity import CapacityConfig


class MoEConfig(FFNConfig, frozen=True):
    """Routed Mixture of Experts: a router sends each token to a few of many experts."""

    type: Literal["moe"] = "moe"
    num_experts: int = Field(default=8, ge=1, le=MAX_COUNT)
    """E, the number of experts."""
    router: RouterConfig = TopKRouterConfig()
    """Chooses the experts of each token and their weights."""
    experts: ExpertsConfig = GatedExpertsConfig()
    """Kind of network of each expert."""
    capacity: CapacityConfig = CapacityConfig()
    """Limit on the tokens of an expert; dropless by default."""
    zero_computation: ZeroComputationConfig = ZeroComputationConfig()
    """Additional experts without a network; none by default."""
    shared_expert: FFNConfig | None = None
    """A block that processes every token in addition to its routed experts (DeepSeekMoE)."""
    combine: CombineConfig = SumConfig()
    """Rule that adds the shared expert's output to the routed output."""

    @classmethod
    def _as_mapping(cls, data: Any) -> Mapping[Any, Any]:
        options, moved = _without_moved_options(super()._as_mapping(data))
        if moved:
            raise errors_at(cls, moved, data)
        return options

    @model_validator(mode="after")
    def _check_parts_against_each_other(self) -> MoEConfig:
        self._check_router()
        if self.shared_expert is None and self.combine != SumConfig():
            raise ValueError(
                f"combine.type ('{self.combine.type}') adds a shared expert, but shared_expert is "
                "null; set shared_expert: swiglu, or leave combine out"
            )
        if self.shared_expert is not None and self.shared_expert.router_infos():
            raise ValueError(
                f"shared_expert.type ('{self.shared_expert.type}') must not be a sparse block: every "
                "token passes through a shared expert; use 'swiglu' or 'dense'"
            )
        return self

    def _check_router(self) -> None:
        try:
            self.router.check_num_experts(self.num_routable)
        except ValueError as error:
            if self.zero_computation.total == 0:
                raise
            raise ValueError(
                f"{error}; the router counts num_experts ({self.num_experts}) and zero_computation "
                f"({self.zero_computation.total}) together"
            ) from error

    @property
    def num_routable(self) -> int:
        """Number of experts that the router chooses from: `num_experts`, then experts without a network."""
        return self.num_experts + self.zero_computation.total

    @property
    def experts_per_token(self) -> float:
        """Mean number of experts with a network per token, at perfect balance."""
        share = self.num_experts / self.num_routable
        return self.router.experts_per_token(self.num_routable) * share

    def unsupported(self, use_case: UseCase) -> Unsupported | None:
        if self.num_experts % use_case.num_ranks:
            return Unsupported(
                f"num_experts ({self.num_experts}) cannot be divided evenly among "
                f"{use_case.num_ranks} ranks",
                "change it or parallel.expert",
            )
        parts = {"router": self.router, "capacity": self.capacity, **inner_configs(self)}
        return first_unsupported(parts, use_case)

    def router_infos(self) -> dict[str, RouterInfo]:
        info = RouterInfo(
            self.router,
            self.num_routable,
            self.zero_computation,
            self.capacity,
            self.shared_expert,
            experts=self.experts,
        )
        return {OWN_ROUTING: info}

    @property
    def expert_stack(self) -> ExpertStack:
        return ExpertStack(self.experts, self.num_experts, self.experts_per_token)

    def build(self, d_model: int) -> FFNBlock:
        return MoEFFN(self, d_model)

    def num_params(self, d_model: int) -> int:
        return self._params_without_experts(d_model) + self.expert_stack.num_params(d_model)

    def num_active_params(self, d_model: int) -> int:
        return self._params_without_experts(d_model) + self.expert_stack.num_active_params(d_model)

    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        shared = 0
        if self.shared_expert is not None:
            shared = self.shared_expert.flops_per_token(d_model, seq_len)
            shared += self.combine.flops_per_token(d_model)
        router = self.router.flops_per_token(d_model, self.num_routable)
        wrapper = self.experts.wrapper_flops_per_token(d_model)
        pairs = self.router.pairs_per_token(self.num_routable, seq_len)
        pairs *= self.num_experts / self.num_routable
        routed = self.expert_stack.flops_per_token(d_model, pairs)
        return routed + shared + router + wrapper + self.zero_computation.flops_per_token(d_model)

    def with_k(self, k: int, d_model: int) -> Self:
        changed, router = super().with_k(k, d_model), self.router.with_k(k)
        if router is None:
            return changed
        experts = self.experts.with_fixed_width(d_model, self.experts_per_token)
        combine = self.combine.with_fixed_weights(self.experts_per_token)
        return changed.model_copy(update={"router": router, "experts": experts, "combine": combine})

    def describe(self) -> str:
        return f"{self.type}, {self.num_experts} experts ({self.experts.type}), {self.router.describe()}"

    def _params_without_experts(self, d_model: int) -> int:
        shared = 0
        if self.shared_expert is not None:
            shared = self.shared_expert.num_params(d_model) + self.combine.num_params(d_model)
        router = self.router.num_params(d_model, self.num_routable)
        return router + shared + self.zero_computation.num_params(d_model)


class MoEFFN(FFNBlock):
    """Each token's output is a weighted sum over a few experts (Shazeer et al. 2017, arXiv:1701.06538).

    flatten -> route -> limit -> plan -> dispatch -> experts -> combine -> add experts without a network
    -> add the shared expert. `experts.wrappers` adds norms, a narrower space or weights on the input.
    """

    def __init__(self, config: MoEConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.d_model = d_model
        self.num_experts = config.num_experts
        self.capacity = config.capacity
        self.router = config.router.build(d_model, config.num_routable)
        self.experts = config.expert_stack.build(d_model)
        self.make_plan = unsorted_plan if self.experts.are_embeddings else make_plan
        self.dispatcher: Dispatcher = LocalDispatcher()
        self.zero_computation = self.shared_expert = None
        if config.zero_computation.total:
            self.zero_computation = ZeroComputationExperts(config.zero_computation, d_model)
        if config.shared_expert is not None:
            self.shared_expert = config.shared_expert.build(d_model)
            self.combine = config.combine.build(d_model, config.experts_per_token)

    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        check_input(x, context, self.d_model, self)
        self.reject_vmap(x)
        x_TD, flat = flatten_tokens(x, context)
        routing = self.router(x_TD, flat)
        return self.run_experts(routing, without_padding(x, context), context)

    def run_experts(self, routing: Routing, x: Tensor, context: TokenContext | None) -> FFNOutput:
        """Run the experts of a routing to `num_routable` experts, and sum their weighted outputs; `x` (...,
        d_model) is zero for padding.
        """
        x_TD = x.reshape(-1, self.d_model)
        routing = self.capacity.apply_to(routing, training=self.training)
        plan = self.make_plan(routing, self.num_experts)
        experts = without_adapters(self.experts)
        sent = self.dispatcher.dispatch(experts.before_dispatch(x_TD), plan)
        # Computed here, so that it overlaps with the exchange of tokens.
        shared = self._shared(x, context)
        y_TD = sent.combine(self.experts(sent.rows(), sent.plan))
        y_TD = experts.after_combine(y_TD)
        y_TD = self._with_zero_computation(y_TD, x_TD, routing)
        output = FFNOutput(y_TD.to(x.dtype).view_as(x), {OWN_ROUTING: routing})
        return self._with_shared(output, shared, x, context)

    def reject_vmap(self, x: Tensor) -> None:
        """Raise ValueError for tensors batched by torch.func.vmap, unless the experts are table rows."""
        if is_transform_on() and not without_adapters(self.experts).are_embeddings:
            reject_vmap(x, self.parameters())

    def _shared(self, x: Tensor, context: TokenContext | None) -> Tensor | None:
        return None if self.shared_expert is None else self.shared_expert(x, context).hidden

    def _with_zero_computation(self, y_TD: Tensor, x_TD: Tensor, routing: Routing) -> Tensor:
        if self.zero_computation is None:
            return y_TD
        return y_TD + self.zero_computation(x_TD, routing, first=self.num_experts)

    def _with_shared(
        self, output: FFNOutput, shared: Tensor | None, x: Tensor, context: TokenContext | None
    ) -> FFNOutput:
        """Add the output of the shared expert to the routed output."""
        if shared is None:
            return output
        routed, weighted_shared = self.combine(output.hidden, shared, x)
        mask = None if context is None else context.mask
        shares = {OWN_ROUTING: share_of_norms(weighted_shared, routed, mask)}
        return replace(output, hidden=routed + weighted_shared, shared_shares=shares)

    def place_experts(self, place: PlaceExperts) -> None:
        self.dispatcher = place(self.experts.innermost, self.num_experts)

    def extra_repr(self) -> str:
        sizes = f"num_experts={self.num_experts}, d_model={self.d_model}"
        capacity = "dropless"
        if self.capacity.is_limited:
            capacity = f"capacity=({describe_options(self.capacity)})"
        return f"{sizes}, {capacity}"

    def routers(self) -> dict[str, Router]:
        return {OWN_ROUTING: self.router}


# -- old options

_MOVED = {
    "latent": "experts: {type: latent, VALUE, experts: {...}}",
    "weights_at": "experts: {type: input_weighted, experts: {...}}",
    "jitter": "{type: jittered, jitter: VALUE, ffn: {type: moe, ...}}",
    "output_bias": "{type: biased, ffn: {type: moe, ...}}",
    "norms.experts_input": "experts: {type: normed, input: {VALUE}, experts: {...}}",
    "norms.each_expert": "experts: {type: normed, each: {VALUE}, experts: {...}}",
    "norms.routed": "experts: {type: normed, output: {VALUE}, experts: {...}}",
    "norms.shared_input": "shared_expert: {type: normed, input: {VALUE}, ffn: {...}}",
    "norms.shared": "shared_expert: {type: normed, output: {VALUE}, ffn: {...}}",
    "norms.output": "{type: normed, output: {VALUE}, ffn: {type: moe, ...}}",
}
"""Old option -> its replacement."""

_OLD_DEFAULTS = (None, False, "output")
"""Old default values, which older runs recorded and which are ignored; False includes 0."""


def _without_moved_options(options: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[str, str]]:
    """Return the options without old ones, and a message for each old one that is not at its default."""
    current, messages = dict(options), dict[str, str]()
    old = {name: current.pop(name) for name in _MOVED if name in current}
    norms = current.pop("norms", None)
    if isinstance(norms, Mapping):
        old |= {f"norms.{place}": norm for place, norm in norms.items()}
    elif norms is not None:
        old["norms.experts_input"] = norms
    for name, value in old.items():
        if name in _MOVED and value not in _OLD_DEFAULTS:
            value = {"width": value} if name == "latent" and type(value) is int else value
            is_shown = isinstance(value, Mapping) or name == "jitter"
            fix = _MOVED[name].replace("VALUE", _as_yaml(value) if is_shown else "...")
            messages[name] = f"has moved; write {fix}"
    return current, messages


def _as_yaml(value: Any) -> str:
    """Format a value as YAML on one line, a mapping without its braces."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_as_yaml(inner)}" for key, inner in value.items())
    return show_value(value)
