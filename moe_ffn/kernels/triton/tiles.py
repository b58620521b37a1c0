"""Which expert, rows and columns a program works on, found on the device.

E experts, N (token, expert) pairs, M rows of a tile
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slot_and_column(num_columns, GROUP: tl.constexpr):
    """The place of this program among the tiles of rows ("slots") and of columns.

    A group of slots goes over all columns before the next group starts: what runs at the same time
    shares its rows and the matrix of its expert, which stay in the L2 cache.
    """
    program = tl.program_id(0)
    num_slots = tl.num_programs(0) // num_columns
    first = program // (GROUP * num_columns) * GROUP
    size = tl.minimum(num_slots - first, GROUP)
    within = program % (GROUP * num_columns)
    return first + within % size, within // size


@triton.jit
def find_rows(offsets_ptr, slot, E: tl.constexpr, E_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, first row, where the expert's rows end); nothing to do where first >= end.

    The slots of expert e are those from start_e // BLOCK_M + e to end_e // BLOCK_M + e: never fewer
    than it has tiles, at most one too many, and N // BLOCK_M + E altogether, a number that the host
    knows. So no table of tiles has to be made, or waited for.
    """
    experts = tl.arange(0, E_BLOCK)
    ends = tl.load(offsets_ptr + experts, mask=experts < E, other=0)
    behind = (experts < E) & (ends // BLOCK_M + experts + 1 <= slot)
    expert: tl.tensor = tl.sum(behind.to(tl.int32), axis=0)  # pyright: ignore[reportAssignmentType]
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert, mask=expert < E, other=0)
    first = start + (slot - start // BLOCK_M - expert) * BLOCK_M
    return expert.to(tl.int64), first, end


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """Add a @ b in float32. Triton's interpreter multiplies bfloat16 wrongly, so it never gets any."""
    if PRECISION == "interpreted":
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """(value, slope) of the element-wise function; the compiler drops the one that nobody uses."""
    if ACTIVATION == "relu":
        # Compared this way round, a NaN stays one, as it does in torch.
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
def hidden_units(
    gate, up, alpha, limit, ACTIVATION: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr
):
    """(hidden, its slope in `gate`, its slope in `up`); without a gate, `gate` is not looked at."""
    if CLAMPED:
        # Where a value is clamped the slope is 0; at the limit itself it is not, as in torch.
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
