"""The values that every feed-forward block reads and returns: frozen, and pytrees to torch.

T tokens (batch and sequence flattened), E experts, N (token, expert) pairs, S sequence length
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from typing import Any, Literal, NoReturn, Protocol, Self, TypeVar, cast

import torch
from torch import Tensor, nn


def summarize(value: Any) -> str:
    """One line for a frozen value: `TokenContext(mask=bool[2, 16] on cpu)`. Tensors are named by dtype, shape
    and device, and what is None is left out. It reads no tensor.
    """
    items = [(field.name, getattr(value, field.name)) for field in fields(value)]
    parts = [f"{name}={brief(item)}" for name, item in items if item is not None]
    return f"{type(value).__name__}({', '.join(parts)})"


def brief(value: object) -> str:
    """`float32[2, 16, 64] on cpu` for a tensor, `repr` for anything else."""
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{_dtype_name(value)}{list(value.shape)} on {value.device}"


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""The dtypes a token's id may have."""


class TokenHistory(Protocol):
    """What blocks keep of the tokens so far, where a decoder computes new tokens alone; see `KVCache`."""

    def window(self, owner: nn.Module, new: Tensor, reach: int) -> Tensor:
        """Values of new tokens (B, S, ...) behind those of the `reach` tokens before them, which are kept.

        Args:
            owner: the module whose values they are; if it asks again in a pass, they are others.

        Returns:
            (B, reach + S, ...), zero where there is no token.
        """
        ...


@dataclass(frozen=True)
class TokenContext:
    """Padding mask, token ids and the like: what some blocks need besides the vectors."""

    mask: Tensor | None = None
    """bool, the leading shape of `x`: True where a token is real, False where it is padding. Padded
    tokens are never routed, counted or in a loss. None: every token is real."""

    token_ids: Tensor | None = None
    """Vocabulary ids, integers of the leading shape of `x`; None when unknown."""

    sequence_length: int | None = None
    """S, for an `x` whose batch and sequence axes are flattened already (token t has position t % S).
    None: the last leading axis of `x`."""

    expert_ids: Tensor | None = None
    """int64, the leading shape of `x` and K: the experts of each token, which a router that `replays` takes
    instead of choosing. None: routers choose."""

    history: TokenHistory | None = None
    """Where blocks keep what they read of earlier tokens; `x` (B, S, d_model) then follows those. None: each
    sequence begins in `x`."""

    def __repr__(self) -> str:
        return summarize(self)

    def __post_init__(self) -> None:
        # torch rebuilds these values around anything; `check_input` refuses what is no tensor or no int.
        if isinstance(self.mask, Tensor) and self.mask.dtype != torch.bool:
            raise ValueError(
                f"TokenContext.mask must be bool, True for real tokens, but is {self.mask.dtype}; "
                "use mask.bool()"
            )
        if isinstance(self.token_ids, Tensor) and self.token_ids.dtype not in INTEGERS:
            raise ValueError(
                f"TokenContext.token_ids must be integers, but is {self.token_ids.dtype}; "
                "use token_ids.long()"
            )
        if isinstance(self.expert_ids, Tensor) and self.expert_ids.dtype != torch.int64:
            raise ValueError(
                f"TokenContext.expert_ids must be int64, but is {self.expert_ids.dtype}; use "
                "expert_ids.long()"
            )
        if isinstance(self.sequence_length, bool):
            raise TypeError("TokenContext.sequence_length must be an int, but is of type bool")
        if isinstance(self.sequence_length, int) and self.sequence_length < 1:
            raise ValueError(
                f"TokenContext.sequence_length must be at least 1, but is {self.sequence_length}; "
                "leave it out where x is (batch, seq, d_model)"
            )


