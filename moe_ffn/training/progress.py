"""What a person sees while a run trains: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from moe_ffn.training.callbacks import StepLogger

SECONDS_BETWEEN_LINES = 15.0


def progress_display(steps: StepLogger) -> Callback:
    """The display for where standard error goes."""
    return ProgressBar(steps) if sys.stderr.isatty() else ProgressLines(steps)


class ProgressBar(Callback):
    """Steps, loss, tokens per second and time left, on one line that stays in place."""

    def __init__(self, steps: StepLogger) -> None:
        self.steps = steps
        self._progress: Progress | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        from rich.console import Console

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            expand=True,
        )
        self._progress.start()
        self._task = self._progress.add_task(
            "training", total=trainer.max_steps, completed=trainer.global_step, status=""
        )

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if self._progress is not None:
            self._progress.update(
                self._task, completed=trainer.global_step, status=status(self.steps)
            )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._describe("validating")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._describe("training")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._stop()

    def _describe(self, text: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, description=text)

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class ProgressLines(Callback):
    """The same as plain lines, for logs and pipes: one every quarter of a minute."""

    def __init__(self, steps: StepLogger) -> None:
        self.steps = steps
        self._printed_at = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started_at = self._printed_at = time.monotonic()
        self._first_step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        now = time.monotonic()
        last = trainer.global_step == trainer.max_steps
        if not trainer.is_global_zero or (
            now - self._printed_at < SECONDS_BETWEEN_LINES and not last
        ):
            return
        self._printed_at = now
        done = max(trainer.global_step - self._first_step, 1)
        left = (now - self._started_at) / done * (trainer.max_steps - trainer.global_step)
        print(
            f"step {trainer.global_step}/{trainer.max_steps}  {status(self.steps)}  "
            f"{left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )


def status(steps: StepLogger) -> str:
    """`loss 2.31  12,345 tokens/s`, from the newest row; empty before the first."""
    if not steps.last_row:
        return ""
    return f"loss {steps.last_row['train/loss']:.3f}  {steps.tokens_per_second:,.0f} tokens/s"
