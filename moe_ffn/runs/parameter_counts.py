"""The parameters that a config counts, held to those of the model that is built of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torch import nn

from moe_ffn.errors import ConfigError
from moe_ffn.ffn import FFNConfig
from moe_ffn.model.decoder import Block, Decoder


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


def miscounted(
    name: str, told: int, found: int, ffn: FFNConfig | None, d_model: int
) -> ConfigError:
    """The refusal of a part whose config counts `told` parameters, of which `found` are built.

    Args:
        ffn: its config, where it is a feed-forward block; experts at fault in it are named.
    """
    why = "" if ffn is None else _miscounted_experts(ffn, d_model)
    return ConfigError(
        f"{name}: num_params says {told:,}, but {found:,} parameters are built{why}; make them equal, "
        "since tables, facts.json and equal budgets go by num_params"
    )


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


def _miscounted_experts(ffn: FFNConfig, d_model: int) -> str:
    """Which experts in a block are at fault for its count; the empty string where none are."""
    for inner in ffn.inner_blocks().values():
        if why := _miscounted_experts(inner, d_model):
            return why
    if (stack := ffn.expert_stack) is None:
        return ""
    told = stack.num_params(d_model)
    found = sum(parameter.numel() for parameter in stack.build(d_model).parameters())
    if found == told:
        return ""
    return (
        f", since of its experts ('{stack.config.type}') params_per_expert and shared_params say {told:,} "
        f"and {found:,} are built"
    )
