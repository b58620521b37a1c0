"""Interface of every feed-forward block: `FFNConfig` builds an `FFNBlock`.

The functions that name routings, check inputs and flatten tokens are for custom blocks too.

T tokens
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self, TypeVar

import torch
from torch import Tensor, nn

from moe_ffn import notebook_cards
from moe_ffn.config.base import TaggedConfig
from moe_ffn.config.errors import HasRequirements, Unsupported, UseCase, first_unsupported
from moe_ffn.config.sizes import MatchConfig
from moe_ffn.experts.base import Experts, ExpertsConfig
from moe_ffn.ffn.dispatch import Dispatcher
from moe_ffn.ffn.zero_computation import ZeroComputationConfig
from moe_ffn.outputs import FFNOutput, TokenContext
from moe_ffn.routing.base import Router, RouterConfig
from moe_ffn.routing.capacity import CapacityConfig


@dataclass(frozen=True)
class RouterInfo:
    """One router of a block, its experts, and the options that affect its routing."""

    router: RouterConfig

    num_experts: int
    """Experts that the router chooses from, including experts without a network."""

    zero_computation: ZeroComputationConfig = field(default_factory=ZeroComputationConfig)
    """The experts without a network; they have the highest ids."""

    capacity: CapacityConfig = field(default_factory=CapacityConfig)
    """Limit on the tokens of one expert."""

    shared_expert: FFNConfig | None = None
    """The block that processes every token in addition to its routed experts."""

    selects_tokens: bool = False
    """True for the router of a mixture of depths: only the tokens that it chooses enter the inner block and
    its routings."""

    token_fraction: float = 1.0
    """Fraction of the tokens that reach the router: below 1 inside a mixture of depths."""

    experts: ExpertsConfig | None = None
    """Config of the experts; None if the router chooses whole blocks, or if a custom block omits it."""

    path: str = ""
    """Dotted path from the queried config to the router's block, such as `ffn`; empty for the config's own
    router."""

    @property
    def num_networks(self) -> int:
        """Number of experts with a network; they have the lowest ids."""
        return self.num_experts - self.zero_computation.total

    def expert_names(self) -> tuple[str, ...]:
        """Return each expert's id, with a prefix if the expert has no network: `7`, `copy8`."""
        kinds = [""] * self.num_networks + self.zero_computation.kinds()
        return tuple(f"{kind}{number}" for number, kind in enumerate(kinds))

    def inside(self, option: str) -> Self:
        """Prefix the path with `option.`, the key of this block in the outer config."""
        return replace(self, path=f"{option}.{self.path}" if self.path else option)


@dataclass(frozen=True)
class ExpertStack:
    """Config and number of a block's experts, from which their size and cost follow."""

    config: ExpertsConfig
    num_experts: int
    experts_per_token: float

    def build(self, d_model: int) -> Experts:
        return self.config.build(d_model, self.num_experts, self.experts_per_token)

    def num_params(self, d_model: int) -> int:
        return self.params_of(self.num_experts, d_model)

    def num_active_params(self, d_model: int) -> int:
        # Several heads of `product_key` may choose the same expert.
        return self.params_of(min(self.experts_per_token, self.num_experts), d_model)

    def flops_per_token(
        self, d_model: int, pairs_per_token: float, rows_per_token: float = 1
    ) -> int:
        """Return the forward FLOPs for one token that `pairs_per_token` experts process. The experts' shared
        weights process each of its `rows_per_token` input rows once.
        """
        per_pair = self.config.flops_per_pair(d_model, self.experts_per_token)
        shared = self.config.shared_flops_per_token(d_model, self.experts_per_token)
        return round(pairs_per_token * per_pair + rows_per_token * shared)

    def params_of(self, num_experts: float, d_model: int) -> int:
        """Return the number of parameters of `num_experts` experts and their shared weights."""
        per_expert = self.config.params_per_expert(d_model, self.experts_per_token)
        shared = self.config.shared_params(d_model, self.experts_per_token)
        return round(num_experts * per_expert) + shared


