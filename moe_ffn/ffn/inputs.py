"""Checks of the input of a block, and its flat form. A custom block may call them too."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_ffn.outputs import TokenContext


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
