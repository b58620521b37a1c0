"""Prepared tokens as Lightning's loaders."""

from __future__ import annotations

from lightning import LightningDataModule, Trainer

from moe_ffn.data.batches import TrainBatches, ValidationBatches
from moe_ffn.data.prepare import DataConfig, PreparedData
from moe_ffn.training.loaders import TrainLoader, ValidationLoader
from moe_ffn.training.module import LanguageModel


class TokenData(LightningDataModule):
    """Windows of the train split in the order of the seed, and the fixed windows of validation."""

    def __init__(
        self, config: DataConfig, data: PreparedData, *, num_batches: int, seed: int
    ) -> None:
        """The loaders of one run.

        Args:
            num_batches: of the whole run: optimizer steps times the batches each accumulates.
        """
        super().__init__()
        self.config = config
        self.data = data
        self.num_batches = num_batches
        self.seed = seed

    def train_dataloader(self) -> TrainLoader:
        trainer = self._trainer()
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
        trainer = self._trainer()
        return ValidationLoader(
            validation_batches(self.config, self.data), trainer.global_rank, trainer.world_size
        )

    def _trainer(self) -> Trainer:
        if self.trainer is None:
            raise RuntimeError("TokenData gives its loaders to a Trainer: pass it as datamodule=")
        return self.trainer


def validation_batches(config: DataConfig, data: PreparedData) -> ValidationBatches:
    """What every validation looks at, and the unigram baseline too."""
    return ValidationBatches(
        data.validation,
        seq_len=config.seq_len,
        batch_size=config.batch_size,
        num_tokens=config.validation_tokens,
    )
