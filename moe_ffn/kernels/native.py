"""The compiled experts, as a function that torch differentiates.

T tokens, D model width, E experts, F hidden width, N computed (token, expert) pairs, H rows of the first
matrix
"""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from moe_ffn.dispatch import Plan
from moe_ffn.kernels.base import (
    NOT_BY_TRANSFORMS,
    Activation,
    ClampedSwiGLU,
    ExpertWeights,
    compute_dtype,
    dropout_mask,
    is_batched,
    needs_gradient,
    no_second_derivative,
    product_dtype_on_cpu,
)
from moe_ffn.kernels.gradient_memory import empty_gradient

_CODES = {name: code for code, name in enumerate((*get_args(Activation), "clamped"))}
"""The numbers of `Activation` in passes.h."""


def takes(weights: ExpertWeights) -> bool:
    """Whether there is a kernel for the gate of these experts."""
    return weights.clamped is None or isinstance(weights.clamped, ClampedSwiGLU)


def native(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> Tensor:
    """Any dtype; reads the offsets on the host. An expert without tokens gets a zero gradient.

    Keeps the first product (N, H) for backward and, with dropout, the mask. The same numbers with any number
    of threads.
    """
    num_rows = int(plan.offsets_E[-1])
    tensors = (x_TD, plan.weights_N[:num_rows], *weights.parameters)
    trains = needs_gradient(*tensors)
    if not trains:
        return _forward(plan, weights, *tensors, None)[0]
    return _Experts.apply(plan, weights, *tensors)


def _forward(
    plan: Plan, weights: ExpertWeights, x_TD: Tensor, weights_N: Tensor, *given: Any
) -> tuple[Tensor, tuple[Any, ...]]:
    """The output, and the arguments that both operators begin with."""
    *parameters, kept_NH = given
    dtype = product_dtype_on_cpu(compute_dtype(x_TD))
    if dtype == torch.float16:  # which the operators store and do not multiply
        dtype = torch.float32
    dropout_NF = dropout_mask(len(weights_N), weights, dtype, x_TD.device)
    clamped = weights.clamped
    assert clamped is None or isinstance(clamped, ClampedSwiGLU)  # as `takes` has said
    layer = (
        x_TD.contiguous(),
        weights_N.to(torch.float64 if dtype == torch.float64 else torch.float32).contiguous(),
        *(None if parameter is None else parameter.contiguous() for parameter in parameters),
        plan.token_ids_N.contiguous(),
        plan.offsets_E.int(),
        dropout_NF,
        _CODES["clamped" if clamped is not None else weights.activation],
        weights.gated,
        weights.interleaved,
        0.0 if clamped is None else clamped.alpha,
        0.0 if clamped is None else clamped.limit,
        dtype,
    )
    y_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    torch.ops.moe_ffn_cpu.experts_forward(*layer, kept_NH, y_TD)
    return y_TD, layer


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        weights: ExpertWeights,
        x_TD: Tensor,
        weights_N: Tensor,
        *parameters: Any,
    ) -> Tensor:
        kept_NH = x_TD.new_empty(len(weights_N), parameters[0].shape[1], dtype=compute_dtype(x_TD))
        y_TD, layer = _forward(plan, weights, x_TD, weights_N, *parameters, kept_NH)
        token_ids_N, offsets_E, dropout_NF, *ctx.rest = layer[6:]
        saved = (token_ids_N, offsets_E, dropout_NF, kept_NH)
        ctx.save_for_backward(x_TD, weights_N, *parameters, *saved)
        return y_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Not `once_differentiable`, whose error is not on the way from a gradient back to x: asked for
        # d/dx alone, torch passes it by.
        if torch.is_grad_enabled():
            raise no_second_derivative("cpu")
        if is_batched(grads[0]):
            raise RuntimeError(f"experts.backend 'cpu' {NOT_BY_TRANSFORMS}")
        x_TD, weights_N, *rest = (
            ctx.saved_tensors
        )  # once: activation checkpointing computes them again
        *parameters, token_ids_N, offsets_E, dropout_NF, kept_NH = rest
        dtype = ctx.rest[-1]
        wants_x, _, *wants = ctx.needs_input_grad[2:]
        grad_x_TD = (
            torch.empty_like(x_TD, memory_format=torch.contiguous_format) if wants_x else None
        )
        sums_N = weights_N.to(
            torch.float64 if dtype == torch.float64 else torch.float32
        ).contiguous()
        grad_weights_N = torch.empty_like(sums_N)
        gradients = [
            empty_gradient(parameter) if wanted else None
            for parameter, wanted in zip(parameters, wants, strict=True)
        ]
        torch.ops.moe_ffn_cpu.experts_backward(
            x_TD.contiguous(),
            sums_N,
            *(None if parameter is None else parameter.contiguous() for parameter in parameters),
            token_ids_N,
            offsets_E,
            dropout_NF,
            *ctx.rest,
            kept_NH,
            grads[0].contiguous(),
            grad_x_TD,
            grad_weights_N,
            *gradients,
        )
        return None, None, grad_x_TD, grad_weights_N.to(weights_N.dtype), *gradients
