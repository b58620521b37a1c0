"""The gradients of matrices and biases: sums over the rows of each expert.

T tokens, E experts, N (token, expert) pairs, I in, O out
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ffn.kernels.triton.tiles import dot


@triton.jit
def weight_gradient_kernel(
    output_grad_ptr,
    input_ptr,
    token_ids_ptr,
    offsets_ptr,
    gradient_ptr,
    output_grad_stride,
    input_stride,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GATHER_OUTPUT: tl.constexpr,
    GATHER_INPUT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """gradient_EOI = output_grad_e^T input_e; one of the two may be read from the tokens' own rows.

    A tile is one of the gradient: BLOCK_M outputs by BLOCK_O inputs, BLOCK_K of the expert's rows at a time.
    An expert without rows writes zeros: DDP and FSDP would hang on a missing gradient.
    """
    tiles_out = tl.cdiv(OUT, BLOCK_M)
    tiles_in = tl.cdiv(IN, BLOCK_O)
    program = tl.program_id(0)
    expert = program // (tiles_out * tiles_in)
    tile = program % (tiles_out * tiles_in)
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert)

    outs = tile // tiles_in * BLOCK_M + tl.arange(0, BLOCK_M)
    ins = tile % tiles_in * BLOCK_O + tl.arange(0, BLOCK_O)
    output_grad_ptrs = output_grad_ptr + outs[None, :]
    input_ptrs = input_ptr + ins[None, :]

    gradient = tl.zeros((BLOCK_M, BLOCK_O), dtype=tl.float32)
    for k in range(start, end, BLOCK_K):
        rows = k + tl.arange(0, BLOCK_K)
        mine = rows < end
        wide_rows = rows.to(tl.int64)
        output_rows = wide_rows
        input_rows = wide_rows
        if GATHER_OUTPUT:
            output_rows = tl.load(token_ids_ptr + rows, mask=mine, other=0).to(tl.int64)
        if GATHER_INPUT:
            input_rows = tl.load(token_ids_ptr + rows, mask=mine, other=0).to(tl.int64)
        # Both masked: a row of the next expert, or one that nobody computed, may hold a NaN.
        output_mask = mine[:, None]
        input_mask = mine[:, None]
        if OUT % BLOCK_M != 0:
            output_mask = output_mask & (outs < OUT)[None, :]
        if IN % BLOCK_O != 0:
            input_mask = input_mask & (ins < IN)[None, :]
        output_grad_rows = output_grad_ptrs + output_rows[:, None] * output_grad_stride
        a = tl.load(output_grad_rows, mask=output_mask, other=0.0)
        b = tl.load(input_ptrs + input_rows[:, None] * input_stride, mask=input_mask, other=0.0)
        gradient = dot(tl.trans(a), b, gradient, PRECISION)

    stored = (outs < OUT)[:, None] & (ins < IN)[None, :]
    gradient_ptrs = (
        gradient_ptr + expert.to(tl.int64) * (OUT * IN) + outs[:, None] * IN + ins[None, :]
    )
    tl.store(gradient_ptrs, gradient.to(gradient_ptr.dtype.element_ty), mask=stored)


@triton.jit
def bias_gradient_kernel(
    output_grad_ptr,
    token_ids_ptr,
    weights_ptr,
    offsets_ptr,
    gradient_ptr,
    output_grad_stride,
    OUT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """gradient_EO: the sum of an expert's rows; weighted, and those of its tokens, if asked."""
    expert = tl.program_id(0)
    outs = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert)

    gradient = tl.zeros((BLOCK_O,), dtype=tl.float32)
    for k in range(start, end, BLOCK_K):
        rows = k + tl.arange(0, BLOCK_K)
        mine = rows < end
        source_rows = rows.to(tl.int64)
        if WEIGHTED:
            source_rows = tl.load(token_ids_ptr + rows, mask=mine, other=0).to(tl.int64)
        pointers = output_grad_ptr + source_rows[:, None] * output_grad_stride + outs[None, :]
        values = tl.load(pointers, mask=mine[:, None] & (outs < OUT)[None, :], other=0.0)
        values = values.to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weights_ptr + rows, mask=mine, other=0.0).to(tl.float32)[:, None]
        gradient += tl.sum(values, axis=0)
    gradient_ptrs = gradient_ptr + expert.to(tl.int64) * OUT + outs
    tl.store(gradient_ptrs, gradient.to(gradient_ptr.dtype.element_ty), mask=outs < OUT)
