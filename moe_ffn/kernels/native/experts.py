"""Compiled experts: arguments of the operators in C++.

T tokens, D model width, E experts, F hidden width, N computed (token, expert) pairs, H rows of the first
matrix
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from threading import Lock
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from moe_ffn.kernels.activations import Activation, ClampedSwiGLU
from moe_ffn.kernels.autograd import Gradients, Implementation, Inputs, run
from moe_ffn.kernels.base import ExpertWeights, product_dtype_on_cpu
from moe_ffn.outputs import Plan

_CODES = {name: code for code, name in enumerate((*get_args(Activation), "clamped"))}
"""The numbers of `Activation` in passes.h."""


def has_kernel(weights: ExpertWeights) -> bool:
    """Return True if a kernel has the gate of these experts."""
    return weights.gate_function is None or isinstance(weights.gate_function, ClampedSwiGLU)


def native(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> Tensor:
    """Run the experts by compiled kernels; any number of threads gives the same bits."""
    return run(NATIVE, x_TD, plan, weights)


def _layer(inputs: Inputs) -> tuple[Any, ...]:
    """First arguments of both operators."""
    dtype = product_dtype_on_cpu(inputs.dtype)
    if dtype == torch.float16:  # which the operators store and do not multiply
        dtype = torch.float32
    of_sums = torch.float64 if dtype == torch.float64 else torch.float32
    options, clamped = inputs.options, inputs.options.gate_function
    assert clamped is None or isinstance(clamped, ClampedSwiGLU)  # see `has_kernel`
    return (
        inputs.x_TD.contiguous(),
        inputs.weights_N.to(of_sums).contiguous(),
        *(None if parameter is None else parameter.contiguous() for parameter in inputs.parameters),
        inputs.token_ids_N.contiguous(),
        inputs.offsets_E.int().contiguous(),
        inputs.dropout_NF,
        _CODES["clamped" if clamped is not None else options.activation],
        options.gated,
        options.interleaved,
        0.0 if clamped is None else clamped.alpha,
        0.0 if clamped is None else clamped.limit,
        dtype,
    )


def _forward(inputs: Inputs, kept_NH: Tensor | None) -> Tensor:
    y_TD = torch.empty_like(inputs.x_TD, memory_format=torch.contiguous_format)
    torch.ops.moe_ffn_cpu.experts_forward(*_layer(inputs), kept_NH, y_TD)
    return y_TD


def _backward(
    inputs: Inputs, kept_NH: Tensor, grad_y_TD: Tensor, wanted: Sequence[bool]
) -> Gradients:
    layer = _layer(inputs)
    wants_x, _, *wants = wanted
    grad_x_TD = None
    if wants_x:
        grad_x_TD = torch.empty_like(inputs.x_TD, memory_format=torch.contiguous_format)
    grad_weights_N = torch.empty_like(layer[1])
    gradients = [
        empty_gradient(parameter) if wanted and parameter is not None else None
        for parameter, wanted in zip(inputs.parameters, wants, strict=True)
    ]
    torch.ops.moe_ffn_cpu.experts_backward(
        *layer, kept_NH, grad_y_TD.contiguous(), grad_x_TD, grad_weights_N, *gradients
    )
    return grad_x_TD, grad_weights_N.to(inputs.weights_N.dtype), *gradients


NATIVE = Implementation(_forward, _backward)


# -- memory of gradients

LARGE_BYTES = 32 * 2**20
"""Size from which glibc keeps no freed memory (the largest value of M_MMAP_THRESHOLD)."""

ALIGNMENT = 64
"""Size in bytes of a cache line, and of the widest vector register."""

_buffers = WeakTensorKeyDictionary()
_lock = Lock()


def empty_gradient(weight: Tensor) -> Tensor:
    """Return an uninitialised, contiguous tensor like `weight`.

    A large one reuses the memory of an earlier gradient of the same weight that no tensor uses any more.
    That memory is freed with the weight.
    """
    size = weight.numel() * weight.itemsize
    if size < LARGE_BYTES:
        return torch.empty_like(weight, memory_format=torch.contiguous_format)
    with _lock:
        if weight not in _buffers:
            _buffers[weight] = []
        buffers: list[bytearray] = _buffers[weight]
        # Every storage over a buffer holds a reference to it; torch has no other way to tell that the last of
        # them is gone. Then the list's and the argument's are left; a loop variable would be a third.
        in_use = [sys.getrefcount(buffers[i]) > 2 for i in range(len(buffers))]
        if all(in_use):
            in_use.append(False)
            buffers.append(bytearray(size + ALIGNMENT))
        bytes_B = torch.frombuffer(buffers[in_use.index(False)], dtype=torch.uint8)
        start = -bytes_B.data_ptr() % ALIGNMENT
        return bytes_B[start : start + size].view(weight.dtype).view(weight.shape)
