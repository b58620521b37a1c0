"""Convert sparse blocks of live models of transformers to our blocks: configs and weights.

    ffn = moe_ffn.interop.convert_block("qwen3_moe", model.model.layers[0].mlp, model.config)

`docs/reference/models.md` lists all of them with the errors of ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moe_ffn.config.errors import ConfigError, nearest_or_all, show
from moe_ffn.ffn import build_ffn
from moe_ffn.ffn.base import FFNBlock
from moe_ffn.interop.block_parts import NAMES, BlockEntry, LiveOptions, resolve
from moe_ffn.interop.block_table import BLOCKS
from moe_ffn.weights.layouts import Layout
from moe_ffn.weights.options import HFConfig


def block_config(model: str, config: Any) -> dict[str, Any]:
    """Return our config of the sparse block of a model of transformers.

    Args:
        model: name of the model in `docs/reference/models.md`, such as `qwen3_moe`.
        config: the live config from which transformers builds the block.

    Raises:
        ConfigError: the name is unknown, or no block of ours computes the same.
    """
    entry = _entry(model)
    hf = HFConfig(entry.class_name, LiveOptions(config, {}))
    for option, values in entry.served.items():
        hf.require(option, *values)
    return resolve(entry.ffn, config)


@torch.no_grad()
def convert_block(model: str, block: nn.Module, config: Any) -> FFNBlock:
    """Return our block with copies of the weights of a live block of transformers, in its mode and dtype.

    `block` is an instance of the class in the table. For other arguments and errors see `block_config`.
    """
    entry = _entry(model)
    ffn = build_ffn(block_config(model, config), config_width(config))
    theirs = block.state_dict()
    ours = {
        name: tensor.to(_dtype_in(theirs)) if tensor.is_floating_point() else tensor
        for name, tensor in ffn.state_dict().items()
    }
    ffn.to(_dtype_in(theirs)).load_state_dict(convert_tensors(entry, theirs, ours, config))
    return ffn.train(block.training)


def _entry(model: str) -> BlockEntry:
    entry = BLOCKS.get(model)
    if entry is None:
        raise ConfigError(
            f"{show(model)} is not a known model of transformers with a sparse block"
            f"{nearest_or_all(model, BLOCKS)}"
        )
    if isinstance(entry, str):
        raise ConfigError(f"moe_ffn has no block that matches the sparse block of {model}: {entry}")
    return entry


def config_width(config: Any) -> int:
    """Return the width of the model."""
    return next(
        getattr(config, name) for name in ("hidden_size", "d_model") if hasattr(config, name)
    )


def _dtype_in(state: Mapping[str, Tensor]) -> torch.dtype:
    return max(state.values(), key=Tensor.numel).dtype


def _layout(entry: BlockEntry, name: str) -> Layout | None:
    """Return the layout of our tensor `name`; the names of wrapped blocks and experts are joined."""
    inner = re.sub(r"^(experts\.)+", "experts.", name.removeprefix("ffn."))
    names = {**NAMES, **entry.names}
    return names.get(name) or names.get(name.removeprefix("ffn.")) or names.get(inner)


def convert_tensors(
    entry: BlockEntry,
    theirs: Mapping[str, Tensor],
    ours: Mapping[str, Tensor],
    config: Any,
    *,
    gradients: bool = False,
) -> dict[str, Tensor]:
    """Return the tensors of a block of transformers by our names, with the shapes and dtypes of `ours`.

    Args:
        theirs: weights of their block, or gradients of the weights, by their names.
        ours: weights of our block by name; their values are not read.
        gradients: True if `theirs` are gradients, possibly of only some weights.

    Raises:
        ConfigError: a tensor of ours or of theirs has no counterpart.
    """
    made: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, like in ours.items():
        layout = _layout(entry, name)
        if layout is None:
            raise ConfigError(f"{entry.class_name} has no tensor for our {name}")
        options = HFConfig(entry.class_name, LiveOptions(config, {}))
        forms = layout("", like.shape, options)
        pieces = next((form for form in forms if all(piece.name in theirs for piece in form)), None)
        if pieces is None:
            raise ConfigError(f"{entry.class_name} has no {forms[0][0].name} for our {name}")
        made[name] = torch.zeros_like(like)
        for piece in pieces:
            into = piece.part(made[name])
            into.copy_(piece.from_hf(theirs[piece.name]).reshape(into.shape))
            if piece.added and not gradients:
                into.add_(piece.added)
            used.add(piece.name)
    left = [
        n for n in theirs if n not in used and not any(re.fullmatch(p, n) for p in entry.unused)
    ]
    if left and not gradients:
        raise ConfigError(f"our block has no tensor for {left[0]} of {entry.class_name}")
    return made
