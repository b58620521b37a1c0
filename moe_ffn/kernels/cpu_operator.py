"""The experts on a CPU as an operator of torch: for its graphs, and for tensors without data.

Graphs of torch.compile and torch.export hold it whole; tensors that have shapes alone, as memory is planned
with, get the shapes of what it returns and keeps. A step outside graphs calls `autograd.run` instead,
which takes fewer microseconds.

T tokens, D model width, E experts, F hidden width, N (token, expert) pairs, H rows of the first matrix
"""

from __future__ import annotations

from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ffn.kernels.activations import GateFunction
from moe_ffn.kernels.autograd import Implementation, Inputs, register
from moe_ffn.kernels.base import ExpertWeights, compute_dtype, dropout_mask, needs_gradient
from moe_ffn.kernels.blocks import BLOCKS
from moe_ffn.kernels.native.build import why_unavailable
from moe_ffn.kernels.native.experts import NATIVE, has_kernel
from moe_ffn.outputs import Plan


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
    """A gate as an operator of torch takes it: which of `GateFunction` it is, then its fields."""
    if gate is None:
        return None
    return [float(get_args(GateFunction).index(type(gate))), *map(float, vars(gate).values())]


def decode_gate(numbers: list[float] | None) -> GateFunction | None:
    """The gate of `encode_gate`."""
    return None if numbers is None else get_args(GateFunction)[int(numbers[0])](*numbers[1:])


@torch.library.custom_op("moe_ffn::experts_on_cpu", mutates_args=())
def experts(
    x_TD: Tensor,
    weights_N: Tensor,
    up_EHD: Tensor,
    down_EDF: Tensor,
    up_bias_EH: Tensor | None,
    down_bias_ED: Tensor | None,
    token_ids_N: Tensor,
    offsets_E: Tensor,
    pair_ids_N: Tensor,
    dropout_NF: Tensor | None,
    activation: str,
    gate: list[float] | None,
    gated: bool,
    interleaved: bool,
    dtype: torch.dtype,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """y_TD, and the first product (N, H) if backward is to come, else none of its rows.

    Args:
        gate: from `encode_gate`.
        dtype: of products, where this CPU multiplies in it, and of the first product.
    """
    parameters = (up_EHD, down_EDF, up_bias_EH, down_bias_ED)
    ids = (token_ids_N, offsets_E, pair_ids_N)
    options = (activation, gate, gated, interleaved, dtype)
    implementation, inputs = _inputs(x_TD, weights_N, parameters, ids, dropout_NF, options)
    kept_NH = x_TD.new_zeros(len(weights_N) if keep else 0, up_EHD.shape[1], dtype=dtype)
    y_TD = implementation.forward(inputs, kept_NH[: len(inputs.weights_N)] if keep else None)
    return y_TD, kept_NH


@torch.library.custom_op("moe_ffn::experts_on_cpu_backward", mutates_args=())
def experts_backward(
    grad_y_TD: Tensor,
    x_TD: Tensor,
    weights_N: Tensor,
    up_EHD: Tensor,
    down_EDF: Tensor,
    up_bias_EH: Tensor | None,
    down_bias_ED: Tensor | None,
    token_ids_N: Tensor,
    offsets_E: Tensor,
    pair_ids_N: Tensor,
    dropout_NF: Tensor | None,
    kept_NH: Tensor,
    activation: str,
    gate: list[float] | None,
    gated: bool,
    interleaved: bool,
    dtype: torch.dtype,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the first six inputs of `experts`; empty where they are not wanted."""
    parameters = (up_EHD, down_EDF, up_bias_EH, down_bias_ED)
    ids = (token_ids_N, offsets_E, pair_ids_N)
    options = (activation, gate, gated, interleaved, dtype)
    implementation, inputs = _inputs(x_TD, weights_N, parameters, ids, dropout_NF, options)
    computed = len(inputs.weights_N)
    found = implementation.backward(inputs, kept_NH[:computed], grad_y_TD, wanted)
    grads = [
        grad if want and grad is not None else x_TD.new_empty(0)
        for grad, want in zip(found, wanted, strict=True)
    ]
    if wanted[1]:
        grads[1] = F.pad(grads[1], (0, weights_N.shape[0] - computed))
    return grads[0], grads[1], grads[2], grads[3], grads[4], grads[5]


def _inputs(
    x_TD: Tensor,
    weights_N: Tensor,
    parameters: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    ids: tuple[Tensor, Tensor, Tensor],
    dropout_NF: Tensor | None,
    options: tuple[Any, ...],
) -> tuple[Implementation, Inputs]:
    activation, gate, gated, interleaved, dtype = options
    weights = ExpertWeights(
        activation,
        *parameters[:2],
        gated,
        *parameters[2:],
        gate_function=decode_gate(gate),
        interleaved=interleaved,
    )
    weights_N = weights_N[: int(ids[1][-1])]
    inputs = Inputs(x_TD, weights_N, parameters, *ids, dropout_NF, weights, dtype)
    return NATIVE if has_kernel(weights) and why_unavailable() is None else BLOCKS, inputs


register(experts, experts_backward, num_tensors=10, backend="cpu")
