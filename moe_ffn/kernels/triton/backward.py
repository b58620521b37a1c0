"""Kernels of the backward pass: gradients of hidden units, matrices and biases.

T tokens, D model width, E experts, F hidden width, N (token, expert) pairs, H rows of the first
matrix: F, or 2 F with a gate, whose rows precede the rows of up
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ffn.kernels.triton.forward import as_operand, dot, find_tile, hidden_units, load


@triton.jit
def hidden_gradient_kernel(
    dy_ptr,
    down_ptr,
    bias_ptr,
    dropout_ptr,
    token_ids_ptr,
    offsets_ptr,
    weights_ptr,
    added_ptr,
    pre_ptr,
    d_pre_ptr,
    hidden_ptr,
    d_weights_ptr,
    dy_stride,
    d_weights_stride,
    alpha,
    limit,
    D: tl.constexpr,
    F: tl.constexpr,
    E: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """For y = w (down h + b), compute d_pre_NH, w h (N, F), and each tile's part of dw.

    dw = <dy, down h + b> = <down^T dy, h> + <dy, b>. The second form does not need the expert's output, and
    multiplies by w only once.

    `added_NF`, unless it is None, is added to down^T dy: the product with a low-rank adapter.
    """
    expert, first, end, column = find_tile(offsets_ptr, tl.cdiv(F, BLOCK_O), E, BLOCK_M, GROUP)
    if first >= end:
        return
    H: tl.constexpr = 2 * F if GATED else F

    rows = first + tl.arange(0, BLOCK_M)
    safe_rows = tl.where(rows < end, rows, first)
    tokens = tl.load(token_ids_ptr + safe_rows).to(tl.int64)
    units = column * BLOCK_O + tl.arange(0, BLOCK_O)
    inner = tl.arange(0, BLOCK_K)
    dy_ptrs = dy_ptr + tokens[:, None] * dy_stride + inner[None, :]
    down_ptrs = down_ptr + expert * (D * F) + (inner[:, None] * F + units[None, :])

    d_weights = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if bias_ptr is not None:  # known at compile time, unlike `column`  # noqa: SIM102
        if column == 0:  # only one tile of units adds <dy, b>
            for k in range(0, D, BLOCK_K):
                dy = tl.load(dy_ptrs + k, mask=inner[None, :] < D - k, other=0.0)
                b = tl.load(bias_ptr + expert * D + k + inner, mask=inner < D - k, other=0.0)
                d_weights += tl.sum(dy.to(tl.float32) * b.to(tl.float32)[None, :], axis=1)

    MASKED: tl.constexpr = D % BLOCK_K != 0 or F % BLOCK_O != 0
    d_hidden = tl.zeros((BLOCK_M, BLOCK_O), dtype=tl.float32)
    for k in range(0, D, BLOCK_K):
        dy = load(dy_ptrs + k, inner[None, :] < D - k, MASKED)
        exist = (inner < D - k)[:, None] & (units < F)[None, :]
        w = load(down_ptrs + k * F, exist, MASKED)
        d_hidden = dot(dy, w, d_hidden, PRECISION)

    # 64-bit offset of the tile's first row, 32-bit offsets within the tile: half as many registers.
    tile = tl.arange(0, BLOCK_M)
    valid = rows < end
    wide_first = first.to(tl.int64)
    if added_ptr is not None:
        added_ptrs = added_ptr + wide_first * F + (tile[:, None] * F + units[None, :])
        exist = valid[:, None] & (units < F)[None, :]
        d_hidden += tl.load(added_ptrs, mask=exist, other=0.0).to(tl.float32)
    weights = tl.load(weights_ptr + wide_first + tile, mask=valid, other=0.0).to(tl.float32)
    pre_ptr += wide_first * H
    d_pre_ptr += wide_first * H
    hidden_ptr += wide_first * F
    if dropout_ptr is not None:
        dropout_ptr += wide_first * F
    pointers = (pre_ptr, d_pre_ptr, hidden_ptr, dropout_ptr)
    if BLOCK_O >= 64:
        # Half of the columns at a time, because registers are scarce.
        halves = tl.permute(tl.reshape(d_hidden, (BLOCK_M, 2, BLOCK_O // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        half = column * BLOCK_O + tl.arange(0, BLOCK_O // 2)
        d_weights += _activation_backward(
            left, half, valid, weights, pointers, alpha, limit, F, ACTIVATION, GATED, PRECISION
        )
        half += BLOCK_O // 2
        d_weights += _activation_backward(
            right, half, valid, weights, pointers, alpha, limit, F, ACTIVATION, GATED, PRECISION
        )
    else:
        d_weights += _activation_backward(
            d_hidden, units, valid, weights, pointers, alpha, limit, F, ACTIVATION, GATED, PRECISION
        )
    d_weights_ptrs = d_weights_ptr + wide_first * d_weights_stride + tile * d_weights_stride
    tl.store(d_weights_ptrs + column, d_weights, mask=valid)


@triton.jit
def _activation_backward(
    d_hidden,
    units,
    valid,
    weights,
    pointers,
    alpha,
    limit,
    F: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write d_pre and w h of these units; return their part of dw."""
    pre_ptr, d_pre_ptr, hidden_ptr, dropout_ptr = pointers
    H: tl.constexpr = 2 * F if GATED else F
    UP: tl.constexpr = H - F
    stored = valid[:, None] & (units < F)[None, :]
    tile = tl.arange(0, d_hidden.shape[0])[:, None]
    pre_offsets = tile * H + units[None, :]
    hidden_offsets = tile * F + units[None, :]
    up = tl.load(pre_ptr + UP + pre_offsets, mask=stored, other=0.0).to(tl.float32)
    gate = up
    if GATED:
        gate = tl.load(pre_ptr + pre_offsets, mask=stored, other=0.0).to(tl.float32)
    hidden, gate_slope, up_slope = hidden_units(gate, up, alpha, limit, ACTIVATION, GATED)
    d_weighted = d_hidden * weights[:, None]
    if dropout_ptr is not None:
        dropout = tl.load(dropout_ptr + hidden_offsets, mask=stored, other=0.0).to(tl.float32)
        hidden *= dropout
        d_weighted *= dropout
    dtype: tl.constexpr = d_pre_ptr.dtype.element_ty
    weighted = as_operand(hidden * weights[:, None], PRECISION)
    tl.store(hidden_ptr + hidden_offsets, weighted.to(dtype), mask=stored)
    d_up = as_operand(d_weighted * up_slope, PRECISION)
    tl.store(d_pre_ptr + UP + pre_offsets, d_up.to(dtype), mask=stored)
    if GATED:
        d_gate = as_operand(d_weighted * gate_slope, PRECISION)
        tl.store(d_pre_ptr + pre_offsets, d_gate.to(dtype), mask=stored)
    # Mask units beyond the width: they are nonzero if act(0) is not 0.
    return tl.sum(tl.where(stored, d_hidden * hidden, 0.0), axis=1)


