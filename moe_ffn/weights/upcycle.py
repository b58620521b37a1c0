"""Upcycling: experts are copies of a trained dense block or of its shards, with some units reinitialised.

Branch-train-mix (`mix`): blocks of several dense models become experts; all other weights are averaged.

E experts, D model width, F hidden width of an expert, G shards of a dense block, P matrices into the hidden
units (2 with a gate)
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal

import torch
from einops import rearrange
from pydantic import Field
from torch import Generator, Tensor

from moe_ffn.config.base import MAX_COUNT
from moe_ffn.config.errors import ConfigError, prefix_errors, show
from moe_ffn.config.option_tree import differences, flatten
from moe_ffn.config.yaml_files import validate
from moe_ffn.experts import ExpertsConfig
from moe_ffn.ffn.base import OWN_ROUTING, FFNBlock, FFNConfig
from moe_ffn.ffn.dense import HiddenWidthConfig
from moe_ffn.ffn.moe import MoEConfig
from moe_ffn.ffn.networks import networks
from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.model.decoder import Decoder, parse_slice
from moe_ffn.outputs import TokenContext
from moe_ffn.routing import RouterConfig, TopKRouterConfig
from moe_ffn.routing.base import Router
from moe_ffn.weights.initialiser import (
    InitialiserConfig,
    build_block,
    layer_blocks,
    with_blocks,
)

_PROBES = 1024
"""Number of random tokens from which the mean sum of a token's weights is estimated."""


class UpcycleConfig(InitialiserConfig, frozen=True):
    """Copy the dense block into every expert, with a new router (Komatsuzaki et al. 2022, arXiv:2212.05055).

    With `granularity` G an expert is one of G shards of the block, and the router chooses complete sets of
    shards (virtual groups: He et al. 2024, arXiv:2410.07524). `redraw` reinitialises a share of each expert's
    hidden units (drop-upcycling: Nakamura et al. 2025, arXiv:2502.19261).
    """

    type: Literal["upcycle"] = "upcycle"
    num_experts: int = Field(default=8, ge=1, le=MAX_COUNT)
    """Number of experts of a layer, a multiple of `granularity`."""
    router: RouterConfig = TopKRouterConfig(renormalize=True)
    """Router of the experts. The model's outputs do not change if all tokens have the same sum of weights, as
    with renormalised weights."""
    granularity: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Number of shards that the dense block is cut into; each expert is one shard."""
    redraw: float = Field(default=0.0, ge=0, le=1)
    """Share of each expert's hidden units to reinitialise; 0.5 in the paper."""
    layers: str = ":"
    """Layers that become sparse, as a Python slice: `1::2` is every other layer."""

    def initialise(
        self, sources: Sequence[Decoder], ids_BS: Tensor | None, generator: Generator
    ) -> Decoder:
        (source,) = sources
        blocks = layer_blocks(source)
        try:
            chosen = range(len(blocks))[parse_slice(self.layers, "method.layers")]
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if not chosen:
            raise ConfigError(
                f"method.layers ({self.layers}) selects none of the {len(blocks)} layers"
            )
        made: dict[int, tuple[FFNConfig, FFNBlock]] = {}
        for layer in chosen:
            config, dense = blocks[layer]
            target = experts_like(
                config,
                source.config.d_model,
                self.num_experts,
                self.granularity,
                self.router,
                layer,
            )
            with prefix_errors("method."):
                block = upcycle([dense], target, source.config.d_model, generator, self.redraw)
            made[layer] = target, block
        return with_blocks(source, made)


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
        for layer, (config, _) in enumerate(layers[0]):
            if as_experts(config, d_model) is None:
                continue  # this block is averaged
            target = experts_like(
                config, d_model, num_experts, self.granularity, self.router, layer
            )
            blocks = [source_layers[layer][1] for source_layers in layers]
            with prefix_errors("method."):
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