@dataclass(frozen=True)
class Routing:
    """Where each token goes: N (token, expert, weight) pairs, and the scores they came from.

    Pairs stand in token-major order. Only `weights_N`, `logits_TE`, `scores_TE`, `selection_probs_TE` and
    `logits_N` carry gradients.
    """

    token_ids_N: Tensor
    """int64, the token of each pair, in [0, T)."""

    expert_ids_N: Tensor
    """int64, the expert of each pair, in [0, E)."""

    weights_N: Tensor
    """float32 (or wider), what the expert's output is multiplied by."""

    dropped_N: Tensor
    """bool, True where the expert's capacity was full, so that the pair is not computed."""

    num_tokens: int
    """T, padding included."""

    num_experts: int
    """E, those without a network included."""

    sequence_length: int
    """S; the position of token t in its sequence is t % S."""

    mask_T: Tensor | None = None
    """bool, True where a token is real; None when all are. Pairs of padded tokens are in the list, so
    that shapes don't depend on data, but they are neither computed nor counted."""

    logits_TE: Tensor | None = None
    """float32 (or wider), the router's scores before any normalisation. None from a router that has too
    many experts for a table of them; see `require`."""

    scores_TE: Tensor | None = None
    """float32 (or wider), after normalisation; each row is non-negative. None where `logits_TE` is."""

    capacity: Tensor | None = None
    """int64 scalar, the pairs one expert may take; None when dropless."""

    chosen_N: Tensor | None = None
    """bool, False for pairs that the router listed and did not choose; None when it chose all. A router
    whose number of pairs depends on the data lists the most there can be, so that shapes do not."""

    capacity_k: float | None = None
    """Experts per token that the capacity assumes, where their number depends on the data: to count the
    pairs would leak later tokens to earlier ones. None: the pairs are counted."""

    target_k: float | None = None
    """Experts per token that the sparsity rule steers the router towards (ReLU routing); None elsewhere."""

    selection_probs_TE: Tensor | None = None
    """Probability, over the router's noise, that each expert is among a token's k (noisy top-k routing);
    None elsewhere."""

    logits_N: Tensor | None = None
    """float32 (or wider), the score of each pair before any normalisation, from a router without tables of
    (T, E) numbers. Losses and metrics are then over the listed pairs. None where there are tables."""

    listed_k: int | None = None
    """K, where the list has exactly K pairs of every token, so that it is a (T, K) table; None elsewhere."""

    def __repr__(self) -> str:
        """One line of sizes and, where tensors hold values (not on `meta`, nor in a trace), of counts."""
        if not isinstance(self.token_ids_N, Tensor) or not isinstance(self.weights_N, Tensor):
            return summarize(self)
        parts = [
            f"num_tokens={self.num_tokens}",
            f"sequence_length={self.sequence_length}",
            f"num_experts={self.num_experts}",
            f"num_pairs={len(self.token_ids_N)}",
            *self._counted(),
            f"{_dtype_name(self.weights_N)} on {self.weights_N.device}",
        ]
        return f"{type(self).__name__}({', '.join(parts)})"

    def _counted(self) -> list[str]:
        """The counts in `__repr__`; reads the values of the tensors."""
        parts: list[str] = []
        try:
            if self.mask_T is not None:
                parts.append(f"num_real_tokens={int(self.num_real_tokens)}")
            num_real = int(self.real_N.sum())
            if num_real < len(self.token_ids_N):
                parts.append(f"num_real_pairs={num_real}")
            if self.capacity is not None:
                share = int((self.dropped_N & self.real_N).sum()) / max(num_real, 1)
                parts.append(f"capacity={int(self.capacity)}, dropped={share:.1%}")
            else:
                parts.append("dropless")
        except RuntimeError:  # there are no values: a fake tensor, or one on the meta device
            pass
        return parts

    @property
    def is_listed(self) -> bool:
        """Whether there are too many experts for a number of each: all there is are the listed pairs."""
        return self.scores_TE is None

    @property
    def num_real_tokens(self) -> Tensor:
        """int64 scalar: T without padding."""
        if self.mask_T is None:
            return torch.tensor(self.num_tokens, device=self.token_ids_N.device)
        return self.mask_T.sum()

    @property
    def real_N(self) -> Tensor:
        """bool: True for the pairs that the router chose for real tokens."""
        real_N = torch.ones_like(self.dropped_N) if self.chosen_N is None else self.chosen_N
        return real_N if self.mask_T is None else real_N & self.mask_T[self.token_ids_N]

    @property
    def computed_N(self) -> Tensor:
        """bool: pairs that an expert computes, real and not dropped."""
        return ~self.left_out_N

    @property
    def left_out_N(self) -> Tensor:
        """bool: pairs that no expert computes: dropped, of padding, or not chosen."""
        if self.chosen_N is None and self.mask_T is None:
            return self.dropped_N
        return self.dropped_N | ~self.real_N

    def require(self, table: Literal["logits_TE", "scores_TE"], needed_by: str) -> Tensor:
        """The table called `table`.

        Raises:
            ValueError: the router returns none; the sentence begins with `needed_by`, a loss or a metric.
        """
        found = self.logits_TE if table == "logits_TE" else self.scores_TE
        if found is None:
            raise ValueError(
                f"{needed_by} needs {table}, a number for each expert and token, which this router does "
                f"not return for its {self.num_experts} experts"
            )
        return found

    def detach(self) -> Self:
        """A copy whose tensors are cut from the graph, which metrics may keep."""
        tensors = {
            field.name: value.detach()
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **tensors)


@dataclass(frozen=True)
class Plan:
    """The rows that each expert reads, and the weights by which its results are added up.

    Sorted by expert; pairs that are not computed (dropped, or padding) stand behind `offsets_E[-1]`
    with weight 0, so that shapes don't depend on data. `dispatch.plan_of_list` makes one that
    is not sorted.
    """

    token_ids_N: Tensor
    """int64, the row of `x_TD` each pair reads and adds to."""

    weights_N: Tensor
    """The factor of each result; carries the router's gradient."""

    offsets_E: Tensor
    """int32, where each expert's pairs end."""

    pair_ids_N: Tensor
    """int64, where each pair stands in the routing's own list, which is sorted by token."""

    expert_ids_N: Tensor | None = None
    """int64, the expert of each pair, in a `plan_of_list`; None where `offsets_E` tells."""

    listed_k: int | None = None
    """K, in a `plan_of_list` with exactly K pairs of every row of `x_TD`, in their order; None elsewhere."""

    def __repr__(self) -> str:
        return summarize(self)


