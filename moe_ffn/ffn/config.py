"""The configs of the feed-forward family; torch-free (see `moe_ffn.config`).

To add a family to the package: its config here, its module in a file of its own beside this one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from moe_ffn.activations import Activation, GatedType
from moe_ffn.config import Config, TaggedConfig
from moe_ffn.errors import ConfigError, explain
from moe_ffn.experts.config import ExpertsConfig, GatedExpertsConfig
from moe_ffn.routing.config import RouterConfig, TopKRouterConfig
from moe_ffn.sizes import (
    gated_params,
    gated_width,
    linear_flops,
    linear_params,
    mlp_params,
)

if TYPE_CHECKING:
    from moe_ffn.ffn.base import FFNBlock


class FFNConfig(TaggedConfig, frozen=True):
    """One feed-forward block, and what it costs.

    A block of your own subclasses this in a file of your own, defines `build`, `num_params` and
    `flops_per_token`, and is named in YAML as `type: my_module:MyConfig`.
    """

    is_sparse: ClassVar[bool] = False
    """True where each token uses a part of the parameters, so that the block returns a Routing."""

    @property
    def is_causal(self) -> bool:
        """False where a token's output may depend on later tokens."""
        return True

    @abstractmethod
    def build(self, d_model: int) -> FFNBlock: ...

    @abstractmethod
    def num_params(self, d_model: int) -> int: ...

    def num_active_params(self, d_model: int) -> int:
        """Parameters that one token passes through, on average."""
        return self.num_params(d_model)

    @abstractmethod
    def flops_per_token(self, d_model: int) -> int:
        """Forward FLOPs of the matrix products for one token; training costs three times that."""

    def describe(self) -> str:
        """A few words for tables."""
        return self.type


class IdentityConfig(FFNConfig, frozen=True):
    """No feed-forward block: adds nothing to the residual stream, for ablations."""

    type: Literal["identity"] = "identity"

    def build(self, d_model: int) -> FFNBlock:
        from moe_ffn.ffn.identity import IdentityFFN

        return IdentityFFN()

    def num_params(self, d_model: int) -> int:
        return 0

    def flops_per_token(self, d_model: int) -> int:
        return 0


class DenseConfig(FFNConfig, frozen=True):
    """Two matrices and an activation between them (Vaswani et al. 2017, section 3.3)."""

    type: Literal["dense"] = "dense"
    d_ff: int | None = Field(default=None, ge=1)
    """Hidden width; 4 * d_model by default."""
    activation: Activation = "gelu"
    """Element-wise function between the two matrices."""
    bias: bool = False
    """Add a bias to both matrices."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of zeroing a hidden unit, in training."""

    def width(self, d_model: int) -> int:
        return self.d_ff or 4 * d_model

    def build(self, d_model: int) -> FFNBlock:
        from moe_ffn.ffn.dense import DenseFFN

        return DenseFFN(self, d_model)

    def num_params(self, d_model: int) -> int:
        return mlp_params(d_model, self.width(d_model), self.bias)

    def flops_per_token(self, d_model: int) -> int:
        return 2 * linear_flops(d_model, self.width(d_model))


class GatedConfig(FFNConfig, frozen=True):
    """A gated linear unit, down(act(gate x) * up x) (Shazeer 2020, arXiv:2002.05202).

    The type is the activation of the gate: swiglu SiLU, geglu GELU, reglu ReLU, glu sigmoid,
    bilinear none.
    """

    type: GatedType = "swiglu"
    d_ff: int | None = Field(default=None, ge=1)
    """Hidden width; by default 8/3 * d_model, rounded, so that it costs what a dense block does."""
    multiple_of: int = Field(default=8, ge=1)
    """What the default width is rounded to."""
    bias: bool = False
    """Add a bias to the three matrices."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of zeroing a hidden unit, in training."""

    def width(self, d_model: int) -> int:
        return self.d_ff or gated_width(d_model, self.multiple_of)

    def build(self, d_model: int) -> FFNBlock:
        from moe_ffn.ffn.gated import GatedFFN

        return GatedFFN(self, d_model)

    def num_params(self, d_model: int) -> int:
        return gated_params(d_model, self.width(d_model), self.bias)

    def flops_per_token(self, d_model: int) -> int:
        return 3 * linear_flops(d_model, self.width(d_model))


