"""The coordinate check of Yang et al. 2022 (arXiv:2203.03466, appendix D.1).

It measures activations, and their changes in the first steps of training, at several sizes of a model. If
both stay the same while the model grows, so does the best learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moe_ffn.config.option_tree import merge, nest_options
from moe_ffn.config.yaml_files import validate
from moe_ffn.data.prepare import PreparedData, prepare
from moe_ffn.model.attention import LatentAttention, SelfAttention
from moe_ffn.model.decoder import Decoder, DecoderLayer
from moe_ffn.routing.base import RouterLinear
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.memory import check_fits
from moe_ffn.studies.timing import Training

ROWS = ("embeddings", "attention", "router logits", "feed-forward", "residual stream", "logits")
"""Measured activations, in the order of the forward pass."""


@dataclass(frozen=True)
class Coordinates:
    """Root mean squares of a model's activations, over layers, tokens and units, at several sizes."""

    option: str
    """Option that sets the size, such as `model.d_model`."""

    sizes: tuple[float, ...]
    """Values of the option."""

    activations: Mapping[str, tuple[float, ...]]
    """Row -> root mean square before training, for each size; rows that the model lacks are absent."""

    updates: Mapping[str, tuple[float, ...]]
    """Row -> root mean square of the change during the steps, for each size."""

    def slope(self, values: Sequence[float]) -> float:
        """Return the exponent a of values proportional to size^a, by least squares on the logarithms."""
        if not all(map(math.isfinite, values)) or min(values) <= 0:
            return math.nan
        return float(np.polyfit(np.log(self.sizes), np.log(values), 1)[0])


def measure_coordinates(
    config: TrainConfig, option: str, values: Sequence[Any], num_steps: int
) -> Coordinates:
    """Train a model at several sizes for a few steps at the peak learning rate, and measure its activations.

    The sizes are values of a dotted option, such as `model.d_model`. All use the seed of `config` and the
    same batches; activations are measured on the first. Raises ConfigError if a value is not valid for the
    option, or the corpus cannot be used.
    """
    constant = {"type": "constant", "warmup_steps": 0}
    options = merge(config.to_dict(), {"optimizer": {"schedule": constant}})
    configs = [
        validate(TrainConfig, merge(options, nest_options([(option, value)]))) for value in values
    ]
    for sized in configs:
        check_fits(sized)
    data = prepare(config.data)
    before_and_change = [_measure(sized, data, num_steps) for sized in configs]
    activations, updates = (
        {row: tuple(sizes[row] for sizes in measured) for row in ROWS if row in measured[0]}
        for measured in zip(*before_and_change, strict=True)
    )
    return Coordinates(option, tuple(map(float, values)), activations, updates)


def _measure(
    config: TrainConfig, data: PreparedData, num_steps: int
) -> tuple[dict[str, float], dict[str, float]]:
    training = Training(config, data, torch.device("cpu"))
    inputs = training.batches[0].input_ids
    before = _activations(training.model, inputs)
    for _ in range(num_steps):
        training.step()
    after = _activations(training.model, inputs)
    change = {
        row: [new - old for new, old in zip(after[row], before[row], strict=True)] for row in before
    }
    return (
        {row: _rms(tensors) for row, tensors in before.items()},
        {row: _rms(tensors) for row, tensors in change.items()},
    )


@torch.no_grad()
def _activations(model: Decoder, inputs: Tensor) -> dict[str, list[Tensor]]:
    """Return row -> activations of all modules of that row, in evaluation mode."""
    found: dict[str, list[Tensor]] = {}

    def keep(row: str, activation: Any) -> None:
        found.setdefault(row, []).append(getattr(activation, "hidden", activation).float())

    with ExitStack() as hooks:
        for row, module in _measured_modules(model):
            hook = module.register_forward_hook(lambda *call, row=row: keep(row, call[-1]))
            hooks.enter_context(hook)
        norm = model.final_norm
        residual = norm.register_forward_pre_hook(lambda _, x: keep("residual stream", x[0]))
        hooks.enter_context(residual)
        hooks.callback(model.train)
        model.eval()
        found["logits"] = [model(inputs).logits.float()]
    return found


def _measured_modules(model: Decoder) -> Iterator[tuple[str, nn.Module]]:
    yield "embeddings", model.dropout  # comes after the factor of scale_embeddings
    for module in model.modules():
        if isinstance(module, SelfAttention | LatentAttention):
            yield "attention", module
        elif isinstance(module, RouterLinear):
            yield "router logits", module
        elif isinstance(module, DecoderLayer):
            yield "feed-forward", module.ffn


def _rms(tensors: Sequence[Tensor]) -> float:
    squares = sum(float(tensor.double().square().sum()) for tensor in tensors)
    return math.sqrt(squares / sum(tensor.numel() for tensor in tensors))