@triton.jit
def weight_gradient_kernel(
    output_grad_ptr,
    input_ptr,
    output_ids_ptr,
    input_ids_ptr,
    offsets_ptr,
    gradient_ptr,
    output_grad_stride,
    input_stride,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """gradient_EOI = output_grad_e^T input_e; one of the two may have a row per token, indexed by token ids.

    A program computes a tile of BLOCK_M outputs by BLOCK_O inputs, from BLOCK_K of the expert's rows at a
    time. An expert without rows gets zeros, because DDP and FSDP would hang on a missing gradient.
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
    output_grad_ptrs = output_grad_ptr + outs[:, None]
    input_ptrs = input_ptr + ins[None, :]

    # The ids of the next rows are loaded one iteration ahead. Loaded in the same iteration, they would take
    # up a stage of the pipeline: of three buffers one would be left. The gradient of the outputs is loaded
    # transposed, because before Hopper the compiler does not load `tl.trans` of a tile ahead.
    rows = start + tl.arange(0, BLOCK_K)
    output_rows = rows_of(output_ids_ptr, rows, end)
    input_rows = rows_of(input_ids_ptr, rows, end)
    gradient = tl.zeros((BLOCK_M, BLOCK_O), dtype=tl.float32)
    for _ in range(start, end, BLOCK_K):
        # Mask both: a row of the next expert, or an uncomputed row, may contain NaN.
        output_mask = (rows < end)[None, :]
        input_mask = (rows < end)[:, None]
        if OUT % BLOCK_M != 0:
            output_mask = output_mask & (outs < OUT)[:, None]
        if IN % BLOCK_O != 0:
            input_mask = input_mask & (ins < IN)[None, :]
        output_grad_rows = output_grad_ptrs + output_rows[None, :] * output_grad_stride
        a = tl.load(output_grad_rows, mask=output_mask, other=0.0)
        b = tl.load(input_ptrs + input_rows[:, None] * input_stride, mask=input_mask, other=0.0)
        rows += BLOCK_K
        output_rows = rows_of(output_ids_ptr, rows, end)
        input_rows = rows_of(input_ids_ptr, rows, end)
        gradient = dot(a, b, gradient, PRECISION)

    stored = (outs < OUT)[:, None] & (ins < IN)[None, :]
    gradient_ptrs = (
        gradient_ptr + expert.to(tl.int64) * (OUT * IN) + outs[:, None] * IN + ins[None, :]
    )
    tl.store(gradient_ptrs, gradient.to(gradient_ptr.dtype.element_ty), mask=stored)


@triton.jit
def rows_of(ids_ptr, rows, end):
    """Return the ids of these rows, 0 from `end` on; without ids, the rows themselves."""
    if ids_ptr is None:
        return rows.to(tl.int64)
    else:
        return tl.load(ids_ptr + rows, mask=rows < end, other=0).to(tl.int64)


@triton.jit
def bias_gradient_kernel(
    output_grad_ptr,
    token_ids_ptr,
    weights_ptr,
    offsets_ptr,
    gradient_ptr,
    output_grad_stride,
    OUT: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """gradient_EO = the sum of each expert's rows, which are gathered by token and weighted if asked."""
    expert = tl.program_id(0)
    outs = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert)

    gradient = tl.zeros((BLOCK_O,), dtype=tl.float32)
    for k in range(start, end, BLOCK_K):
        rows = k + tl.arange(0, BLOCK_K)
        valid = rows < end
        source_rows = rows.to(tl.int64)
        if weights_ptr is not None:
            source_rows = tl.load(token_ids_ptr + rows, mask=valid, other=0).to(tl.int64)
        pointers = output_grad_ptr + source_rows[:, None] * output_grad_stride + outs[None, :]
        values = tl.load(pointers, mask=valid[:, None] & (outs < OUT)[None, :], other=0.0)
        values = values.to(tl.float32)
        if weights_ptr is not None:
            values *= tl.load(weights_ptr + rows, mask=valid, other=0.0).to(tl.float32)[:, None]
        gradient += tl.sum(values, axis=0)
    gradient_ptrs = gradient_ptr + expert.to(tl.int64) * OUT + outs
    tl.store(gradient_ptrs, gradient.to(gradient_ptr.dtype.element_ty), mask=outs < OUT)
