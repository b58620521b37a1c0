"""The configs of the blocks with experts or a router: MoE, Soft MoE, mixture-of-depths; torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from moe_ffn.config import MOST, Config
from moe_ffn.experts.config import ExpertsConfig, GatedExpertsConfig
from moe_ffn.ffn.base_config import FFNConfig
from moe_ffn.ffn.combine_config import CombineConfig, SumConfig
from moe_ffn.ffn.dense_config import GatedConfig
from moe_ffn.routing.config import ExpertChoiceRouterConfig, RouterConfig, TopKRouterConfig
from moe_ffn.sizes import linear_flops, linear_params

if TYPE_CHECKING:
    from moe_ffn.ffn.base import FFNBlock


class CapacityConfig(Config, frozen=True):
    """How many (token, expert) pairs an expert takes: ceil(factor * pairs / num_experts)."""

    factor: float | None = Field(default=None, gt=0, le=MOST)
    """Capacity factor in training; 1 is what perfect balance needs, and num_experts is enough for any
    imbalance; null drops nothing."""
    eval_factor: float | None = Field(default=None, gt=0, le=MOST)
    """Capacity factor in evaluation, where dropping makes an output depend on its batch."""
    drop: Literal["position", "probability", "random"] = "position"
    """Whom a full expert drops: the latest positions, the smallest weights, or, in training, anyone.
    Only the first is causal."""
    renormalize: bool = False
    """Scale the weights a token keeps up to the sum they had before dropping."""

    @property
    def is_limited(self) -> bool:
        return self.factor is not None or self.eval_factor is not None

    @property
    def not_causal_because(self) -> str | None:
        if self.drop == "position" or not self.is_limited:
            return None
        return (
            f"capacity.drop '{self.drop}' lets later tokens displace earlier ones; use 'position'"
        )


class ZeroComputationConfig(Config, frozen=True):
    """Experts without a network that a router may choose beside the real ones, at no cost.

    MoE++ (Jin et al. 2024, arXiv:2410.07348); the copy expert is LongCat-Flash's identity expert.
    """

    num_zero: int = Field(default=0, ge=0, le=MOST)
    """Experts that return 0: the token is left out."""
    num_copy: int = Field(default=0, ge=0, le=MOST)
    """Experts that return the token as it is."""
    num_constant: int = Field(default=0, ge=0, le=MOST)
    """Experts that mix the token with a learned vector."""

    @property
    def total(self) -> int:
        return self.num_zero + self.num_copy + self.num_constant

    def num_params(self, d_model: int) -> int:
        return self.num_constant * (d_model + linear_params(d_model, 2, bias=False))

    def flops_per_token(self, d_model: int) -> int:
        return self.num_constant * linear_flops(d_model, 2) + linear_flops(
            self.num_constant, d_model
        )


class MoEConfig(FFNConfig, frozen=True):
    """A routed Mixture of Experts: a router sends each token to a few of many experts."""

    type: Literal["moe"] = "moe"
    num_experts: int = Field(default=8, ge=1, le=MOST)
    """E, the experts the router chooses from."""
    router: RouterConfig = TopKRouterConfig()
    """Who goes where."""
    experts: ExpertsConfig = GatedExpertsConfig()
    """What one expert is."""
    capacity: CapacityConfig = CapacityConfig()
    """How many tokens an expert takes; dropless by default."""
    zero_computation: ZeroComputationConfig = ZeroComputationConfig()
    """Experts that cost nothing, which the router chooses from too; none by default."""
    shared_expert: FFNConfig | None = None
    """A block that every token passes through beside its routed experts (DeepSeekMoE)."""
    combine: CombineConfig = SumConfig()
    """How the shared expert's output joins the routed one."""

    is_sparse: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check_parts_against_each_other(self) -> MoEConfig:
        self._check_router()
        if self.shared_expert is None and self.combine.type != "sum":
            raise ValueError(
                f"combine.type ('{self.combine.type}') joins a shared expert, but shared_expert is "
                "null; give it one, such as 'swiglu', or leave combine out"
            )
        if self.shared_expert is not None and self.shared_expert.is_sparse:
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
        """What the router chooses from: the experts, and behind them those without computation."""
        return self.num_experts + self.zero_computation.total

    @property
    def experts_per_token(self) -> float:
        """Experts with a network that a token passes through, on average, if all are chosen equally often."""
        share = self.num_experts / self.num_routable
        return self.router.experts_per_token(self.num_routable) * share

    @property
    def not_causal_because(self) -> str | None:
        shared = self.shared_expert.not_causal_because if self.shared_expert else None
        return self.router.not_causal_because or self.capacity.not_causal_because or shared

    def routers(self) -> dict[str, tuple[RouterConfig, int]]:
        return {"routing": (self.router, self.num_routable)}

    def build(self, d_model: int) -> FFNBlock:
        from moe_ffn.ffn.moe import MoEFFN

        return MoEFFN(self, d_model)

    def num_params(self, d_model: int) -> int:
        return self._always_on_params(d_model) + self.num_experts * self._expert_params(d_model)

    def num_active_params(self, d_model: int) -> int:
        return self._always_on_params(d_model) + round(
            self.experts_per_token * self._expert_params(d_model)
        )

    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        routed = round(
            self.experts_per_token * self.experts.flops_per_pair(d_model, self.experts_per_token)
        )
        shared = 0
        if self.shared_expert is not None:
            shared = self.shared_expert.flops_per_token(d_model, seq_len)
            shared += self.combine.flops_per_token(d_model)
        router = self.router.flops_per_token(d_model, self.num_routable)
        return routed + shared + router + self.zero_computation.flops_per_token(d_model)

    def describe(self) -> str:
        return f"{self.type}, {self.num_experts} experts ({self.experts.type}), {self.router.describe()}"

    def _expert_params(self, d_model: int) -> int:
        return self.experts.params_per_expert(d_model, self.experts_per_token)

    def _always_on_params(self, d_model: int) -> int:
        shared = 0
        if self.shared_expert is not None:
            shared = self.shared_expert.num_params(d_model) + self.combine.num_params(d_model)
        router = self.router.num_params(d_model, self.num_routable)
        return router + shared + self.zero_computation.num_params(d_model)


