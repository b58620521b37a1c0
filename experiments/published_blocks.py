"""Compare our blocks with the sparse blocks of transformers, and write docs/reference/models.md.

    python -m experiments.published_blocks [docs/reference/models.md]

Both blocks are small, in float32, and have the same random weights. Outputs and all gradients are compared,
in evaluation, and for blocks with noise or a capacity also in training.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from jinja2 import Template
from torch import Tensor, nn

from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.config.errors import ConfigError
from moe_ffn.config.files import write_atomically
from moe_ffn.config.option_tree import show_value
from moe_ffn.ffn import build_ffn
from moe_ffn.hf.block_parts import BlockEntry
from moe_ffn.hf.block_table import BLOCKS, NO_BLOCK
from moe_ffn.hf.blocks import config_width, convert_tensors
from moe_ffn.outputs import TokenContext
from moe_ffn.routing.sparse_mixer import TINY

SMALL: dict[str, Any] = {
    "vocab_size": 31,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 16,
    "d_model": 16,
    "d_ff": 12,
    "encoder_ffn_dim": 12,
    "intermediate_size": 12,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "n_group": 3,
    "topk_group": 2,
    "n_shared_experts": 2,
    "num_shared_experts": 2,
    "router_hidden_size": 8,
    "router_jitter_noise": 0.1,
    "mlp_bias": True,
    "moe_router_logit_softcapping": 0.7,
    "zero_expert_num": 2,
    "expert_ffn_hidden_size": 12,
    **dict.fromkeys(("swiglu_limit", "mlp_gate_softcap", "mlp_up_softcap"), 0.5),
    "moe_num_shared_experts": 2,
    **dict.fromkeys(("moe_hidden_size", "moe_latent_size", "shared_intermediate_size"), 20),
    **dict.fromkeys(
        ("moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"), 20
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 6),
}
BATCH, LENGTH = 2, 6


Errors = dict[str, float]
"""Tensor -> largest difference between theirs and ours, relative to their largest value.

