"""The interface of every feed-forward block: `FFNConfig` builds an `FFNBlock`; what blocks share.

Names of routings, checks of a block's input, and its flat form; a custom block may call them too.

T tokens
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self, TypeVar

import torch
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

    def router_infos(self) -> dict[str, RouterInfo]:
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
                `moe_ffn.ffn.base` and `check_dtype` in `moe_ffn.kernels.base`, for custom blocks too.

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


# -- names of routings

Value = TypeVar("Value")

OWN = "routing"
"""The key of `FFNOutput.routings` for the block's own router."""

ROUTING_SUFFIX = "(?:/(?:inner|round_[0-9]+))*"
"""Regular expression of what follows the name of a layer in those of the routings of its block."""


def round_name(number: int) -> str:
    """The key of `FFNOutput.routings` for a round, counted from 0, of a chain of experts: `round_2`."""
    return f"round_{number + 1}" if number else OWN


def within(outer: str, values: Mapping[str, Value]) -> dict[str, Value]:
    """The values of an inner block, by routing name, renamed for the module that holds it as `outer`.

    `routing`, the block's own, becomes `outer`; `inner` becomes `outer/inner`.
    """
    return {outer if name == OWN else f"{outer}/{name}": value for name, value in values.items()}


# -- inputs


def check_input(
    x: Tensor, context: TokenContext | None, d_model: int, block: nn.Module | None = None
) -> None:
    """Refuse an input that no block can transform; every block calls it first. It reads no tensor's values.

    Args:
        x: the input of the block.
        context: its context.
        d_model: the width that the block was built for.
        block: its class begins the sentence.

    Raises:
        TypeError: `x`, `context` or what is in it is of another type.
        ValueError: a dtype, a width or a shape is wrong.
    """
    try:
        _check_x(x, d_model)
        if context is not None:
            _check_context(context, x.shape[:-1], x.device)
    except (TypeError, ValueError) as error:
        if block is None:
            raise
        raise type(error)(f"{type(block).__name__}: {error}") from None


def _check_x(x: Tensor, d_model: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor, but is of type {type(x).__name__}")
    if not x.dtype.is_floating_point:
        raise ValueError(
            f"x must be floating point, but is {x.dtype}; a block takes embedded tokens, not their ids"
        )
    if x.dtype.itemsize < 2:
        raise ValueError(
            f"x must have at least 16 bits, but is {x.dtype}, which torch stores and does not compute "
            "with; use x.to(torch.bfloat16)"
        )
    if x.layout != torch.strided or x.is_nested:
        layout = "a nested tensor" if x.is_nested else f"of the layout {x.layout}"
        raise ValueError(
            f"x must be a dense (..., {d_model}), but is {layout}; pad it to one shape, and say in "
            "TokenContext.mask which tokens are real"
        )
    if x.ndim == 0:
        raise ValueError(f"x must be (..., {d_model}), but has no axis at all")
    if x.shape[-1] != d_model:
        raise ValueError(
            f"x has width {x.shape[-1]}, but this block was built for d_model {d_model}; "
            f"x must be (..., {d_model})"
        )


def _check_context(context: TokenContext, leading_shape: torch.Size, device: torch.device) -> None:
    if not isinstance(context, TokenContext):
        raise TypeError(
            f"context must be a TokenContext, but is of type {type(context).__name__}; "
            "use TokenContext(mask=..., token_ids=...)"
        )
    for name in ("mask", "token_ids", "expert_ids"):
        value = getattr(context, name)
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(
                f"TokenContext.{name} must be a torch.Tensor, but is of type {type(value).__name__}"
            )
        if (value.shape[:-1] if name == "expert_ids" else value.shape) != leading_shape:
            raise ValueError(
                f"TokenContext.{name} must have the leading shape of x, {tuple(leading_shape)}, "
                f"but has {tuple(value.shape)}"
            )
        if value.device != device:
            raise ValueError(
                f"TokenContext.{name} is on {value.device}, but x is on {device}; "
                f"use {name}.to(x.device)"
            )
    length = context.sequence_length
    if length is None:
        return
    if not isinstance(length, (int, torch.SymInt)):
        raise TypeError(
            f"TokenContext.sequence_length must be an int, but is of type {type(length).__name__}"
        )
    num_tokens = leading_shape.numel()
    if num_tokens % length:
        raise ValueError(
            f"TokenContext.sequence_length ({length}) must divide the number of tokens in x "
            f"({num_tokens})"
        )


def without_padding(x: Tensor, context: TokenContext | None) -> Tensor:
    """`x` (..., d_model), zero where it is padding.

    Padding may hold anything, NaN too, which would reach the gradients of weights as 0 * NaN.
    """
    if context is None or context.mask is None:
        return x
    return x.masked_fill(~context.mask.unsqueeze(-1), 0)


def flatten_tokens(x: Tensor, context: TokenContext | None) -> tuple[Tensor, TokenContext]:
    """`x` (..., d_model) as (T, d_model), zero where it is padding, and the context flattened alike.

    Both have passed `check_input`.
    """
    context = context or TokenContext()
    leading_shape = x.shape[:-1]
    x = without_padding(x, context)
    length = context.sequence_length or (leading_shape[-1] if leading_shape else 1)
    flat = TokenContext(
        mask=None if context.mask is None else context.mask.reshape(-1),
        token_ids=None if context.token_ids is None else context.token_ids.reshape(-1),
        expert_ids=None if context.expert_ids is None else context.expert_ids.flatten(0, -2),
        sequence_length=max(length, 1),
    )
    return x.reshape(-1, x.shape[-1]), flat
