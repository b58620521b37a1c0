"""Checks of a run's options and hardware, before the data are read and the folder is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning import Trainer

from moe_ffn.config.environment import check_launcher, check_number_of_processes, is_first_rank
from moe_ffn.config.errors import ConfigError, UseCase, first_line
from moe_ffn.data.batches import require_equal_shares
from moe_ffn.runs.config import Resume, TrainConfig
from moe_ffn.runs.custom_parts import check_custom_parts
from moe_ffn.runs.folder import check_run_folder
from moe_ffn.runs.json_files import Facts
from moe_ffn.runs.memory import check_fits
from moe_ffn.training.config import resolve_precision
from moe_ffn.training.parallel.layout import SHARDED_PRECISIONS, Layout


@dataclass(frozen=True)
class Hardware:
    """Device, precision and processes of a run."""

    device: torch.device
    precision: str
    layout: Layout
    """Division of the model among the ranks."""


def require_valid(config: TrainConfig, resume: Resume | None = None) -> Hardware:
    """Return the hardware of a run, or raise all mistakes in its config as one ConfigError."""
    _raise_together(
        *([partial(check_run_folder, config)] if resume is None and is_first_rank() else []),
        partial(check_fits, config),
        partial(check_launcher, config.trainer.num_nodes),
    )
    hardware = find_hardware(config, Facts() if resume is None else resume.facts)
    _raise_together(
        partial(require_equal_shares, config.data.batch_size, hardware.layout.num_ranks),
        partial(_check_precision, hardware),
        partial(check_layout, config, hardware.layout.num_ranks, hardware.precision),
        partial(check_custom_parts, config, hardware.device),
        partial(_check_device, config, hardware.device.type),
    )
    return hardware


def _raise_together(*checks: Callable[[], object]) -> None:
    mistakes: list[ConfigError] = []
    for check in checks:
        try:
            check()
        except ConfigError as mistake:
            mistakes.append(mistake)
    if len(mistakes) == 1:
        raise mistakes[0]
    if mistakes:
        raise ConfigError("\n".join(map(str, mistakes)))


def find_hardware(config: TrainConfig, facts: Facts) -> Hardware:
    """Return the hardware that Lightning selects; with precision `auto`, a resumed run keeps that of `facts`.

    Raises ConfigError if Lightning rejects the options, or the launcher started another number of processes.
    """
    arguments = config.trainer.lightning_arguments()
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary"), False
    )
    try:
        trainer = Trainer(**{**quiet, **arguments})
    except Exception as error:  # of any type: the user's arguments are wrong
        shown = "".join(f" {name}: {value}," for name, value in arguments.items()).rstrip(",")
        raise ConfigError(
            f"trainer: lightning.Trainer rejects{shown}: {first_line(error)}"
        ) from error
    check_number_of_processes(trainer.num_devices, trainer.num_nodes)
    device, num_ranks = trainer.strategy.root_device, trainer.world_size
    began_in = facts.precision if config.trainer.precision == "auto" else None
    precision = resolve_precision(began_in or config.trainer.precision, device.type)
    return Hardware(device, precision, _layout_of(config, num_ranks))


# -- single checks


def _check_precision(hardware: Hardware) -> None:
    if hardware.precision == "16-mixed" and hardware.device.type == "cpu":
        raise ConfigError("trainer.precision (16-mixed) needs a GPU; on a CPU use bf16-mixed")


def check_layout(config: TrainConfig, num_ranks: int, precision: str) -> Layout:
    """Return a run's layout; ConfigError if the model, the precision or the optimizer does not allow it."""
    layout = _layout_of(config, num_ranks)
    if config.parallel is None:
        return layout
    if layout.expert > 1:
        if not config.model.router_infos():
            raise ConfigError(
                f"parallel.expert ({layout.expert}) divides the experts that a router chooses from, but no "
                "layer has a router; use parallel.shard"
            )
        if unsupported := config.model.unsupported(UseCase(num_ranks=layout.expert)):
            raise ConfigError(f"model.{unsupported}")
    if layout.is_sharded and config.trainer.strategy != "auto":
        raise ConfigError(
            f"trainer.strategy ({config.trainer.strategy}) holds the whole model on each rank, but parallel "
            "divides it; leave one of them out"
        )
    if layout.is_sharded and precision not in SHARDED_PRECISIONS:
        raise ConfigError(
            f"trainer.precision ({precision}) does not work with parallel.shard and parallel.expert; use one "
            f"of {', '.join(SHARDED_PRECISIONS)}"
        )
    if layout.is_sharded and not config.optimizer.takes_shards:
        raise ConfigError(
            f"optimizer.type ({config.optimizer.type}) needs whole matrices, which parallel.shard and "
            "parallel.expert divide; use adamw or muon"
        )
    if layout.expert > 1:
        empty = config.model.build_empty(*config.data.text_sizes)
        if reason := layout.unsupported_reason(empty):
            raise ConfigError(reason)
    return layout


def _layout_of(config: TrainConfig, num_ranks: int) -> Layout:
    return Layout(data=num_ranks) if config.parallel is None else config.parallel.layout(num_ranks)


def _check_device(config: TrainConfig, device: str) -> None:
    if unsupported := config.model.unsupported(UseCase(device=device)):
        raise ConfigError(f"model.{unsupported}")