The tensors are `output`, and the gradients of `x` (the input) and of our parameters, by name.
"""


def config_of(model: str, entry: BlockEntry, options: Mapping[str, Any]) -> Any:
    """Return the config of transformers for a block, with these options."""
    folder = model.split()[0]
    module = import_module(f"transformers.models.{folder}.configuration_{folder}")
    classes = {name: value for name, value in vars(module).items() if name.endswith("Config")}
    prefixes = {name: name.removesuffix("Config").removesuffix("Text") for name in classes}
    matches = [name for name, prefix in prefixes.items() if entry.class_name.startswith(prefix)]
    name = entry.config_name or max(matches, key=len)
    config = classes[name](**options)
    config._experts_implementation = config._attn_implementation = "eager"
    return config


def build_theirs(model: str, entry: BlockEntry, config: Any) -> nn.Module:
    """Build the block of transformers with random weights."""
    folder = model.split()[0]
    module = import_module(f"transformers.models.{folder}.modeling_{folder}")
    cls = getattr(module, entry.class_name)
    arguments = {"config": config, "layer_idx": 0, "ffn_dim": getattr(config, "encoder_ffn_dim", 0)}
    accepted = inspect.signature(cls.__init__).parameters
    block = cls(**{name: value for name, value in arguments.items() if name in accepted}).float()
    generator = torch.Generator().manual_seed(0)
    for name, tensor in block.state_dict().items():
        if not tensor.is_floating_point():  # a table of the experts of each token id
            random = torch.rand(len(tensor), config.num_local_experts, generator=generator)
            tensor.copy_(random.argsort(dim=-1)[:, : tensor.shape[1]])
            continue
        tensor.normal_(std=0.3, generator=generator)
        if "norm" in name or "scale" in name:
            tensor.add_(1)
        elif name.endswith(("correction_bias", "expert_bias", "balancing_biases")):
            tensor.abs_()
    return block


@contextmanager
def same_noise() -> Iterator[None]:
    """Replace random noise by a function of its size, so that both blocks draw the same noise."""

    def drawn(like: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(like.numel())
        return torch.rand(like.numel(), generator=generator).view(like.shape)

    def uniform_(x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
        return x.copy_(low + (high - low) * drawn(x))

    with (
        patch.object(Tensor, "uniform_", uniform_),
        patch.object(Tensor, "exponential_", lambda x: x.copy_(-drawn(x).clamp(TINY).log())),
        patch.object(torch, "rand_like", lambda x, **_: drawn(x)),
    ):
        yield


def call_theirs(block: Any, x_BSD: Tensor, ids_BS: Tensor) -> Tensor:
    """Return the output of a block, or of the feed-forward part of a decoder layer."""
    if "Layer" in type(block).__name__ and hasattr(block, "self_attn"):
        return _call_layer(block, x_BSD)
    takes_ids = "input_ids" in inspect.signature(block.forward).parameters
    output = block(x_BSD, input_ids=ids_BS) if takes_ids else block(x_BSD)
    return (output[0] if isinstance(output, tuple) else output).view(x_BSD.shape)


def _call_layer(layer: Any, x_BSD: Tensor) -> Tensor:
    """Return the output of the feed-forward part of a layer, with its other parts switched off."""
    if hasattr(layer, "shared_mlp"):  # Granite
        return layer.block_sparse_moe(x_BSD) + layer.shared_mlp(x_BSD)

    class Zero(nn.Module):
        def forward(self, *_: Any, hidden_states: Tensor, **__: Any) -> tuple[Tensor, None]:
            return torch.zeros_like(hidden_states), None

    layer.self_attn, layer.post_attention_layernorm = Zero(), nn.Identity()
    layer.layer_scalar.fill_(1.0)
    output = layer(x_BSD)
    return (output[0] if isinstance(output, tuple) else output) - x_BSD


def _nllb_paper(block: Any, x_BSD: Tensor) -> Tensor:
    """Return the sum of all experts with the router's weights, which are 0 for experts not chosen."""
    x_TD = x_BSD.flatten(0, 1)
    _, weights_TE, _ = block.router(x_TD)
    outputs = [
        weights_TE[:, e : e + 1] * block.experts[f"expert_{e}"](x_TD)
        for e in range(block.num_experts)
    ]
    return torch.stack(outputs).sum(dim=0).view_as(x_BSD)


def _doge_paper(block: Any, x_BSD: Tensor) -> Tensor:
    """Return the output for one token at a time, with which the block's scores are correct."""
    tokens = x_BSD.flatten(0, 1)[:, None, None]
    return torch.stack([block(x_11D)[0] for x_11D in tokens]).view_as(x_BSD)


PAPERS: dict[str, Callable[[Any, Tensor], Tensor]] = {"nllb_moe": _nllb_paper, "doge": _doge_paper}
"""Block whose code differs from its paper even in evaluation -> the paper's formula."""


def compare(model: str, *, training: bool = False) -> Errors:
    """Compare their block and ours, small and with the same weights, on the same tokens."""
    entry = cast("BlockEntry", BLOCKS[model])
    config = config_of(model, entry, {**SMALL, **entry.small})
    theirs = build_theirs(model, entry, config).train(training)
    options = entry.options(config, training=training)
    ours = build_ffn(options, config_width(config)).train(training)
    state = dict(theirs.state_dict())
    ours.load_state_dict(convert_tensors(entry, state, ours.state_dict(), config))

    generator = torch.Generator().manual_seed(1)
    x_BSD = torch.randn(BATCH, LENGTH, config_width(config), generator=generator)
    direction_BSD = torch.randn(x_BSD.shape, generator=generator)
    ids_BS = torch.randint(31, (BATCH, LENGTH), generator=generator)
    x_theirs, x_ours = (x_BSD.clone().requires_grad_() for _ in range(2))
    with same_noise():
        x_copy = x_theirs * 1  # some blocks modify it in place
        paper = PAPERS.get(model)
        y_theirs = paper(theirs, x_copy) if paper else call_theirs(theirs, x_copy, ids_BS)
        y_ours = ours(x_ours, TokenContext(token_ids=ids_BS)).hidden
    (y_theirs * direction_BSD).sum().backward()
    (y_ours * direction_BSD).sum().backward()
    gradients = {
        name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        for name, tensor in theirs.named_parameters()
    }
    expected = convert_tensors(
        entry, gradients, dict(ours.named_parameters()), config, gradients=True
    )
    # In training a jittered block may contain the block, so names may have a prefix.
    errors = {
        name.removeprefix("ffn."): _error(parameter.grad, expected[name])
        for name, parameter in ours.named_parameters()
    }
    return {"output": _error(y_ours, y_theirs), "x": _error(x_ours.grad, x_theirs.grad), **errors}


