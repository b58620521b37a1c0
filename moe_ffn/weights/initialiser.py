"""Base of the initialisers, and their shared helpers: decoders with other blocks, inputs of blocks.

B sequences, S tokens of each, D model width
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from pydantic import Field
from torch import Generator, Tensor

from moe_ffn.config.base import MAX_COUNT, Config, TaggedConfig
from moe_ffn.config.errors import ConfigError, prefix_errors
from moe_ffn.config.yaml_files import validate
from moe_ffn.data.batches import TrainBatches
from moe_ffn.data.prepare import DataConfig, PreparedData, prepare
from moe_ffn.ffn.base import FFNBlock, FFNConfig
from moe_ffn.ffn.moe import MoEConfig, MoEFFN
from moe_ffn.model.decoder import Decoder, DecoderConfig, DecoderLayer
from moe_ffn.outputs import TokenContext
from moe_ffn.weights.open_model import OpenModel

_BATCH_SIZE = 8

NewBlocks = Iterator[tuple[int, tuple[FFNConfig, FFNBlock]]]


class CalibrationConfig(Config, frozen=True):
    """Text on which a method computes statistics of the source."""

    data: DataConfig | None = None
    """Text and sequence length; the tokenizer is the source's; null: the data of the source's run."""
    num_tokens: int = Field(default=65_536, ge=1, le=MAX_COUNT)
    """Tokens of the training split to read, in whole sequences."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed for random numbers and for the choice of sequences."""

    def prepared(self, source: OpenModel) -> tuple[DataConfig, PreparedData]:
        """Return data options with sequences no longer than the source's, and the text in its tokens.

        Raises ConfigError if no text is given, it cannot be read, or the source has no tokenizer.
        """
        config = self.data
        if config is not None:
            config = config.model_copy(update={"tokenizer": source.tokenizer_config})
        elif source.run is not None:
            config = source.run.config.data
        else:
            raise ConfigError(
                f"data: '{source.folder}' does not name its training text; give a text, such as "
                "--data.corpus '{type: text, paths: [FOLDER]}', or the folder of a run as the source"
            )
        seq_len = min(config.seq_len, source.decoder.max_seq_len)
        config = config.model_copy(update={"seq_len": seq_len})
        data = prepare(config)
        if self.data is None:  # else the tokenizer is the source's
            source.require_same_tokens(data.tokenizer)
        return config, data

    def ids(self, config: DataConfig, data: PreparedData) -> Tensor:
        """Return tokens of the training split, (B, S)."""
        count = max(1, self.num_tokens // config.seq_len)
        batches = TrainBatches(data.train, seq_len=config.seq_len, batch_size=count, seed=self.seed)
        return batches[0].input_ids

    @property
    def generator(self) -> Generator:
        return Generator().manual_seed(self.seed)


class InitialiserConfig(TaggedConfig, frozen=True):
    """Base of the methods that make a model from trained ones."""

    needs_text: ClassVar[bool] = False
    """True if the method runs the model on a text."""
    takes_several: ClassVar[bool] = False
    """True if the method takes several models."""

    @abstractmethod
    def initialise(
        self, sources: Sequence[Decoder], ids_BS: Tensor | None, generator: Generator
    ) -> Decoder:
        """Return a new decoder from one in evaluation mode, or several if `takes_several`, and from tokens of
        the text if `needs_text`; sources are not modified. ConfigError if the method cannot use these models.
        """


class BlockInitialiserConfig(InitialiserConfig, frozen=True):
    """Base of the methods that replace blocks of one model by what they observe on a text."""

    needs_text: ClassVar[bool] = True

    @torch.no_grad()
    def initialise(
        self, sources: Sequence[Decoder], ids_BS: Tensor | None, generator: Generator
    ) -> Decoder:
        (source,) = sources
        assert ids_BS is not None
        return with_blocks(source, dict(self.new_blocks(source, ids_BS, generator)))

    @abstractmethod
    def new_blocks(self, source: Decoder, ids_BS: Tensor, generator: Generator) -> NewBlocks:
        """Yield (layer, (config, block)) for each layer whose block is replaced."""


def layer_blocks(decoder: Decoder) -> list[tuple[FFNConfig, FFNBlock]]:
    """Return (config, feed-forward block) of each layer."""
    blocks = (cast("DecoderLayer", layer).ffn for layer in decoder.layers)
    return list(zip(decoder.config.layer_ffns(), blocks, strict=True))


def build_block(config: FFNConfig, like: FFNBlock, d_model: int, generator: Generator) -> FFNBlock:
    """Build a block in evaluation mode, with weights from `generator` and the dtype of `like`."""
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        block = config.build(d_model)
    dtypes = [parameter.dtype for parameter in like.parameters()]
    return block.to(dtypes[0] if dtypes else torch.get_default_dtype()).eval()


def with_blocks(decoder: Decoder, blocks: Mapping[int, tuple[FFNConfig, FFNBlock]]) -> Decoder:
    """Return a copy of a decoder with other blocks in some layers; ConfigError if it rejects one."""
    before = layer_blocks(decoder)
    configs = [blocks.get(layer, old)[0] for layer, old in enumerate(before)]
    last = configs[-1]
    options: dict[str, Any] = {
        **decoder.config.to_dict(),
        "parametrization": "standard",  # its base may not fit other blocks, and the weights are given
        "ffn": last.to_dict(),
        "ffn_at": {str(i): c.to_dict() for i, c in enumerate(configs) if c != last},
    }
    with prefix_errors("method: "):
        config = validate(DecoderConfig, options)
    replaced = {id(before[layer][1]): block for layer, (_, block) in blocks.items()}
    result = copy.deepcopy(decoder, replaced)  # deepcopy takes the new blocks from its memo
    result.config, result.scales = config, {}
    return result


@torch.no_grad()
def block_inputs(
    decoder: Decoder, layer: int, ids_BS: Tensor
) -> Iterator[tuple[Tensor, TokenContext]]:
    """Run a decoder on a text; yield the tokens and the context that one feed-forward block receives."""
    inputs: list[tuple[Tensor, TokenContext]] = []
    _, ffn = layer_blocks(decoder)[layer]
    with ffn.register_forward_pre_hook(lambda _, args: inputs.append(args)):
        for ids in ids_BS.split(_BATCH_SIZE):
            decoder(ids)
            yield inputs.pop()


def resized_layers(decoder: Decoder, num_experts: int) -> dict[int, tuple[FFNConfig, MoEFFN]]:
    """Return (config with fewer experts of the same width, block) of each sparse layer. ConfigError without
    sparse layers, or if a layer or router does not have or support so few experts.
    """
    resized: dict[int, tuple[FFNConfig, MoEFFN]] = {}
    for layer, (config, block) in enumerate(layer_blocks(decoder)):
        if not isinstance(config, MoEConfig) or config.expert_stack is None:
            continue
        if num_experts > config.num_experts:
            raise ConfigError(
                f"method.num_experts ({num_experts}) must not exceed the experts of layer {layer} "
                f"({config.num_experts}); give fewer"
            )
        experts = config.experts.with_fixed_width(decoder.config.d_model, config.experts_per_token)
        options = {**dict(config), "num_experts": num_experts, "experts": experts}
        try:
            smaller = validate(type(config), options)
        except ConfigError as error:
            text = str(error)
            problem = text.rpartition("; ")[0] or text  # its advice is for training
            raise ConfigError(
                f"method.num_experts ({num_experts}), layer {layer}: {problem}; keep another number"
            ) from error
        resized[layer] = smaller, cast("MoEFFN", block)
    if not resized:
        types = {ffn.type for ffn in decoder.config.layer_ffns() if ffn.router_infos()}
        why = f", and experts of type {types.pop()!r} cannot be removed" if types else ""
        raise ConfigError(
            f"method.type: no layer of this model is of type 'moe'{why}; use upcycle or carve first, or take "
            "another model"
        )
    return resized