class FFNConfig(TaggedConfig, frozen=True):
    """Config of a feed-forward block; it also counts the block's parameters and FLOPs.

    For a custom block, subclass this in your own file and define `build`, `num_params` and `flops_per_token`.
    YAML names the class as `type: my_module:MyConfig`. `moe_ffn.testing.check_ffn` tests the block.
    """

    def router_infos(self) -> dict[str, RouterInfo]:
        """Return the routers of the block by the names of `FFNOutput.routings`."""
        return {}

    @property
    def expert_stack(self) -> ExpertStack | None:
        """The experts in the option `experts`; None for a block without experts."""
        return None

    def unsupported(self, use_case: UseCase) -> Unsupported | None:
        """Return the reason why this block cannot serve a use case, and the fix; None if it can.

        The default is the first reason of an inner config. Override it to allow cached decoding: the base
        class cannot know whether a block mixes tokens.
        """
        unsupported = first_unsupported(inner_configs(self), use_case)
        if unsupported is None and use_case.cached:
            return Unsupported(
                f"type '{self.type}' may mix tokens, so it cannot decode with a cache",
                "if its output depends on one token only, let `unsupported` in its config return None when "
                "use_case.cached",
            )
        return unsupported

    @abstractmethod
    def build(self, d_model: int) -> FFNBlock:
        """Return a new block for tokens of width `d_model`."""

    @abstractmethod
    def num_params(self, d_model: int) -> int:
        """Return the number of parameters of the block that `build` returns."""

    def num_active_params(self, d_model: int) -> int:
        """Return the mean number of parameters that one token uses."""
        return self.num_params(d_model)

    @abstractmethod
    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        """Return the forward FLOPs of matrix products per token, a third of those in training."""

    def with_k(self, k: int, d_model: int) -> Self:
        """Return a config for evaluation with k experts per token of the same width; see `RouterConfig`."""
        blocks = {option: block.with_k(k, d_model) for option, block in inner_blocks(self).items()}
        return self.model_copy(update=blocks)

    def describe(self) -> str:
        """Return a short description for tables."""
        return self.type


def inner_blocks(config: FFNConfig) -> dict[str, FFNConfig]:
    """Return the blocks among the options of a block, by name."""
    return {option: value for option, value in config if isinstance(value, FFNConfig)}


def inner_configs(config: FFNConfig) -> dict[str, HasRequirements]:
    """Return the configs inside a block by option: its inner blocks, then its experts."""
    stack = config.expert_stack
    experts = {} if stack is None else {"experts": stack.config}
    return {**inner_blocks(config), **experts}


def unfit_width(config: FFNConfig, d_model: int) -> Unsupported | None:
    """Return the reason why the experts of a block cannot have their widths; None if they can."""
    for option, block in inner_blocks(config).items():
        if unfit := unfit_width(block, d_model):
            return unfit.inside(option)
    if (stack := config.expert_stack) is None:
        return None
    unfit = stack.config.unfit_width(d_model, stack.experts_per_token)
    return unfit and unfit.inside("experts")


PlaceExperts = Callable[[Experts, int], Dispatcher]
"""(experts, number of experts) -> their dispatcher; divides the experts among the ranks."""

MatchConfig.model_rebuild(_types_namespace={"FFNConfig": FFNConfig})

_SHOWN_SEQ_LEN = 1024
"""Sequence length for the FLOPs shown in notebooks; those of a soft MoE, for example, depend on it."""


class FFNBlock(nn.Module, ABC):
    """Maps (..., d_model) to (..., d_model), returns its routings, and stores no statistics."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput: ...

    @abstractmethod
    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        """Transform each token.

        Args:
            x: (batch, seq, d_model), or any (..., d_model), in the dtype of the weights, or under autocast.
            context: padding mask and token ids, for blocks that need them; see `TokenContext`.

        Returns:
            `hidden`, with the shape and dtype of `x`, and the routings by name; a dense block has none.

        Raises:
            TypeError, ValueError: `x` or `context` does not fit the block. Custom blocks get the same errors
                from `check_input` in `moe_ffn.ffn.base` and `check_dtype` in `moe_ffn.kernels.base`.

        """

    def routers(self) -> dict[str, Router]:
        """Return the router of each entry of `FFNOutput.routings`, by the same names."""
        return {}

    def _repr_html_(self) -> str:
        """Type, size and, for blocks with attributes `config` and `d_model`, cost; for a notebook."""
        facts = {"parameters": f"{sum(parameter.numel() for parameter in self.parameters()):,}"}
        config, d_model = getattr(self, "config", None), getattr(self, "d_model", None)
        if isinstance(config, FFNConfig) and isinstance(d_model, int):
            facts |= {
                "active parameters": f"{config.num_active_params(d_model):,}",
                "FLOPs per token": f"{config.flops_per_token(d_model, _SHOWN_SEQ_LEN):,}",
                "d_model": f"{d_model:,}",
            }
        title = config.describe() if isinstance(config, FFNConfig) else type(self).__name__
        return notebook_cards.card(title, facts, notebook_cards.folded("modules", repr(self)))

    def place_experts(self, place: PlaceExperts) -> None:
        """Divide the experts among ranks by `place`, and keep its dispatcher; by default in inner blocks."""
        for block in self.children():
            if isinstance(block, FFNBlock):
                block.place_experts(place)


# -- names of routings: `layer_03`; `layer_03/inner` for a block inside the block of that layer;
# `layer_03/round_2` for a later round of a chain of experts

Value = TypeVar("Value")

OWN_ROUTING = "routing"
"""The key of `FFNOutput.routings` for the block's own router."""
ROUTING_SUFFIX = "(?:/(?:inner|round_[0-9]+))*"
"""Regular expression of the suffixes that a block's routings add to the name of their layer."""

