from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_ffn.config.errors import ConfigError
from moe_ffn.data import batches
from moe_ffn.data.batches import (
    Batch,
    FeistelOrder,
    TrainBatches,
    ValidationBatches,
    epoch_starts,
    spread_starts,
    windows_per_epoch,
)

TOKENS = np.arange(1000, dtype=np.uint16)


def rows(batch: Batch) -> list[int]:
    """The first token of each sequence, which in TOKENS is also where it lies."""
    return batch.input_ids[:, 0].tolist()


def windows_of(batches: Iterable[Batch]) -> list[list[int]]:
    return [
        [*inputs, targets[-1]]
        for batch in batches
        for inputs, targets in zip(batch.input_ids.tolist(), batch.target_ids.tolist(), strict=True)
    ]


def train(**changes: int) -> TrainBatches:
    return TrainBatches(TOKENS, **{"seq_len": 9, "batch_size": 4, "seed": 0, **changes})


def assert_equal(one: Batch, other: Batch) -> None:
    assert torch.equal(one.input_ids, other.input_ids)
    assert torch.equal(one.target_ids, other.target_ids)


class TestTrain:
    def test_targets_are_the_inputs_shifted_by_one(self) -> None:
        batch = train()[0]
        assert batch.input_ids.shape == batch.target_ids.shape == (4, 9)
        assert batch.input_ids.dtype == batch.target_ids.dtype == torch.int64
        assert batch.input_ids.is_contiguous()
        assert batch.target_ids.is_contiguous()
        assert torch.equal(batch.target_ids, batch.input_ids + 1)

    def test_depends_on_seed_and_index_alone(self) -> None:
        in_order = [train()[index] for index in range(60)]
        batches = train()
        for index in (59, 3, 30, 0, 58):
            assert_equal(batches[index], in_order[index])

    def test_each_window_comes_once_per_epoch_across_batch_borders(self) -> None:
        batches = train(batch_size=7)
        count = batches.windows_per_epoch
        assert count == 99
        assert count % 7 != 0
        visited = [start for batch in map(batches.__getitem__, range(50)) for start in rows(batch)]
        epochs = [visited[epoch * count : (epoch + 1) * count] for epoch in range(3)]
        for starts in map(sorted, epochs):
            assert starts == list(range(starts[0], starts[0] + 10 * count, 10))
        assert len({tuple(start // 10 for start in starts) for starts in epochs}) == 3, "one order"

    def test_windows_read_returns_each_window_once_in_order(self) -> None:
        batches = train(batch_size=7)
        in_order = windows_of(map(batches.__getitem__, range(50)))
        assert batches.windows_read(3, max_tokens=1000).tolist() == in_order[:21]
        assert batches.windows_read(50, max_tokens=1000).tolist() == in_order[:99], "an epoch"
        assert batches.windows_read(3, max_tokens=59).tolist() == in_order[:5], "5 of 10 tokens"
        assert batches.windows_read(0, max_tokens=1000).shape == (0, 10)
        of_rank = train(batch_size=7 * 2, rank=1, world_size=2).windows_read(2, max_tokens=1000)
        assert len(of_rank) == 28, "of all ranks"

    def test_a_batch_may_be_larger_than_an_epoch(self) -> None:
        batch = TrainBatches(TOKENS[:30], seq_len=9, batch_size=8, seed=0)[3]
        assert batch.input_ids.shape == (8, 9)

    @pytest.mark.parametrize("world_size", [2, 4])
    def test_ranks_together_see_the_batch_of_one(self, world_size: int) -> None:
        for index in (0, 24, 25, 1000):
            parts = [train(rank=rank, world_size=world_size)[index] for rank in range(world_size)]
            together = Batch(
                torch.cat([part.input_ids for part in parts]),
                torch.cat([part.target_ids for part in parts]),
            )
            assert_equal(together, train()[index])

    def test_the_batch_size_must_divide_by_the_ranks(self) -> None:
        message = (
            r"data\.batch_size \(4\) must be divisible by the number of ranks \(3\): "
            "it counts the sequences of all ranks together"
        )
        with pytest.raises(ConfigError, match=message):
            train(world_size=3)


class TestValidation:
    def test_windows_are_evenly_spaced_with_a_smaller_last_batch(self) -> None:
        batches = ValidationBatches(TOKENS, seq_len=9, batch_size=4, num_tokens=90)
        assert len(batches) == 3
        assert [rows(batch) for batch in batches] == [
            [0, 100, 200, 300],
            [400, 500, 600, 700],
            [800, 900],
        ]

    def test_there_is_at_most_the_split_and_at_least_one_sequence(self) -> None:
        everything = ValidationBatches(TOKENS, seq_len=9, batch_size=1, num_tokens=10**9)
        assert len(everything) == 100
        assert len(ValidationBatches(TOKENS, seq_len=9, batch_size=1, num_tokens=1)) == 1

    def test_windows_are_those_of_the_batches(self) -> None:
        batches = ValidationBatches(TOKENS, seq_len=9, batch_size=4, num_tokens=90)
        assert batches.windows.tolist() == windows_of(batches)

    def test_the_digest_is_of_every_token_and_of_where_windows_end(self) -> None:
        def digest(changed: int = 0, seq_len: int = 3, num_tokens: int = 12) -> str:
            ids = np.arange(1, 17, dtype=np.uint32)
            ids[-1] += changed
            batches = ValidationBatches(ids, seq_len, batch_size=1, num_tokens=num_tokens)
            assert batches.windows[-1, -1] == 16 + changed
            return batches.sha256

        # 16 tokens in 4 windows or in 2; the last one as it is, and as others of its low bytes.
        others = [digest(1), digest(1 << 16), digest(1 << 24), digest(seq_len=7, num_tokens=14)]
        assert len({digest(), *others}) == 5


SIZES = {"num_tokens": st.integers(9, 200), "seq_len": st.integers(1, 8)}


@pytest.fixture(params=["listed", "computed"])
def _order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The order of few windows, and of so many that they are not kept in memory."""
    if request.param == "computed":
        monkeypatch.setattr(batches, "MAX_LISTED", 0)
    epoch_starts.cache_clear()
    yield
    epoch_starts.cache_clear()


@pytest.mark.usefixtures("_order")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**SIZES, seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_the_windows_of_an_epoch_are_adjacent(
    num_tokens: int, seq_len: int, seed: int, epoch: int
) -> None:
    starts = np.sort(epoch_starts(num_tokens, seq_len, seed, epoch)[:])
    assert len(starts) == windows_per_epoch(num_tokens, seq_len)
    assert starts[0] >= 0
    assert starts[-1] + seq_len + 1 <= num_tokens
    assert (np.diff(starts) == seq_len + 1).all()
    # As many as can begin at each of the window's places: seq_len + 1 offsets, and no room for one more.
    room = num_tokens - len(starts) * (seq_len + 1)
    assert room >= seq_len or len(starts) == 1
    assert room < seq_len + (seq_len + 1)


@pytest.mark.usefixtures("_order")
def test_order_and_offset_differ_between_epochs_and_seeds() -> None:
    first = epoch_starts(10_000, 9, 0, 0)[:]
    second, of_another_seed = epoch_starts(10_000, 9, 0, 1)[:], epoch_starts(10_000, 9, 1, 0)[:]
    for one, other in ((first, second), (first, of_another_seed), (second, of_another_seed)):
        assert not np.array_equal(one, other)
        assert not np.array_equal(one - one.min(), other - other.min()), "the same order"
    assert len({epoch_starts(10_000, 9, 0, epoch)[:].min() for epoch in range(30)}) > 5


@pytest.mark.parametrize("count", [1, 2, 3, 1000, 65_536, 65_537])
def test_any_part_of_a_computed_order_is_that_of_the_whole(count: int) -> None:
    order = FeistelOrder.drawn(count, np.random.default_rng(count))
    whole = order[:]
    assert np.array_equal(np.sort(whole), np.arange(count))
    for first in range(0, count, max(count // 3, 1)):
        assert np.array_equal(order[first : first + 7], whole[first : first + 7])


def test_a_computed_order_is_as_random_as_a_drawn_one() -> None:
    """Neighbours are as far apart, and places and numbers as unrelated; five deviations at most."""
    count = 100_000
    for seed in range(4):
        order = FeistelOrder.drawn(count, np.random.default_rng(seed))[:]
        gaps = np.abs(np.diff(order)) / count
        assert abs(gaps.mean() - 1 / 3) < 5 * np.sqrt(1 / 18 / count)
        assert abs(np.corrcoef(order, np.arange(count))[0, 1]) < 5 / np.sqrt(count)
        assert abs((order[:-1] % 2 == order[1:] % 2).mean() - 0.5) < 5 * 0.5 / np.sqrt(count)


@given(**SIZES, count=st.integers(1, 50))
def test_spread_windows_do_not_overlap(num_tokens: int, seq_len: int, count: int) -> None:
    starts = spread_starts(num_tokens, seq_len, count)
    assert 1 <= len(starts) <= count
    assert (np.diff(starts) >= seq_len + 1).all()
    assert starts[-1] + seq_len + 1 <= num_tokens


def test_spread_windows_are_even() -> None:
    assert spread_starts(100, 9, 4).tolist() == [0, 25, 50, 75]
    assert spread_starts(100, 24, 99).tolist() == [0, 25, 50, 75]
    # 107 / 4 is 26.75: the tokens that no whole window holds are spread between the windows too.
    assert spread_starts(107, 9, 4).tolist() == [0, 26, 53, 80]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_split_too_short_for_one_window_is_refused(split: str) -> None:
    given = (
        {"batch_size": 4, "seed": 0} if split == "train" else {"batch_size": 4, "num_tokens": 90}
    )
    batches_of = TrainBatches if split == "train" else ValidationBatches
    batches_of(TOKENS[:9], seq_len=8, **given)
    message = rf"data\.seq_len \(9\) must be shorter than the {split} split \(9 tokens\): lower data\.seq_len"
    with pytest.raises(ConfigError, match=message):
        batches_of(TOKENS[:9], seq_len=9, **given)
