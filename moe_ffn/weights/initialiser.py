"""The interface of every method, and what methods share: copies of a decoder with other blocks, input hooks.

B sequences, S tokens of each, D model width
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from torch import Generator, Tensor

from moe_ffn.config.base import TaggedConfig
from moe_ffn.config.errors import ConfigError
from moe_ffn.config.yaml_files import validate
from moe_ffn.ffn.base import FFNBlock, FFNConfig
from moe_ffn.ffn.moe import MoEConfig, MoEFFN
from moe_ffn.model.decoder import Block, Decoder, DecoderConfig
from moe_ffn.outputs import TokenContext

_BATCH_SIZE = 8


class InitialiserConfig(TaggedConfig, frozen=True):
    """How a model is made of trained ones."""

    needs_text: ClassVar[bool] = False
    """Whether it reads what the model does with a text."""
    takes_several: ClassVar[bool] = False
    """Whether it is made of several models."""

    @abstractmethod
    def initialise(
        self, sources: Sequence[Decoder], ids_BS: Tensor | None, generator: Generator
    ) -> Decoder:
        """A new decoder; the sources stay as they are.

        Args:
            sources: one, or several where `takes_several`; in evaluation.
            ids_BS: the tokens of that text, where `needs_text`.
            generator: of all that is drawn.

        Raises:
            ConfigError: it cannot be made of these.
        """


InputHook = Callable[[Tensor, TokenContext], None]
"""Called with the input of a feed-forward block: the tokens and their context."""


def layer_blocks(decoder: Decoder) -> list[tuple[FFNConfig, FFNBlock]]:
    """The feed-forward block of each layer, after its config."""
    blocks = [cast("Block", layer).ffn for layer in decoder.layers]
    return list(zip(decoder.config.layer_ffns(), blocks, strict=True))


def build_block(config: FFNConfig, like: FFNBlock, d_model: int, generator: Generator) -> FFNBlock:
    """A block with weights drawn from `generator`, of the dtype of `like`, in evaluation."""
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        block = config.build(d_model)
    dtypes = [parameter.dtype for parameter in like.parameters()]
    return block.to(dtypes[0] if dtypes else torch.get_default_dtype()).eval()


@contextmanager
def prefix_errors(option: str) -> Iterator[None]:
    """Prefix the option that a ConfigError names with `option.`, as it stands on a command line."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{option}.{error}") from error


def with_blocks(
    decoder: Decoder, blocks: Mapping[int, tuple[FFNConfig, FFNBlock]], option: str
) -> Decoder:
    """A copy of a decoder that has other blocks in some layers.

    Args:
        option: names the mistake, such as `method`.

    Raises:
        ConfigError: the model refuses such a block.
    """
    configs = [
        blocks[i][0] if i in blocks else c for i, c in enumerate(decoder.config.layer_ffns())
    ]
    last = configs[-1]
    options: dict[str, Any] = {
        **decoder.config.to_dict(),
        "ffn": last.to_dict(),
        "ffn_at": {str(i): c.to_dict() for i, c in enumerate(configs) if c != last},
    }
    try:
        config = validate(DecoderConfig, options)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error
    replaced = {id(cast("Block", decoder.layers[i]).ffn): block for i, (_, block) in blocks.items()}
    made = copy.deepcopy(decoder, replaced)  # which takes these blocks in the place of copies
    made.config = config
    return made


@torch.no_grad()
def run_with_hook(decoder: Decoder, layer: int, ids_BS: Tensor, hook: InputHook) -> None:
    """Run a text through a decoder, with a hook on what comes to the feed-forward block of one layer."""
    ffn = cast("Block", decoder.layers[layer]).ffn
    handle = ffn.register_forward_pre_hook(lambda _, inputs: hook(*inputs))
    try:
        for ids in ids_BS.split(_BATCH_SIZE):
            decoder(ids)
    finally:
        handle.remove()


def with_num_experts(config: FFNConfig, num_experts: int, d_model: int) -> MoEConfig | None:
    """Return the block with so many experts, each as wide as now; None where it is no mixture of experts.

    Raises:
        ValueError: its router cannot serve so few.
    """
    if not isinstance(config, MoEConfig):
        return None
    width = config.expert_stack.width(d_model)
    experts = config.experts.with_fixed_width(width, config.experts_per_token)
    options = {**dict(config), "num_experts": num_experts, "experts": experts}
    return type(config).model_validate(options)


def resized_layers(
    decoder: Decoder, num_experts: int, option: str
) -> dict[int, tuple[FFNConfig, MoEFFN]]:
    """The sparse blocks of a decoder by layer, each after what its config is with fewer experts.

    Raises:
        ConfigError: there is none, one has no more experts than that, or its router cannot serve so few.
    """
    found: dict[int, tuple[FFNConfig, MoEFFN]] = {}
    for layer, (config, block) in enumerate(layer_blocks(decoder)):
        stack = config.expert_stack
        if stack is None:
            continue
        try:
            smaller = with_num_experts(config, num_experts, decoder.config.d_model)
        except ValueError as error:
            why = str(error).split("Value error, ")[-1].split(" [type=")[0]
            raise ConfigError(
                f"{option}.num_experts ({num_experts}), layer {layer}: {why}"
            ) from error
        if smaller is None:
            continue
        if num_experts > stack.num_experts:
            raise ConfigError(
                f"{option}.num_experts ({num_experts}) must not exceed the experts of layer {layer} "
                f"({stack.num_experts}); give fewer"
            )
        found[layer] = smaller, cast("MoEFFN", block)
    if not found:
        for layer, config in enumerate(decoder.config.layer_ffns()):
            if config.routers():
                raise ConfigError(
                    f"{option}.type: layer {layer} is of type '{config.type}', whose experts cannot be made "
                    "fewer; take a model whose blocks are of type 'moe'"
                )
        raise ConfigError(
            f"{option}.type: no layer of this model has experts; use upcycle or carve first"
        )
    return found
