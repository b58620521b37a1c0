"""Branch-train-mix: blocks of several dense models become experts; all other weights are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Generator, Tensor

from moe_ffn.config.base import MAX_COUNT
from moe_ffn.config.errors import ConfigError, show
from moe_ffn.config.option_tree import differences, flatten
from moe_ffn.ffn.base import FFNBlock, FFNConfig
from moe_ffn.ffn.networks import networks
from moe_ffn.model.decoder import Decoder
from moe_ffn.routing import RouterConfig, TopKRouterConfig
from moe_ffn.weights.initialiser import InitialiserConfig, layer_blocks, prefix_errors, with_blocks
from moe_ffn.weights.upcycle import experts_like, upcycle


class MixConfig(InitialiserConfig, frozen=True):
    """Make experts from the blocks of several dense models, and average all other weights (BTX).

    Sukhbaatar et al. 2024, Branch-Train-MiX, arXiv:2403.07816. The models are branches of one model, trained
    on different texts. The router is new. Equal models give the same result as `upcycle`.
    """

    type: Literal["mix"] = "mix"
    router: RouterConfig = TopKRouterConfig(renormalize=True)
    """Router over the experts, whose number is the number of models times `granularity`."""
    granularity: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Number of shards that each block is cut into, as in `upcycle`."""

    takes_several = True

    def initialise(
        self, sources: Sequence[Decoder], ids_BS: Tensor | None, generator: Generator
    ) -> Decoder:
        if len(sources) < 2:
            raise ConfigError("--source: names 1 folder, but method.type 'mix' takes two or more")
        first = sources[0]
        for number, other in enumerate(sources[1:], start=2):
            _require_same(first, other, number)
        made: dict[int, tuple[FFNConfig, FFNBlock]] = {}
        layers = [layer_blocks(source) for source in sources]
        d_model, num_experts = first.config.d_model, len(sources) * self.granularity
        for layer, (config, dense) in enumerate(layers[0]):
            if networks(dense) is None:
                continue  # this block is averaged
            target = experts_like(
                config, d_model, num_experts, self.granularity, self.router, layer
            )
            blocks = [source_layers[layer][1] for source_layers in layers]
            with prefix_errors():
                made[layer] = target, upcycle(blocks, target, d_model, generator)
        if not made:
            raise ConfigError(
                "--source: no layer of these models has a dense or a gated block to mix"
            )
        mixed = with_blocks(first, made)
        others = [dict(source.named_parameters()) for source in sources]
        with torch.no_grad():
            for name, parameter in mixed.named_parameters():
                if all(name in other and other[name].shape == parameter.shape for other in others):
                    mean = torch.stack([other[name].double() for other in others]).mean(dim=0)
                    parameter.copy_(mean)
        return mixed


def _require_same(first: Decoder, other: Decoder, number: int) -> None:
    """Raise ConfigError for the first option in which two models differ."""
    ours, theirs = (
        {
            **flatten(decoder.config.to_dict()),
            "vocab_size": decoder.embedding.num_embeddings,
            "max_seq_len": decoder.max_seq_len,
        }
        for decoder in (first, other)
    )
    for key, (one, another) in differences(ours, theirs).items():
        raise ConfigError(
            f"--source: mixed models must have the same architecture, but {key} is {show(one)} in model 1 "
            f"and {show(another)} in model {number}; leave one of them out"
        )
