"""What the config of every router is; torch-free (see `moe_ffn.config`)."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from moe_ffn.config import Config, TaggedConfig
from moe_ffn.sizes import linear_flops

if TYPE_CHECKING:
    from moe_ffn.routing.base import Router


class RouterConfig(TaggedConfig, frozen=True):
    """Chooses which experts each token goes to, and with what weight."""

    has_selection_probs: ClassVar[bool] = False
    """True where `Routing.selection_probs_TE` is given, which the load loss of noisy top-k needs."""

    @property
    def not_causal_because(self) -> str | None:
        """Why a later token can change where an earlier one goes, and what to use instead."""
        return None

    @property
    def is_causal(self) -> bool:
        return self.not_causal_because is None

    @property
    def has_correction_bias(self) -> bool:
        """True where the router has a bias that `objective.bias_rule` moves."""
        return False

    def check_num_experts(self, num_experts: int) -> None:
        """ValueError, in one sentence, when this router cannot serve `num_experts` experts."""

    @abstractmethod
    def build(self, d_model: int, num_experts: int) -> Router: ...

    @abstractmethod
    def experts_per_token(self, num_experts: int) -> float:
        """How many experts a token goes to, on average."""

    def num_params(self, d_model: int, num_experts: int) -> int:
        return d_model * num_experts

    def flops_per_token(self, d_model: int, num_experts: int) -> int:
        """Forward FLOPs of the matrix products for one token."""
        return linear_flops(d_model, num_experts)

    def describe(self) -> str:
        """A few words for tables."""
        return self.type


class LinearRouterConfig(RouterConfig, frozen=True):
    """A router whose logits are a projection of the token."""

    bias: bool = False
    """Add a learned bias to the logits, as GPT-OSS does."""
    jitter: float = Field(default=0.0, ge=0, lt=1)
    """In training, multiply what the router sees by noise from U(1 - jitter, 1 + jitter) (Switch)."""

    def num_params(self, d_model: int, num_experts: int) -> int:
        return d_model * num_experts + (num_experts if self.bias else 0)


class GroupsConfig(Config, frozen=True):
    """Node-limited routing: a token's experts come from a few groups of neighbours (DeepSeek-V3)."""

    num_groups: int = Field(ge=1)
    """Groups of equal size that the experts are divided into."""
    keep: int = Field(ge=1)
    """Groups a token may go to, the ones with the highest score."""
    score_top: int | None = Field(default=2, ge=1)
    """A group's score is the sum of its best experts' scores, this many of them: 2 in DeepSeek-V3;
    null stands for k / keep, Megatron-LM's rule."""

    def experts_scored(self, k: int) -> int:
        return k // self.keep if self.score_top is None else self.score_top

    def check(self, k: int, num_experts: int) -> None:
        if num_experts % self.num_groups:
            divisor = next(n for n in range(self.num_groups, 0, -1) if num_experts % n == 0)
            raise ValueError(
                f"router.groups.num_groups ({self.num_groups}) must divide the number of experts "
                f"({num_experts}); use a divisor of it, such as {divisor}"
            )
        if self.keep > self.num_groups:
            raise ValueError(
                f"router.groups.keep ({self.keep}) must not exceed router.groups.num_groups "
                f"({self.num_groups}); lower router.groups.keep"
            )
        size = num_experts // self.num_groups
        if k > self.keep * size:
            raise ValueError(
                f"router.k ({k}) must not exceed the experts a token may choose from "
                f"({self.keep * size}: router.groups.keep {self.keep}, each group of {size}); "
                "raise router.groups.keep or lower router.k"
            )
        if self.experts_scored(k) > size:
            raise ValueError(
                f"router.groups.score_top ({self.score_top}) must not exceed the experts of a group "
                f"({size}); lower router.groups.score_top or router.groups.num_groups"
            )
        if self.experts_scored(k) < 1:
            raise ValueError(
                f"router.groups.score_top (null) scores a group by k / keep experts, but router.k "
                f"({k}) is below router.groups.keep ({self.keep}); set router.groups.score_top: 1 or "
                "lower router.groups.keep"
            )


class TokenChoiceConfig(LinearRouterConfig, frozen=True):
    """The options that softmax and sigmoid top-k share."""

    k: int = Field(default=2, ge=1)
    """Experts per token."""
    renormalize: bool = False
    """Divide the k weights by their sum. Not for k = 1: the weight would be a constant 1."""
    scale: float = Field(default=1.0, gt=0)
    """Multiplies the weights (DeepSeek's routed scaling factor)."""
    groups: GroupsConfig | None = None
    """Limit each token to a few groups of experts; off by default."""
    correction_bias: bool = False
    """Select by score + bias and weight by the score alone; `objective.bias_rule` moves the bias
    towards balance (Wang et al. 2024, arXiv:2408.15664)."""

    @model_validator(mode="after")
    def _keep_the_router_gradient(self) -> TokenChoiceConfig:
        if self.k == 1 and self.renormalize:
            raise ValueError(
                "renormalize (true) with k (1) makes every weight a constant 1, so the router would "
                "never learn; set renormalize: false or k >= 2"
            )
        return self

    @property
    def has_correction_bias(self) -> bool:
        return self.correction_bias

    def check_num_experts(self, num_experts: int) -> None:
        check_k(self.k, num_experts)
        if self.groups is not None:
            self.groups.check(self.k, num_experts)

    def experts_per_token(self, num_experts: int) -> float:
        return self.k

    def describe(self) -> str:
        return f"{self.type} k={self.k}"


def check_k(k: float, num_experts: int) -> None:
    if k > num_experts:
        raise ValueError(
            f"router.k ({k:g}) must not exceed num_experts ({num_experts}); "
            "lower router.k or raise num_experts"
        )
