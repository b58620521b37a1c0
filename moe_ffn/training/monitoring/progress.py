"""What a person sees while a run trains and validates: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import rich.console
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from rich.console import RenderableType
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

from moe_ffn.layer_names import short_name
from moe_ffn.metrics.load_summary import percent, percent_digits, summarize_load
from moe_ffn.metrics.table import LAYER_METRICS
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.monitoring.callbacks import Row, StepLogger, ValidationLogger

SECONDS_BETWEEN_LINES = 15.0


def progress_display(steps: StepLogger, validation: ValidationLogger) -> Callback:
    """The display for where standard error goes."""
    if sys.stderr.isatty():
        return ProgressBar(steps, validation)
    return ProgressLines(steps, validation)


class _Bar(Progress):
    """The bars and, under them, lines of text."""

    lines: Sequence[str] = ()

    def __init__(self) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=rich.console.Console(stderr=True),
            expand=True,
        )
        self.start()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        for line in self.lines:
            yield Text(line, no_wrap=True, overflow="ellipsis")


class ProgressBar(Callback):
    """Steps and time left, the batches of a validation while it lasts, losses, and the health of the routing,
    on a few lines that stay in place.
    """

    def __init__(self, steps: StepLogger, validation: ValidationLogger) -> None:
        self.steps = steps
        self.validation = validation
        self._progress: _Bar | None = None
        self._training: TaskID | None = None
        self._validating: TaskID | None = None
        self._shown: Row | None = None
        self._load = ""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._progress = _Bar()
            self._training = self._progress.add_task(
                "training", total=trainer.max_steps, completed=trainer.global_step
            )
            self._show_status()

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if self._progress is None or self._training is None:
            return
        self._progress.update(self._training, completed=trainer.global_step)
        if self.steps.last_row is not self._shown:
            self._shown = self.steps.last_row
            self._load = load_bars(self.steps.last_routing, self._progress.console.width)
            self._show_status()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._progress = self._progress or _Bar()  # there is none after the fit
            self._validating = self._progress.add_task("validating", total=num_batches(trainer))

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        if self._progress is not None and self._validating is not None:
            self._progress.advance(self._validating)
            self._show_status(f"validation loss {loss_so_far(pl_module):.3f} so far")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._progress is None or self._validating is None:
            return
        self._show_status()
        if self._training is None:
            self._stop()
        else:
            self._progress.remove_task(self._validating)
            self._validating = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._stop()

    def _show_status(self, validation: str = "") -> None:
        """The newest row, and `validation`, or the newest validation's loss where that is empty."""
        assert self._progress is not None
        if not validation and self.validation.last:
            step, loss = self.validation.last_step, self.validation.last["loss"]
            validation = f"validation loss {loss:.3f} (step {step})"
        lines = flow(status_parts(self.steps), self._progress.console.width)
        # A line of its own, so that nothing moves when it comes.
        self._progress.lines = [*lines, *filter(None, [validation]), *self._load.splitlines()]

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._training = self._validating = None


class ProgressLines(Callback):
    """Plain lines, for logs and pipes: one every quarter of a minute, and the loss of each validation."""

    def __init__(self, steps: StepLogger, validation: ValidationLogger) -> None:
        self.steps = steps
        self.validation = validation
        self._printed_at = 0.0
        self._validation_began_at = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started_at = self._printed_at = time.monotonic()
        self._first_step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        last = trainer.global_step == trainer.max_steps
        if not trainer.is_global_zero or not (self._is_due() or last):
            return
        done = max(trainer.global_step - self._first_step, 1)
        spent = time.monotonic() - self._started_at
        left = spent / done * (trainer.max_steps - trainer.global_step)
        # The last validation is still to come, and takes who knows how long.
        parts = (
            f"step {trainer.global_step}/{trainer.max_steps}",
            status(self.steps),
            "" if last else f"{left:.0f} s left",
        )
        self._print("  ".join(filter(None, parts)))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_began_at = self._printed_at = time.monotonic()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not trainer.is_global_zero or not self._is_due():
            return
        done, total = batch_idx + 1, num_batches(trainer)
        left = (time.monotonic() - self._validation_began_at) / done * (total - done)
        self._print(
            f"validation at step {trainer.global_step}: {done}/{total}  "
            f"loss {loss_so_far(pl_module):.3f} so far  {left:.0f} s left"
        )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            loss = self.validation.last["loss"]
            self._print(f"validation at step {trainer.global_step}: loss {loss:.4f}")

    def _is_due(self) -> bool:
        return time.monotonic() - self._printed_at >= SECONDS_BETWEEN_LINES

    def _print(self, line: str) -> None:
        self._printed_at = time.monotonic()
        print(line, file=sys.stderr, flush=True)


