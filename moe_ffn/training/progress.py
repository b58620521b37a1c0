"""What a person sees while a run trains: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from rich.console import RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from torch import Tensor

from moe_ffn.layer_names import short_name
from moe_ffn.training.callbacks import StepLogger
from moe_ffn.training.rows import Row

SECONDS_BETWEEN_LINES = 15.0


def progress_display(steps: StepLogger) -> Callback:
    """The display for where standard error goes."""
    return ProgressBar(steps) if sys.stderr.isatty() else ProgressLines(steps)


class _Bar(Progress):
    """The bar and, under it, how full each expert is."""

    load = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.load:
            yield Text(self.load, no_wrap=True, overflow="ellipsis")


class ProgressBar(Callback):
    """Steps, loss, health of the routing and time left, on two lines that stay in place."""

    def __init__(self, steps: StepLogger) -> None:
        self.steps = steps
        self._progress: _Bar | None = None
        self._shown: Row | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        from rich.console import Console

        self._progress = _Bar(
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
            self._progress.update(self._task, completed=trainer.global_step)
            if self.steps.last_row is not self._shown:
                self._shown = self.steps.last_row
                self._progress.load = load_bars(self.steps.last_routing)
                self._progress.update(self._task, status=status(self.steps))

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
        line = f"step {trainer.global_step}/{trainer.max_steps}  {status(self.steps)}"
        # The last validation is still to come, and takes who knows how long.
        print(line if last else f"{line}  {left:.0f} s left", file=sys.stderr, flush=True)


def status(steps: StepLogger) -> str:
    """`loss 2.310  MaxVio 0.65 (layer 0)  12,345 tokens/s`, from the newest row; empty before the first."""
    if not steps.last_row:
        return ""
    parts = [
        f"loss {steps.last_row['train/loss']:.3f}",
        *routing_health(steps.last_routing),
        *([f"skipped {steps.num_skipped}"] if steps.num_skipped else []),
        f"{steps.tokens_per_second:,.0f} tokens/s",
    ]
    return "  ".join(parts)


def routing_health(routing: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
    """The layer with the worst balance and, where there are any, dropped pairs and dead experts."""
    if not routing:
        return []
    worst = max(routing, key=lambda layer: routing[layer]["max_violation"].item())
    parts = [f"MaxVio {routing[worst]['max_violation'].item():.2f} (layer {short_name(worst)})"]
    dropped = max(values["dropped_fraction"].item() for values in routing.values())
    if dropped:
        parts.append(f"dropped {dropped:.1%}")
    dead = sum(int(values["dead_experts"]) for values in routing.values())
    if dead:
        parts.append(f"dead experts {dead}")
    return parts


MOST_BARS = 32
"""More experts in a layer than this have no bars: a terminal has 80 columns."""


def load_bars(routing: Mapping[str, Mapping[str, Tensor]]) -> str:
    """`load  0 ▃▅█▁  1 ▄▄▄▄`: the share of each expert, half a block for the even one."""
    layers = {
        short_name(layer): values["load"].tolist()
        for layer, values in routing.items()
        if len(values["load"]) <= MOST_BARS
    }
    bars = [
        f"{layer} {''.join(_block(share * len(load)) for share in load)}"
        for layer, load in layers.items()
    ]
    return "load  " + "  ".join(bars) if bars else ""


def _block(ratio: float) -> str:
    """A block as high as the share over the even share; full at twice the even one, a dot at none."""
    return "\N{MIDDLE DOT}" if ratio == 0 else "▁▂▃▄▅▆▇█"[min(int(ratio * 4), 7)]
