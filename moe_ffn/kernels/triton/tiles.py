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
