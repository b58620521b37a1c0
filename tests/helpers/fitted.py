"""A real fit of a few steps, and everything that was seen of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger

from moe_ffn.data.prepare import PreparedData
from moe_ffn.runs.assemble import build_module, build_trainer, make_callbacks, make_token_data
from moe_ffn.runs.config import TrainConfig
from moe_ffn.training.module import LanguageModel


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
