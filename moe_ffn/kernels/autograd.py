"""Operators with a hand-written backward pass: their arguments and their autograd.

T tokens, D model width, E experts, F hidden width, N computed (token, expert) pairs, H rows of the first
matrix, R rank of an adapter
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from moe_ffn.kernels.activations import GateFunction
from moe_ffn.kernels.base import (
    PARAMETERS,
    ExpertWeights,
    compute_dtype,
    needs_gradient,
    no_second_derivative,
)
from moe_ffn.outputs import Plan

DIFFERENTIABLE = ("x_TD", "weights_N", *PARAMETERS)
"""Names of the differentiable inputs of an operator: x, the pairs' weights and the parameters."""

Gradients = tuple[Tensor | None, ...]
"""Gradients in the order of `DIFFERENTIABLE`."""


class Inputs(NamedTuple):
    """Inputs of the forward and the backward pass."""

    x_TD: Tensor
    weights_N: Tensor
    token_indices_N: Tensor
    offsets_E: Tensor
    order: Sequence[Tensor]
    """Other tensors of the plan, which `define` names."""
    dropout_NF: Tensor | None
    weights: ExpertWeights
    """The experts; `dropout_NF` replaces their dropout."""
    dtype: torch.dtype
    """Dtype of products and of the matrix kept for backward; on a CPU that is slower in it, products use
    float32."""


def encode_gate(gate: GateFunction | None) -> list[float] | None:
    """Encode a gate as numbers for an operator: its index in `GateFunction`, then its fields."""
    if gate is None:
        return None
    return [float(get_args(GateFunction).index(type(gate))), *map(float, vars(gate).values())]


def decode_gate(numbers: list[float] | None) -> GateFunction | None:
    """Decode the numbers of `encode_gate`."""
    return None if numbers is None else get_args(GateFunction)[int(numbers[0])](*numbers[1:])


def run_operator(
    operator: Callable[..., Any],
    x_TD: Tensor,
    plan: Plan,
    weights: ExpertWeights,
    order: Sequence[Tensor],
    dropout_NF: Tensor | None,
) -> Tensor:
    """Run experts by an operator of `define`; return (T, D)."""
    differentiable = (x_TD, plan.weights_N, *weights.parameters)
    y_TD, _ = operator(
        *(*differentiable, plan.token_indices_N, plan.offsets_E, *order, dropout_NF),
        *(weights.activation, encode_gate(weights.gate_function)),
        *(weights.gated, weights.interleaved, compute_dtype(x_TD), needs_gradient(*differentiable)),
    )
    return y_TD


def define(
    name: str,
    backend: str,
    order: Sequence[str],
    forward: Callable[[Inputs, bool], tuple[Tensor, Tensor]],
    backward: Callable[[Inputs, Tensor, Tensor, Sequence[bool]], Gradients],
    width_of_kept: Callable[..., int] = lambda up_EHD, *_: up_EHD.shape[1],
) -> tuple[CustomOpDef, CustomOpDef]:
    """Define a forward and a backward operator: their schemas, output shapes and autograd.

    Args:
        name: name of the forward operator.
        backend: name of the backend, for error messages.
        order: names of `Inputs.order`.
        forward: (inputs, keep) -> y, and a matrix in `dtype` for backward, with 0 rows unless `keep`.
        backward: (inputs, that matrix, grad_y, wanted) -> the gradients; those not wanted are ignored.
        width_of_kept: (the parameters) -> width of the matrix, by default that of the first product.
    """
    num_differentiable, num_tensors = len(DIFFERENTIABLE), len(DIFFERENTIABLE) + len(order) + 3
    names = *DIFFERENTIABLE, "token_indices_N", "offsets_E", *order, "dropout_NF"
    optional = {"dropout_NF", *PARAMETERS[2:]}
    tensors = ", ".join(f"Tensor{'?' if each in optional else ''} {each}" for each in names)
    options = "str activation, float[]? gate, bool gated, bool interleaved, ScalarType dtype"
    returned = ", ".join(["Tensor"] * num_differentiable)

    def parse(*arguments: Any) -> Inputs:
        x_TD, weights_N, *others = arguments[:num_differentiable]
        token_indices_N, offsets_E, *order, dropout_NF = arguments[num_differentiable:num_tensors]
        activation, gate, gated, interleaved, dtype = arguments[num_tensors:]
        weights = ExpertWeights(
            activation=activation,
            gated=gated,
            gate_function=decode_gate(gate),
            interleaved=interleaved,
            **dict(zip(PARAMETERS, others, strict=True)),
        )
        plan = token_indices_N, offsets_E, order
        return Inputs(x_TD, weights_N, *plan, dropout_NF, weights, dtype)

    @torch.library.custom_op(
        name, mutates_args=(), schema=f"({tensors}, {options}, bool keep) -> (Tensor, Tensor)"
    )
    def experts(*arguments: Any) -> tuple[Tensor, Tensor]:
        return forward(parse(*arguments[:-1]), arguments[-1])

    @torch.library.custom_op(
        f"{name}_backward",
        mutates_args=(),
        schema=f"(Tensor dy_TD, {tensors}, Tensor kept, {options}, bool[] wanted) -> ({returned})",
    )
    def experts_backward(dy_TD: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        *inputs, wanted = arguments
        kept = inputs.pop(num_tensors)
        grads = backward(parse(*inputs), kept, dy_TD, wanted)
        return tuple(
            grad if want and grad is not None else dy_TD.new_empty(0)
            for grad, want in zip(grads, wanted, strict=True)
        )

    def fake(x_TD: Tensor, weights_N: Tensor, *others: Any) -> tuple[Tensor, ...]:
        *_, dtype, keep = others
        num_kept = weights_N.shape[0] if keep else 0
        width = width_of_kept(*others[: len(PARAMETERS)])
        return x_TD.new_empty(x_TD.shape), x_TD.new_empty(num_kept, width, dtype=dtype)

    def fake_backward(_: Tensor, x_TD: Tensor, *others: Any) -> tuple[Tensor, ...]:
        inputs, wanted = (x_TD, *others)[:num_differentiable], others[-1]
        return tuple(
            tensor.new_empty(tensor.shape) if want and tensor is not None else x_TD.new_empty(0)
            for tensor, want in zip(inputs, wanted, strict=True)
        )

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *options, keep = inputs[num_tensors:]
        assert keep, "backward needs the kept matrix"
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # otherwise torch makes zeros as large as the kept matrix
        ctx.save_for_backward(*inputs[:num_tensors], output[1])
        ctx.options = options

    def differentiate(ctx: Any, dy_TD: Tensor | None, _: Any) -> Gradients:
        wanted = list(ctx.needs_input_grad[:num_differentiable])
        rest = (None,) * (len(ctx.needs_input_grad) - num_differentiable)
        if dy_TD is None:
            return (None,) * num_differentiable + rest
        grads = experts_backward(dy_TD, *ctx.saved_tensors, *ctx.options, wanted)
        return (*(g if want else None for g, want in zip(grads, wanted, strict=True)), *rest)

    def reject(ctx: Any, *grads: Any) -> Gradients:
        raise no_second_derivative(backend)

    experts.register_fake(fake)
    experts_backward.register_fake(fake_backward)
    experts.register_autograd(differentiate, setup_context=save)
    experts_backward.register_autograd(reject)
    return experts, experts_backward
