"""From tokens to hidden units: the activation is an epilogue of the first product.

T tokens, D model width, E experts, F hidden width, N (token, expert) pairs, H rows of the first
matrix: F, or 2 F where the rows of a gate stand before those of up
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ffn.kernels.triton.activation import hidden_units
from moe_ffn.kernels.triton.tiles import dot, find_rows, slot_and_column


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
