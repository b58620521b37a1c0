"""Convert sparse blocks of live models of transformers to our blocks: configs and weights.

    ffn = moe_ffn.hf.convert_block("qwen3_moe", model.model.layers[0].mlp, model.config)

`docs/reference/models.md` lists these blocks, and how closely ours agree with them.
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
from moe_ffn.hf.block_parts import NAMES, BlockEntry
from moe_ffn.hf.block_table import BLOCKS
from moe_ffn.hf.layouts import TensorLayout


def block_config(model: str, config: Any) -> dict[str, Any]:
    """Return our config of the sparse block of a model of transformers.

    Args:
        model: name of the model in `docs/reference/models.md`, such as `qwen3_moe`.
        config: the live config from which transformers builds the block.

    Raises:
        ConfigError: the name is unknown, or none of our blocks computes the same.
    """
    return _entry(model).options(config)


@torch.no_grad()
def convert_block(model: str, block: nn.Module, config: Any) -> FFNBlock:
    """Return our block with copies of the weights of a live block, whose class the table names, in its mode
    and dtype; for other arguments and errors see `block_config`.
    """
    ffn = build_ffn(block_config(model, config), config_width(config))
    theirs = block.state_dict()
    ffn.to(max(theirs.values(), key=Tensor.numel).dtype)
    ffn.load_state_dict(convert_tensors(_entry(model), theirs, ffn.state_dict(), config))
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
    """Return the model width in a live config."""
    return config.hidden_size if hasattr(config, "hidden_size") else config.d_model


def _layout(entry: BlockEntry, name: str) -> TensorLayout | None:
    """Return the layout of our tensor `name`, which may be inside wrappers of the block or of its experts."""
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
    """Return the tensors of a block of transformers by our names, with the shapes and dtypes of `ours`. With
    `gradients`, `theirs` are gradients, perhaps of few weights. ConfigError if a tensor has no counterpart.
    """
    converted: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, like in ours.items():
        layout = _layout(entry, name)
        if layout is None:
            raise ConfigError(f"{entry.class_name} has no tensor for our {name}")
        forms = layout("", like.shape, entry.hf(config))
        pieces = next((form for form in forms if all(piece.name in theirs for piece in form)), None)
        if pieces is None:
            raise ConfigError(f"{entry.class_name} has no {forms[0][0].name} for our {name}")
        converted[name] = torch.zeros_like(like)
        for piece in pieces:
            target = piece.part(converted[name])
            target.copy_(piece.from_hf(theirs[piece.name]).reshape(target.shape))
            if piece.added and not gradients:
                target.add_(piece.added)
            used.add(piece.name)
    for name in theirs:
        is_unused = name in used or any(re.fullmatch(p, name) for p in entry.unused)
        if not is_unused and not gradients:
            raise ConfigError(f"our block has no tensor for {name} of {entry.class_name}")
    return converted
