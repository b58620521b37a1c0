"""The routed Mixture of Experts: where routing, capacity, dispatch and experts meet.

T tokens, D model width, N (token, expert) pairs, R rows
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from moe_ffn.config.base import MAX_COUNT, describe_options
from moe_ffn.config.errors import Refusal, Situation, first_refusal
from moe_ffn.dispatch import Dispatched, Dispatcher, LocalDispatcher, make_plan, plan_of_list
from moe_ffn.experts.base import ExpertsConfig
from moe_ffn.experts.matrices import GatedExpertsConfig
from moe_ffn.ffn.base import ExpertStack, FFNBlock, FFNConfig, PlaceExperts, RouterInfo, parts_of
from moe_ffn.ffn.inputs import check_input, flatten_tokens
from moe_ffn.ffn.latent import Latent, LatentConfig
from moe_ffn.ffn.norms import Norms, NormsConfig
from moe_ffn.ffn.shared_expert import CombineConfig, SumConfig, share_of_norms
from moe_ffn.ffn.zero_computation import ZeroComputationConfig, ZeroComputationExperts
from moe_ffn.kernels.base import refuse_vmap
from moe_ffn.kernels.torch_modes import is_transform_on
from moe_ffn.outputs import FFNOutput, TokenContext
from moe_ffn.routing import LinearRouterConfig, RouterConfig, TopKRouterConfig
from moe_ffn.routing.base import Router, jittered
from moe_ffn.routing.capacity import CapacityConfig


class MoEConfig(FFNConfig, frozen=True):
    """A routed Mixture of Experts: a router sends each token to a few of many experts."""

    type: Literal["moe"] = "moe"
    num_experts: int = Field(default=8, ge=1, le=MAX_COUNT)
    """E, the experts the router chooses from."""
    router: RouterConfig = TopKRouterConfig()
    """Chooses the experts of each token, and their weights."""
    experts: ExpertsConfig = GatedExpertsConfig()
    """The kind of network that each expert is."""
    capacity: CapacityConfig = CapacityConfig()
    """The limit on the tokens of an expert; dropless by default."""
    zero_computation: ZeroComputationConfig = ZeroComputationConfig()
    """Experts that cost nothing, which the router chooses from too; none by default."""
    shared_expert: FFNConfig | None = None
    """A block that every token passes through beside its routed experts (DeepSeekMoE)."""
    combine: CombineConfig = SumConfig()
    """How the shared expert's output joins the routed one."""
    weights_at: Literal["output", "input"] = "output"
    """Whether the weight of an expert multiplies what it returns, or what it reads (Llama 4)."""
    jitter: float = Field(default=0.0, ge=0, lt=1)
    """In training, multiply what the whole block sees by noise from U(1 - jitter, 1 + jitter) (Mixtral in
    transformers), where `router.jitter` is seen by the router alone."""
    latent: LatentConfig | None = None
    """The experts are in a narrower space; off by default."""
    norms: NormsConfig = NormsConfig()
    """Norms inside the block; none by default."""
    output_bias: bool = False
    """Add a learned vector to the output (JetMoE)."""

    @model_validator(mode="after")
    def _check_parts_against_each_other(self) -> MoEConfig:
        self._check_router()
        if self.shared_expert is None and self.combine != SumConfig():
            raise ValueError(
                f"combine.type ('{self.combine.type}') joins a shared expert, but shared_expert is "
                "null; give it one, such as 'swiglu', or leave combine out"
            )
        if self.shared_expert is not None and self.shared_expert.routers():
            raise ValueError(
                f"shared_expert.type ('{self.shared_expert.type}') must not be a sparse block: every "
                "token passes through a shared expert; use 'swiglu' or 'dense'"
            )
        for option in ("shared_input", "shared"):
            if self.shared_expert is None and getattr(self.norms, option) is not None:
                raise ValueError(
                    f"norms.{option} is of a shared expert, but shared_expert is null; give it one, such as "
                    f"'swiglu', or leave norms.{option} out"
                )
        if self.weights_at == "input" and not self.experts.reads_input:
            raise ValueError(
                f"weights_at (input) multiplies what an expert reads, but those of experts.type "
                f"('{self.experts.type}') read nothing; set weights_at to output"
            )
        if self.jitter and self.router_jitter:
            raise ValueError(
                f"jitter ({self.jitter:g}) reaches the router too, which has router.jitter "
                f"({self.router_jitter:g}) of its own; set one of them to 0"
            )
        return self

    @property
    def router_jitter(self) -> float:
        """The noise that the router alone sees; 0 for a router without that option."""
        return self.router.jitter if isinstance(self.router, LinearRouterConfig) else 0.0

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
        """Experts that the router chooses from: `num_experts`, then those without a network."""
        return self.num_experts + self.zero_computation.total

    @property
    def experts_per_token(self) -> float:
        """Mean number of experts with a network that a token passes through, in perfect balance."""
        share = self.num_experts / self.num_routable
        return self.router.experts_per_token(self.num_routable) * share

    def refusal(self, situation: Situation) -> Refusal | None:
        if self.num_experts % situation.num_ranks:
            return Refusal(
                f"num_experts ({self.num_experts}) cannot be divided evenly among "
                f"{situation.num_ranks} ranks",
                "change it or parallel.expert",
            )
        parts = {"router": self.router, "capacity": self.capacity, **parts_of(self)}
        return first_refusal(parts, situation)

    def routers(self) -> dict[str, RouterInfo]:
        info = RouterInfo(
            self.router,
            self.num_routable,
            self.zero_computation,
            self.capacity,
            self.shared_expert,
            width=None if self.latent is None else self.latent.width,
        )
        return {"routing": info}

    def inner_blocks(self) -> dict[str, FFNConfig]:
        return {} if self.shared_expert is None else {"shared_expert": self.shared_expert}

    @property
    def expert_stack(self) -> ExpertStack:
        width = None if self.latent is None else self.latent.width
        return ExpertStack(self.experts, self.num_experts, self.experts_per_token, width)

    def build(self, d_model: int) -> FFNBlock:
        return MoEFFN(self, d_model)

    def num_params(self, d_model: int) -> int:
        return self._params_beside_experts(d_model) + self.expert_stack.num_params(d_model)

    def num_active_params(self, d_model: int) -> int:
        return self._params_beside_experts(d_model) + self.expert_stack.num_active_params(d_model)

    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        shared = 0
        if self.shared_expert is not None:
            shared = self.shared_expert.flops_per_token(d_model, seq_len)
            shared += self.combine.flops_per_token(d_model)
        router = self.router.flops_per_token(d_model, self.num_routable)
        if self.latent is not None:
            router += self.latent.flops_per_token(d_model)
        routed = self.routed_flops_per_token(d_model, seq_len)
        return routed + shared + router + self.zero_computation.flops_per_token(d_model)

    def routed_flops_per_token(self, d_model: int, seq_len: int) -> int:
        pairs = self.router.pairs_per_token(self.num_routable, seq_len)
        pairs *= self.num_experts / self.num_routable
        return self.expert_stack.flops_per_token(d_model, pairs)

    def describe(self) -> str:
        return f"{self.type}, {self.num_experts} experts ({self.experts.type}), {self.router.describe()}"

    def _params_beside_experts(self, d_model: int) -> int:
        shared = self.norms.num_params(d_model, self.expert_stack.width(d_model))
        shared += d_model if self.output_bias else 0
        shared += 0 if self.latent is None else self.latent.num_params(d_model)
        if self.shared_expert is not None:
            shared += self.shared_expert.num_params(d_model) + self.combine.num_params(d_model)
        router = self.router.num_params(d_model, self.num_routable)
        return router + shared + self.zero_computation.num_params(d_model)


