"""Fewer experts: prune removes the least important ones, merge averages those with similar router logits.

T tokens, D model width, E experts, F hidden units, N pairs, G experts of a group
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Generator, Tensor

from moe_ffn.balancing.sums import count_pairs
from moe_ffn.config.base import MAX_COUNT
from moe_ffn.config.errors import ConfigError, import_optional
from moe_ffn.ffn.base import FFNConfig, flatten_tokens
from moe_ffn.ffn.moe import MoEConfig, MoEFFN
from moe_ffn.ffn.networks import networks
from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.model.decoder import Decoder
from moe_ffn.weights.initialiser import (
    BlockInitialiserConfig,
    NewBlocks,
    block_inputs,
    build_block,
    resized_layers,
)

Criterion = Literal["reap", "frequency", "random"]


class PruneConfig(BlockInitialiserConfig, frozen=True):
    """Keep the experts that are most important on a text, with their router rows.

    `reap`: mean of g ||f|| over the tokens of an expert, with router weight g and expert output f
    (Lasby et al. 2025, arXiv:2510.13999). `frequency`: number of tokens of an expert.
    """

    type: Literal["prune"] = "prune"
    num_experts: int = Field(default=4, ge=1, le=MAX_COUNT)
    """Number of experts kept in each layer."""
    by: Criterion = "reap"
    """Criterion that ranks experts; `random` is a baseline."""

    def new_blocks(self, source: Decoder, ids_BS: Tensor, generator: Generator) -> NewBlocks:
        for layer, (config, block) in resized_layers(source, self.num_experts).items():
            if self.by == "random":
                score_E = torch.rand(block.num_experts, generator=generator)
            else:
                counts_E, reap_E = observe_use(source, layer, block, ids_BS)
                score_E = reap_E if self.by == "reap" else counts_E.double()
            score_E[block.num_experts - num_always(config) :] = torch.inf
            kept = score_E.topk(self.num_experts).indices.sort().values
            pruned = prune_experts(block, config, source.config.d_model, kept, generator)
            yield layer, (config, pruned)


def num_always(config: FFNConfig) -> int:
    """Return the number of the last experts that process every token, and are neither pruned nor merged."""
    return getattr(cast("MoEConfig", config).router, "num_always", 0)


@torch.no_grad()
def observe_use(
    decoder: Decoder, layer: int, block: MoEFFN, ids_BS: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the pairs that each expert of a layer computed on a text, int64 (E,), and its mean g ||f|| over
    them, float64 (E,), 0 without pairs; ConfigError for experts without separate outputs, such as `latent`.
    """
    weights = networks(block)
    if weights is None:
        raise ConfigError(
            f"method.by: experts of type '{block.config.experts.type}' in layer {layer} have no separate "
            "outputs; use random"
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
    """Return a block with the experts `kept`, int64, in this order; zero-computation experts always stay. A
    token that chose no removed expert has the same output if its weights do not depend on others:
    renormalised, a softmax over the chosen experts, or sigmoids. A softmax over all gives the removed share
    to the others.
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


# -- merging


class MergeConfig(BlockInitialiserConfig, frozen=True):
    """Merge each expert into the most similar of the most used experts, by router logits (M-SMoE).

    Li et al. 2023, arXiv:2310.01334: hidden units are aligned with the most used expert of each group. Then
    weights and router rows are averaged, weighted by how often each expert is chosen.
    """

    type: Literal["merge"] = "merge"
    num_experts: int = Field(default=4, ge=1, le=MAX_COUNT)
    """Number of experts kept in each layer."""

    def new_blocks(self, source: Decoder, ids_BS: Tensor, generator: Generator) -> NewBlocks:
        for layer, (config, block) in resized_layers(source, self.num_experts).items():
            for info in config.router_infos().values():
                if info.router.is_pairs_only:
                    raise ConfigError(
                        f"method.type: merge compares the router's scores of all experts, but the router of "
                        f"layer {layer}, of type '{info.router.type}', scores only a few; use another model"
                    )
            counts_E = torch.zeros(block.num_experts, dtype=torch.int64)
            products_EE = torch.zeros(block.num_experts, block.num_experts, dtype=torch.float64)

            for x, context in block_inputs(source, layer, ids_BS):
                x_TD, flat = flatten_tokens(x, context)
                routing = block.router(x_TD, flat)
                logits_TE = routing.require("logits_TE", "merging experts").double()
                logits_TE = logits_TE[:, : block.num_experts]
                products_EE.add_(logits_TE.t() @ logits_TE)
                ids_N = routing.expert_ids_N[routing.active_N]
                counts_E.add_(count_pairs(ids_N[ids_N < block.num_experts], block.num_experts))

            groups = group_experts(counts_E, products_EE, self.num_experts, num_always(config))
            d_model = source.config.d_model
            merged = merge_experts(block, config, d_model, groups, counts_E, generator)
            yield layer, (config, merged)


def group_experts(
    counts_E: Tensor, products_EE: Tensor, num_groups: int, num_always: int = 0
) -> list[list[int]]:
    """Group each expert with the most similar of the most used experts, which comes first. `counts_E` counts
    choices; `products_EE` sums products of two experts' router logits, whose cosine is the similarity. Each
    of the last `num_always` experts, which process every token, is a group of its own.
    """
    num_chosen = len(counts_E) - num_always
    norms_E = products_EE.diagonal().clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    similarity_EE = products_EE / norms_E / norms_E.unsqueeze(-1)
    order = counts_E[:num_chosen].argsort(descending=True, stable=True).tolist()
    leaders = sorted(order[: num_groups - num_always])
    groups = {leader: [leader] for leader in (*leaders, *range(num_chosen, len(counts_E)))}
    for expert in sorted(order[len(leaders) :]):
        groups[leaders[int(similarity_EE[expert, leaders].argmax())]].append(expert)
    return list(groups.values())


@torch.no_grad()
def merge_experts(
    block: MoEFFN,
    config: FFNConfig,
    d_model: int,
    groups: Sequence[Sequence[int]],
    counts_E: Tensor,
    generator: Generator,
) -> MoEFFN:
    """Return a block with one expert per group, which has the group's mean weights and mean router row.

    The new block computes the same function if the weights of every token have the same sum, and one of two
    conditions holds. Either all experts of the layer are equal up to the order of their hidden units. Or all
    groups have m experts, which are equal in this sense and in their router rows, and k, a multiple of m,
    becomes k / m. Otherwise the function changes: with an unchanged k a token reaches other experts, and in
    a softmax over all experts the logit of a merged expert would have to grow by log m.

    Args:
        block: a routed Mixture of Experts.
        config: config of the new block, with as many experts as there are groups.
        groups: experts of each group; hidden units are aligned with the group's first expert.
        counts_E: weights of the mean; in a group that was never chosen, all experts weigh the same.
        generator: source of the initial weights, which are then replaced.

    Raises:
        ConfigError: the experts are of a type that cannot be averaged, or scipy is missing.
    """
    leaders = torch.tensor([group[0] for group in groups])
    made = prune_experts(block, config, d_model, leaders, generator)
    source, target = networks(block), networks(made)
    if source is None or target is None:
        raise ConfigError(
            f"method.type: experts of type '{block.config.experts.type}' have no units that can be aligned; "
            "use prune"
        )
    rows, made_rows = block.router.expert_rows(), made.router.expert_rows()
    for index, group in enumerate(groups):
        counts_G = counts_E[list(group)]
        counts_G = counts_G if counts_G.any() else torch.ones_like(counts_G)
        share_G = counts_G.double() / counts_G.sum()
        for name, value in made_rows.items():
            value[index] = _weighted_mean(rows[name][list(group)], share_G)
        aligned = [_aligned(source, expert, group[0]) for expert in group]
        for parameter, values in zip(
            target.without_adapters, zip(*aligned, strict=True), strict=True
        ):
            if parameter is not None:
                parameter[index] = _weighted_mean(torch.stack(values), share_G)
    return made


def _weighted_mean(values: Tensor, share_G: Tensor) -> Tensor:
    """Return the weighted mean over the first axis, G."""
    return torch.tensordot(share_G, values.double(), dims=1).to(values.dtype)


def _aligned(weights: ExpertWeights, expert: int, leader: int) -> list[Tensor | None]:
    """Return the weights of an expert, with its units in the order of the similar units of `leader`."""
    num_matrices = 2 if weights.gated else 1  # into the hidden units

    def units(number: int) -> Tensor:
        matrices = *weights.up_EHD[number].chunk(num_matrices), weights.down_EDF[number].t()
        return F.normalize(torch.cat(matrices, dim=-1).double(), dim=-1)

    order = torch.arange(weights.d_ff)
    if expert != leader:
        optimize = import_optional("scipy.optimize", "method.type: merge needs scipy")
        similarity_FF = (units(leader) @ units(expert).t()).numpy()
        order = torch.from_numpy(optimize.linear_sum_assignment(similarity_FF, maximize=True)[1])
    rows = torch.cat([order + i * weights.d_ff for i in range(num_matrices)])
    up_bias, down_bias = weights.up_bias_EH, weights.down_bias_ED
    return [
        weights.up_EHD[expert][rows],
        weights.down_EDF[expert][:, order],
        None if up_bias is None else up_bias[expert][rows],
        None if down_bias is None else down_bias[expert],
    ]