def experts_like(
    dense: FFNConfig,
    d_model: int,
    num_experts: int,
    granularity: int,
    router: RouterConfig,
    layer: int,
) -> MoEConfig:
    """Return the config of a layer whose experts are shards of a dense block; ConfigError if no type of
    expert computes it, or the router does not support their number.
    """
    experts = as_experts(dense, d_model)
    if experts is None:
        raise ConfigError(
            f"method.layers: the block of layer {layer} is of type '{dense.type}', which no type of expert "
            "computes; leave that layer out, or use a model with dense or gated blocks"
        )
    options = experts.to_dict()
    if options["d_ff"] % granularity:
        raise ConfigError(
            f"method.granularity ({granularity}) must divide the hidden width of layer {layer} "
            f"({options['d_ff']}); use a divisor of it"
        )
    options["d_ff"] //= granularity
    given = {"num_experts": num_experts, "router": router.to_dict(), "experts": options}
    with prefix_errors("method."):
        return validate(MoEConfig, given)


def as_experts(config: FFNConfig, d_model: int) -> ExpertsConfig | None:
    """Return the config of experts that compute the same network as this block; None if there is none."""
    type_of_experts = "mlp" if config.type == "dense" else config.type
    experts = ExpertsConfig.members.get(type_of_experts)
    if experts is None or not isinstance(config, HiddenWidthConfig):
        return None
    options = {name: value for name, value in config if name in experts.model_fields}
    options |= {"type": type_of_experts, "d_ff": config.width(d_model)}
    return ExpertsConfig.model_validate(options)


