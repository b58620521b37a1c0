"""The optimizer of a run, its parameter groups and its schedule."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from moe_ffn.training.optimizer_config import OptimizerConfig


def build_schedule(optimizer: Optimizer, config: OptimizerConfig, max_steps: int) -> LambdaLR:
    """The learning rate as a function of the optimizer step alone, so that resuming needs no state."""
    return LambdaLR(optimizer, lambda step: config.schedule.multiplier(step, max_steps))


def restate_options(
    checkpoint: dict[str, Any], model: nn.Module, config: OptimizerConfig, max_steps: int
) -> None:
    """Make a checkpoint, in place, one of a run with these options, so that a resumed run obeys them.

    torch would restore the rates and decays that the checkpoint was saved with, and say nothing.
    """
    (optimizer,), (schedule,) = checkpoint["optimizer_states"], checkpoint["lr_schedulers"]
    multiplier = config.schedule.multiplier(schedule["last_epoch"], max_steps)
    fresh = config.build(model).state_dict()["param_groups"]
    optimizer["param_groups"] = [
        {**group, "initial_lr": group["lr"], "lr": group["lr"] * multiplier} for group in fresh
    ]
    schedule["base_lrs"] = [group["lr"] for group in fresh]
    schedule["_last_lr"] = [group["lr"] for group in optimizer["param_groups"]]


def load_scalars_exactly(optimizer: Optimizer) -> None:
    """Have `load_state_dict` leave every state of one number in the format it was saved in.

    torch does so with `step` alone. All else takes the format of its parameter, in which the product of
    momenta that NAdam keeps is another number, and multiplied on in another format.
    """
    saved: dict[int, dict[str, Any]] = {}

    def note(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        saved.update(state_dict["state"])

    def put_back(optimizer: Optimizer) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        for number, parameter in enumerate(parameters):
            for name, value in saved.get(number, {}).items():
                # The moment of a parameter that is itself one number goes with the parameter.
                if isinstance(value, Tensor) and value.ndim == 0 < parameter.ndim:
                    state = optimizer.state[parameter]
                    state[name] = value.to(state[name].device)
        saved.clear()

    optimizer.register_load_state_dict_pre_hook(note)
    optimizer.register_load_state_dict_post_hook(put_back)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups of parameters for an optimizer: those that decay and those that don't."""
    decayed, kept = split_by_decay(model)
    return [
        {"params": list(decayed.values()), "weight_decay": weight_decay},
        {"params": list(kept.values()), "weight_decay": 0.0},
    ]


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
