"""Lightning data loaders over prepared tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning import LightningDataModule, Trainer

from moe_ffn.data.batches import Batch, TrainBatches, ValidationBatches
from moe_ffn.data.prepare import DataConfig, PreparedData, validation_batches
from moe_ffn.training.module import LanguageModel, LoadedBatch
from moe_ffn.training.objective import IGNORED_TARGET

FILLER = -1
"""Index of a filler batch, which no metric counts."""


def _loaded(index: int, batch: Batch) -> LoadedBatch:
    assert batch.starts is not None
    return LoadedBatch(
        index=index, input_ids=batch.input_ids, target_ids=batch.target_ids, starts=batch.starts
    )


class TrainLoader:
    """Yields the batches of a run in order, from the current optimizer step on.

    Every `__iter__` calls `start`. The position comes from the optimizer step, because a counter in the
    loader would include a batch that an interrupted run had fetched but not trained on.
    """

    def __init__(self, batches: TrainBatches, num_batches: int, start: Callable[[], int]) -> None:
        self.batches = batches
        self.num_batches = num_batches
        self.start = start

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[LoadedBatch]:
        return map(self.batch, range(self.start(), self.num_batches))

    def batch(self, index: int) -> LoadedBatch:
        """Return the batch of the run with this index."""
        return _loaded(index, self.batches[index])

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state; without both state methods, Lightning would not resume this loader."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing, since `start` returns the position."""


class ValidationLoader:
    """Yields the fixed validation batches; rank r of W gets batches r, r + W, r + 2 W and so on.

    Every rank gets the same number of batches, since ranks wait for each other in every forward pass. If
    there are too few, a rank gets the first batch again as a filler whose targets are all ignored.
    """

    def __init__(self, batches: ValidationBatches, rank: int = 0, world_size: int = 1) -> None:
        self.batches = batches
        self.indices = range(rank, -(-len(batches) // world_size) * world_size, world_size)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[LoadedBatch]:
        for index in self.indices:
            if index < len(self.batches):
                yield _loaded(index, self.batches[index])
            else:
                first = self.batches[0]
                ignored = torch.full_like(first.target_ids, IGNORED_TARGET)
                yield _loaded(FILLER, Batch(first.input_ids, ignored, first.starts))


class TokenData(LightningDataModule):
    """Training windows of the whole run, shuffled by the seed, and the fixed validation windows."""

    trainer: Trainer  # pyright: ignore[reportIncompatibleVariableOverride]  # None only before fit

    def __init__(
        self, config: DataConfig, data: PreparedData, *, num_batches: int, seed: int
    ) -> None:
        super().__init__()
        self.config = config
        self.data = data
        self.num_batches = num_batches
        self.seed = seed

    def train_dataloader(self) -> TrainLoader:
        trainer = self.trainer
        batches = TrainBatches(
            self.data.train,
            seq_len=self.config.seq_len,
            batch_size=self.config.batch_size,
            seed=self.seed,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
        )
        loader = TrainLoader(
            batches,
            self.num_batches,
            start=lambda: trainer.global_step * trainer.accumulate_grad_batches,
        )
        if isinstance(trainer.lightning_module, LanguageModel):
            trainer.lightning_module.batch_at = loader.batch
        return loader

    def val_dataloader(self) -> ValidationLoader:
        batches = validation_batches(self.config, self.data)
        return ValidationLoader(batches, self.trainer.global_rank, self.trainer.world_size)
