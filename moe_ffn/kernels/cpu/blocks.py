"""The plan's rows cut into blocks that stay in a CPU's cache, and each block into its experts' rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

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
