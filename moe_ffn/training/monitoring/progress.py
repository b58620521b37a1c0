"""Progress display of training and validation: a bar in a terminal, otherwise plain lines."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from torch import Tensor

from moe_ffn.ffn.base import short_name
from moe_ffn.metrics.table import LAYER_METRICS
from moe_ffn.training.monitoring.callbacks import LoggedRow, StepLogger, ValidationLogger

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 15.0


def progress_display(steps: StepLogger, validation: ValidationLogger) -> Callback:
    """Return a progress bar if standard error is a terminal, otherwise a callback that prints lines."""
    display = ProgressBar if sys.stderr.isatty() else ProgressLines
    return display(steps, validation)


class ProgressBar(Callback):
    """Shows a bar of steps, time left, losses, and the balance of the routing."""

    def __init__(self, steps: StepLogger, validation: ValidationLogger) -> None:
        self.steps = steps
        self.validation = validation
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            expand=True,
        )
        self._training = self._bars.add_task("training", visible=False)
        self._validating = self._bars.add_task("validating", visible=False)
        # The training thread sets this text: rich draws in another thread, which must not read tensors.
        self._text = Text()
        self._shown: LoggedRow | None = None
        self._live = Live()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start(trainer, self._training, trainer.max_steps, trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._bars.update(self._training, completed=trainer.global_step)
        if self._live.is_started and self.steps.last_row is not self._shown:
            self._shown = self.steps.last_row
            self._show()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start(trainer, self._validating, sum(trainer.num_val_batches))

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._bars.advance(self._validating)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._bars.update(self._validating, visible=False)
        self._show()
        if trainer.state.fn != "fit":
            self._live.stop()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._bars.update(self._training, visible=False)
        self._live.stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._live.stop()

    def _start(self, trainer: Trainer, task: TaskID, total: float, completed: int = 0) -> None:
        if trainer.is_global_zero:
            self._bars.reset(task, total=total, completed=completed, visible=True)
            if not self._live.is_started:
                self._live = Live(get_renderable=self._frame, console=Console(stderr=True))
                self._show()
                self._live.start()

    def _frame(self) -> Group:
        return Group(self._bars, self._text)

    def _show(self) -> None:
        """Show the newest row and the loss of the newest validation."""
        parts = status(self.steps)
        if self.validation.last:
            loss, step = self.validation.last["loss"], self.validation.last_step
            parts.append(f"validation loss {loss:.3f} (step {step})")
        self._text = Text("  ".join(parts))


class ProgressLines(Callback):
    """Prints a line every 15 seconds, and the loss of each validation, for logs and pipes."""

    def __init__(self, steps: StepLogger, validation: ValidationLogger) -> None:
        self.steps = steps
        self.validation = validation
        self._printed_at = 0.0
        self._first_step = 0
        self._first_ended_at: float | None = None
        """Time when the first step ended; that step is slow, so the estimate leaves it out."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._printed_at = time.monotonic()
        self._first_step, self._first_ended_at = trainer.global_step + 1, None

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        step, num_steps = trainer.global_step, trainer.max_steps
        if self._first_ended_at is None and step == self._first_step:
            self._first_ended_at = time.monotonic()
        if not trainer.is_global_zero or not (self._is_due() or step == num_steps):
            return
        end: list[str] = []
        # No estimate at the last step: a validation of unknown duration follows.
        if self._first_ended_at is not None and self._first_step < step < num_steps:
            per_step = (time.monotonic() - self._first_ended_at) / (step - self._first_step)
            left = per_step * (num_steps - step)
            end = [f"{left:.0f} s left"]
        self._print("  ".join([f"step {step}/{num_steps}", *status(self.steps, step), *end]))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            loss = self.validation.last["loss"]
            self._print(f"validation at step {trainer.global_step}: loss {loss:.4f}")

    def _is_due(self) -> bool:
        return time.monotonic() - self._printed_at >= SECONDS_BETWEEN_LINES

    def _print(self, line: str) -> None:
        self._printed_at = time.monotonic()
        log.info(line)


def status(steps: StepLogger, step: int | None = None) -> list[str]:
    """Return the newest row as `loss 2.310`, `MaxVio 0.65 (layer 0)`, `12,345 tokens/s`; empty without a row.

    If the row is older than `step`, its step follows the loss.
    """
    if not steps.last_row:
        return []
    is_older = step is not None and step != steps.last_row_step
    return [
        f"loss {steps.last_row['train/loss']:.3f}"
        + (f" (step {steps.last_row_step})" if is_older else ""),
        *routing_health(steps.last_routing),
        *([f"skipped {steps.num_skipped}"] if steps.num_skipped else []),
        f"{steps.tokens_per_second:,.0f} tokens/s",
    ]


def routing_health(routing: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
    """Return the layer with the worst balance, and dropped pairs and dead experts if there are any.

    A router that lists pairs has no load; of these layers, the layer with the fewest used experts is shown.
    """
    if not routing:
        return []

    def shown(key: str, value: float) -> str:
        metric = LAYER_METRICS[key]
        return f"{metric.label} {value:{metric.form}}"

    parts: list[str] = []
    for key, worst_of in (("max_violation", max), ("experts_used", min)):
        by_layer = {layer: v[key].item() for layer, v in routing.items() if key in v}
        if by_layer:
            worst = worst_of(by_layer, key=by_layer.__getitem__)
            parts.append(f"{shown(key, by_layer[worst])} (layer {short_name(worst)})")
    if dropped := max(values["dropped_fraction"].item() for values in routing.values()):
        parts.append(shown("dropped_fraction", dropped))
    if dead := sum(v["dead_experts"].item() for v in routing.values() if "dead_experts" in v):
        parts.append(shown("dead_experts", dead))
    return parts