class SoftMoEConfig(FFNConfig, frozen=True):
    """Soft MoE: experts work on slots, weighted means of all tokens; nothing is chosen or dropped.

    Puigcerver et al. 2023 (arXiv:2308.00951). Every token reaches every expert, so it returns no routing.
    """

    type: Literal["soft_moe"] = "soft_moe"
    num_experts: int = Field(default=8, ge=1, le=MOST)
    """E, the experts."""
    slots_per_expert: int = Field(default=32, ge=1, le=MOST)
    """Slots of each expert and sequence; as many slots as tokens cost what top-1 routing does."""
    experts: ExpertsConfig = GatedExpertsConfig()
    """What one expert is; by default as wide as the dense block."""

    @property
    def not_causal_because(self) -> str | None:
        return "type 'soft_moe' mixes all tokens of a sequence; use 'moe' with router.type 'top_k'"

    @property
    def num_slots(self) -> int:
        return self.num_experts * self.slots_per_expert

    def build(self, d_model: int) -> FFNBlock:
        from moe_ffn.ffn.soft_moe import SoftMoEFFN

        return SoftMoEFFN(self, d_model)

    def num_params(self, d_model: int) -> int:
        experts = self.num_experts * self.experts.params_per_expert(d_model, 1)
        return experts + d_model * self.num_slots + 1

    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        # Logits, and the sums into the slots and out of them; then each slot passes its expert.
        mixing = 3 * linear_flops(d_model, self.num_slots)
        return mixing + round(self.num_slots * self.experts.flops_per_pair(d_model, 1) / seq_len)

    def describe(self) -> str:
        return (
            f"{self.type}, {self.num_experts} experts ({self.experts.type}), {self.num_slots} slots"
        )


class MixtureOfDepthsConfig(FFNConfig, frozen=True):
    """Mixture-of-depths: a router decides which tokens pass through a block at all, k of every one.

    Raposo et al. 2024 (arXiv:2404.02258). The tokens left out get 0, so that the residual stream
    carries them past. Expert choice is the paper's router; `relu` is a causal one.
    """

    type: Literal["mixture_of_depths"] = "mixture_of_depths"
    ffn: FFNConfig = GatedConfig()
    """The block that some tokens pass through."""
    router: RouterConfig = ExpertChoiceRouterConfig(k=0.5, score="sigmoid")
    """Which tokens, and with what weight; its k is their share."""

    is_sparse: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check_parts_against_each_other(self) -> MixtureOfDepthsConfig:
        if isinstance(self.ffn, MixtureOfDepthsConfig):
            raise ValueError(
                "ffn.type ('mixture_of_depths') must not be another mixture of depths; multiply their "
                "router.k instead"
            )
        if self.share >= 1:
            raise ValueError(
                f"router.type ('{self.router.type}') sends {self.share:g} of the tokens through the "
                "block, so it leaves none out; use 'expert_choice' with score: sigmoid, or 'relu', "
                "with k below 1"
            )
        self.router.check_num_experts(1)
        return self

    @property
    def share(self) -> float:
        """Of the tokens, those that pass through the block."""
        return self.router.experts_per_token(1)

    @property
    def not_causal_because(self) -> str | None:
        if self.router.not_causal_because:
            return self.router.not_causal_because.replace("'top_k'", "'relu'")
        if isinstance(self.ffn, MoEConfig) and self.ffn.capacity.is_limited:
            return (
                "its ffn.capacity grows with the number of tokens chosen, later ones among them; set "
                "ffn.capacity.factor and eval_factor to null"
            )
        return self.ffn.not_causal_because

    def routers(self) -> dict[str, tuple[RouterConfig, int]]:
        inner = self.ffn.routers()
        routers = {"routing": (self.router, 1)}
        return routers | ({"inner_routing": inner["routing"]} if inner else {})

    def build(self, d_model: int) -> FFNBlock:
        from moe_ffn.ffn.mixture_of_depths import MixtureOfDepthsFFN

        return MixtureOfDepthsFFN(self, d_model)

    def num_params(self, d_model: int) -> int:
        return self.router.num_params(d_model, 1) + self.ffn.num_params(d_model)

    def num_active_params(self, d_model: int) -> int:
        router = self.router.num_params(d_model, 1)
        return router + round(self.share * self.ffn.num_active_params(d_model))

    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        router = self.router.flops_per_token(d_model, 1)
        inner_length = max(round(self.share * seq_len), 1)
        return router + round(self.share * self.ffn.flops_per_token(d_model, inner_length))

    def describe(self) -> str:
        return f"{self.router.describe()} of ({self.ffn.describe()})"
