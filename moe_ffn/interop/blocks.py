"""Sparse blocks of live models of transformers as blocks of ours: which there are, our configs, weights.

    ffn = moe_ffn.interop.convert_block("qwen3_moe", model.model.layers[0].mlp, model.config)

`docs/models.md` lists them all, and how near ours are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_ffn.errors import ConfigError, nearest_or_all, show
from moe_ffn.ffn import build_ffn
from moe_ffn.ffn.base import FFNBlock
from moe_ffn.interop.layouts import Layout
from moe_ffn.interop.options import Theirs

Template = Mapping[str, Any] | Callable[[Any], Any]
"""Options of ours as YAML has them; what can be called makes one of the config of transformers."""


@dataclass(frozen=True)
class Block:
    """A sparse feed-forward block of transformers."""

    class_name: str
    """In the file of its model; a decoder layer where experts have no block of their own."""
    ffn: Template
    """Our config of it."""
    names: Mapping[str, Layout]
    """Our name of a tensor -> theirs, in the block."""
    config_name: str = ""
    """The class of its config; by default that of which it has the name in front."""
    small: Mapping[str, Any] = field(default_factory=dict)
    """Options of theirs for a small block, beside `SMALL` of `experiments.models`."""
    served: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Option of theirs that `ffn` does not read -> its values of which this is the block."""
    unused: tuple[str, ...] = ()
    """Patterns of tensors in their class that are no part of the block, or do nothing in it."""
    in_training: Template | None = None
    """Options of ours that differ in training, where noise or a capacity act: those that repeat theirs."""
    note: str = ""
    """What a reader of the table should know."""
    wrong: str = ""
    """How theirs departs from its paper; ours does not."""

    def but(self, options: Template | None = None, **changes: Any) -> Block:
        """The same block of another model; `options` are changes of ours."""
        made = replace(self, **changes)
        if options is None:
            return made
        return replace(
            made, ffn=lambda config: merged(resolve(self.ffn, config), resolve(options, config))
        )


class Live(Mapping[str, Any]):
    """The options of a live config of theirs, under other names of them too, or else the defaults."""

    def __init__(self, config: Any, defaults: Mapping[str, Any]) -> None:
        self.config, self.defaults = config, defaults

    def __getitem__(self, key: str) -> Any:
        if hasattr(self.config, key):
            return getattr(self.config, key)
        return self.defaults[key]

    def __contains__(self, key: object) -> bool:
        return hasattr(self.config, str(key)) or key in self.defaults

    def __iter__(self) -> Iterator[str]:
        return iter({*vars(self.config), *self.defaults})

    def __len__(self) -> int:
        return len({*vars(self.config), *self.defaults})


def its(name: str) -> Callable[[Any], Any]:
    """An option of their config."""
    return attrgetter(name)


def its_word(words: Mapping[str, str], name: str) -> Callable[[Any], str]:
    """Ours of the word in an option of their config, which others are refused."""

    def word(config: Any) -> str:
        found = config
        for part in name.split("."):
            found = found[part] if isinstance(found, Mapping) else getattr(found, part)
        their = Theirs(type(config).__name__, {name: found})
        their.require(name, *words)
        return words[found]

    return word


def resolve(template: Any, config: Any) -> Any:
    """Plain options, of a config of theirs."""
    if callable(template):
        return resolve(template(config), config)
    if isinstance(template, Mapping):
        return {key: resolve(value, config) for key, value in template.items()}
    return template


