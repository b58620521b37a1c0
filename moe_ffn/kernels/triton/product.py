"""Rows that stand in the plan's order, each times the matrix of its expert.

E experts, N (token, expert) pairs, I in, O out
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ffn.kernels.triton.tiles import dot, find_rows, slot_and_column


@triton.jit
def product_kernel(
    input_ptr,
    matrix_ptr,
    bias_ptr,
    offsets_ptr,
    output_ptr,
    out_stride,
    in_stride,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """output_NO = input_NI matrix_e^T + bias_e.

    The two strides within an expert's matrix make it (O, I) or its transpose.
    """
    slot, column = slot_and_column(tl.cdiv(OUT, BLOCK_O), GROUP)
    expert, first, end = find_rows(offsets_ptr, slot, E, E_BLOCK, BLOCK_M)
    if first >= end:
        return
    rows = first + tl.arange(0, BLOCK_M)
    # 64 bits up to the tile's first row, 32 within it: half as many registers.
    tile = tl.arange(0, BLOCK_M)
    wide_first = first.to(tl.int64)
    outs = column * BLOCK_O + tl.arange(0, BLOCK_O)
    inner = tl.arange(0, BLOCK_K)
    safe_tile = tl.where(rows < end, tile, 0)
    input_ptrs = input_ptr + wide_first * IN + (safe_tile[:, None] * IN + inner[None, :])
    matrix_ptrs = matrix_ptr + expert * (OUT * IN)
    matrix_ptrs += outs[None, :] * out_stride + inner[:, None] * in_stride

    output = tl.zeros((BLOCK_M, BLOCK_O), dtype=tl.float32)
    for k in range(0, IN, BLOCK_K):
        # Neighbouring columns are neighbours in memory: a mask leaves them so for the compiler.
        if IN % BLOCK_K == 0 and OUT % BLOCK_O == 0:
            a = tl.load(input_ptrs + k)
            w = tl.load(matrix_ptrs + k * in_stride)
        else:
            a = tl.load(input_ptrs + k, mask=inner[None, :] < IN - k, other=0.0)
            exist = (inner < IN - k)[:, None] & (outs < OUT)[None, :]
            w = tl.load(matrix_ptrs + k * in_stride, mask=exist, other=0.0)
        output = dot(a, w, output, PRECISION)

    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * OUT + outs, mask=outs < OUT, other=0.0)
        output += bias.to(tl.float32)[None, :]
    stored = (rows < end)[:, None] & (outs < OUT)[None, :]
    output_ptrs = output_ptr + wide_first * OUT + (tile[:, None] * OUT + outs[None, :])
    tl.store(output_ptrs, output.to(output_ptr.dtype.element_ty), mask=stored)
