"""Backend `cpu`: compiled kernels if there is a compiler, otherwise the loop over experts.

Under torch.compile and torch.export, and for meta or fake tensors, the experts run as one custom operator.
Eager mode calls the kernels directly, which saves some microseconds.

T tokens, D model width, E experts, F hidden width, N (token, expert) pairs, H rows of the first matrix
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from moe_ffn.kernels import autograd
from moe_ffn.kernels.activations import ClampedSwiGLU
from moe_ffn.kernels.autograd import Gradients, Inputs
from moe_ffn.kernels.base import (
    NO_TRANSFORMS,
    ExpertWeights,
    autograd_in_operators,
    compute_dtype,
    dropout_mask,
    is_dispatch_mode_on,
    is_emulated_on_cpu,
    is_transform_on,
    needs_gradient,
    product_dtype_on_cpu,
    reject_more_derivatives,
    without_autocast,
)
from moe_ffn.kernels.native.build import activations, unavailable_reason
from moe_ffn.kernels.torch_products import run_loop
from moe_ffn.outputs import Plan


def cpu(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> Tensor:
    """Run the experts on a CPU: by compiled kernels if they support the gate, otherwise by the loop."""
    if torch.compiler.is_compiling():
        return run_operator(x_TD, plan, weights)
    if not is_dispatch_mode_on() and is_compiled(weights):
        return native(x_TD, plan, weights)
    return loop_on_cpu(x_TD, plan, weights, compute_dtype(x_TD))


def is_compiled(weights: ExpertWeights) -> bool:
    """Return True if the kernels are compiled and support these experts."""
    return has_kernel(weights) and unavailable_reason() is None


def unsupported_reason(x_TD: Tensor, weights: ExpertWeights) -> str | None:
    """Return the reason why `cpu` cannot run these tokens; None if it can."""
    if x_TD.device.type == "cpu":
        return NO_TRANSFORMS if is_transform_on() else None
    return f"is for tensors on the CPU, but x is on {x_TD.device}; use 'auto'"


# -- the autograd function of both implementations


def width_of_kept(up_EHD: Tensor, *others: Tensor | None) -> int:
    """Return the width of the matrix kept for backward: the first product, then A x of both adapters."""
    *_, up_a_ERD, _, down_a_ERF, _ = others
    return up_EHD.shape[1] + sum(a.shape[1] for a in (up_a_ERD, down_a_ERF) if a is not None)


class Implementation(NamedTuple):
    """Forward and backward pass of experts on a CPU."""

    forward: Callable[[Inputs, Tensor | None], Tensor]
    """(inputs, kept) -> y_TD; writes to `kept` (N, `width_of_kept`) if given."""
    backward: Callable[[Inputs, Tensor, Tensor, Sequence[bool]], Gradients]
    """(inputs, kept, grad_y_TD, wanted) -> the wanted gradients; the C++ kernels
    return the gradient of `weights_N` even if it is not wanted."""


def run(implementation: Implementation, x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> Tensor:
    """Run experts of any dtype.

    An expert without tokens gets a zero gradient. The first product (N, H), A x of both adapters and the
    dropout mask are saved for backward.
    """
    weights_N, dtype = plan.weights_N[: int(plan.offsets_E[-1])], compute_dtype(x_TD)
    dropout_NF = dropout_mask(len(weights_N), weights, product_dtype_on_cpu(dtype), x_TD.device)
    ids = plan.token_indices_N, plan.offsets_E, (plan.pair_ids_N,)
    inputs = Inputs(x_TD, weights_N, *ids, dropout_NF, weights, dtype)
    differentiable = x_TD, weights_N, *weights.parameters
    if needs_gradient(*differentiable):
        return _Experts.apply(implementation, inputs, *differentiable)
    return implementation.forward(inputs, None)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, implementation: Implementation, inputs: Inputs, *differentiable: Any
    ) -> Tensor:
        x_TD, weights_N, *parameters = differentiable
        kept = x_TD.new_empty(len(weights_N), width_of_kept(*parameters), dtype=inputs.dtype)
        y_TD = implementation.forward(inputs, kept)
        ids = inputs.token_indices_N, inputs.offsets_E, *inputs.order
        ctx.save_for_backward(*differentiable, *ids, inputs.dropout_NF, kept)
        ctx.implementation, ctx.weights, ctx.dtype = implementation, inputs.weights, inputs.dtype
        return y_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        reject_more_derivatives("cpu", grads[0])
        # Read once: under activation checkpointing, each read recomputes the tensors.
        x_TD, weights_N, *parameters, ids_N, offsets_E, pair_ids_N, mask_NF, kept = (
            ctx.saved_tensors
        )
        ids, weights = (ids_N, offsets_E, (pair_ids_N,)), ctx.weights.with_parameters(*parameters)
        inputs = Inputs(x_TD, weights_N, *ids, mask_NF, weights, ctx.dtype)
        wanted = ctx.needs_input_grad[2:]
        return None, None, *ctx.implementation.backward(inputs, kept, grads[0], wanted)


# -- compiled kernels

_CODES = {name: code for code, name in enumerate(activations())}


def has_kernel(weights: ExpertWeights) -> bool:
    """Return True if the kernels support the activation and the gate of these experts."""
    is_gate_known = weights.gate_function is None or isinstance(
        weights.gate_function, ClampedSwiGLU
    )
    return is_gate_known and weights.activation in _CODES


def native(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> Tensor:
    """Run the experts with compiled kernels; the result does not depend on the number of threads."""
    return run(NATIVE, x_TD, plan, weights)


def _operator_args(inputs: Inputs) -> tuple[Any, ...]:
    """Return the arguments that both C++ operators share."""
    dtype = product_dtype_on_cpu(inputs.dtype)
    if dtype == torch.float16:  # the operators have no float16 products
        dtype = torch.float32
    sum_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    weights, clamped = inputs.weights, inputs.weights.gate_function
    assert clamped is None or isinstance(clamped, ClampedSwiGLU)  # see `has_kernel`
    return (
        inputs.x_TD.contiguous(),
        inputs.weights_N.to(sum_dtype).contiguous(),
        *(
            None if parameter is None else parameter.contiguous()
            for parameter in weights.parameters
        ),
        inputs.token_indices_N.contiguous(),
        inputs.offsets_E.int().contiguous(),
        inputs.dropout_NF,
        _CODES["clamped" if clamped is not None else weights.activation],
        weights.gated,
        weights.interleaved,
        0.0 if clamped is None else clamped.alpha,
        0.0 if clamped is None else clamped.limit,
        dtype,
    )


def _native_forward(operators: Any, inputs: Inputs, kept: Tensor | None) -> Tensor:
    y_TD = torch.empty_like(inputs.x_TD, memory_format=torch.contiguous_format)
    operators.experts_forward(*_operator_args(inputs), kept, y_TD)
    return y_TD


def _native_backward(
    operators: Any, inputs: Inputs, kept: Tensor, grad_y_TD: Tensor, wanted: Sequence[bool]
) -> Gradients:
    layer = _operator_args(inputs)
    wants_x, _, *wants = wanted
    grad_x_TD = None
    if wants_x:
        grad_x_TD = torch.empty_like(inputs.x_TD, memory_format=torch.contiguous_format)
    grad_weights_N = torch.empty_like(layer[1])
    gradients = [
        empty_gradient(parameter) if want and parameter is not None else None
        for parameter, want in zip(inputs.weights.parameters, wants, strict=True)
    ]
    operators.experts_backward(
        *layer, kept, grad_y_TD.contiguous(), grad_x_TD, grad_weights_N, *gradients
    )
    return grad_x_TD, grad_weights_N.to(inputs.weights_N.dtype), *gradients


def compiled(operators: Any) -> Implementation:
    """Return both passes of a compiled library, a namespace of `torch.ops`."""
    return Implementation(partial(_native_forward, operators), partial(_native_backward, operators))


NATIVE = compiled(torch.ops.moe_ffn_cpu)


# -- memory of gradients

LARGE_BYTES = 2**20
"""Size from which freed memory is likely to return to the system: directly, or as glibc trims its heap."""

ALIGNMENT = 64
"""Bytes of a cache line, and of the widest vector register."""

_buffers = WeakTensorKeyDictionary()
_lock = Lock()


def empty_gradient(weight: Tensor) -> Tensor:
    """Return an uninitialised, contiguous tensor like `weight`.

    A large tensor reuses the memory of an earlier gradient of the same weight once no tensor uses it. This
    memory is freed with the weight.
    """
    size = weight.numel() * weight.itemsize
    if size < LARGE_BYTES:
        return torch.empty_like(weight, memory_format=torch.contiguous_format)
    with _lock:
        if weight not in _buffers:
            _buffers[weight] = []
        buffers: list[bytearray] = _buffers[weight]
        # Every storage in a buffer holds a reference to it. An unused buffer has two references, from the
        # list and from the argument of `getrefcount`. A loop variable would be a third.
        in_use = [sys.getrefcount(buffers[i]) > 2 for i in range(len(buffers))]
        if all(in_use):
            in_use.append(False)
            buffers.append(bytearray(size + ALIGNMENT))
        bytes_B = torch.frombuffer(buffers[in_use.index(False)], dtype=torch.uint8)
        start = -bytes_B.data_ptr() % ALIGNMENT
        return bytes_B[start : start + size].view(weight.dtype).view(weight.shape)


# -- without compiled kernels


def loop_on_cpu(
    x_TD: Tensor,
    plan: Plan,
    weights: ExpertWeights,
    dtype: torch.dtype,
    dropout_NF: Tensor | None = None,
) -> Tensor:
    """Run the loop over experts, with products in float32 if this CPU only emulates `dtype`.

    If it only multiplies `dtype` more slowly, converting all experts would take longer.
    """
    dtype = torch.float32 if is_emulated_on_cpu(dtype) else dtype
    dropout_NF = None if dropout_NF is None else dropout_NF.to(dtype)
    with without_autocast(x_TD):
        return run_loop(x_TD, plan, weights.to(dtype), dtype, dropout_NF)


def _run_inputs(inputs: Inputs, x_TD: Tensor, weights_N: Tensor, *parameters: Any) -> Tensor:
    (pair_ids_N,) = inputs.order
    plan = Plan(inputs.token_indices_N, weights_N, inputs.offsets_E, pair_ids_N)
    # `dropout_NF` already is the dropout mask.
    weights = replace(inputs.weights.with_parameters(*parameters), dropout=0.0)
    return loop_on_cpu(x_TD, plan, weights, inputs.dtype, inputs.dropout_NF)


def _loop_forward(inputs: Inputs, kept: Tensor | None) -> Tensor:
    return _run_inputs(inputs, inputs.x_TD, inputs.weights_N, *inputs.weights.parameters)


def _loop_backward(
    inputs: Inputs, kept: Tensor, grad_y_TD: Tensor, wanted: Sequence[bool]
) -> Gradients:
    """Recompute the forward pass and differentiate it."""
    tensors = (inputs.x_TD, inputs.weights_N, *inputs.weights.parameters)
    with autograd_in_operators():
        leaves = [
            None if tensor is None else tensor.detach().requires_grad_(want)
            for tensor, want in zip(tensors, wanted, strict=True)
        ]
        y_TD = _run_inputs(inputs, *leaves)  # pyright: ignore[reportArgumentType]
        needed = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        grads = iter(torch.autograd.grad(y_TD, needed, grad_y_TD))
    return tuple(
        next(grads) if leaf is not None and leaf.requires_grad else None for leaf in leaves
    )


LOOP = Implementation(_loop_forward, _loop_backward)
"""The loop over experts; its backward pass computes the first product again."""


# -- the operator


def run_operator(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> Tensor:
    """Run the backend `cpu` as an operator; return (T, D)."""
    mask_dtype = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
    dropout_NF = dropout_mask(plan.weights_N.shape[0], weights, mask_dtype, x_TD.device)
    return autograd.run_operator(experts, x_TD, plan, weights, (plan.pair_ids_N,), dropout_NF)


def _forward(inputs: Inputs, keep: bool) -> tuple[Tensor, Tensor]:
    num_kept = len(inputs.weights_N) if keep else 0
    width = width_of_kept(*inputs.weights.parameters)
    kept = inputs.x_TD.new_zeros(num_kept, width, dtype=inputs.dtype)
    implementation, inputs = _computed(inputs)
    y_TD = implementation.forward(inputs, kept[: len(inputs.weights_N)] if keep else None)
    return y_TD, kept


def _backward(inputs: Inputs, kept: Tensor, dy_TD: Tensor, wanted: Sequence[bool]) -> Gradients:
    implementation, computed = _computed(inputs)
    num_computed = len(computed.weights_N)
    grad_x_TD, grad_weights_N, *grads = implementation.backward(
        computed, kept[:num_computed], dy_TD, wanted
    )
    if grad_weights_N is not None:
        grad_weights_N = F.pad(grad_weights_N, (0, len(inputs.weights_N) - num_computed))
    return grad_x_TD, grad_weights_N, *grads


def _computed(inputs: Inputs) -> tuple[Implementation, Inputs]:
    """Return the implementation for these experts, and the inputs without pairs that are not computed."""
    computed_N = inputs.weights_N[: int(inputs.offsets_E[-1])]
    implementation = NATIVE if is_compiled(inputs.weights) else LOOP
    return implementation, inputs._replace(weights_N=computed_N)


experts, experts_backward = autograd.define(
    *("moe_ffn::experts_on_cpu", "cpu", ["pair_ids_N"], _forward, _backward, width_of_kept)
)