def upcycle(
    blocks: Sequence[FFNBlock],
    config: MoEConfig,
    d_model: int,
    generator: Generator,
    redraw: float = 0.0,
) -> FFNBlock:
    """Return a layer of experts made from dense blocks; copy c is block c % len(blocks).

    If experts have 1 / G of a block's width, expert e is shard e % G of copy e // G. The router rows within a
    copy are equal, so that the k chosen experts are complete copies. `down` is multiplied by G / t, where t
    is the mean sum of a token's weights. A layer made from one block computes the same as the block if the
    sum is equal for all tokens, and nothing is dropped or reinitialised.

    Args:
        blocks: dense or gated blocks of one config.
        config: config of the layer; its experts have the activation and biases of the blocks.
        generator: source of the router's weights, and of reinitialised units.
        redraw: share of each expert's hidden units to reinitialise.

    Raises:
        ConfigError: the experts do not have the type or size of shards of these blocks.
    """
    made = build_block(config, blocks[0], d_model, generator)
    weights, target = [networks(block) for block in blocks], networks(made)
    if target is None or config.shared_expert is not None or config.zero_computation.total:
        raise ConfigError(
            "upcycling makes only routed experts: leave shared_expert and zero_computation out, and use "
            "experts of type mlp or of a gated type"
        )
    sources = [source for source in weights if source is not None]
    if len(sources) < len(weights) or any(_function(s) != _function(target) for s in sources):
        raise ConfigError(
            f"experts.type: the experts compute {_describe(target)}, but the dense block computes "
            f"{_describe(weights[0])}; use the experts that `as_experts` returns for its config"
        )
    shards, rest = divmod(sources[0].d_ff, target.d_ff)
    num_copies, left_over = divmod(config.num_experts, max(shards, 1))
    k = config.router.experts_per_token(config.num_routable)
    if rest:
        raise ConfigError(
            f"experts.d_ff ({target.d_ff}) must divide the width of the dense block ({sources[0].d_ff}), "
            "which is cut into shards of this width"
        )
    if left_over or num_copies % len(sources):
        raise ConfigError(
            f"num_experts ({config.num_experts}) must be a multiple of {shards * len(sources)}: each of "
            f"{len(sources)} dense blocks (width {sources[0].d_ff}) is cut into {shards} shards of width "
            f"{target.d_ff}"
        )
    if k % shards:
        raise ConfigError(
            f"router.k ({k:g}) must be a multiple of the shards of a dense block ({shards}), since a token "
            f"needs all of them; use {shards * max(1, round(k / shards))}"
        )
    router = made.routers()[OWN_ROUTING]
    scale = shards / total_weight(router, d_model, generator)
    with torch.no_grad():
        for expert in range(config.num_experts):
            source = sources[expert // shards % len(sources)]
            _copy_shard(source, target, expert, expert % shards, redraw, generator)
        target.down_EDF.mul_(scale)
        if target.down_bias_ED is not None:  # each shard adds it
            target.down_bias_ED.mul_(scale / shards)
        if shards > 1:
            for rows in router.expert_rows().values():
                rows.copy_(rows[torch.arange(len(rows)) // shards * shards])
    return made


def _function(weights: ExpertWeights) -> tuple[object, ...]:
    """Return a value that is equal for networks that differ only in size and weights."""
    biases = weights.up_bias_EH is not None, weights.down_bias_ED is not None
    return weights.activation, weights.gated, weights.gate_function, biases


def _describe(weights: ExpertWeights | None) -> str:
    if weights is None:
        return "something else"
    gate = "gated " if weights.gated else ""
    return f"{gate}{weights.activation}{' with biases' if weights.up_bias_EH is not None else ''}"


@torch.no_grad()
def total_weight(router: Router, d_model: int, generator: Generator) -> float:
    """Return the mean sum of a token's weights, tokens from N(0, 1); ConfigError if no expert is chosen."""
    x_TD = torch.randn(_PROBES, d_model, generator=generator, dtype=torch.float64)
    table_VK = getattr(router, "table_VK", None)  # has a row for each token id
    ids_T = torch.arange(_PROBES) % (_PROBES if table_VK is None else len(table_VK))
    routing = (
        copy.deepcopy(router)
        .eval()
        .double()(x_TD, TokenContext(token_ids=ids_T, sequence_length=_PROBES))
    )
    total = float(routing.weights_N[routing.active_N].sum()) / _PROBES
    if not total > 0:
        raise ConfigError("router.type: the router gives no weight to any expert; use top_k")
    return total


def _copy_shard(
    source: ExpertWeights,
    target: ExpertWeights,
    expert: int,
    shard: int,
    redraw: float,
    generator: Generator,
) -> None:
    """Copy the units of one shard of a dense block into an expert, and reinitialise some of them."""
    units = slice(shard * target.d_ff, (shard + 1) * target.d_ff)
    matrices = _by_unit(source.up_EHD[0], source)[:, units].clone()
    down = source.down_EDF[0][:, units].clone()
    drawn = torch.randperm(target.d_ff, generator=generator)[: round(redraw * target.d_ff)]
    if len(drawn):
        for matrix in matrices:
            matrix[drawn] = _drawn_like(matrix[drawn], generator)
        down[:, drawn] = _drawn_like(down[:, drawn], generator)
    _by_unit(target.up_EHD[expert], target).copy_(matrices)
    target.down_EDF[expert].copy_(down)
    if target.up_bias_EH is not None and source.up_bias_EH is not None:
        up_bias = _by_unit(source.up_bias_EH[0], source)[:, units]
        _by_unit(target.up_bias_EH[expert], target).copy_(up_bias)
    if target.down_bias_ED is not None and source.down_bias_ED is not None:
        target.down_bias_ED[expert].copy_(source.down_bias_ED[0])


def _by_unit(rows: Tensor, weights: ExpertWeights) -> Tensor:
    """Return the rows (P F, ...) of the matrices into the hidden units as a view (P, F, ...)."""
    return rearrange(rows, "(p f) ... -> p f ...", p=2 if weights.gated else 1)


def _drawn_like(weights: Tensor, generator: Generator) -> Tensor:
    """Draw normal numbers with the mean and standard deviation of `weights` (arXiv:2502.19261, section 3)."""
    noise = torch.randn(weights.shape, generator=generator).to(weights)
    return weights.mean() + weights.std() * noise if weights.numel() > 1 else weights
