"""The computed pairs of a plan as rows, cut into blocks; gathers from tokens, and sums back to them.

T tokens, D model width, N computed (token, expert) pairs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ffn.dispatch import Plan
from moe_ffn.outputs import count_pairs

MIN_BLOCK_ROWS, MAX_BLOCK_ROWS = 1024, 2048
"""Smaller blocks pay more calls for gathers and activations, larger ones fall out of the cache."""


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one expert: one matrix product per weight."""

    expert: int
    start: int
    stop: int
    """Rows, counted from the start of the block."""
    continues: bool
    """The expert has rows in the block before, so that gradients of its weights add up."""

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Block:
    """Rows `start` to `stop` of the plan."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    def split(self, *values_N: Tensor) -> Iterator[tuple[Any, ...]]:
        """(piece, its rows of each of `values_N`), for every piece."""
        # As views of one split: a slice at a time would cost as much as the call of a small product.
        sizes = [piece.stop - piece.start for piece in self.pieces]
        return zip(
            self.pieces, *(values.split_with_sizes(sizes) for values in values_N), strict=True
        )


def cut_blocks(offsets: Sequence[int]) -> list[Block]:
    """Whole experts together where they are small, one expert over several blocks where it is large.

    Args:
        offsets: where each expert's rows end.
    """
    blocks: list[Block] = []
    pieces: list[Piece] = []
    block_start = expert_start = 0
    for expert, expert_stop in enumerate(offsets):
        start = expert_start
        while start < expert_stop:
            stop = min(expert_stop, block_start + MAX_BLOCK_ROWS)
            pieces.append(
                Piece(expert, start - block_start, stop - block_start, start > expert_start)
            )
            start = stop
            if stop - block_start >= MIN_BLOCK_ROWS:
                blocks.append(Block(block_start, stop, tuple(pieces)))
                pieces, block_start = [], stop
        expert_start = expert_stop
    if pieces:
        blocks.append(Block(block_start, expert_start, tuple(pieces)))
    return blocks


@dataclass(frozen=True)
class Rows:
    """Row n is the n-th pair of the plan; pairs behind the last offset have none."""

    token_ids_N: Tensor
    by_token_N: Tensor
    """The rows in the order of their tokens."""
    starts_T: Tensor
    """Where each token's rows begin in `by_token_N`."""
    blocks: list[Block]

    @classmethod
    def of(cls, plan: Plan, num_tokens: int) -> Rows:
        """Reads the offsets on the host."""
        offsets = plan.offsets_E.tolist()
        num_rows = offsets[-1]
        token_ids_N = plan.token_ids_N[:num_rows]
        by_token_N = torch.empty_like(plan.pair_ids_N)
        by_token_N[plan.pair_ids_N] = torch.arange(len(by_token_N), device="cpu")
        if num_rows < len(by_token_N):
            by_token_N = by_token_N[by_token_N < num_rows]
        counts_T = count_pairs(token_ids_N, num_tokens)
        return cls(token_ids_N, by_token_N, counts_T.cumsum(0) - counts_T, cut_blocks(offsets))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.token_ids_N, self.by_token_N, self.starts_T

    def __len__(self) -> int:
        return len(self.token_ids_N)

    @property
    def largest_block(self) -> int:
        return max((block.num_rows for block in self.blocks), default=0)

    def gather(self, x_TD: Tensor, block: Block, out_ND: Tensor) -> Tensor:
        """The block's rows of `x_TD`."""
        return torch.index_select(x_TD, 0, self.token_ids_N[block.rows], out=out_ND)

    def sum_per_token(self, values_ND: Tensor, weights_N: Tensor | None = None) -> Tensor:
        """(T, D): the weighted sum of each token's rows, in one pass."""
        if not len(self):
            return values_ND.new_zeros(len(self.starts_T), values_ND.shape[1])
        if weights_N is not None:
            weights_N = weights_N.index_select(0, self.by_token_N).to(values_ND.dtype)
        return F.embedding_bag(
            self.by_token_N, values_ND, self.starts_T, mode="sum", per_sample_weights=weights_N
        )