def num_batches(trainer: Trainer) -> int:
    """Batches of one validation, on this rank."""
    return int(sum(trainer.num_val_batches))


def loss_so_far(module: LightningModule) -> float:
    """Of the validation that is going on, in nats per token, over this rank's batches."""
    assert isinstance(module, LanguageModel)
    return float(module.validation_metrics.loss_so_far)


def status(steps: StepLogger) -> str:
    """`loss 2.310  MaxVio 0.65 (layer 0)  12,345 tokens/s`, from the newest row; empty before the first."""
    return "  ".join(status_parts(steps))


def status_parts(steps: StepLogger) -> list[str]:
    if not steps.last_row:
        return []
    return [
        f"loss {steps.last_row['train/loss']:.3f}",
        *routing_health(steps.last_routing),
        *([f"skipped {steps.num_skipped}"] if steps.num_skipped else []),
        f"{steps.tokens_per_second:,.0f} tokens/s",
    ]


def routing_health(routing: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
    """The layer with the worst balance and, where there are any, dropped pairs and dead experts."""
    if not routing:
        return []
    found = {
        key: {layer: values[key].item() for layer, values in routing.items()}
        for key in ("max_violation", "dropped_fraction", "dead_experts")
    }
    worst = max(routing, key=found["max_violation"].__getitem__)
    parts = [
        f"{_shown('max_violation', found['max_violation'][worst])} (layer {short_name(worst)})"
    ]
    if dropped := max(found["dropped_fraction"].values()):
        parts.append(_shown("dropped_fraction", dropped))
    if dead := sum(found["dead_experts"].values()):
        parts.append(_shown("dead_experts", dead))
    return parts


def _shown(key: str, value: float) -> str:
    metric = LAYER_METRICS[key]
    return f"{metric.label} {value:{metric.form}}"


MAX_BARS = 32
"""More experts in a layer than this are summed up in words: a terminal has 80 columns."""

MAX_LOAD_LINES = 4
"""Where all layers take more lines than this, the least balanced of them are shown."""


def load_bars(routing: Mapping[str, Mapping[str, Tensor]], width: int = 80) -> str:
    """`load  0 ▃▅█▁  1 ▄▄▄▄`: the share of each expert, half a block for the even one; lines of `width`.

    Of many experts the busiest, the median, the idlest and how many had no token.
    """
    by_balance = sorted(routing, key=lambda layer: routing[layer]["max_violation"].item())
    for num_left_out in range(len(routing)):
        left_out = set(by_balance[:num_left_out])
        parts = [
            f"{short_name(layer)} {_load(values['load'].tolist())}"
            for layer, values in routing.items()
            if layer not in left_out
        ]
        if left_out:
            parts.append(f"(of {len(routing)} layers the least balanced)")
        lines = flow(parts, width - len(_LOAD))
        if len(lines) <= MAX_LOAD_LINES:
            return _LOAD + ("\n" + " " * len(_LOAD)).join(lines)
    return ""


_LOAD = "load  "


def flow(parts: Sequence[str], width: int) -> list[str]:
    """The parts, two spaces between them, on lines of `width`; a part is broken nowhere."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines


def _load(load: list[float]) -> str:
    summary = summarize_load(load)
    if summary is None:
        return "not measured"
    if len(load) <= MAX_BARS:
        return "".join(_block(share * len(load)) for share in load)
    highest, middle, lowest = (
        f"{percent(share, percent_digits(len(load)))}%"
        for share in (summary.highest, summary.median, summary.lowest)
    )
    return (
        f"busiest #{summary.busiest} {highest}, median {middle}, idlest {lowest}, "
        f"{len(summary.unused)} of {len(load)} unused"
    )


def _block(ratio: float) -> str:
    """A block as high as the share over the even share; full at twice the even one, a dot at none."""
    return "\N{MIDDLE DOT}" if ratio == 0 else "▁▂▃▄▅▆▇█"[min(int(ratio * 4), 7)]
