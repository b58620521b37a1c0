from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ffn.data.batches import epoch_starts, require_window, spread_starts, windows_per_epoch
from moe_ffn.errors import ConfigError

SIZES = {"num_tokens": st.integers(9, 200), "seq_len": st.integers(1, 8)}


@given(**SIZES, seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_the_windows_of_an_epoch_lie_side_by_side(
    num_tokens: int, seq_len: int, seed: int, epoch: int
) -> None:
    starts = np.sort(epoch_starts(num_tokens, seq_len, seed, epoch))
    assert len(starts) == windows_per_epoch(num_tokens, seq_len)
    assert starts[0] >= 0
    assert starts[-1] + seq_len + 1 <= num_tokens
    assert (np.diff(starts) == seq_len + 1).all()


def test_order_and_offset_differ_between_epochs_and_seeds() -> None:
    first = epoch_starts(10_000, 9, 0, 0)
    for other in (epoch_starts(10_000, 9, 0, 1), epoch_starts(10_000, 9, 1, 0)):
        assert not np.array_equal(first, other)
    assert len({epoch_starts(10_000, 9, 0, epoch).min() for epoch in range(30)}) > 5


def test_no_token_is_always_left_out() -> None:
    seen = np.zeros(50, dtype=bool)
    for epoch in range(200):
        for start in epoch_starts(50, 7, 0, epoch):
            seen[start : start + 8] = True
    assert seen.all()


def test_an_epoch_is_nearly_all_tokens() -> None:
    assert windows_per_epoch(1_000_000, 99) == 9_999  # 10,000 fit, from offset 0 alone
    assert windows_per_epoch(100, 99) == 1


@given(**SIZES, count=st.integers(1, 50))
def test_spread_windows_do_not_overlap(num_tokens: int, seq_len: int, count: int) -> None:
    starts = spread_starts(num_tokens, seq_len, count)
    assert 1 <= len(starts) <= count
    assert (np.diff(starts) >= seq_len + 1).all()
    assert starts[-1] + seq_len + 1 <= num_tokens


def test_spread_windows_are_even() -> None:
    assert spread_starts(100, 9, 4).tolist() == [0, 25, 50, 75]
    assert spread_starts(100, 24, 99).tolist() == [0, 25, 50, 75]


def test_a_split_too_short_for_one_window_is_refused() -> None:
    require_window(8, 9, "the train split")
    message = r"data\.seq_len \(9\) must be shorter than the train split \(9 tokens\): lower data\.seq_len"
    with pytest.raises(ConfigError, match=message):
        require_window(9, 9, "the train split")
