"""What watches a run: rows of metrics for the loggers, and the results of the last validation.

Neither calls `self.log`, which costs about 0.3 ms per key and step: they add up tensors and hand the
loggers one row every `every_n_steps`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from moe_ffn.metrics.routing import RoutingMetrics
from moe_ffn.outputs import Routing
from moe_ffn.training.loaders import FILLER
from moe_ffn.training.module import LoadedBatch, TrainStepOutput


class RoutingByLayer:
    """One `RoutingMetrics` per sparse layer, made when the layer is first seen."""

    def __init__(self) -> None:
        self.layers: dict[str, RoutingMetrics] = {}

    def update(self, routings: Mapping[str, Routing], counted: bool = True) -> None:
        """Add a batch; one not `counted` only creates the metrics, so that all ranks reduce the same."""
        for layer, routing in routings.items():
            if layer not in self.layers:
                metrics = RoutingMetrics(routing.num_experts)
                self.layers[layer] = metrics.to(routing.logits_TE.device)
            if counted:
                self.layers[layer].update(routing)

    def compute(self) -> dict[str, dict[str, Tensor]]:
        """The values of each layer since the last reset, on every rank."""
        values = {layer: metrics.compute() for layer, metrics in sorted(self.layers.items())}
        # torchmetrics squeezes what has one element, and so the load of a single expert.
        return {layer: v | {"load": v["load"].reshape(-1)} for layer, v in values.items()}

    def reset(self) -> None:
        for metrics in self.layers.values():
            metrics.reset()


def flatten_routing(
    values: Mapping[str, Mapping[str, Tensor]], prefix: str = ""
) -> dict[str, float]:
    """`{"layer_03": {"entropy": 1.2, "load": [...]}}` as `routing/layer_03/entropy`, `.../load/expert_00`.

    nan, which says that a value does not exist (the capacity of a dropless layer), is left out.
    """
    row: dict[str, float] = {}
    for layer, metrics in values.items():
        for name, value in metrics.items():
            key = f"{prefix}routing/{layer}/{name}"
            if value.ndim:
                row |= {f"{key}/expert_{e:02d}": v for e, v in enumerate(value.tolist())}
            elif not value.isnan():
                row[key] = value.item()
    return row


class StepLogger(Callback):
    """Hands the loggers one row every `every_n_steps` optimizer steps, covering all of them."""

    def __init__(self, every_n_steps: int) -> None:
        self.every_n_steps = every_n_steps
        self.last_row: dict[str, float] = {}
        """The newest row, for the progress display."""
        self.total_tokens = 0
        self.total_seconds = 0.0
        self._routing = RoutingByLayer()
        self._window = _Window()
        self._clock = 0.0
        self._learning_rate = 0.0
        self._last_row_step = 0
        self._told: set[str] = set()

    @property
    def tokens_per_second(self) -> float:
        """Over the whole run so far, validations left out."""
        return self.total_tokens / self.total_seconds if self.total_seconds else 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_row_step = trainer.global_step
        self._clock = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock = time.perf_counter()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        # By the end of the batch the schedule has moved on to the rate of the next step.
        self._learning_rate = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: TrainStepOutput,
        batch: LoadedBatch,
        batch_idx: int,
    ) -> None:
        tokens = batch["input_ids"].numel() * trainer.world_size
        self._window.add(outputs, tokens)
        self._routing.update(outputs["routings"])
        due = (
            trainer.global_step % self.every_n_steps == 0
            or trainer.global_step == trainer.max_steps
        )
        # Between the batches of one accumulation window the step stands still.
        due = due and trainer.global_step > self._last_row_step
        # Reading the values waits for the device, so it belongs to the time that was worked.
        row = self._values(trainer, pl_module) if due else None
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        self._window.seconds += seconds
        self.total_seconds += seconds
        self.total_tokens += tokens
        if row is not None:
            self._write(row, trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step > self._last_row_step:  # stopped early, between two rows
            self._write(self._values(trainer, pl_module), trainer)

    def _values(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        routing = self._routing.compute()
        self._tell_of_broken_tokens(routing, trainer)
        return {
            **self._window.means(trainer),
            "train/learning_rate": self._learning_rate,
            "train/gradient_norm": float(pl_module.gradient_norm),  # pyright: ignore[reportArgumentType]
            **flatten_routing(routing),
        }

    def _tell_of_broken_tokens(
        self, routing: Mapping[str, Mapping[str, Tensor]], trainer: Trainer
    ) -> None:
        """Name the layers that tokens reached with NaN or infinity, once each."""
        for layer, values in routing.items():
            if values["nonfinite_tokens"] and layer not in self._told:
                self._told.add(layer)
                if trainer.is_global_zero:
                    print(
                        f"step {trainer.global_step}: {int(values['nonfinite_tokens'])} tokens reached "
                        f"the router of {layer} with NaN or infinity; something before it broke",
                        file=sys.stderr,
                    )

    def _write(self, row: dict[str, float], trainer: Trainer) -> None:
        if self._window.seconds:
            row["train/tokens_per_second"] = self._window.tokens / self._window.seconds
        log_row(trainer, row)
        self.last_row = row
        self._last_row_step = trainer.global_step
        self._routing.reset()
        self._window = _Window()


@dataclass
class _Window:
    """Sums since the last row."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    num_batches: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, outputs: TrainStepOutput, tokens: int) -> None:
        losses = outputs["objective"]
        values = {"loss": losses.cross_entropy, "objective": losses.total, **losses.balancing}
        for name, value in values.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.num_batches += 1
        self.tokens += tokens

    def means(self, trainer: Trainer) -> dict[str, float]:
        """Over the batches, and over the ranks, each of which saw an equal part of every batch."""
        means = torch.stack(list(self.sums.values())) / self.num_batches
        means = trainer.strategy.reduce(means, reduce_op="mean")
        assert isinstance(means, Tensor)
        return {f"train/{key}": value for key, value in zip(self.sums, means.tolist(), strict=True)}


class ValidationLogger(Callback):
    """Adds each validation to the loggers, and keeps the last one."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}
        """`loss` and `bits_per_byte` of the newest validation."""
        self.last_step = -1
        """The optimizer step it was made at; -1 before the first."""
        self.routing: dict[str, dict[str, Tensor]] = {}
        """For each sparse layer, `RoutingMetrics` over the newest validation."""
        self._routing = RoutingByLayer()

    def on_validation_batch_end(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: dict[str, dict[str, Routing]],
        batch: LoadedBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._routing.update(outputs["routings"], counted=batch["index"] != FILLER)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.routing = self._routing.compute()
        self._routing.reset()
        self.last_step = trainer.global_step
        metrics = trainer.callback_metrics
        self.last = {
            name: float(metrics[f"validation/{name}"]) for name in ("loss", "bits_per_byte")
        }
        row = {f"validation/{name}": value for name, value in self.last.items()}
        log_row(trainer, row | flatten_routing(self.routing, prefix="validation/"))


def log_row(trainer: Trainer, row: Mapping[str, Any]) -> None:
    """One row for every logger, at the optimizer step the run has reached."""
    for logger in trainer.loggers:
        logger.log_metrics({**row, "trainer/global_step": trainer.global_step}, trainer.global_step)