class MoEFFN(FFNBlock):
    """Each token's output is the weighted sum of a few experts (Shazeer et al. 2017, arXiv:1701.06538).

    flatten -> route -> limit -> plan -> dispatch -> experts -> combine -> add those without a network
    -> add shared
    """

    def __init__(self, config: MoEConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.d_model = d_model
        self.num_experts = config.num_experts
        self.capacity = config.capacity
        self.router = config.router.build(d_model, config.num_routable)
        self.experts = config.expert_stack.build(d_model)
        self.make_plan = plan_of_list if self.experts.by_row else make_plan
        self.dispatcher: Dispatcher = LocalDispatcher()
        self.zero_computation = self.shared_expert = self.output_bias = None
        if config.zero_computation.total:
            self.zero_computation = ZeroComputationExperts(config.zero_computation, d_model)
        if config.shared_expert is not None:
            self.shared_expert = config.shared_expert.build(d_model)
            self.combine = config.combine.build(d_model, config.experts_per_token)
        if config.output_bias:
            self.output_bias = nn.Parameter(torch.zeros(d_model))
        width = config.expert_stack.width(d_model)
        self.latent = None if config.latent is None else Latent(config.latent, d_model)
        places = config.norms.widths(d_model, width)
        self.norms = Norms(config.norms, places) if places else None
        self.by_pair = config.norms.each_expert is not None or config.weights_at == "input"

    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        check_input(x, context, self.d_model, self)
        return self.route_by(self.router, x, context)

    def route_by(self, router: Router, x: Tensor, context: TokenContext | None) -> FFNOutput:
        """`forward` with another router for as many experts; `x` and `context` are checked."""
        if self.make_plan is make_plan and is_transform_on():
            refuse_vmap(x, self.parameters())
        x_TD, flat = flatten_tokens(x, context)
        if self.training and self.config.jitter:
            x_TD = jittered(x_TD, self.config.jitter).to(x_TD.dtype)
        routing = router(x_TD, flat)
        routing = self.capacity.limit(routing, training=self.training)
        inner_TD = x_TD if self.latent is None else self.latent.narrowed(x_TD)
        inner_TD = self._normed("experts_input", inner_TD)
        sent = self.dispatcher.dispatch(inner_TD, self.make_plan(routing, self.num_experts))
        x = x_TD.view_as(x)  # zero where it is padding
        shared = None  # computed while tokens travel to experts elsewhere
        if self.shared_expert is not None:
            shared = self.shared_expert(self._normed("shared_input", x), context).hidden
            shared = self._normed("shared", shared)
        y_TD = sent.combine(self._run_experts(sent))
        y_TD = y_TD if self.latent is None else self.latent.out_of(y_TD)
        y_TD = self._normed("routed", y_TD)
        if self.zero_computation is not None:
            y_TD = y_TD + self.zero_computation(x_TD, routing, first=self.num_experts)
        output = FFNOutput(y_TD.to(x.dtype).view_as(x), {"routing": routing})
        return self._with_shared(output, shared, x, context)

    def _normed(self, place: str, x: Tensor) -> Tensor:
        return x if self.norms is None else self.norms(place, x)

    def _run_experts(self, sent: Dispatched) -> Tensor:
        """(R, D), the weighted sums of the experts' outputs, for each row of what was sent."""
        if not self.by_pair:
            return self.experts(sent.rows(), sent.plan)
        # Each pair as a row of its own, of weight 1: its input is weighted, or its output normalised.
        x_RD, plan, weigh_input = sent.rows(), sent.plan, self.config.weights_at == "input"
        rows_ND, weights_N1 = x_RD.index_select(0, plan.token_ids_N), plan.weights_N.unsqueeze(-1)
        if weigh_input:
            rows_ND = (rows_ND * weights_N1).to(x_RD.dtype)
        places_N = torch.arange(rows_ND.shape[0], device=x_RD.device)
        ones_N = torch.ones_like(plan.weights_N)
        pairs = replace(plan, token_ids_N=places_N, weights_N=ones_N, pair_ids_N=places_N)
        y_ND = self._normed("each_expert", self.experts(rows_ND, pairs))
        if not weigh_input:
            y_ND = y_ND * weights_N1
        sums_RD = torch.zeros(x_RD.shape, dtype=y_ND.dtype, device=x_RD.device)
        return sums_RD.index_add_(0, plan.token_ids_N, y_ND).to(x_RD.dtype)

    def _with_shared(
        self, output: FFNOutput, shared: Tensor | None, x: Tensor, context: TokenContext | None
    ) -> FFNOutput:
        """The routed output and the shared expert's together, normalised, and with the bias."""
        hidden, shares = output.hidden, {}
        if shared is not None:
            routed, joined = self.combine(hidden, shared, x)
            mask = None if context is None else context.mask
            shares["routing"] = share_of_norms(joined, routed, mask)
            hidden = routed + joined
        hidden = self._normed("output", hidden)
        if self.output_bias is not None:
            hidden = hidden + self.output_bias.to(hidden.dtype)
        return replace(output, hidden=hidden, shared_shares=shares)

    def place_experts(self, place: PlaceExperts) -> None:
        self.dispatcher = place(self.experts, self.num_experts)

    def extra_repr(self) -> str:
        sizes = f"num_experts={self.num_experts}, d_model={self.d_model}"
        capacity = "dropless"
        if self.capacity.is_limited:
            capacity = f"capacity=({describe_options(self.capacity)})"
        return f"{sizes}, {capacity}"

    def routers(self) -> dict[str, Router]:
        return {"routing": self.router}