class ConvConfig(FFNConfig, frozen=True):
    """Two 1-D convolutions over positions; with kernel size 1 it is the dense block.

    Vaswani et al. 2017, section 3.3: "another way of describing this is as two convolutions with
    kernel size 1".
    """

    type: Literal["conv"] = "conv"
    kernel_size: int = Field(default=3, ge=1)
    """Positions each convolution sees."""
    causal: bool = True
    """Look back only. False centres the kernel, which a causal model refuses."""
    d_ff: int | None = Field(default=None, ge=1)
    """Hidden width; 4 * d_model by default."""
    activation: Activation = "gelu"
    """Element-wise function between the two convolutions."""
    bias: bool = False
    """Add a bias to both convolutions."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of zeroing a hidden unit, in training."""

    @property
    def is_causal(self) -> bool:
        return self.causal or self.kernel_size == 1

    def width(self, d_model: int) -> int:
        return self.d_ff or 4 * d_model

    def build(self, d_model: int) -> FFNBlock:
        from moe_ffn.ffn.conv import ConvFFN

        return ConvFFN(self, d_model)

    def num_params(self, d_model: int) -> int:
        width, k = self.width(d_model), self.kernel_size
        up = linear_params(k * d_model, width, self.bias)
        return up + linear_params(k * width, d_model, self.bias)

    def flops_per_token(self, d_model: int) -> int:
        return 2 * linear_flops(self.kernel_size * d_model, self.width(d_model))


class CapacityConfig(Config, frozen=True):
    """How many (token, expert) pairs an expert takes: ceil(factor * pairs / num_experts)."""

    factor: float | None = Field(default=None, gt=0)
    """Capacity factor in training; 1 is what perfect balance needs, null drops nothing."""
    eval_factor: float | None = Field(default=None, gt=0)
    """Capacity factor in evaluation, where dropping makes an output depend on its batch."""


class MoEConfig(FFNConfig, frozen=True):
    """A routed Mixture of Experts: a router sends each token to a few of many experts."""

    type: Literal["moe"] = "moe"
    num_experts: int = Field(default=8, ge=1)
    """E, the experts the router chooses from."""
    router: RouterConfig = TopKRouterConfig()
    """Who goes where."""
    experts: ExpertsConfig = GatedExpertsConfig()
    """What one expert is."""
    capacity: CapacityConfig = CapacityConfig()
    """How many tokens an expert takes; dropless by default."""
    shared_expert: FFNConfig | None = None
    """A block that every token passes through beside its routed experts (DeepSeekMoE)."""

    is_sparse: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check_parts_against_each_other(self) -> MoEConfig:
        self.router.check_num_experts(self.num_experts)
        if self.shared_expert is not None and self.shared_expert.is_sparse:
            raise ValueError(
                f"shared_expert.type ('{self.shared_expert.type}') must not be a sparse block: every "
                "token passes through a shared expert; use 'swiglu' or 'dense'"
            )
        return self

    @property
    def experts_per_token(self) -> float:
        """Routed experts that a token passes through, on average."""
        return self.router.experts_per_token(self.num_experts)

    @property
    def is_causal(self) -> bool:
        shared_is_causal = self.shared_expert is None or self.shared_expert.is_causal
        return self.router.is_causal and shared_is_causal

    def build(self, d_model: int) -> FFNBlock:
        from moe_ffn.ffn.moe import MoEFFN

        return MoEFFN(self, d_model)

    def num_params(self, d_model: int) -> int:
        return self._always_on_params(d_model) + self.num_experts * self._expert_params(d_model)

    def num_active_params(self, d_model: int) -> int:
        return self._always_on_params(d_model) + round(
            self.experts_per_token * self._expert_params(d_model)
        )

    def flops_per_token(self, d_model: int) -> int:
        routed = round(
            self.experts_per_token * self.experts.flops_per_pair(d_model, self.experts_per_token)
        )
        shared = self.shared_expert.flops_per_token(d_model) if self.shared_expert else 0
        return routed + shared + linear_flops(d_model, self.num_experts)

    def describe(self) -> str:
        return f"{self.type}, {self.num_experts} experts ({self.experts.type}), {self.router.describe()}"

    def _expert_params(self, d_model: int) -> int:
        return self.experts.params_per_expert(d_model, self.experts_per_token)

    def _always_on_params(self, d_model: int) -> int:
        shared = self.shared_expert.num_params(d_model) if self.shared_expert else 0
        return self.router.num_params(d_model, self.num_experts) + shared


def build_ffn(config: Mapping[str, Any] | str | FFNConfig, d_model: int) -> FFNBlock:
    """A feed-forward block from a plain mapping, a type name or a config.

        build_ffn({"type": "moe", "num_experts": 8, "router": {"type": "top_k", "k": 2}}, d_model=512)
        build_ffn("swiglu", d_model=512)

    Raises:
        ConfigError: one line per mistake, naming the key.

    """
    if d_model < 1:
        raise ConfigError(f"d_model must be at least 1, got {d_model}")
    try:
        return FFNConfig.model_validate(config).build(d_model)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(error))) from error