def merged(template: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`template` with the changes, mappings in it merged too; what is changed to None is left out."""
    found = dict(template)
    for key, value in changes.items():
        inner = found.get(key)
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            value = merged(inner, value)
        found[key] = value
    return {key: value for key, value in found.items() if value is not None}


# A file that defines one of these has a sparse block, as far as names tell.
_CLASSES = re.compile(r"^class \w*(?:Expert|Router|TopK|MoE|Moe|SparseMLP)\w*\(nn\.", re.MULTILINE)
_OPTIONS = re.compile(r"\b(?:num_experts|num_local_experts|n_routed_experts|moe_num_experts)\b")
_CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
_HOLDS_EXPERTS = re.compile(r"\bself\.experts\s*=\s*\w+\(")


def sparse_models() -> dict[str, list[str]]:
    """The models of the installed transformers whose files speak of experts, without importing them.

    Returns:
        By model, the classes that hold experts: none where they are called something else.

    Raises:
        ConfigError: transformers is not installed.
    """
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        raise ConfigError("transformers 5 or newer is not installed: pip install transformers")
    found: dict[str, list[str]] = {}
    for path in sorted(Path(spec.origin).parent.glob("models/*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if _CLASSES.search(text) or _OPTIONS.search(text):
            _, *parts = _CLASS.split(text)
            bodies = dict(zip(parts[::2], parts[1::2], strict=True))
            holders = [name for name, body in bodies.items() if _HOLDS_EXPERTS.search(body)]
            found.setdefault(path.parent.name, []).extend(holders)
    return found


def block_config(model: str, config: Any) -> dict[str, Any]:
    """Our config of the sparse block of a model of transformers.

    Args:
        model: its name in `docs/models.md`, such as `qwen3_moe`.
        config: the live config that transformers builds the block from.

    Raises:
        ConfigError: there is no block of that name, or none of ours computes it.
    """
    entry = _entry(model)
    their = Theirs(entry.class_name, Live(config, {}))
    for option, values in entry.served.items():
        their.require(option, *values)
    return resolve(entry.ffn, config)


@torch.no_grad()
def convert_block(model: str, block: nn.Module, config: Any) -> FFNBlock:
    """Our block with copies of the weights of a live one of transformers, in its mode and dtype.

    Arguments and errors as of `block_config`; `block` is of the class that the table names.
    """
    entry = _entry(model)
    ffn = build_ffn(block_config(model, config), config_width(config))
    theirs = block.state_dict()
    ours = {
        name: tensor.to(_dtype_in(theirs)) if tensor.is_floating_point() else tensor
        for name, tensor in ffn.state_dict().items()
    }
    ffn.to(_dtype_in(theirs)).load_state_dict(ours_of(entry, theirs, ours, config))
    return ffn.train(block.training)


def _entry(model: str) -> Block:
    from moe_ffn.interop.block_table import BLOCKS

    entry = BLOCKS.get(model)
    if entry is None:
        raise ConfigError(
            f"{show(model)} is no model of transformers with a sparse block that is known here"
            f"{nearest_or_all(model, BLOCKS)}"
        )
    if isinstance(entry, str):
        raise ConfigError(f"no block of ours computes that of {model}: {entry}")
    return entry


def config_width(config: Any) -> int:
    """The width of the model."""
    return next(
        getattr(config, name) for name in ("hidden_size", "d_model") if hasattr(config, name)
    )


def _dtype_in(state: Mapping[str, Tensor]) -> torch.dtype:
    return max(state.values(), key=Tensor.numel).dtype


def ours_of(
    entry: Block,
    theirs: Mapping[str, Tensor],
    ours: Mapping[str, Tensor],
    config: Any,
    *,
    gradients: bool = False,
) -> dict[str, Tensor]:
    """Tensors like `ours`, of those of a block of transformers: weights of weights, gradients of gradients.

    Args:
        theirs: by their names in the block.
        ours: by the names of ours; shapes and dtypes alone are read.
        gradients: whether they are those of the weights, of some alone it may be.

    Raises:
        ConfigError: a tensor of ours has none of theirs, or a weight of theirs none of ours.
    """
    made: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, like in ours.items():
        if name not in entry.names:
            raise ConfigError(f"{entry.class_name} has nothing that is our {name}")
        ways = entry.names[name]("", like.shape, Theirs(entry.class_name, Live(config, {})))
        pieces = next((way for way in ways if all(piece.name in theirs for piece in way)), None)
        if pieces is None:
            raise ConfigError(f"{entry.class_name} has no {ways[0][0].name}, our {name}")
        made[name] = torch.zeros_like(like)
        for piece in pieces:
            into = piece.part(made[name])
            into.copy_(piece.to_ours(theirs[piece.name]).reshape(into.shape))
            if piece.added and not gradients:
                into.add_(piece.added)
            used.add(piece.name)
    left = [
        n for n in theirs if n not in used and not any(re.fullmatch(p, n) for p in entry.unused)
    ]
    if left and not gradients:
        raise ConfigError(f"our block has nothing that is {left[0]} of {entry.class_name}")
    return made
