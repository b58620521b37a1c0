"""Autograd of operators with a hand-written backward pass.

T tokens, D model width, E experts, F hidden width, N computed (token, expert) pairs, H rows of the first
matrix
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from moe_ffn.kernels.base import PARAMETERS, no_second_derivative

NUM_GRADIENTS = 2 + len(PARAMETERS)
"""Number of differentiable inputs of an operator: x, the pairs' weights and the parameters."""


def register(
    forward: CustomOpDef,
    backward: CustomOpDef,
    num_tensors: int,
    backend: str,
    width_of_kept: Callable[..., int] = lambda up_EHD, *_: up_EHD.shape[1],
) -> None:
    """Register an operator's output shapes, for tensors without data, and its backward operator.

    Args:
        forward: (x, weights_N, the parameters, other tensors, options, dtype, keep) -> y, and a matrix in
            `dtype` for backward, with 0 rows unless `keep`.
        backward: (grad_y, the same tensors, that matrix, the same options, dtype, wanted) -> the gradients
            of x, weights_N and the parameters; empty tensors for those not wanted.
        num_tensors: number of tensor arguments of both operators, some of which may be None.
        backend: name of the backend, for error messages.
        width_of_kept: (the parameters) -> width of the matrix, by default that of the first product.
    """

    def fake(x_TD: Tensor, weights_N: Tensor, *others: Any) -> tuple[Tensor, ...]:
        *_, dtype, keep = others
        num_kept = weights_N.shape[0] if keep else 0
        width = width_of_kept(*others[: len(PARAMETERS)])
        return x_TD.new_empty(x_TD.shape), x_TD.new_empty(num_kept, width, dtype=dtype)

    def fake_backward(_: Tensor, x_TD: Tensor, *others: Any) -> tuple[Tensor, ...]:
        inputs, wanted = (x_TD, *others)[:NUM_GRADIENTS], others[-1]
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

    def differentiate(ctx: Any, grad_y_TD: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        wanted = list(ctx.needs_input_grad[:NUM_GRADIENTS])
        rest = (None,) * (len(ctx.needs_input_grad) - NUM_GRADIENTS)
        if grad_y_TD is None:
            return (None,) * NUM_GRADIENTS + rest
        grads = backward(grad_y_TD, *ctx.saved_tensors, *ctx.options, wanted)
        return (*(g if want else None for g, want in zip(grads, wanted, strict=True)), *rest)

    def reject(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        raise no_second_derivative(backend)

    forward.register_fake(fake)
    backward.register_fake(fake_backward)
    forward.register_autograd(differentiate, setup_context=save)
    backward.register_autograd(reject)