@torch.no_grad()
def _error(ours: Tensor | None, theirs: Tensor | None) -> float:
    assert ours is not None
    assert theirs is not None
    size = theirs.abs().max().clamp(min=1e-30)
    assert size > 1e-6, "nothing to compare"
    return ((ours - theirs).abs().max() / size).item()


# -- docs/reference/models.md


def flow(value: Any) -> str:
    """Return YAML on one line, without null values."""
    if isinstance(value, Mapping):
        items = [(key, inner) for key, inner in value.items() if inner is not None]
        items.sort(key=lambda item: (item[0] != "type", isinstance(item[1], Mapping)))
        return "{" + ", ".join(f"{key}: {flow(inner)}" for key, inner in items) + "}"
    if isinstance(value, float):
        # YAML 1.1 reads a number with an exponent but no point as text.
        return re.sub(r"^(\d+)e", r"\1.0e", f"{value:.4g}")
    return show_value(value)


def shown_config(model: str, entry: BlockEntry) -> dict[str, Any]:
    """Return our config for the default config of a model, or for a small one if the default fails."""
    try:
        options = entry.options(config_of(model, entry, {}))
        build_empty(options)
    # RuntimeError: layers have different numbers of experts.
    except (ConfigError, TypeError, RuntimeError):
        options = entry.options(config_of(model, entry, {**SMALL, **entry.small}))
    return options


def build_empty(options: Mapping[str, Any]) -> nn.Module:
    """Build a block on the meta device; raise ConfigError for wrong options."""
    with torch.device("meta"):
        return build_ffn(options, 64)


def largest_errors(model: str, entry: BlockEntry) -> Errors:
    """Return the larger error of evaluation and training, for blocks that differ in training."""
    evaluated = compare(model)
    trained = evaluated if entry.in_training is None else compare(model, training=True)
    return {name: max(error, trained[name]) for name, error in evaluated.items()}


def page(errors: Mapping[str, Errors]) -> str:
    """Return the Markdown of docs/reference/models.md."""
    models = {model.split()[0] for model in BLOCKS}
    missing = {model for model, entry in BLOCKS.items() if isinstance(entry, str)}
    source = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    template = Template(source, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return template.render(
        blocks=BLOCKS,
        without_block=NO_BLOCK,
        errors=errors,
        version=version("transformers"),
        num_models=len(models),
        num_exact=len(models - missing),
        num_papers=len(PAPERS),
        flow=flow,
        shown_config=shown_config,
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.published_blocks", description=__doc__
    )
    parser.add_argument("file", type=Path, nargs="?", default=Path("docs/reference/models.md"))
    path = parser.parse_args(argv).file
    blocks = {model: entry for model, entry in BLOCKS.items() if isinstance(entry, BlockEntry)}
    errors = {model: largest_errors(model, entry) for model, entry in blocks.items()}
    write_atomically(path, page(errors))
    largest = max(max(of_block.values()) for of_block in errors.values())
    print(f"{path}: {len(errors)} blocks, largest error {largest:.1e}")
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_on_bad_input(main))
