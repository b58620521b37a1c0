"""A fit that is killed at a step and resumed, and what it computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from moe_ffn.data.prepare import PreparedData
from moe_ffn.runs.assemble import build_module, build_trainer, make_callbacks, make_token_data
from moe_ffn.runs.config import TrainConfig

VALIDATE_EVERY = 4


class Killed(Exception):  # noqa: N818 - not an error of the program
    pass


class Recorder(Callback):
    """Keeps what the run computed; saves and kills it at step `stop_at`.

    After the validation of that step if there is one, where the program saves its checkpoints too;
    otherwise after the step.
    """

    def __init__(self, checkpoint: Path | None = None, stop_at: int | None = None) -> None:
        self.checkpoint = checkpoint
        self.stop_at = stop_at
        self.losses: dict[int, Tensor] = {}
        self.gradient_norms: dict[int, Tensor] = {}
        self.validations: dict[int, Tensor] = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses[batch["index"]] = outputs["objective"].total
        if trainer.fit_loop._should_accumulate():
            return
        self.gradient_norms[trainer.global_step] = pl_module.gradient_norm  # pyright: ignore[reportArgumentType]
        if trainer.global_step % VALIDATE_EVERY:
            self._maybe_stop(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validations[trainer.global_step] = trainer.callback_metrics["validation/loss"]
        self._maybe_stop(trainer)

    def _maybe_stop(self, trainer: Trainer) -> None:
        if self.checkpoint is not None and trainer.global_step == self.stop_at:
            trainer.save_checkpoint(self.checkpoint)
            raise Killed


def run(
    config: TrainConfig,
    data: PreparedData,
    folder: Path,
    recorder: Recorder,
    resume_from: Path | None = None,
) -> tuple[dict[str, Any], Any]:
    """Fit as the program does; returns weights and the optimizer's state."""
    # A fresh process has seen other random numbers, and its fresh weights are to be overwritten.
    torch.manual_seed(config.seed if resume_from is None else 999)
    module = build_module(config, data)
    folder.mkdir(exist_ok=True)
    trainer = build_trainer(config, folder, "32-true", [], make_callbacks(config, data, folder))
    trainer.callbacks.append(recorder)  # pyright: ignore[reportAttributeAccessIssue]
    trainer.fit(module, datamodule=make_token_data(config, data), ckpt_path=resume_from)
    return module.state_dict(), trainer.optimizers[0].state_dict()
