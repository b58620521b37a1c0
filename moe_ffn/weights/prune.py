"""Pruning: remove the least important experts of each layer.

T tokens, D model width, E experts, N pairs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Generator, Tensor

from moe_ffn.config.base import MAX_COUNT
from moe_ffn.config.errors import ConfigError
from moe_ffn.ffn.base import FFNBlock, FFNConfig, flatten_tokens
from moe_ffn.ffn.moe import MoEFFN
from moe_ffn.ffn.networks import networks
from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.model.decoder import Decoder
from moe_ffn.weights.initialiser import (
    InitialiserConfig,
    block_inputs,
    build_block,
    resized_layers,
    with_blocks,
)

Criterion = Literal["reap", "frequency", "random"]


class PruneConfig(InitialiserConfig, frozen=True):
    """Keep the experts that are most important on a text, with their router rows.

    `reap`: mean of g ||f|| over the tokens of an expert, with router weight g and expert output f
    (Lasby et al. 2025, arXiv:2510.13999). `frequency`: number of tokens of an expert.
    """

    type: Literal["prune"] = "prune"
    num_experts: int = Field(default=4, ge=1, le=MAX_COUNT)
    """Number of experts kept in each layer."""
    by: Criterion = "reap"
    """Criterion that ranks experts; `random` is a baseline."""

    needs_text: ClassVar[bool] = True

    def initialise(
        self, sources: Sequence[Decoder], ids_BS: Tensor | None, generator: Generator
    ) -> Decoder:
        (source,) = sources
        assert ids_BS is not None
        made: dict[int, tuple[FFNConfig, FFNBlock]] = {}
        for layer, (config, block) in resized_layers(source, self.num_experts).items():
            if self.by == "random":
                score_E = torch.rand(block.num_experts, generator=generator)
            else:
                counts_E, reap_E = observe_use(source, layer, block, ids_BS)
                score_E = reap_E if self.by == "reap" else counts_E
            kept = score_E.topk(self.num_experts).indices.sort().values
            made[layer] = (
                config,
                prune_experts(block, config, source.config.d_model, kept, generator),
            )
        return with_blocks(source, made)


@torch.no_grad()
def observe_use(
    decoder: Decoder, layer: int, block: MoEFFN, ids_BS: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the pairs that each expert of a layer computed on a text, int64 (E,), and its mean g ||f|| over
    them, float64 (E,), 0 without pairs; ConfigError for custom experts, which have no separate outputs.
    """
    weights = networks(block)
    if weights is None:
        raise ConfigError(
            f"method.by: the experts of layer {layer} are of a custom type, whose separate outputs are not "
            "available; use random"
        )
    counts_E = torch.zeros(block.num_experts, dtype=torch.int64)
    norms_E = torch.zeros(block.num_experts, dtype=torch.float64)

    for x, context in block_inputs(decoder, layer, ids_BS):
        x_TD, flat = flatten_tokens(x, context)
        routing = block.capacity.apply_to(block.router(x_TD, flat), training=False)
        for expert in range(block.num_experts):
            (pairs,) = (routing.computed_N & (routing.expert_ids_N == expert)).nonzero(
                as_tuple=True
            )
            output_ND = run_expert(weights, expert, x_TD[routing.token_indices_N[pairs]])
            norm_N = torch.linalg.vector_norm(output_ND, dim=-1, dtype=torch.float64)
            counts_E[expert] += len(pairs)
            norms_E[expert] += (routing.weights_N[pairs] * norm_N).sum()

    return counts_E, norms_E / counts_E.clamp(min=1)


def run_expert(weights: ExpertWeights, expert: int, x_TD: Tensor) -> Tensor:
    """Return the output of one expert, (T, D), before the router's weight."""
    up, down, up_bias, down_bias = (
        None if w is None else w[expert] for w in weights.without_adapters
    )
    assert up is not None
    assert down is not None
    return F.linear(weights.activate(F.linear(x_TD, up, up_bias)), down, down_bias)


@torch.no_grad()
def prune_experts(
    block: MoEFFN, config: FFNConfig, d_model: int, kept: Tensor, generator: Generator
) -> MoEFFN:
    """Return a block with some experts of `block`.

    The output for a token that chose no removed expert is unchanged if its weights do not depend on experts
    that it did not choose: renormalised weights, a softmax over the chosen experts, and sigmoids. A softmax
    over all experts gives the share of removed experts to the others.

    Args:
        block: a routed Mixture of Experts.
        config: config of the new block, with fewer experts.
        kept: ids of the experts to keep, in their new order, int64; zero-computation experts always stay.
        generator: source of the initial weights, which are then replaced.
    """
    made = cast("MoEFFN", build_block(config, block, d_model, generator))
    rows = block.router.expert_rows()
    num_routable = next(iter(rows.values())).shape[0]
    routed = torch.cat([kept, torch.arange(block.num_experts, num_routable)])
    state = dict(block.state_dict())
    stacked = {id(p) for p in block.experts.innermost.parameters()}  # their first axis is E
    for name, parameter in block.named_parameters():
        if id(parameter) in stacked:
            state[name] = state[name][kept]
    state |= {f"router.{name}": value[routed] for name, value in rows.items()}
    made.load_state_dict(state)
    return made
