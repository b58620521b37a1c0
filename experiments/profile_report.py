"""Where the time of training went, as Lightning's profilers see it."""

from __future__ import annotations

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback


class ProfileReport(Callback):
    """Keeps what Lightning's profiler says at the end of training, before Lightning drops it."""

    text = ""
    """Empty without a profiler."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.text = trainer.profiler.summary()  # pyright: ignore[reportAttributeAccessIssue]  # set late
