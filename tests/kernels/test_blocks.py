"""The cut of a plan's rows into blocks."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ffn.kernels import blocks
from moe_ffn.kernels.blocks import Block, Piece, cut_blocks


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MIN_BLOCK_ROWS", 4)
    monkeypatch.setattr(blocks, "MAX_BLOCK_ROWS", 6)


def test_small_experts_share_a_block_and_a_large_one_has_several() -> None:
    # expert     0  1  2   3
    # rows       1  0  4  14   -> rows 0..5 | the 14 as 6 + 6 + 2
    assert cut_blocks([1, 1, 5, 19]) == [
        Block(slice(0, 5), (Piece(0, slice(0, 1), False), Piece(2, slice(1, 5), False))),
        Block(slice(5, 11), (Piece(3, slice(0, 6), False),)),
        Block(slice(11, 17), (Piece(3, slice(0, 6), True),)),
        Block(slice(17, 19), (Piece(3, slice(0, 2), True),)),
    ]


def test_nothing_to_compute_has_no_blocks() -> None:
    assert cut_blocks([0, 0, 0]) == []


@given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=8))
def test_every_row_is_in_one_piece_of_its_expert(sizes: list[int]) -> None:
    offsets = list(accumulate(sizes))
    cut = cut_blocks(offsets)
    experts = [e for e, size in enumerate(sizes) for _ in range(size)]
    pieces = [
        (block.rows.start + p.rows.start, block.rows.start + p.rows.stop, p)
        for block in cut
        for p in block.pieces
    ]
    rows = [(row, p.expert) for start, stop, p in pieces for row in range(start, stop)]
    assert rows == list(enumerate(experts))
    assert all(block.num_rows <= 6 for block in cut)
    assert all(block.num_rows >= 4 for block in cut[:-1])
    for (_, _, before), (_, _, piece) in pairwise(pieces):
        assert piece.continues == (before.expert == piece.expert)
