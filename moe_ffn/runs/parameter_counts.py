"""The parameters that a config counts, held to those of the model that is built of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

from torch import nn

from moe_ffn.config.base import TaggedConfig
from moe_ffn.config.errors import ConfigError, show
from moe_ffn.config.import_path import explaining_outside_errors, is_outside
from moe_ffn.experts.base import ExpertsConfig
from moe_ffn.ffn import FFNConfig
from moe_ffn.ffn.shared_expert import CombineConfig
from moe_ffn.model.decoder import Block, Decoder
from moe_ffn.model.norm import NormConfig
from moe_ffn.model.positions import PositionsConfig
from moe_ffn.routing.base import RouterConfig
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.outside_code import tagged_parts
from moe_ffn.testing import miscounted

_COUNTS: dict[type[TaggedConfig], dict[str, tuple[str, ...]]] = {
    FFNConfig: {
        "num_params": ("d_model",),
        "num_active_params": ("d_model",),
        "flops_per_token": ("d_model", "seq_len"),
    },
    ExpertsConfig: {
        "params_per_expert": ("d_model", "num_experts"),
        "shared_params": ("d_model", "num_experts"),
        "flops_per_pair": ("d_model", "num_experts"),
        "shared_flops_per_token": ("d_model", "num_experts"),
    },
    RouterConfig: {
        "num_params": ("d_model", "num_experts"),
        "flops_per_token": ("d_model", "num_experts"),
    },
    CombineConfig: {"num_params": ("d_model",), "flops_per_token": ("d_model",)},
    NormConfig: {"num_params": ("d_model",)},
    PositionsConfig: {"num_params": ("d_model", "seq_len")},
}
"""Family -> its methods that count parameters or FLOPs, and what they are given."""


def check_counts(config: TrainConfig) -> None:
    """Have the parts from outside the package count, before anything adds up what they say.

    Raises:
        ConfigError: what one returns is no number of 0 or more; one sentence with its path.
    """
    d_model = config.model.d_model
    sizes: dict[str, Any] = {"d_model": d_model, "seq_len": config.data.seq_len, "num_experts": 2}
    for path, part in reversed(list(tagged_parts(config))):  # what is inside first
        if not is_outside(type(part)):
            continue
        name = f"{'.'.join(map(str, path))} ('{part.type}')"
        for family, methods in _COUNTS.items():
            for method, arguments in methods.items() if isinstance(part, family) else ():
                with explaining_outside_errors(name):
                    found = getattr(part, method)(*(sizes[argument] for argument in arguments))
                if not isinstance(found, int | float) or not 0 <= found < math.inf:
                    raise ConfigError(
                        f"{name}: {method} returned {show(found)}, but has to return a number of 0 or more"
                    )


def check_num_params(decoder: Decoder) -> None:
    """Hold the parameters that each config counts to those that are built of it.

    Tables, facts, comparisons and equal budgets go by the first. A parameter counts where it is met first, so
    that a layer which uses another's has none.

    Raises:
        ConfigError: they differ; one sentence with the layer and both numbers.
    """
    seen: set[int] = set()
    for name, told, module, ffn in _counted_parts(decoder):
        new = [parameter for parameter in module.parameters() if id(parameter) not in seen]
        seen.update(map(id, new))
        if (found := sum(parameter.numel() for parameter in new)) != told:
            raise miscounted(name, told, found, ffn, decoder.config.d_model)


def _counted_parts(decoder: Decoder) -> Iterator[tuple[str, int, nn.Module, FFNConfig | None]]:
    """(name, parameters by the config, module, config of a feed-forward block) of each part of a model."""
    model = decoder.config
    d_model, norm = model.d_model, model.norm
    of_norm = norm.num_params(d_model)
    for layer, (option, ffn) in enumerate(model.ffns_by_option()):
        block, where = cast("Block", decoder.layers[layer]), f"of layer {layer}"
        yield f"model.{option} ('{ffn.type}') {where}", ffn.num_params(d_model), block.ffn, ffn
        told = model.attention.num_params(d_model, norm)
        yield f"model.attention {where}", told, block.attention, None
        for module in (block.attention_norm, block.ffn_norm):
            yield f"model.norm ('{norm.type}') {where}", of_norm, module, None
    if model.norm_placement == "pre":
        yield f"model.norm ('{norm.type}') of the output", of_norm, decoder.final_norm, None
    positions = model.positions
    told = positions.num_params(d_model, decoder.max_seq_len)
    yield f"model.positions ('{positions.type}')", told, decoder.positions, None
