"""Carving: units of a dense block that are active together become experts.

T tokens, D model width, F hidden units, R units that are not shared, E routed experts, M units of an expert
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch
from pydantic import Field
from torch import Generator, Tensor

from moe_ffn.config.base import MAX_COUNT
from moe_ffn.config.errors import ConfigError, prefix_errors
from moe_ffn.config.yaml_files import validate
from moe_ffn.ffn.base import FFNBlock, FFNConfig
from moe_ffn.ffn.dense import GatedFFN
from moe_ffn.ffn.moe import MoEConfig, MoEFFN
from moe_ffn.ffn.networks import hidden_units, networks
from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.model.decoder import Decoder
from moe_ffn.routing.balanced_assignment import assign
from moe_ffn.routing.neuron_top_k import NeuronTopKRouterConfig
from moe_ffn.weights.initialiser import (
    BlockInitialiserConfig,
    NewBlocks,
    block_inputs,
    build_block,
    layer_blocks,
)
from moe_ffn.weights.upcycle import as_experts

_MAX_ROUNDS = 20


class CarveConfig(BlockInitialiserConfig, frozen=True):
    """Divide a SwiGLU block into experts by its activations (CMoE: Pei et al. 2025, arXiv:2502.04416).

    The units that are active most often become a shared expert. The others form clusters of equal size, by
    the tokens that activate them; the unit nearest to a cluster's centre gives the expert's router row.
    """

    type: Literal["carve"] = "carve"
    num_experts: int = Field(default=6, ge=1, le=MAX_COUNT)
    """Number of routed experts."""
    num_shared: int = Field(default=2, ge=0, le=MAX_COUNT)
    """Width of the shared expert, which every token uses, in multiples of a routed expert's width."""
    k: int = Field(default=2, ge=1, le=MAX_COUNT)
    """Routed experts per token. If a token uses all experts, the block's output does not change."""
    active_units: int = Field(default=10, ge=1, le=MAX_COUNT)
    """Number of units per token that count as active; they have the largest absolute activations."""

    def new_blocks(self, source: Decoder, ids_BS: Tensor, generator: Generator) -> NewBlocks:
        d_model = source.config.d_model
        for layer, (config, dense) in enumerate(layer_blocks(source)):
            target = self.target(config, d_model, layer)
            active: list[Tensor] = []
            for x, context in block_inputs(source, layer, ids_BS):
                (units,) = hidden_units(dense, x, context)
                active.append(most_active(units.activations_NF, self.active_units))
            partition = partition_units(torch.cat(active), self.num_experts, self.num_shared)
            yield layer, (target, carve(dense, target, d_model, partition, generator))

    def target(self, config: FFNConfig, d_model: int, layer: int) -> MoEConfig:
        """Return the carved layer's config; ConfigError unless a SwiGLU without biases can be divided."""
        experts = as_experts(config, d_model)
        options = {} if experts is None else experts.to_dict()
        if options.get("type") != "swiglu" or options["bias"]:
            raise ConfigError(
                "method.type: carve needs swiglu blocks without biases, whose units form the router; "
                f"layer {layer} is of type '{config.type}'{' with biases' if options.get('bias') else ''}; "
                "use upcycle"
            )
        size, rest = divmod(options["d_ff"], self.num_experts + self.num_shared)
        if rest:
            raise ConfigError(
                f"method.num_experts ({self.num_experts}) and method.num_shared ({self.num_shared}) together "
                f"must divide the hidden width of layer {layer} ({options['d_ff']}); change one of them"
            )
        shared = {**options, "d_ff": size * self.num_shared} if self.num_shared else None
        router = NeuronTopKRouterConfig(k=self.k, correction_bias=True)
        given = {
            "num_experts": self.num_experts,
            "router": router.to_dict(),
            "experts": {**options, "d_ff": size},
            "shared_expert": shared and {k: v for k, v in shared.items() if k != "backend"},
        }
        with prefix_errors("method."):
            return validate(MoEConfig, given)


@dataclass(frozen=True)
class Partition:
    """Division of the hidden units among the routed experts and the shared expert."""

    shared: Tensor
    """Units of the shared expert, int64."""
    experts_EM: Tensor
    """Units of each routed expert, int64; the first unit is the expert's router row."""


def most_active(activations_TF: Tensor, num_units: int) -> Tensor:
    """Return a mask, (T, F), of each token's units with the largest absolute activations (section 3.1)."""
    units = activations_TF.abs().topk(min(num_units, activations_TF.shape[-1]), dim=-1).indices
    return torch.zeros_like(activations_TF, dtype=torch.bool).scatter_(1, units, True)


def partition_units(active_TF: Tensor, num_experts: int, num_shared: int) -> Partition:
    """Share the units that are active most often, and cluster the rest evenly (section 3.2).

    The most active of the remaining units are the first centres. An auction assigns equally many units to
    each centre, at a small total distance; then the means become the centres. This repeats until no unit
    moves.
    """
    size = active_TF.shape[1] // (num_experts + num_shared)
    order = active_TF.float().mean(dim=0).argsort(descending=True, stable=True)
    shared, rest = order[: size * num_shared], order[size * num_shared :]
    tokens_RT = active_TF[:, rest].float().t()
    centres_ET = tokens_RT[:num_experts].clone()
    experts_R = torch.full((len(rest),), -1)
    for _ in range(_MAX_ROUNDS):
        previous_R, experts_R = experts_R, assign(-torch.cdist(tokens_RT, centres_ET))
        if torch.equal(experts_R, previous_R):
            break
        centres_ET = torch.stack(
            [tokens_RT[experts_R == e].mean(dim=0) for e in range(num_experts)]
        )
    distances_R = torch.cdist(tokens_RT, centres_ET)[torch.arange(len(rest)), experts_R]
    nearest_first = distances_R.argsort(stable=True)
    by_expert = nearest_first[experts_R[nearest_first].argsort(stable=True)]
    return Partition(shared, rest[by_expert].view(num_experts, size))


@torch.no_grad()
def carve(
    dense: FFNBlock, config: MoEConfig, d_model: int, partition: Partition, generator: Generator
) -> FFNBlock:
    """Make a layer (router `neuron_top_k`, perhaps a shared swiglu) from the units of a SwiGLU block without
    biases. If all experts are active, it computes the same. Initial weights, from `generator`, are replaced.
    """
    made = cast("MoEFFN", build_block(config, dense, d_model, generator))
    source, target = networks(dense), networks(made)
    assert source is not None
    assert target is not None
    for expert, units in enumerate(partition.experts_EM):
        up, down = _units(source, units)
        target.up_EHD[expert].copy_(up)
        target.down_EDF[expert].copy_(down)
    if made.shared_expert is not None:
        shared = cast("GatedFFN", made.shared_expert)
        up, down = _units(source, partition.shared)
        for linear, weight in zip((shared.gate, shared.up), up.chunk(2), strict=True):
            linear.weight.copy_(weight)
        shared.down.weight.copy_(down)
    up, _ = _units(source, partition.experts_EM[:, 0])
    rows = made.router.expert_rows()
    for name, weight in zip(("gate.weight", "projection.weight"), up.chunk(2), strict=True):
        rows[name].copy_(weight)
    rows["slope_E"].zero_()
    return made


def _units(source: ExpertWeights, units: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of gate and then up, and the columns of down, of the given units."""
    gate, up = source.up_EHD[0].chunk(2)
    return torch.cat([gate[units], up[units]]), source.down_EDF[0][:, units]
