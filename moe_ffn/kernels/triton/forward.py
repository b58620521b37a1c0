"""Kernels of the forward pass, and device functions of all kernels.

T tokens, D model width, E experts, F hidden width, N (token, expert) pairs, M rows of a tile, H rows of
the first matrix: F, or 2 F with a gate, whose rows precede the rows of up
"""

from __future__ import annotations

import triton
import triton.language as tl

# ------------------------------------------------------- tiles, products and activations


@triton.jit
def find_tile(
    offsets_ptr, num_columns, E: tl.constexpr, BLOCK_M: tl.constexpr, GROUP: tl.constexpr
):
    """Return (expert, first row, end of the expert's rows, column) of this program's tile.

    If first >= end, the program has nothing to do.

    Each program computes one tile: one slot of rows by one column block. A group of slots runs all columns
    before the next group starts, so that concurrent programs share rows and matrices in the L2 cache.

    Expert e has the slots from start_e // BLOCK_M + e to end_e // BLOCK_M + e: at least its number of tiles,
    and at most one more. There are N // BLOCK_M + E slots in total, a number that the host knows without a
    table of tiles.
    """
    program = tl.program_id(0)
    num_slots = tl.num_programs(0) // num_columns
    first_slot = program // (GROUP * num_columns) * GROUP
    size = tl.minimum(num_slots - first_slot, GROUP)
    within = program % (GROUP * num_columns)
    slot = first_slot + within % size

    experts = tl.arange(0, triton.next_power_of_2(E))  # pyright: ignore[reportArgumentType]
    ends = tl.load(offsets_ptr + experts, mask=experts < E, other=0)
    behind = (experts < E) & (ends // BLOCK_M + experts + 1 <= slot)
    expert: tl.tensor = tl.sum(behind.to(tl.int32), axis=0)  # pyright: ignore[reportAssignmentType]
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert, mask=expert < E, other=0)
    first = start + (slot - start // BLOCK_M - expert) * BLOCK_M
    return expert.to(tl.int64), first, end, within // size


@triton.jit
def load(pointers, mask, MASKED: tl.constexpr):
    """Load values, with 0 where the mask is false.

    The compiler vectorises loads only without a mask, so MASKED is False if tiles divide the width evenly.
    """
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """Return acc + a @ b in float32. Triton's interpreter multiplies bfloat16 wrongly, so it gets float32."""
    if PRECISION == "interpreted":
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def as_operand(x, PRECISION: tl.constexpr):
    """Return x, rounded to the nearest number of tf32 if products are in tf32.

    A product in tf32 drops all but ten bits of each fraction: half of them would be wrong by one more bit.
    """
    if PRECISION == "tf32":
        half = x.to(tl.int32, bitcast=True) + 0x1000
        rounded = (half & -0x2000).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x)  # the sum would turn some NaN into 0
    else:
        return x


