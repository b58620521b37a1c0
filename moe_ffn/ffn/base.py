"""The interface of every feed-forward block: `FFNConfig` builds an `FFNBlock`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Self

from torch import Tensor, nn

from moe_ffn.config.base import TaggedConfig
from moe_ffn.config.errors import Refusal, first_refusal
from moe_ffn.config.sizes import MatchConfig
from moe_ffn.dispatch import Dispatcher
from moe_ffn.experts.base import Experts, ExpertsConfig
from moe_ffn.ffn.zero_computation import ZeroComputationConfig
from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.outputs import FFNOutput, Memory, TokenContext
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
    """One feed-forward block, and what it costs.

    A block of your own subclasses this in a file of your own, defines `build`, `num_params` and
    `flops_per_token`, and is named in YAML as `type: my_module:MyConfig`.
    `moe_ffn.testing.check_ffn` tries it.
    """

    by_token: ClassVar[bool] = False
    """True where, in evaluation, what a token becomes depends on that token alone, its id included."""

    @property
    def is_sparse(self) -> bool:
        """True where a router gives each token a part of the parameters: the block returns a Routing."""
        return bool(self.routers())

    @property
    def reads_history(self) -> bool:
        """True where a block reads of earlier tokens what it keeps in `TokenContext.history`."""
        return any(block.reads_history for block in self.inner_blocks().values())

    @property
    def not_causal_because(self) -> Refusal | None:
        """Why a token's output may depend on later tokens, and what to use instead; None if causal.

        By default as of the blocks inside.
        """
        inner = self.inner_blocks().items()
        return first_refusal({option: block.not_causal_because for option, block in inner})

    @property
    def not_cached_because(self) -> Refusal | None:
        """Why, in evaluation, a token computed alone may become something else than in its sequence.

        None where it does not, so that a decoder may keep keys and values, and compute new tokens alone. It
        hands in `TokenContext.history`, where a block keeps what it reads of earlier tokens.
        """
        if self.by_token:
            return None
        return self.not_causal_because or Refusal(
            f"type '{self.type}' does not say that it takes each token by itself",
            "set by_token in its config if it does",
        )

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

    def as_experts(self, d_model: int) -> ExpertsConfig | None:
        """Experts each of which is a network such as this block; None where experts of that kind are none."""
        return None

    def with_num_experts(self, num_experts: int, d_model: int) -> FFNConfig | None:
        """The block with so many experts, each as wide as now; None where it has no experts of its own.

        Raises:
            ValueError: its router cannot serve so few.
        """
        return None

    def refusal_on(self, device: str) -> Refusal | None:
        """Why the block, or one inside it, does not run on a kind of device, `cpu` or `cuda`."""
        parts = {option: block.refusal_on(device) for option, block in self.inner_blocks().items()}
        if self.expert_stack is not None:
            parts["experts"] = self.expert_stack.config.refusal_on(device)
        return first_refusal(parts)

    def refusal_over(self, num_ranks: int) -> Refusal | None:
        """Why the experts cannot be divided among so many ranks; None where they can, or there are none."""
        parts = {
            option: block.refusal_over(num_ranks) for option, block in self.inner_blocks().items()
        }
        return first_refusal(parts)

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

    def routed_flops_per_token(self, d_model: int, seq_len: int) -> int:
        """Those of `flops_per_token` that are an expert's, and done where that expert is."""
        return 0

    def describe(self) -> str:
        """A few words for tables."""
        return self.type


PlaceExperts = Callable[[Experts, int], Dispatcher]
"""(experts, their number) -> what brings tokens to them, once each rank has its share of them."""

MatchConfig.model_rebuild(_types_namespace={"FFNConfig": FFNConfig})


class FFNBlock(nn.Module, ABC):
    """Maps (..., d_model) to (..., d_model), and says where the tokens went.

    Nothing observed is kept on the module: what a caller wants to know is in the output.
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
                `moe_ffn.outputs` and `check_dtype` in `moe_ffn.kernels.base`, which your own block may call.

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

    def networks(self) -> ExpertWeights | None:
        """Its weights as those of E networks, one of a dense block; None where they are of another kind.

        Those of experts are the parameters themselves.
        """
        return None

    def memories(self, x: Tensor, context: TokenContext | None = None) -> list[Memory]:
        """The hidden units of each network in the block, and how `x` activates them.

        Arguments as of `forward`. Empty where there are no units, or where none sees a token by itself.
        """
        return []
