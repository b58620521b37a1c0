"""Short real fits, everything that was observed of them, and faults to inject: numbers, alarms, blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn

from moe_ffn.data.prepare import PreparedData
from moe_ffn.model.decoder import DecoderConfig
from moe_ffn.runs.assemble import build_module, build_trainer, make_callbacks, make_token_data
from moe_ffn.runs.config import TrainConfig
from moe_ffn.training.config import AlarmsConfig, TrainerConfig
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.monitoring.alarms import Advice, AlarmRules
from moe_ffn.training.objective import Objective, ObjectiveConfig
from moe_ffn.training.optimizer import AdamWConfig


class MemoryLogger(Logger):
    """Keeps every row."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, Any]]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        assert step is not None
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def named(self, prefix: str) -> list[tuple[int, dict[str, Any]]]:
        return [row for row in self.rows if f"{prefix}/loss" in row[1]]


class Spy(Callback):
    """Record the objective and routing of every batch, and the gradient of every step."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.clipped_norms: list[float] = []
        self.rates: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.outputs.append(outputs)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        def record(*given: Any) -> None:
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            if gradients:
                self.clipped_norms.append(float(torch.nn.utils.get_total_norm(gradients)))

        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(record)


class Fitted:
    """A finished fit, as the program makes it, and what was seen of it."""

    def __init__(
        self,
        config: TrainConfig,
        data: PreparedData,
        folder: Path,
        *more: Callback,
        resume_from: Path | None = None,
    ) -> None:
        # A fresh process has drawn other numbers; the checkpoint replaces its weights.
        torch.manual_seed(config.seed if resume_from is None else 999)
        self.config, self.data = config, data
        self.module: LanguageModel = build_module(config, data)
        self.start = {k: v.clone() for k, v in self.module.state_dict().items()}
        self.logger, self.spy = MemoryLogger(), Spy()
        self.watchers = make_callbacks(config, data, folder)
        self.trainer = build_trainer(config, folder, "32-true", [self.logger], self.watchers)
        self.trainer.callbacks.extend([self.spy, *more])  # pyright: ignore[reportAttributeAccessIssue]
        self.trainer.fit(
            self.module, datamodule=make_token_data(config, data), ckpt_path=resume_from
        )


Fit = Callable[..., Fitted]
MakeConfig = Callable[..., TrainConfig]


class Fault(Callback):
    """Breaks batches of the run whenever they pass: also when one is repeated to find the fault."""

    def __init__(self, place: str, value: float, batches: range) -> None:
        """A fault in the batches of these numbers.

        Args:
            place: `loss`; or a module of the decoder, whose output breaks, such as `embedding`; `into:` and
                a module, whose input breaks; or a parameter, whose gradient breaks.
            value: what becomes of one value of it; of a loss what it is multiplied by.
        """
        self.place, self.value, self.batches = place, value, batches
        self.num_strikes = 0
        self._ids: list[Tensor] = []
        self._now = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LanguageModel)
        assert pl_module.batch_at is not None
        decoder, batch_at = pl_module.decoder, pl_module.batch_at
        self._ids = [batch_at(index)["input_ids"] for index in self.batches]
        # Known by its tokens, so that a repetition is broken too, and a validation is not.
        decoder.embedding.register_forward_pre_hook(self._recognize)
        name = self.place.removeprefix("into:")
        modules = dict(decoder.named_modules())
        if self.place.startswith("into:"):
            modules[name].register_forward_pre_hook(self._break_input)
        elif name in modules:
            modules[name].register_forward_hook(self._break_output)
        elif name != "loss":
            decoder.get_parameter(name).register_hook(self._broken)

    def objective(self, real: Callable[..., Objective]) -> Callable[..., Objective]:
        """`real`, whose total breaks if the loss is the place."""

        def broken(*args: Any, **kwargs: Any) -> Objective:
            losses = real(*args, **kwargs)
            if self.place != "loss" or not self._now:
                return losses
            self.num_strikes += 1
            return replace(losses, total=losses.total * self.value)

        return broken

    def _recognize(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._now = any(torch.equal(args[0], ids) for ids in self._ids)

    def _break_input(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._broken(args[0]), *args[1:])

    def _break_output(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return self._broken(output)

    def _broken(self, values: Tensor) -> Tensor:
        if not self._now:
            return values
        self.num_strikes += 1
        values = values.clone()
        values.view(-1)[0] = self.value
        return values


RATE = "lower optimizer.learning_rate (now 0.003) or lower trainer.gradient_clip_val (now 1)"


def make_rules(model: dict[str, Any] | None = None, **trainer: Any) -> AlarmRules:
    decoder = DecoderConfig.model_validate(model or {"ffn": "moe"})
    advice = Advice(decoder, ObjectiveConfig(), AdamWConfig(), TrainerConfig(**trainer))
    return AlarmRules(AlarmsConfig(after_steps=20), advice)


OWN_BLOCK = """
import torch
from moe_ffn import FFNBlock, FFNConfig, FFNOutput
class Config(FFNConfig, frozen=True):
    def build(self, d_model): return Block()
    def num_params(self, d_model): return 0
    def flops_per_token(self, d_model, seq_len): return 0
class Block(FFNBlock):
    def forward(self, x, context=None):
        %s
        return FFNOutput(x)
"""
