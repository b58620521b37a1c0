"""The gradient of a run's first optimizer step, as every rank of it ends up with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from moe_ffn.data.prepare import prepare
from moe_ffn.runs.assemble import build_module, build_trainer, make_callbacks, make_token_data
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.train.teacher import read_teacher
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.parallel.layout import SINGLE_PROCESS, Layout
from moe_ffn.training.parallel.sharding import full_tensor


class KeepGradient(Callback):
    """Copies what the optimizer is about to use, before it is clipped."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if not self.gradients:
            self.gradients = {
                name: full_tensor(parameter.grad).clone()
                for name, parameter in pl_module.named_parameters()
                if parameter.grad is not None
            }


def fit(
    config: TrainConfig,
    folder: Path,
    layout: Layout = SINGLE_PROCESS,
    *more: Callback,
    precision: str = "32-true",
    weights: Mapping[str, Tensor] | None = None,
) -> LanguageModel:
    """Train on the machine that the config asks for, with these callbacks and those of a run.

    Args:
        weights: initial weights of the decoder, in place of random ones.
    """
    data = prepare(config.data)
    torch.manual_seed(config.seed)
    module = build_module(config, data, layout)
    module.start_from(weights or {})
    module.teacher = read_teacher(config, data)
    callbacks = make_callbacks(config, data, folder)
    trainer: Any = build_trainer(config, folder, precision, [], callbacks, layout)
    trainer.callbacks += more
    trainer.fit(module, datamodule=make_token_data(config, data))
    return module


def first_gradient(
    config: TrainConfig, folder: Path, layout: Layout = SINGLE_PROCESS
) -> dict[str, Tensor]:
    """Train one step.

    Returns:
        the gradient of each parameter, the norm of all, biases, thresholds and parameters after the step.
    """
    keep = KeepGradient()
    module = fit(config, folder, layout, keep)
    moved = ("correction_bias_E", "threshold_E")
    biases = {f"{k}.bias": v for k, v in module.named_buffers() if k.endswith(moved)}
    after = {
        f"{name} after": full_tensor(p.detach()).clone() for name, p in module.named_parameters()
    }
    found = keep.gradients | biases | after | {"norm": module.gradient_norm}
    return {name: value.cpu() for name, value in found.items()}
