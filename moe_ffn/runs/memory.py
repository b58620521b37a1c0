"""Memory that a training run needs, and errors if there is not enough."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moe_ffn.config.errors import ConfigError
from moe_ffn.config.import_path import explaining_custom_errors
from moe_ffn.config.numbers import gigabytes
from moe_ffn.config.process_memory import memory_limit

if TYPE_CHECKING:
    from moe_ffn.runs.config import TrainConfig

_FLOAT32 = 4
_INT64 = 8
_MAX_COPIES = 6
"""Upper limit of copies of a weight in memory: the weight, its gradient and its optimizer state."""


@explaining_custom_errors()
def check_fits(config: TrainConfig, teacher_bytes: int = 0) -> None:
    """Raise ConfigError if the model, or the token ids of a batch, exceed the memory limit of this process.

    A run on a CPU needs weights, gradients and optimizer state, and the weights of its teacher once they are
    read; on a GPU it needs only the weights, since the process builds them before it moves them.
    """
    memory = memory_limit()
    if memory is None:
        return
    weights = _bytes_of_weights(config)
    for section, num_bytes in {"model": weights, "data": _bytes_of_batch(config)}.items():
        if num_bytes > memory:
            raise ConfigError(
                f"{section}: {training_needs(config)}; this process may have {gigabytes(memory)} of memory"
            )
    relative_size = {"bf16-true": 0.5, "64-true": 2}.get(config.trainer.precision, 1)
    most = relative_size * weights * _MAX_COPIES + teacher_bytes
    if not _is_on_cpu(config) or most <= memory:
        return  # every optimizer fits
    decoder = config.model.build_empty(*config.data.text_sizes)
    state = sum(optimizer_bytes(config, decoder).values())
    needed = int(relative_size * (2 * weights + state)) + teacher_bytes
    teacher = (
        f", {gigabytes(teacher_bytes)} of them for objective.distill.teacher"
        if teacher_bytes
        else ""
    )
    if needed > memory:
        raise ConfigError(
            f"model: {weights // _FLOAT32:,} parameters take {gigabytes(int(relative_size * weights))}, and "
            f"{gigabytes(needed)} with gradients and the state of optimizer.type '{config.optimizer.type}'"
            f"{teacher}, "
            f"but this process may have {gigabytes(memory)} of memory; make the model smaller, its largest "
            "tables first, or train on a machine with more"
        )


def _is_on_cpu(config: TrainConfig) -> bool:
    accelerator, num_nodes = config.trainer.accelerator, config.trainer.num_nodes
    has_gpu = torch.cuda.is_available() or torch.backends.mps.is_available()
    return num_nodes == 1 and (accelerator == "cpu" or (accelerator == "auto" and not has_gpu))


def training_needs(config: TrainConfig) -> str:
    """Return a sentence about the memory that a run needs, and the options that reduce it."""
    weights, model, data = _bytes_of_weights(config), config.model, config.data
    params = Counter[str]()
    for option, ffn in model.ffns_by_option():
        params[option] += ffn.num_params(model.d_model)
    ((option, largest),) = params.most_common(1)
    is_most = 2 * _FLOAT32 * largest > weights > _bytes_of_batch(config)
    most = f"model.{option}, which has {largest:,} of them, " if is_most else ""
    return (
        f"{weights // _FLOAT32:,} parameters and their gradients take {gigabytes(2 * weights)}, the token "
        f"ids of a batch {gigabytes(_bytes_of_batch(config))}; the optimizer's states and the activations "
        f"come on top: lower {most}data.batch_size ({data.batch_size}), data.seq_len ({data.seq_len}), "
        f"model.num_layers ({model.num_layers}) or model.d_model ({model.d_model})"
    )


def _bytes_of_weights(config: TrainConfig) -> int:
    return config.model.num_params(*config.data.text_sizes) * _FLOAT32


def _bytes_of_batch(config: TrainConfig) -> int:
    return config.data.batch_size * config.data.seq_len * _INT64


def optimizer_bytes(config: TrainConfig, model: nn.Module) -> dict[int, int]:
    """Return `id` of a parameter -> bytes of its optimizer state, measured in a step on the meta device."""
    optimizer = config.optimizer.build(model)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    return {
        id(parameter): sum(
            value.numel() * value.element_size()
            for value in optimizer.state[parameter].values()
            if isinstance(value, Tensor) and value.ndim
        )
        for parameter in model.parameters()
    }
