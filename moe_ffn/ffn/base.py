"""The interface of every feed-forward block: `FFNConfig` builds an `FFNBlock`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from torch import Tensor, nn

from moe_ffn.config.base import TaggedConfig
from moe_ffn.config.errors import Refusal, Refusing, Situation, first_refusal
from moe_ffn.config.sizes import MatchConfig
from moe_ffn.dispatch import Dispatcher
from moe_ffn.experts.base import Experts, ExpertsConfig
from moe_ffn.ffn.zero_computation import ZeroComputationConfig
from moe_ffn.outputs import FFNOutput, TokenContext
from moe_ffn.routing.base import Router, RouterConfig
from moe_ffn.routing.capacity import CapacityConfig


@dataclass(frozen=True)
class RouterInfo:
    """One router of a block, the experts that it chooses from, and the options around it."""

    router: RouterConfig

    num_experts: int
    """Experts that it chooses from, including those without a network."""

    zero_computation: ZeroComputationConfig = field(default_factory=ZeroComputationConfig)
    """The experts without a network, which are the last of them."""

    capacity: CapacityConfig = field(default_factory=CapacityConfig)
    """The limit on the tokens of one expert."""

    shared_expert: FFNConfig | None = None
    """The block that every token passes through beside its routed experts."""

    is_gate: bool = False
    """True for the router of a mixture of depths: tokens it does not choose skip the whole inner block, whose
    routings hold the chosen tokens alone."""

    share: float = 1.0
    """Fraction of the tokens that reach it: below 1 inside a mixture of depths."""

    experts: ExpertsConfig | None = None
    """The kind of its experts; None where it chooses a whole block, or a custom block does not say."""

    path: str = ""
    """Dotted path from the queried config to the block of this router, such as `ffn`; empty for itself."""

    @property
    def num_networks(self) -> int:
        """The experts with a network, which are the first."""
        return self.num_experts - self.zero_computation.total

    def expert_names(self) -> tuple[str, ...]:
        """The number of each expert, with a prefix where it has no network: `7`, `copy8`."""
        words = [""] * self.num_networks + self.zero_computation.words()
        return tuple(f"{word}{number}" for number, word in enumerate(words))

    def inside(self, option: str) -> Self:
        """The router as seen from the config that holds its block as `option`."""
        return replace(self, path=f"{option}.{self.path}" if self.path else option)


@dataclass(frozen=True)
class ExpertStack:
    """The experts of a block: their config, and the arguments they are built with."""

    config: ExpertsConfig
    num_experts: int
    experts_per_token: float

    def build(self, d_model: int) -> Experts:
        return self.config.build(d_model, self.num_experts, self.experts_per_token)

    def num_params(self, d_model: int) -> int:
        return self.params_of(self.num_experts, d_model)

    def num_active_params(self, d_model: int) -> int:
        return self.params_of(self.experts_per_token, d_model)

    def flops_per_token(
        self, d_model: int, pairs_per_token: float, rows_per_token: float = 1
    ) -> int:
        """Forward FLOPs for one token.

        Args:
            pairs_per_token: experts that it passes through.
            rows_per_token: rows that the experts are given for it.
        """
        pair = self.config.flops_per_pair(d_model, self.experts_per_token)
        shared = self.config.shared_flops_per_token(d_model, self.experts_per_token)
        return round(pairs_per_token * pair + rows_per_token * shared)

    def params_of(self, num_experts: float, d_model: int) -> int:
        """Number of parameters of `num_experts` experts and their shared weights."""
        own = self.config.params_per_expert(d_model, self.experts_per_token)
        return round(num_experts * own) + self.config.shared_params(d_model, self.experts_per_token)


class FFNConfig(TaggedConfig, frozen=True):
    """One feed-forward block and its costs.

    A custom block subclasses this in your own file, defines `build`, `num_params` and `flops_per_token`, and
    is named in YAML as `type: my_module:MyConfig`. `moe_ffn.testing.check_ffn` tests it.
    """

    def routers(self) -> dict[str, RouterInfo]:
        """The routers of the block, named as in `FFNOutput.routings`."""
        return {}

    def inner_blocks(self) -> dict[str, FFNConfig]:
        """The blocks inside this one, by option: every option that is a block."""
        return {option: value for option, value in self if isinstance(value, FFNConfig)}

    @property
    def expert_stack(self) -> ExpertStack | None:
        """The experts in the option `experts`; None for a block without any."""
        return None

    def refusal(self, situation: Situation) -> Refusal | None:
        """Return the reason why this block cannot serve a situation, and what to use instead; None if it can.

        By default the first refusal of the blocks and experts inside. A block has to override it to be
        `cached`, since by default nothing is known of how it mixes tokens.
        """
        refusal = first_refusal(parts_of(self), situation)
        if refusal is None and situation.cached:
            return Refusal(
                f"type '{self.type}' does not say that it takes each token by itself",
                "return None from refusal(situation) in its config if it does",
            )
        return refusal

    @abstractmethod
    def build(self, d_model: int) -> FFNBlock: ...

    @abstractmethod
    def num_params(self, d_model: int) -> int: ...

    def num_active_params(self, d_model: int) -> int:
        """Parameters that one token passes through, on average."""
        return self.num_params(d_model)

    @abstractmethod
    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        """Forward FLOPs of the matrix products for one token of a sequence of `seq_len`.

        Training costs three times that.
        """

    def describe(self) -> str:
        """A few words for tables."""
        return self.type


def parts_of(config: FFNConfig) -> dict[str, Refusing]:
    """Return the blocks inside a block, then its experts, by option."""
    stack = config.expert_stack
    experts = {} if stack is None else {"experts": stack.config}
    return {**config.inner_blocks(), **experts}


PlaceExperts = Callable[[Experts, int], Dispatcher]
"""(experts, their number) -> what brings tokens to them, once each rank has its share of them."""

MatchConfig.model_rebuild(_types_namespace={"FFNConfig": FFNConfig})


class FFNBlock(nn.Module, ABC):
    """Maps (..., d_model) to (..., d_model), and returns where the tokens went.

    The module keeps no observations: all of them are in the output.
    """

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput: ...

    @abstractmethod
    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        """Transform each token.

        Args:
            x: (batch, seq, d_model), or any (..., d_model), of the weights' dtype or under autocast.
            context: padding mask and token ids, for the blocks that need them; see `TokenContext`.

        Returns:
            hidden, of the shape and dtype of `x`, and the routings by name, none for a dense block.

        Raises:
            TypeError, ValueError: `x` or `context` does not fit, in one sentence; see `check_input` in
                `moe_ffn.ffn.inputs` and `check_dtype` in `moe_ffn.kernels.base`, for custom blocks too.

        """

    def routers(self) -> dict[str, Router]:
        """The routers behind `FFNOutput.routings`, under the same names."""
        return {}

    def place_experts(self, place: PlaceExperts) -> None:
        """Have `place` divide the experts inside among ranks; its dispatcher brings tokens from then on.

        By default in every block inside.
        """
        for block in self.children():
            if isinstance(block, FFNBlock):
                block.place_experts(place)
