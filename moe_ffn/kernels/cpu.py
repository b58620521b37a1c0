"""Backend `cpu`: compiled kernels if there is a compiler, otherwise the loop over experts.

Graphs of torch.compile and torch.export hold it as one operator of torch; so do tensors that have shapes
alone, with which memory is planned. A step outside graphs calls no operator, which saves some microseconds.

T tokens, D model width, E experts, F hidden width, N (token, expert) pairs, H rows of the first matrix
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ffn.kernels.activations import GateFunction
from moe_ffn.kernels.autograd import Gradients, Implementation, Inputs, register
from moe_ffn.kernels.base import (
    NOT_BY_TRANSFORMS,
    ExpertWeights,
    compute_dtype,
    dropout_mask,
    needs_gradient,
    product_dtype_on_cpu,
)
from moe_ffn.kernels.native.build import unavailable_reason
from moe_ffn.kernels.native.experts import NATIVE, has_kernel, native
from moe_ffn.kernels.torch_modes import (
    autograd_in_operators,
    is_dispatch_mode_on,
    is_transform_on,
    without_autocast,
)
from moe_ffn.kernels.torch_products import run_loop
from moe_ffn.outputs import Plan


def cpu(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> Tensor:
    """Run experts of any dtype; reads the offsets on the host."""
    if torch.compiler.is_compiling():
        return run_operator(x_TD, plan, weights)
    if not is_dispatch_mode_on() and is_compiled(weights):
        return native(x_TD, plan, weights)
    return loop_on_cpu(x_TD, plan, weights, compute_dtype(x_TD))


def is_compiled(weights: ExpertWeights) -> bool:
    """Return True if the kernels are compiled, and one has the gate of these experts."""
    return has_kernel(weights) and unavailable_reason() is None


def refusal(x_TD: Tensor, weights: ExpertWeights) -> str | None:
    """Reason why `cpu` does not take these tokens; None if it does."""
    if x_TD.device.type == "cpu":
        return NOT_BY_TRANSFORMS if is_transform_on() else None
    return f"is for tensors on the CPU, but x is on {x_TD.device}; use 'auto'"


# -- without a compiled kernel


def loop_on_cpu(
    x_TD: Tensor,
    plan: Plan,
    weights: ExpertWeights,
    dtype: torch.dtype,
    dropout_NF: Tensor | None = None,
) -> Tensor:
    """Run the loop over experts, with products in float32 if this CPU only emulates `dtype`."""
    dtype = product_dtype_on_cpu(dtype)
    with without_autocast(x_TD):
        return run_loop(x_TD, plan, weights.to(dtype), dtype, dropout_NF)


def _run_inputs(inputs: Inputs, x_TD: Tensor, weights_N: Tensor, *parameters: Any) -> Tensor:
    plan = Plan(inputs.token_ids_N, weights_N, inputs.offsets_E, inputs.pair_ids_N)
    weights = replace(inputs.options.with_parameters(*parameters), dropout=0.0)  # in the mask
    return loop_on_cpu(x_TD, plan, weights, inputs.dtype, inputs.dropout_NF)


def _forward(inputs: Inputs, kept_NH: Tensor | None) -> Tensor:
    return _run_inputs(inputs, inputs.x_TD, inputs.weights_N, *inputs.parameters)


def _backward(
    inputs: Inputs, kept_NH: Tensor, grad_y_TD: Tensor, wanted: Sequence[bool]
) -> Gradients:
    """Compute the forward pass again, and differentiate it."""
    tensors = (inputs.x_TD, inputs.weights_N, *inputs.parameters)
    with autograd_in_operators():
        leaves = [
            None if tensor is None else tensor.detach().requires_grad_(want)
            for tensor, want in zip(tensors, wanted, strict=True)
        ]
        y_TD = _run_inputs(inputs, *leaves)  # pyright: ignore[reportArgumentType]
        needed = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        found = iter(torch.autograd.grad(y_TD, needed, grad_y_TD))
    return tuple(
        next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves
    )


LOOP = Implementation(_forward, _backward)
"""`loop` for the operator; it does not read the first product."""


# -- the operator


def run_operator(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> Tensor:
    """The backend `cpu` as an operator, (T, D)."""
    of_mask = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
    ids = plan.token_ids_N, plan.offsets_E, plan.pair_ids_N
    y_TD, _ = experts(
        x_TD,
        plan.weights_N,
        *weights.parameters,
        *ids,
        dropout_mask(plan.weights_N.shape[0], weights, of_mask, x_TD.device),
        weights.activation,
        encode_gate(weights.gate_function),
        weights.gated,
        weights.interleaved,
        compute_dtype(x_TD),
        needs_gradient(x_TD, plan.weights_N, *weights.parameters),
    )
    return y_TD


def encode_gate(gate: GateFunction | None) -> list[float] | None:
    """Encode a gate for an operator of torch: its index in `GateFunction`, then its fields."""
    if gate is None:
        return None
    return [float(get_args(GateFunction).index(type(gate))), *map(float, vars(gate).values())]


def decode_gate(numbers: list[float] | None) -> GateFunction | None:
    """Decode the numbers of `encode_gate`."""
    return None if numbers is None else get_args(GateFunction)[int(numbers[0])](*numbers[1:])


_INPUTS = (
    "Tensor x, Tensor weights, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias, "
    "Tensor token_ids, Tensor offsets, Tensor pair_ids, Tensor? dropout"
)
_OPTIONS = "str activation, float[]? gate, bool gated, bool interleaved, ScalarType dtype"
"""`gate` is from `encode_gate`; `dtype` is that of products, where this CPU multiplies in it."""


@torch.library.custom_op(
    "moe_ffn::experts_on_cpu",
    mutates_args=(),
    schema=f"({_INPUTS}, {_OPTIONS}, bool keep) -> (Tensor, Tensor)",
)
def experts(*given: Any) -> tuple[Tensor, Tensor]:
    """Return y_TD and the first product (N, H), which has no rows unless `keep`."""
    implementation, inputs = _read(given[:10], given[10:15])
    keep = given[15]
    x_TD, weights_N, up_EHD = given[:3]
    kept_NH = x_TD.new_zeros(len(weights_N) if keep else 0, up_EHD.shape[1], dtype=inputs.dtype)
    y_TD = implementation.forward(inputs, kept_NH[: len(inputs.weights_N)] if keep else None)
    return y_TD, kept_NH


@torch.library.custom_op(
    "moe_ffn::experts_on_cpu_backward",
    mutates_args=(),
    schema=f"(Tensor grad_y, {_INPUTS}, Tensor kept, {_OPTIONS}, bool[] wanted) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def experts_backward(grad_y_TD: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Return the gradients of the first six inputs of `experts`; empty if not wanted."""
    implementation, inputs = _read(given[:10], given[11:16])
    kept_NH, wanted, num_computed = given[10], given[16], len(inputs.weights_N)
    found = implementation.backward(inputs, kept_NH[:num_computed], grad_y_TD, wanted)
    grads = [
        grad if want and grad is not None else grad_y_TD.new_empty(0)
        for grad, want in zip(found, wanted, strict=True)
    ]
    if wanted[1]:
        grads[1] = F.pad(grads[1], (0, len(given[1]) - num_computed))
    return tuple(grads)


def _read(tensors: Sequence[Any], options: Sequence[Any]) -> tuple[Implementation, Inputs]:
    """Read the arguments of both operators: `_INPUTS` and `_OPTIONS`."""
    x_TD, weights_N, *parameters, token_ids_N, offsets_E, pair_ids_N, dropout_NF = tensors
    activation, gate, gated, interleaved, dtype = options
    up_EHD, down_EDF, up_bias_EH, down_bias_ED = parameters
    weights = ExpertWeights(
        activation=activation,
        up_EHD=up_EHD,
        down_EDF=down_EDF,
        gated=gated,
        up_bias_EH=up_bias_EH,
        down_bias_ED=down_bias_ED,
        gate_function=decode_gate(gate),
        interleaved=interleaved,
    )
    computed_N = weights_N[: int(offsets_E[-1])]
    ids = token_ids_N, offsets_E, pair_ids_N
    inputs = Inputs(x_TD, computed_N, parameters, *ids, dropout_NF, weights, dtype)
    return NATIVE if is_compiled(weights) else LOOP, inputs


register(experts, experts_backward, num_tensors=10, backend="cpu")
