"""Callback that saves checkpoints and removes old ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.callbacks import Callback

from moe_ffn.config.files import WriteFailures, reason, remove_unfinished
from moe_ffn.kernels.base import on_this_rank
from moe_ffn.training.config import CheckpointsConfig
from moe_ffn.training.module import LoadedBatch
from moe_ffn.training.recovery import Checkpointed
from moe_ffn.training.recovery.checkpoint_file import (
    BEST_NAME,
    IDENTITY,
    CheckpointError,
    newest_first,
    read_checkpoint,
    remove_unused_shards,
    step_name,
    step_of,
    verify,
    write_checkpoint,
)
from moe_ffn.training.recovery.guard import first_over_ranks

log = logging.getLogger(__name__)


class ChecksummedCheckpointIO(CheckpointIO):
    """Lightning plugin that reads and writes our checkpoint files.

    The error of a failed save is stored, not raised, since the other ranks wait for the rank that writes.
    """

    def __init__(self) -> None:
        self.failure: OSError | None = None
        """Error of the last save; None if it succeeded."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        self.failure = None
        try:
            write_checkpoint(checkpoint, Path(path))
        except OSError as error:
            self.failure = error

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return read_checkpoint(Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink(missing_ok=True)


class CheckpointKeeper(Checkpointed, Callback):
    """Saves regular checkpoints, of which it keeps the newest, and the weights of the lowest validation loss.

    A failed save is retried after the next step, then after two, four and more steps. The newest intact
    checkpoint is never removed.
    """

    in_checkpoint = ("best_loss", "missed_loss", "_should_stop")

    def __init__(
        self,
        folder: Path,
        config: CheckpointsConfig,
        validate_every_n_steps: int,
        identity: Mapping[str, Any],
    ) -> None:
        self.folder = folder
        self.config = config
        self.validate_every_n_steps = validate_every_n_steps
        self.identity = dict(identity)
        self.io = ChecksummedCheckpointIO()
        self.best_loss = float("inf")
        self.missed_loss = float("inf")
        """Lowest validation loss whose weights could not be written."""
        self.last_saved_step = -1
        """Optimizer step of the newest successful save; -1 before the first."""
        self.problem = ""
        """Reason why the last save failed; empty if it succeeded."""
        self._retry_after = 0  # steps to wait after a failed save; 0 after a successful one
        self._failed_step = -1
        self._failures = WriteFailures(folder)
        self._should_stop = False  # true if early stopping had ended the run at the newest save
        self._has_warned_of_nan = False
        # Loss of the weights in `best.ckpt`; infinite if they are of no step of the run.
        self._loss_in_file = float("-inf")

    def is_between_steps(self, trainer: Trainer, batch: LoadedBatch) -> bool:
        """Return True after the last batch of an optimizer step, unless a validation follows."""
        is_last = (batch["index"] + 1) % trainer.accumulate_grad_batches == 0
        return is_last and trainer.global_step % self.validate_every_n_steps != 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # If early stopping ended the run, training continues only with a larger patience or without the rule.
        is_spent = any(c.wait_count >= c.patience for c in trainer.early_stopping_callbacks)
        trainer.should_stop = trainer.should_stop or (self._should_stop and is_spent)
        loss = self._loss_in_file
        if trainer.is_global_zero:
            loss = self._read_loss_of_best(trainer.global_step)
            with suppress(OSError):
                remove_unfinished(self.folder)
                remove_unused_shards(self.folder)
        self._loss_in_file = trainer.strategy.broadcast(loss)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.is_between_steps(trainer, batch) and self._is_due(trainer.global_step):
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loss = float(trainer.callback_metrics["validation/loss"])
        if loss < self.loss_of_best:
            if self._write(trainer, BEST_NAME, partial(self._save_weights, trainer, loss)):
                self.missed_loss = min(loss, self.missed_loss)
            else:
                self.best_loss = min(loss, self.best_loss)
                self._loss_in_file = min(loss, self._loss_in_file)
                self.missed_loss = self.missed_loss if self.lacks_best else float("inf")
        if trainer.state.fn == "fit" and self._is_due(trainer.global_step):
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer)

    def save(self, trainer: Trainer) -> bool:
        """Save the newest step unless it is saved; return True if it is then. A collective of all ranks."""
        step = trainer.global_step
        if step == self.last_saved_step:
            return True
        self.problem = self._write(trainer, step_name(step), trainer.save_checkpoint)
        if self.problem:
            self._retry_after = min(max(2 * self._retry_after, 1), self._every)
            self._failed_step = step
            return False
        self._retry_after = 0
        self.last_saved_step = step
        if trainer.is_global_zero:
            self._remove_old(step)
            remove_unused_shards(self.folder)
        return True

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[IDENTITY] = self.identity

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.last_saved_step = checkpoint["global_step"]

    @property
    def loss_of_best(self) -> float:
        """Validation loss of the weights in `best.ckpt`."""
        return max(self.best_loss, self._loss_in_file)

    @property
    def lacks_best(self) -> bool:
        """True if `best.ckpt` does not hold the weights of the lowest validation loss."""
        return self.missed_loss < self.best_loss

    @property
    def _every(self) -> int:
        return self.config.every_n_steps or self.validate_every_n_steps

    def _is_due(self, step: int) -> bool:
        if self._retry_after:
            return step >= self._failed_step + self._retry_after
        return step % self._every == 0

    def _read_loss_of_best(self, step: int) -> float:
        """Return the loss of `best.ckpt`; infinite if it is missing or damaged, or if a resumed run trains
        its step again or had trained on without it.
        """
        with suppress(CheckpointError):
            best = read_checkpoint(self.folder / BEST_NAME)
            is_outdated = best["global_step"] > step or best["validation_loss"] < self.best_loss
            return float("inf") if is_outdated else best["validation_loss"]
        return float("inf")

    def _save_weights(self, trainer: Trainer, validation_loss: float, path: Path) -> None:
        values = {
            "state_dict": trainer.strategy.lightning_module_state_dict(),
            IDENTITY: self.identity,
            "global_step": trainer.global_step,
            "validation_loss": validation_loss,
        }
        trainer.strategy.save_checkpoint(values, path)
        trainer.strategy.barrier()

    def _write(self, trainer: Trainer, name: str, save: Callable[[Path], None]) -> str:
        """Write a file by calling `save`, unless a weight is NaN or infinite; return the problem, or ""."""
        nonfinite = first_over_ranks(_first_nonfinite(trainer.lightning_module))
        if nonfinite is not None:
            if not self._has_warned_of_nan:
                self._has_warned_of_nan = True
                log.warning(
                    "checkpoint: steps from %d on are not saved while '%s' holds NaN or infinity; earlier "
                    "checkpoints in '%s' are kept",
                    *(trainer.global_step, nonfinite, self.folder),
                )
            return f"'{nonfinite}' holds NaN or infinity"
        self._should_stop = trainer.should_stop
        for logger in trainer.loggers:
            logger.save()  # a run that resumes from this checkpoint needs all earlier rows
        save(self.folder / name)
        failure = self.io.failure
        if trainer.is_global_zero:
            with self._failures.expected():
                if failure is not None:
                    raise failure
        return trainer.strategy.broadcast("" if failure is None else reason(failure))

    def _remove_old(self, step: int) -> None:
        """Remove all but the newest few checkpoints before `step`, if the checkpoint of `step` is intact."""
        try:
            old = [path for path in newest_first(self.folder) if step_of(path) < step]
            too_old = old[self.config.keep_last - 1 :]
            if too_old:
                verify(self.folder / step_name(step))
        except (CheckpointError, OSError):
            return
        for path in too_old:
            with suppress(OSError):  # retried after the next save
                path.unlink(missing_ok=True)


def _first_nonfinite(module: torch.nn.Module) -> str | None:
    """Return the first parameter with NaN or infinity, or buffer with NaN (masks hold infinities)."""
    parameters = (
        (name, on_this_rank(value).isfinite().all()) for name, value in module.named_parameters()
    )
    buffers = ((name, ~value.isnan().any()) for name, value in module.named_buffers())
    return next((name for name, is_valid in chain(parameters, buffers) if not is_valid), None)
