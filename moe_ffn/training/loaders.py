"""Batches for Lightning: always a function of their number, never of a counter in the loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moe_ffn.data.batches import Batch, TrainBatches, ValidationBatches
from moe_ffn.training.module import LoadedBatch


class TrainLoader:
    """The run's batches in order, from wherever the run stands.

    `start` is asked at every `__iter__`: the position comes from the optimizer step, because a
    counter kept here would include the batch an interrupted run had fetched but not trained on.
    """

    def __init__(
        self, batches: TrainBatches, num_batches: int, start: Callable[[], int]
    ) -> None:
        self.batches = batches
        self.num_batches = num_batches
        self.start = start

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[LoadedBatch]:
        for index in range(self.start(), self.num_batches):
            yield _loaded(index, self.batches[index])


class ValidationLoader:
    """The same fixed batches every time; with several ranks, each takes every W-th."""

    def __init__(self, batches: ValidationBatches, rank: int = 0, world_size: int = 1) -> None:
        self.batches = batches
        self.indices = range(rank, len(batches), world_size)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[LoadedBatch]:
        for index in self.indices:
            yield _loaded(index, self.batches[index])


def _loaded(index: int, batch: Batch) -> LoadedBatch:
    return LoadedBatch(index=index, input_ids=batch.input_ids, target_ids=batch.target_ids)