_NAME = re.compile(r"layer_(\d{1,9})((?:/\w+)*)")


def round_name(number: int) -> str:
    """Return the key of `FFNOutput.routings` for a round of a chain of experts: `round_2` for number 1."""
    return f"round_{number + 1}" if number else OWN_ROUTING


def prefix_names(outer: str, values: Mapping[str, Value]) -> dict[str, Value]:
    """Prefix names of an inner block: `routing`, its own, becomes `outer`, and `inner` `outer/inner`."""
    return {
        outer if name == OWN_ROUTING else f"{outer}/{name}": value for name, value in values.items()
    }


def layer_name(index: int) -> str:
    """Return the name of a layer's main routing, such as `layer_03`."""
    return f"layer_{index:02d}"


def layer_number(name: str) -> int:
    """Return the layer index of a routing name."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(
            f"the name of a layer must be like 'layer_03' or 'layer_03/inner', got {name!r}"
        )
    return int(match[1])


def is_inner(name: str) -> bool:
    """Return True for the routing of a block inside another block; a later round is not inside."""
    return any(not part.startswith("round_") for part in name.split("/")[1:])


def without_round(name: str) -> str:
    """Return the name of the block whose experts a routing chooses from; rounds share their experts."""
    return "/".join(part for part in name.split("/") if not part.startswith("round_"))


def short_name(name: str) -> str:
    """Return `3` for `layer_03` and `3 inner` for `layer_03/inner`; return any other name unchanged."""
    match = _NAME.fullmatch(name)
    return f"{int(match[1])}{match[2].replace('/', ' ')}" if match else name


# -- inputs


def check_input(
    x: Tensor, context: TokenContext | None, d_model: int, block: nn.Module | None = None
) -> None:
    """Raise if a block of width `d_model`, whose class begins the message, cannot process an input; every
    block calls this first. TypeError for wrong types, ValueError for a wrong dtype, width, shape, layout or
    device. No tensor values are read.
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
            f"x must have at least 16 bits, but is {x.dtype}, in which torch cannot compute; use "
            "x.to(torch.bfloat16)"
        )
    if x.layout != torch.strided or x.is_nested:
        layout = "a nested tensor" if x.is_nested else f"of the layout {x.layout}"
        raise ValueError(
            f"x must be a dense (..., {d_model}), but is {layout}; pad it to one shape, and mark the real "
            "tokens in TokenContext.mask"
        )
    if x.ndim == 0:
        raise ValueError(f"x must be (..., {d_model}), but is a scalar")
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
    """Return `x` (..., d_model) with zeros for padding, whose NaN would reach the gradients as 0 * NaN."""
    if context is None or context.mask is None:
        return x
    return x.masked_fill(~context.mask.unsqueeze(-1), 0)


def flatten_tokens(x: Tensor, context: TokenContext | None) -> tuple[Tensor, TokenContext]:
    """Return `x` (..., d_model), already checked, as (T, d_model) without padding, and its context."""
    context = context or TokenContext()
    leading_shape = x.shape[:-1]
    x, ids = without_padding(x, context), context.expert_ids
    length = context.sequence_length or (leading_shape[-1] if leading_shape else 1)
    flat = TokenContext(
        mask=None if context.mask is None else context.mask.reshape(-1),
        token_ids=None if context.token_ids is None else context.token_ids.reshape(-1),
        expert_ids=None if ids is None else ids.reshape(-1, ids.shape[-1]),
        sequence_length=max(length, 1),
    )
    return x.reshape(-1, x.shape[-1]), flat
