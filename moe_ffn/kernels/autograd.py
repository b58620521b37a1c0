"""Derivatives of experts with a backward pass of their own: an autograd function, and operators.

T tokens, D model width, E experts, F hidden width, N computed (token, expert) pairs, H rows of the first
matrix
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from moe_ffn.kernels.base import (
    ExpertWeights,
    compute_dtype,
    dropout_mask,
    needs_gradient,
    no_second_derivative,
    product_dtype_on_cpu,
    refuse_more_derivatives,
)
from moe_ffn.outputs import Plan


class Inputs(NamedTuple):
    """Inputs of the forward and the backward pass."""

    x_TD: Tensor
    weights_N: Tensor
    parameters: Sequence[Any]
    """`ExpertWeights.parameters`."""
    token_ids_N: Tensor
    offsets_E: Tensor
    pair_ids_N: Tensor
    dropout_NF: Tensor | None
    options: ExpertWeights
    """Kind of the experts; its tensors are not read."""
    dtype: torch.dtype
    """Dtype of what is kept, and of products if this CPU multiplies in it."""


Gradients = tuple[Tensor | None, ...]
"""The gradients of x, of the pairs' weights and of the four parameters."""


class Implementation(NamedTuple):
    """The forward and the backward pass of experts on a CPU."""

    forward: Callable[[Inputs, Tensor | None], Tensor]
    """(inputs, kept_NH) -> y_TD; writes the first product to `kept_NH` unless it is None."""
    backward: Callable[[Inputs, Tensor, Tensor, Sequence[bool]], Gradients]
    """(inputs, kept_NH, grad_y_TD, wanted) -> the wanted gradients; that of the weights always."""


def run(implementation: Implementation, x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> Tensor:
    """Run experts of any dtype; reads the offsets on the host.

    An expert without tokens gets a zero gradient. The first product (N, H) and the dropout mask are kept
    for backward.
    """
    weights_N, parameters = plan.weights_N[: int(plan.offsets_E[-1])], weights.parameters
    if needs_gradient(x_TD, weights_N, *parameters):
        return _Experts.apply(implementation, plan, weights, x_TD, weights_N, *parameters)
    return implementation.forward(_inputs(plan, weights, x_TD, weights_N, parameters), None)


def _inputs(
    plan: Plan, weights: ExpertWeights, x_TD: Tensor, weights_N: Tensor, parameters: Any
) -> Inputs:
    dtype = compute_dtype(x_TD)
    dropout_NF = dropout_mask(len(weights_N), weights, product_dtype_on_cpu(dtype), x_TD.device)
    ids = plan.token_ids_N, plan.offsets_E, plan.pair_ids_N
    return Inputs(x_TD, weights_N, parameters, *ids, dropout_NF, weights, dtype)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        implementation: Implementation,
        plan: Plan,
        weights: ExpertWeights,
        x_TD: Tensor,
        weights_N: Tensor,
        *parameters: Any,
    ) -> Tensor:
        inputs = _inputs(plan, weights, x_TD, weights_N, parameters)
        kept_NH = x_TD.new_empty(len(weights_N), parameters[0].shape[1], dtype=inputs.dtype)
        y_TD = implementation.forward(inputs, kept_NH)
        tensors = (*parameters, *inputs[3:7], kept_NH)
        ctx.save_for_backward(x_TD, weights_N, *tensors)
        ctx.implementation, ctx.options = implementation, inputs[7:]
        return y_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_more_derivatives("cpu", grads[0])
        saved = ctx.saved_tensors  # once: activation checkpointing computes them again for it
        inputs = Inputs._make((*saved[:2], saved[2:6], *saved[6:10], *ctx.options))
        wanted = ctx.needs_input_grad[3:]
        return (None,) * 3 + ctx.implementation.backward(inputs, saved[10], grads[0], wanted)


def register(forward: CustomOpDef, backward: CustomOpDef, num_tensors: int, backend: str) -> None:
    """Register shapes of an operator, for tensors without data, and its backward pass, another operator.

    Args:
        forward: (x, weights_N, the four parameters, other tensors, options, dtype, keep) -> y, and the first
            product (N, H) in `dtype`, without rows unless `keep`.
        backward: (grad_y, the same tensors, first product, the same options, dtype, wanted) -> the gradients
            of the first six tensors, empty if not wanted.
        num_tensors: number of tensors that both take, or None in their places.
        backend: name in error messages.
    """

    def fake(x_TD: Tensor, weights_N: Tensor, up_EHD: Tensor, *others: Any) -> tuple[Tensor, ...]:
        *_, dtype, keep = others
        num_kept = weights_N.shape[0] if keep else 0
        return x_TD.new_empty(x_TD.shape), x_TD.new_empty(num_kept, up_EHD.shape[1], dtype=dtype)

    def fake_backward(_: Tensor, x_TD: Tensor, *others: Any) -> tuple[Tensor, ...]:
        inputs, wanted = (x_TD, *others)[:6], others[-1]
        return tuple(
            tensor.new_empty(tensor.shape) if want and tensor is not None else x_TD.new_empty(0)
            for tensor, want in zip(inputs, wanted, strict=True)
        )

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *options, keep = inputs[num_tensors:]
        assert keep, "the first product of a forward pass that needs gradients is kept"
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # zeros for the first product would be as large as it is
        ctx.save_for_backward(*inputs[:num_tensors], output[1])
        ctx.options = options

    def differentiate(ctx: Any, grad_y_TD: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        wanted = list(ctx.needs_input_grad[:6])
        rest = (None,) * (len(ctx.needs_input_grad) - 6)
        if grad_y_TD is None:
            return (None,) * 6 + rest
        grads = backward(grad_y_TD, *ctx.saved_tensors, *ctx.options, wanted)
        return (*(g if want else None for g, want in zip(grads, wanted, strict=True)), *rest)

    def refuse(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        raise no_second_derivative(backend)

    forward.register_fake(fake)
    backward.register_fake(fake_backward)
    forward.register_autograd(differentiate, setup_context=save)
    backward.register_autograd(refuse)
