"""A token's sum over its pairs, always in the order of the routing: the same bits every time.

T tokens, D model width, N (token, expert) pairs
"""

from __future__ import annotations

import triton
import triton.language as tl


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
