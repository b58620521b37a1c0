"""AdamW, its parameter groups and its schedule."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from moe_ffn.training.config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """AdamW that decays matrices, and neither norms nor biases nor embeddings."""
    decayed, kept = split_by_decay(model)
    return AdamW(
        [
            {"params": list(decayed.values()), "weight_decay": config.weight_decay},
            {"params": list(kept.values()), "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
    )


def build_schedule(optimizer: AdamW, config: OptimizerConfig, max_steps: int) -> LambdaLR:
    """The learning rate as a function of the optimizer step alone, so that resuming needs no state."""
    return LambdaLR(optimizer, lambda step: config.schedule.multiplier(step, max_steps))


def restate_options(checkpoint: dict[str, Any], config: OptimizerConfig, max_steps: int) -> None:
    """Make a checkpoint, in place, one of a run with these options, so that a resumed run obeys them.

    torch would restore the rates and decays that the checkpoint was saved with, and say nothing.
    """
    (optimizer,), (schedule,) = checkpoint["optimizer_states"], checkpoint["lr_schedulers"]
    decayed, kept = optimizer["param_groups"]
    multiplier = config.schedule.multiplier(schedule["last_epoch"], max_steps)
    for group, weight_decay in ((decayed, config.weight_decay), (kept, 0.0)):
        group["initial_lr"] = config.learning_rate
        group["lr"] = config.learning_rate * multiplier
        group["betas"], group["eps"] = config.betas, config.eps
        group["weight_decay"] = weight_decay
    schedule["base_lrs"] = [config.learning_rate] * 2
    schedule["_last_lr"] = [decayed["lr"]] * 2


def split_by_decay(
    model: nn.Module,
) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """The parameters that decay and those that don't, by name; a tied parameter appears once.

    An embedding is recognised by its module, since it is a matrix too; stacked biases (E, F) by their
    name.
    """
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    decayed: dict[str, nn.Parameter] = {}
    kept: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim >= 2 and not name.endswith("bias")
        chosen = decayed if is_matrix and id(parameter) not in embeddings else kept
        chosen[name] = parameter
    return decayed, kept
