"""Where the time of training went, as Lightning's profilers see it."""

from __future__ import annotations

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback


class ProfileReport(Callback):
    """Keeps what Lightning's profiler says at the end of training, before Lightning drops it."""

    text = ""
    """Empty without a profiler."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_step = trainer.global_step + 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = trainer.profiler.summary()  # pyright: ignore[reportAttributeAccessIssue]  # set late
        # Of a resumed run it is the steps since then alone.
        steps = f"optimizer steps {self._first_step} to {trainer.global_step}\n"
        self.text = steps + found if found else ""