@triton.jit
def round_kernel(input_ptr, output_ptr, count, BLOCK: tl.constexpr):
    """Write the input rounded to tf32."""
    indices = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(input_ptr + indices, mask=indices < count)
    tl.store(output_ptr + indices, as_operand(x, "tf32"), mask=indices < count)  # pyright: ignore[reportArgumentType]


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Return (value, slope) of the activation function; the compiler removes unused results."""
    if ACTIVATION == "relu":
        # This comparison keeps NaN, as torch does.
        value = tl.where(x <= 0, 0.0, x)
        slope = tl.where(x <= 0, 0.0, 1.0)
    elif ACTIVATION == "relu_squared":
        positive = tl.where(x <= 0, 0.0, x)
        value = positive * positive
        slope = 2.0 * positive
    elif ACTIVATION == "gelu":
        below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * below
        slope = below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh(u)) is sigmoid(2 u).
        s = tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
        value = x * s
        slope = s * (1.0 + x * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x))
    elif ACTIVATION == "silu":
        s = tl.sigmoid(x)
        value = x * s
        slope = s * (1.0 + x * (1.0 - s))
    elif ACTIVATION == "sigmoid":
        value = tl.sigmoid(x)
        slope = value * (1.0 - value)
    else:
        tl.static_assert(ACTIVATION == "identity")
        value = x
        slope = tl.full(x.shape, 1.0, tl.float32)
    return value, slope


@triton.jit
def hidden_units(gate, up, alpha, limit, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    """Return (hidden, its slope in `gate`, its slope in `up`); without a gate, `gate` is ignored."""
    if ACTIVATION == "clamped_swiglu":
        # The slope of a clamped value is 0, but not at the limit itself, as in torch.
        g = tl.where(gate > limit, limit, gate)
        u = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        s = tl.sigmoid(alpha * g)
        hidden = (u + 1.0) * g * s
        gate_slope = tl.where(gate > limit, 0.0, (u + 1.0) * s * (1.0 + alpha * g * (1.0 - s)))
        up_slope = tl.where((up > limit) | (up < -limit), 0.0, g * s)
    elif GATED:
        value, slope = activate(gate, ACTIVATION)
        hidden = value * up
        gate_slope = slope * up
        up_slope = value
    else:
        hidden, up_slope = activate(up, ACTIVATION)
        gate_slope = up_slope
    return hidden, gate_slope, up_slope


# -------------------------------------------------------------------------------- kernels


@triton.jit
def hidden_kernel(
    x_ptr,
    up_ptr,
    bias_ptr,
    dropout_ptr,
    token_ids_ptr,
    offsets_ptr,
    added_ptr,
    pre_ptr,
    hidden_ptr,
    x_stride,
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
    """hidden_NF = act(up_e x[token] + bias), gate and up in one pass; writes `pre_NH` unless it is None.

    `added_NH`, unless it is None, is added before the activation: the product with a low-rank adapter.
    """
    expert, first, end, column = find_tile(offsets_ptr, tl.cdiv(F, BLOCK_O), E, BLOCK_M, GROUP)
    if first >= end:
        return
    H: tl.constexpr = 2 * F if GATED else F
    UP: tl.constexpr = H - F  # first row of up in the matrix

    # Rows and columns beyond the end read existing ones, and are not stored.
    rows = first + tl.arange(0, BLOCK_M)
    tokens = tl.load(token_ids_ptr + tl.where(rows < end, rows, first)).to(tl.int64)
    units = column * BLOCK_O + tl.arange(0, BLOCK_O)
    safe_units = tl.where(units < F, units, 0)
    inner = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + tokens[:, None] * x_stride + inner[None, :]
    gate_ptrs = up_ptr + expert * (H * D) + safe_units[None, :] * D + inner[:, None]

    gate = tl.zeros((BLOCK_M, BLOCK_O), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_O), dtype=tl.float32)
    if bias_ptr is not None:
        # The sums start from the bias: after them, registers are scarce.
        bias_ptrs = bias_ptr + expert * H + safe_units
        up += tl.load(bias_ptrs + UP).to(tl.float32)[None, :]
        if GATED:
            gate += tl.load(bias_ptrs).to(tl.float32)[None, :]
    for k in range(0, D, BLOCK_K):
        exists = inner < D - k
        x = load(x_ptrs + k, exists[None, :], D % BLOCK_K != 0)
        w = load(gate_ptrs + UP * D + k, exists[:, None], D % BLOCK_K != 0)
        up = dot(x, w, up, PRECISION)
        if GATED:
            v = load(gate_ptrs + k, exists[:, None], D % BLOCK_K != 0)
            gate = dot(x, v, gate, PRECISION)

    stored = (rows < end)[:, None] & (units < F)[None, :]
    # 64-bit offset of the tile's first row, 32-bit offsets within the tile: half as many registers.
    tile = tl.arange(0, BLOCK_M)[:, None]
    wide_first = first.to(tl.int64)
    if added_ptr is not None:
        added_ptrs = added_ptr + wide_first * H + (tile * H + units[None, :])
        up += tl.load(added_ptrs + UP, mask=stored, other=0.0).to(tl.float32)
        if GATED:
            gate += tl.load(added_ptrs, mask=stored, other=0.0).to(tl.float32)

    # Round before the activation, even if `pre_NH` is not stored: backward then recomputes the same hidden
    # units, and evaluation computes the same as training.
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    rounded_up = up.to(dtype)
    rounded_gate = gate.to(dtype)
    if pre_ptr is not None:
        pre_ptrs = pre_ptr + wide_first * H + (tile * H + units[None, :])
        tl.store(pre_ptrs + UP, rounded_up, mask=stored)
        if GATED:
            tl.store(pre_ptrs, rounded_gate, mask=stored)
    kept_gate, kept_up = rounded_gate.to(tl.float32), rounded_up.to(tl.float32)
    hidden, _, _ = hidden_units(kept_gate, kept_up, alpha, limit, ACTIVATION, GATED)
    hidden_offsets = tile * F + units[None, :]
    if dropout_ptr is not None:
        dropout_ptrs = dropout_ptr + wide_first * F + hidden_offsets
        hidden *= tl.load(dropout_ptrs, mask=stored, other=0.0).to(tl.float32)
    hidden = as_operand(hidden, PRECISION)
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
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """output_NO = input_NI matrix_e^T + bias_e; the strides choose a matrix (O, I) or a transposed view."""
    expert, first, end, column = find_tile(offsets_ptr, tl.cdiv(OUT, BLOCK_O), E, BLOCK_M, GROUP)
    if first >= end:
        return
    rows = first + tl.arange(0, BLOCK_M)
    # 64-bit offset of the tile's first row, 32-bit offsets within the tile: half as many registers.
    tile = tl.arange(0, BLOCK_M)
    wide_first = first.to(tl.int64)
    outs = column * BLOCK_O + tl.arange(0, BLOCK_O)
    inner = tl.arange(0, BLOCK_K)
    safe_tile = tl.where(rows < end, tile, 0)
    input_ptrs = input_ptr + wide_first * IN + (safe_tile[:, None] * IN + inner[None, :])
    matrix_ptrs = matrix_ptr + expert * (OUT * IN)
    matrix_ptrs += outs[None, :] * out_stride + inner[:, None] * in_stride

    MASKED: tl.constexpr = IN % BLOCK_K != 0 or OUT % BLOCK_O != 0
    output = tl.zeros((BLOCK_M, BLOCK_O), dtype=tl.float32)
    for k in range(0, IN, BLOCK_K):
        a = load(input_ptrs + k, inner[None, :] < IN - k, MASKED)
        exist = (inner < IN - k)[:, None] & (outs < OUT)[None, :]
        w = load(matrix_ptrs + k * in_stride, exist, MASKED)
        output = dot(a, w, output, PRECISION)

    if bias_ptr is not None:
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
    BLOCK_D: tl.constexpr,
):
    """output_TD = the sum of the rows (N, D) of each token's pairs, in float32.

    `ranks_N` has each pair's rank in the plan, sorted by token. Pairs with ranks from `total` on were not
    computed, and their rows are not read.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = tl.load(starts_ptr + token)
    end = tl.load(starts_ptr + token + 1)
    total = tl.load(total_ptr)

    output = tl.zeros((BLOCK_D,), dtype=tl.float32)
    rank = tl.load(ranks_ptr + first, mask=first < end, other=0)
    for pair in range(first, end):
        # Load the next rank before waiting for this row.
        next_rank = tl.load(ranks_ptr + pair + 1, mask=pair + 1 < end, other=0)
        computed = rank < total
        pointers = rows_ptr + rank.to(tl.int64) * D + columns
        row = tl.load(pointers, mask=columns < tl.where(computed, D, 0), other=0.0).to(tl.float32)
        if weights_ptr is not None:
            row *= tl.load(weights_ptr + rank, mask=computed, other=0.0).to(tl.float32)
        output += row
        rank = next_rank
    output_ptrs = output_ptr + token * D + columns
    tl.store(output_ptrs, output.to(output_ptr.dtype.element_ty), mask=columns < D)