_NO_TENSOR = (
    "a block returns an FFNOutput, which is no tensor; use its .hidden, as in x + ffn(x).hidden"
)


@dataclass(frozen=True)
class FFNOutput:
    """What every feed-forward block returns."""

    hidden: Tensor
    """The shape and dtype of the block's input."""

    routings: dict[str, Routing] = field(default_factory=dict)
    """The routings by name: `routing` of the block's own router, `inner` of that of a sparse block inside a
    mixture of depths, `round_2` and so on of later rounds of a chain of experts. Empty for a dense block."""

    shared_shares: dict[str, Tensor] = field(default_factory=dict)
    """Routing name -> the shared expert's fraction of the norm of the block's output, a scalar in [0, 1]; see
    `ffn.shared_expert.share_of_norms`."""

    def __post_init__(self) -> None:
        if isinstance(self.routings, Routing):
            raise TypeError("FFNOutput.routings is a mapping; use {'routing': routing}")

    @property
    def routing(self) -> Routing | None:
        """The first of the routings; None where nothing was routed."""
        return next(iter(self.routings.values()), None)

    def __repr__(self) -> str:
        routings = (f"{name}={brief(routing)}" for name, routing in self.routings.items())
        lines = ",\n    ".join([f"hidden={brief(self.hidden)}", *routings])
        return f"{type(self).__name__}({lines})"

    def __add__(self, other: object) -> NoReturn:
        raise TypeError(_NO_TENSOR)

    __radd__ = __add__

    @classmethod
    def __torch_function__(cls, *given: object) -> NoReturn:
        """Refuse to be the argument of a function of torch, which calls this for every such value."""
        raise TypeError(_NO_TENSOR)


@dataclass(frozen=True)
class Memory:
    """The hidden units of one network at work, each a key-value memory: it adds its activation times its
    value vector to the output (Geva et al. 2021, arXiv:2012.14913, equation 2).

    N tokens that came to the network, F hidden units, D model width.
    """

    name: str
    """`expert 3`, `shared expert`; empty for the only network of a block."""

    token_ids_N: Tensor
    """int64, which of the block's flattened tokens they are; padding is none of them."""

    activations_NF: Tensor
    """After the activation function and the gate, before any weight of a router."""

    values_FD: Tensor
    """The columns of the matrix `down`."""


# -- names of routings, inside of what holds a block

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


# -- checks of what functions and blocks are given

F = TypeVar("F", bound=Callable[..., Any])


def takes_routing(function: F) -> F:
    """Check the first argument of a function of a Routing with `check_routing`."""

    @wraps(function)
    def checked(routing: Routing, *args: Any, **kwargs: Any) -> Any:
        check_routing(routing, function.__name__)
        return function(routing, *args, **kwargs)

    return cast("F", checked)


def check_routing(value: object, taker: str) -> None:
    """TypeError where `value` is no Routing; most often it is None, from a dense block."""
    if isinstance(value, Routing):
        return
    got = f"a value of type {type(value).__name__}"
    if value is None:
        got = "None, the routing of a block that routes nothing"
    elif isinstance(value, FFNOutput):
        got = "an FFNOutput; use output.routing"
    raise TypeError(f"{taker} takes a Routing, but got {got}")


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


# -- arithmetic of routings


def count_pairs(expert_ids_N: Tensor, num_experts: int) -> Tensor:
    """int64 (E,): the number of pairs of each expert. No host synchronisation, unlike `bincount`."""
    ones_N = torch.ones_like(expert_ids_N)
    return expert_ids_N.new_zeros(num_experts).scatter_add_(0, expert_ids_N, ones_N)


def divisor(sums: Tensor) -> Tensor:
    """Sums of what is not negative, to divide by, none of them 0."""
    # Larger than the least number there is, so that no gradient divided by it overflows.
    limits = torch.finfo(sums.dtype)
    return sums.clamp(min=limits.tiny / limits.eps)


def finite_log(values: Tensor) -> Tensor:
    """The logarithm of what is not negative, and of 0 that of the least number there is."""
    return values.clamp(min=torch.finfo(values.dtype).tiny).log()


def on_this_rank(tensor: Tensor) -> Tensor:
    """The part of a distributed tensor that is on this rank; any other tensor as it is."""
    if type(tensor) in (Tensor, nn.Parameter):
        return tensor
    # Importing it takes half a second. Not `hasattr(tensor, "to_local")`, which torch.compile denies.
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


for _value in (TokenContext, Routing, Plan, FFNOutput):
    torch.export.register_dataclass(_value, serialized_type_name=f"moe_ffn.{_value.__name__}")
