"""From tokens to hidden units: the activation is an epilogue of the first product.

T tokens, D model width, E experts, F hidden width, N (token, expert) pairs, H rows of the first
matrix: F, or 2 F where the rows of a gate stand before those of up
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ffn.kernels.triton.tiles import dot, find_rows, hidden_units, slot_and_column


@triton.jit
def hidden_kernel(
    x_ptr,
    up_ptr,
    bias_ptr,
    dropout_ptr,
    token_ids_ptr,
    offsets_ptr,
    pre_ptr,
    hidden_ptr,
    x_stride,
    alpha,
    limit,
    D: tl.constexpr,
    F: tl.constexpr,
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    KEEP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """hidden_NF = act(up_e x[token] + bias), gate and up in one pass; `pre_NH` where it is kept."""
    slot, column = slot_and_column(tl.cdiv(F, BLOCK_O), GROUP)
    expert, first, end = find_rows(offsets_ptr, slot, E, E_BLOCK, BLOCK_M)
    if first >= end:
        return
    H: tl.constexpr = 2 * F if GATED else F
    UP: tl.constexpr = H - F  # the row of the matrix at which up begins

    # Rows and columns that are too many repeat one that exists; nothing of them is stored.
    rows = first + tl.arange(0, BLOCK_M)
    tokens = tl.load(token_ids_ptr + tl.where(rows < end, rows, first)).to(tl.int64)
    units = column * BLOCK_O + tl.arange(0, BLOCK_O)
    safe_units = tl.where(units < F, units, 0)
    inner = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + tokens[:, None] * x_stride + inner[None, :]
    gate_ptrs = up_ptr + expert * (H * D) + safe_units[None, :] * D + inner[:, None]

    gate = tl.zeros((BLOCK_M, BLOCK_O), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_O), dtype=tl.float32)
    for k in range(0, D, BLOCK_K):
        if D % BLOCK_K == 0:
            x = tl.load(x_ptrs + k)
            w = tl.load(gate_ptrs + UP * D + k)
        else:
            x = tl.load(x_ptrs + k, mask=inner[None, :] < D - k, other=0.0)
            w = tl.load(gate_ptrs + UP * D + k, mask=inner[:, None] < D - k, other=0.0)
        up = dot(x, w, up, PRECISION)
        if GATED:
            if D % BLOCK_K == 0:
                v = tl.load(gate_ptrs + k)
            else:
                v = tl.load(gate_ptrs + k, mask=inner[:, None] < D - k, other=0.0)
            gate = dot(x, v, gate, PRECISION)

    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert * H + safe_units
        up += tl.load(bias_ptrs + UP).to(tl.float32)[None, :]
        if GATED:
            gate += tl.load(bias_ptrs).to(tl.float32)[None, :]

    # Rounded before the activation, kept or not: backward computes the very same hidden units from
    # what is kept, and evaluation the same as training.
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    stored = (rows < end)[:, None] & (units < F)[None, :]
    # 64 bits up to the tile's first row, 32 within it: half as many registers.
    tile = tl.arange(0, BLOCK_M)[:, None]
    wide_first = first.to(tl.int64)
    rounded_up = up.to(dtype)
    rounded_gate = gate.to(dtype)
    if KEEP:
        pre_ptrs = pre_ptr + wide_first * H + (tile * H + units[None, :])
        tl.store(pre_ptrs + UP, rounded_up, mask=stored)
        if GATED:
            tl.store(pre_ptrs, rounded_gate, mask=stored)
    hidden, _, _ = hidden_units(
        rounded_gate.to(tl.float32),
        rounded_up.to(tl.float32),
        alpha,
        limit,
        ACTIVATION,
        GATED,
        CLAMPED,
    )
    hidden_offsets = tile * F + units[None, :]
    if HAS_DROPOUT:
        dropout_ptrs = dropout_ptr + wide_first * F + hidden_offsets
        hidden *= tl.load(dropout_ptrs, mask=stored, other=0.0).to(tl.float32)
    tl.store(hidden_ptr + wide_first * F + hidden_offsets, hidden.to(dtype), mask=stored)


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


@triton.jit
def combine_kernel(
    rows_ptr,
    weights_ptr,
    ranks_ptr,
    starts_ptr,
    total_ptr,
    output_ptr,
    D: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """output_TD = the sum over the token's pairs of their rows (N, D), in float32.

    `ranks_N` says where each pair of the routing's list stands in the plan; those from `total` on
    were not computed, and what stands in their rows is not looked at.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = tl.load(starts_ptr + token)
    end = tl.load(starts_ptr + token + 1)
    total = tl.load(total_ptr)

    output = tl.zeros((BLOCK_D,), dtype=tl.float32)
    rank = tl.load(ranks_ptr + first, mask=first < end, other=0)
    for pair in range(first, end):
        # The next rank is asked for before this row is waited for.
        next_rank = tl.load(ranks_ptr + pair + 1, mask=pair + 1 < end, other=0)
        computed = rank < total
        pointers = rows_ptr + rank.to(tl.int64) * D + columns
        row = tl.load(pointers, mask=columns < tl.where(computed, D, 0), other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights_ptr + rank, mask=computed, other=0.0).to(tl.float32)
        output += row
        rank = next_rank
    tl.store(
        output_ptr + token * D + columns,
        output.to(output_ptr.dtype.element_ty),
        mask=columns < D,
    )
