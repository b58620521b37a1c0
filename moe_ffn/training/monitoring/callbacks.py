"""Callbacks that log metrics, validation results and generated texts.

They do not call `self.log`, which costs about 0.3 ms per key and step. Instead they sum tensors on the device
and send the loggers one row every `logging.every_n_steps`.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from moe_ffn.config.errors import first_line
from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.training.config import LoggingConfig
from moe_ffn.training.data_module import FILLER
from moe_ffn.training.module import LanguageModel, LoadedBatch, TrainStepOutput, ValidationOutput
from moe_ffn.training.monitoring.alarms import AlarmRules
from moe_ffn.training.monitoring.hardware import peak_memory
from moe_ffn.training.monitoring.json_lines import STEP_KEY, STEP_SECONDS, TRAIN_SECONDS, JsonLines
from moe_ffn.training.monitoring.loggers import AlarmLog
from moe_ffn.training.monitoring.row_sums import (
    ByLayer,
    LoggedRow,
    RoutingByLayer,
    RoutingRowSums,
    all_gather_scalar,
    gather_by_index,
    routing_row,
    scalar_of_this_rank,
)
from moe_ffn.training.recovery import Checkpointed
from moe_ffn.training.recovery.guard import Diverged
from moe_ffn.training.sampling import SampleConfig, sample_text

log = logging.getLogger(__name__)


def log_row(trainer: Trainer, row: LoggedRow) -> None:
    """Send a row to every logger, with the current optimizer step."""
    values: Any = row  # Lightning's type allows no lists
    for logger in trainer.loggers:
        logger.log_metrics(values, trainer.global_step)


class StepLogger(Checkpointed, Callback):
    """Logs one row of metrics for every `logging.every_n_steps` optimizer steps, and reports alarms.

    Checkpoints hold the sums of the unfinished row, and the values that later rows are compared with.
    """

    in_checkpoint = (
        "_window",
        "_routing",
        "rules",
        "alarm_log",
        "last_row_step",
        "total_tokens",
        "total_seconds",
        "validation_seconds",
        "peak_memory_bytes",
    )

    def __init__(self, config: LoggingConfig, rules: AlarmRules, alarm_log: AlarmLog) -> None:
        self.config = config
        self.rules = rules
        self.alarm_log = alarm_log
        self.last_row: LoggedRow = {}
        """Newest row, for the progress display."""
        self.last_routing: ByLayer = {}
        """Values of each sparse layer in the newest row."""
        self.num_skipped = 0
        """Number of optimizer steps skipped in the whole run."""
        self.total_tokens = 0
        """Number of tokens of all batches and ranks so far."""
        self.total_seconds = 0.0
        """Seconds of training steps, without validations."""
        self.validation_seconds = 0.0
        """Seconds of validations, including their samples and the checkpoint before them."""
        self.peak_memory_bytes = 0
        """Maximum of `peak_memory`, including the part of the run before a resume."""
        self._routing = RoutingRowSums(config)
        self._window = _LossRowSums()
        self._clock = 0.0
        self._learning_rate = 0.0
        self.last_row_step = 0

    @property
    def tokens_per_second(self) -> float:
        """Mean tokens per second so far, without validations."""
        return self.total_tokens / self.total_seconds if self.total_seconds else 0.0

    def not_judged(self, *, is_routed: bool) -> list[str]:
        """Return one sentence for each kind of alarm that needs more steps than this run has."""
        return self.rules.not_judged(self.last_row_step, is_routed=is_routed)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LanguageModel)
        self.num_skipped = pl_module.guard.num_skipped  # restored from the checkpoint
        self._clock = time.perf_counter()  # also for a validation of a run without steps left

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validation_seconds += self._lap()
        self.peak_memory_bytes = max(self.peak_memory_bytes, peak_memory(pl_module.device))

    def _lap(self) -> float:
        """Return the seconds since the last lap."""
        before, self._clock = self._clock, time.perf_counter()
        return self._clock - before

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        # At the end of the batch, the schedule has already set the rate of the next step.
        first = optimizer.param_groups[0]
        self._learning_rate = first["lr"] / first.get("lr_factor", 1.0)

    def on_train_batch_end(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: TrainStepOutput,
        batch: LoadedBatch,
        batch_idx: int,
    ) -> None:
        assert isinstance(pl_module, LanguageModel)
        tokens = batch["input_ids"].numel() * trainer.world_size
        self.total_tokens = (batch["index"] + 1) * tokens
        self._window.add(outputs, tokens)
        step = batch["index"] // trainer.accumulate_grad_batches + 1
        ends_row = step % self.config.every_n_steps == 0 or step == trainer.max_steps
        capacities = pl_module.decoder.expert_capacities(outputs["routings"])
        self._routing.update(outputs["routings"], ends_row, outputs["shared_shares"], capacities)
        row = None
        if trainer.global_step == step:  # this was the last batch of the step
            self.num_skipped = pl_module.guard.num_skipped
            skipped = pl_module.skipped_step
            self._window.end_step(taken=skipped is None)
            if skipped is not None and trainer.is_global_zero:
                limit = pl_module.guard.config.max_skipped_in_a_row
                self.alarm_log.report(self.rules.skipped(skipped, limit), trainer.loggers)
            # Read the values before the lap ends: reading waits for the device, which belongs to this step.
            row = self._values(trainer, pl_module) if ends_row else None
        seconds = self._lap()
        self._window.seconds += seconds
        if trainer.global_step == step:
            self._window.record_step_seconds()
        self.total_seconds += seconds
        if row is not None:
            self._write(row, trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, Diverged):  # log the last steps, which show the divergence
            self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LanguageModel)
        if trainer.global_step > self.last_row_step:  # stopped early, between two rows
            self._write(self._values(trainer, pl_module), trainer)

    def _values(self, trainer: Trainer, module: LanguageModel) -> LoggedRow:
        step = trainer.global_step
        num_steps = step - self.last_row_step
        layout = module.layout
        num_ranks = layout.expert if layout.expert > 1 else trainer.world_size
        self.last_routing = self._routing.close(step, num_steps, module, num_ranks)
        return {
            **self._window.means(trainer),
            "train/tokens": self.total_tokens,
            "train/skipped_steps": self._window.num_skipped,
            "train/learning_rate": self._learning_rate,
            "train/gradient_norm": float(module.gradient_norm),
            **({} if module.coupling is None else {"train/coupling": float(module.coupling)}),
            **routing_row(self.last_routing),
        }

    def _write(self, row: LoggedRow, trainer: Trainer) -> None:
        if self._window.seconds:
            row["train/tokens_per_second"] = self._window.tokens / self._window.seconds
        row[TRAIN_SECONDS] = self.total_seconds
        if self._window.step_seconds:
            row[STEP_SECONDS] = median(self._window.step_seconds)
        self.peak_memory_bytes = max(
            self.peak_memory_bytes, peak_memory(trainer.lightning_module.device)
        )
        log_row(trainer, row)
        step = trainer.global_step
        if trainer.is_global_zero:
            loss = row["train/loss"]
            assert isinstance(loss, float)
            alarms = self.rules.check(step, step - self.last_row_step, loss, self.last_routing)
            self.alarm_log.report(alarms, trainer.loggers)
        self.last_row = row
        self.last_row_step = step
        self._window = _LossRowSums()


@dataclass
class _LossRowSums(Checkpointed):
    """Sums over the steps since the last row; losses of skipped steps are left out."""

    in_checkpoint = ("num_batches", "num_skipped", "tokens", "seconds", "step_seconds")

    sums: dict[str, Tensor] = field(default_factory=dict)
    num_batches: int = 0
    num_skipped: int = 0
    tokens: int = 0
    seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    """Seconds of each step, including skipped steps."""
    batch_losses: list[dict[str, Tensor]] = field(default_factory=list)
    """Losses of each batch of the current step."""

    def add(self, outputs: TrainStepOutput, tokens: int) -> None:
        losses = outputs["objective"]
        self.batch_losses.append(
            {"loss": losses.cross_entropy, "objective": losses.total, **losses.other_terms}
        )
        self.tokens += tokens

    def end_step(self, *, taken: bool) -> None:
        for values in self.batch_losses:
            for name, value in values.items():
                # A skipped step may have a loss of NaN, which would make the row's mean NaN.
                counted = value if taken else torch.zeros_like(value)
                before = self.sums.get(name)
                self.sums[name] = counted if before is None else before.to(counted.device) + counted
        self.num_batches += len(self.batch_losses) * taken
        self.num_skipped += not taken
        self.batch_losses = []

    def record_step_seconds(self) -> None:
        self.step_seconds.append(self.seconds - sum(self.step_seconds))

    def means(self, trainer: Trainer) -> dict[str, float]:
        """Return mean losses over the row's batches and ranks; nan if all steps were skipped."""
        means = torch.stack(list(self.sums.values())) / self.num_batches
        means = trainer.strategy.reduce(means, reduce_op="mean")
        assert isinstance(means, Tensor)
        return {f"train/{key}": value for key, value in zip(self.sums, means.tolist(), strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes and the sums of each rank. A collective: every rank has to call this."""
        sums = {name: all_gather_scalar(value) for name, value in self.sums.items()}
        return super().state_dict() | {"sums": sums}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        sums = state_dict["sums"]
        self.sums = {name: scalar_of_this_rank(values_R) for name, values_R in sums.items()}


class ValidationLogger(Checkpointed, Callback):
    """Logs each validation, and keeps the results of the last one."""

    in_checkpoint = ("last", "last_step", "routing", "window_losses")

    def __init__(self) -> None:
        self.last: dict[str, float] = {}
        """`loss` and `bits_per_byte` of the newest validation."""
        self.last_step = -1
        """Optimizer step of the newest validation; -1 before the first."""
        self.routing: ByLayer = {}
        """Metrics of each sparse layer over the newest validation."""
        self.window_losses = torch.zeros(0)
        """Mean loss of each sequence of the newest validation, (num_windows,), in the order of the data."""
        self._routing = RoutingByLayer("every batch", "last step", "validation")
        self._losses_by_batch: dict[int, Tensor] = {}

    def on_validation_batch_end(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: ValidationOutput,
        batch: LoadedBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        counted = batch["index"] != FILLER
        assert isinstance(pl_module, LanguageModel)
        capacities = pl_module.decoder.expert_capacities(outputs["routings"])
        self._routing.update(outputs["routings"], counted, outputs["shared_shares"], capacities)
        if counted:
            self._losses_by_batch[batch["index"]] = outputs["window_losses"]

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.routing = self._routing.close()
        self.window_losses = gather_by_index(self._losses_by_batch)
        self._losses_by_batch = {}
        self.last_step = trainer.global_step
        metrics = trainer.callback_metrics
        self.last = {
            name: float(metrics[f"validation/{name}"]) for name in ("loss", "bits_per_byte")
        }
        row: LoggedRow = {f"validation/{name}": value for name, value in self.last.items()}
        log_row(trainer, row | routing_row(self.routing, prefix="validation/"))


class SampleLog(Checkpointed, Callback):
    """Continues the prompt at every validation, with the same seed, and logs the text."""

    in_checkpoint = ("last",)

    def __init__(
        self, path: Path, tokenizer: Tokenizer, options: SampleConfig, prompt: str, seed: int
    ) -> None:
        self.prompt = prompt
        self.tokenizer = tokenizer
        self.options = options
        self.seed = seed
        self.file = JsonLines(path)
        self.last = ""
        """Newest text, without the prompt; empty if none could be generated."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LanguageModel)
        self.last = ""
        # A diverged model has no probabilities; a bidirectional model cannot generate left to right.
        loss = trainer.callback_metrics["validation/loss"].item()
        if not (
            pl_module.decoder.config.causal and self.options.num_tokens and math.isfinite(loss)
        ):
            return
        try:
            # Every rank takes part, since each may hold a part of the model. Eager, since torch.compile would
            # compile the model again for every sequence length.
            with torch.compiler.set_stance("force_eager"):
                text = sample_text(
                    pl_module.decoder, self.tokenizer, self.prompt, self.options, self.seed
                )
        except RuntimeError as error:  # logits, or a temperature, that give no probabilities
            if trainer.is_global_zero:
                log.warning(
                    "sample: no text at step %d: %s", trainer.global_step, first_line(error)
                )
            return
        if trainer.is_global_zero:
            self.last = text
            line = {STEP_KEY: trainer.global_step, "prompt": self.prompt, "text": text}
            self.file.add([line])


class ProfileReport(Callback):
    """Keeps the table of Lightning's profiler at the end of training, before Lightning discards it."""

    text = ""
    """Table of the profiler; empty without a profiler."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_step = trainer.global_step + 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        table = trainer.profiler.summary()  # pyright: ignore[reportAttributeAccessIssue]  # set late
        # After a resume, the profile covers only the steps since then.
        steps = f"optimizer steps {self._first_step} to {trainer.global_step}\n"
        self.text = steps + table if table else ""
