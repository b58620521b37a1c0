"""What is minimised: the cross-entropy and the weighted balancing losses, in one place.

B batch, S sequence, V vocabulary, E experts
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from moe_ffn.balancing.bias_rules import BiasRuleConfig, SignRuleConfig, SparsityRuleConfig
from moe_ffn.balancing.losses import (
    BALANCING_LOSSES,
    global_load_balancing_loss,
    load_balancing_loss,
    pairs_per_expert,
    pooled_load_balancing_loss,
    relu_sparsity_loss,
)
from moe_ffn.config import Config
from moe_ffn.outputs import Routing


class ObjectiveConfig(Config, frozen=True):
    """The weights of what is added to the cross-entropy, and the rules that need no weight.

    Each loss is a mean over the sparse layers; docs/routing.md compares them.
    """

    load_balance: float = Field(default=0.01, ge=0)
    """Weight of the Switch load-balancing loss, which is 1 at balance; of each batch and rank by itself."""
    load_balance_global: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss of all batches and ranks of an optimizer step together. With
    accumulation it costs one more forward pass of each batch."""
    load_balance_sequence: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss of each sequence by itself (DeepSeek-V3)."""
    load_balance_pooled: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss of all layers' tokens together, as Hugging Face has it."""
    importance_cv2: float = Field(default=0.0, ge=0)
    """Weight of the squared coefficient of variation of the experts' summed weights (Shazeer 2017)."""
    load_cv2: float = Field(default=0.0, ge=0)
    """Weight of that of the experts' smooth load; for router.type 'noisy_top_k' alone."""
    router_z: float = Field(default=0.001, ge=0)
    """Weight of the router z-loss."""
    router_entropy: float = Field(default=0.0, ge=0)
    """Weight of the entropy of each token's scores, which makes top-p routers decide."""
    sparsity_rule: SparsityRuleConfig = SparsityRuleConfig()
    """The rule that brings routers of type 'relu' to their k; no other router is concerned."""
    bias_rule: BiasRuleConfig = SignRuleConfig()
    """The rule that moves the bias of routers with correction_bias; no other router is concerned."""
    masked_fraction: float = Field(default=0.15, gt=0, lt=1)
    """Share of the tokens that a model with causal: false has to guess."""


ALWAYS_SHOWN = ("load_balance", "router_z")
"""Losses that are computed and logged also where their weight is 0."""

NOT_FOR_RELU = ("router_z",)
"""Pulls logits down; below 0 a ReLU router chooses nobody, and has no gradient left."""


@dataclass(frozen=True)
class Objective:
    """What a step minimises, and its parts."""

    total: Tensor
    """Scalar, what is differentiated."""

    cross_entropy: Tensor
    """Scalar, nats per token."""

    balancing: dict[str, Tensor]
    """Balancing losses, unweighted, as a mean over the sparse layers; empty without any."""

    def detach(self) -> Objective:
        """The same values cut from the graph."""
        balancing = {name: value.detach() for name, value in self.balancing.items()}
        return Objective(self.total.detach(), self.cross_entropy.detach(), balancing)


def objective(
    logits_BSV: Tensor,
    target_ids_BS: Tensor,
    routings: Mapping[str, Routing],
    weights: ObjectiveConfig,
    *,
    sparsity_weight: Tensor | None = None,
    step_totals: StepTotals | None = None,
) -> Objective:
    """The cross-entropy plus each balancing loss times its weight.

    The balancing losses are computed per layer and averaged: pooling the layers' tokens first would
    let two layers collapse onto opposite halves unseen, and a sum would change the meaning of a
    weight with the depth.

    Args:
        sparsity_weight: of `relu_sparsity_loss`, as `balancing.sparsity` left it; where it starts when
            None.
        step_totals: of the optimizer step; None where this batch is the whole step.
    """
    wide_BSV = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
    cross_entropy = F.cross_entropy(
        wide_BSV.flatten(0, 1), target_ids_BS.flatten(), ignore_index=IGNORED_TARGET
    )
    balancing: dict[str, Tensor] = {}
    total = cross_entropy
    for name, weight, value in _balancing_losses(routings, weights, sparsity_weight, step_totals):
        balancing[name] = value
        total = total + weight * value
    return Objective(total, cross_entropy, balancing)


def _balancing_losses(
    routings: Mapping[str, Routing],
    weights: ObjectiveConfig,
    sparsity_weight: Tensor | None,
    step_totals: StepTotals | None,
) -> Iterator[tuple[str, float | Tensor, Tensor]]:
    """Name, weight and value of each loss that has a weight, or is always shown."""
    layers = list(routings.values())
    relu_layers = [routing for routing in layers if routing.target_k is not None]
    other_layers = [routing for routing in layers if routing.target_k is None]
    for name, loss in BALANCING_LOSSES.items():
        concerned = other_layers if name in NOT_FOR_RELU else layers
        weight = getattr(weights, name)
        if concerned and (weight or name in ALWAYS_SHOWN):
            yield name, weight, torch.stack([loss(routing) for routing in concerned]).mean()
    if layers and weights.load_balance_pooled:
        pooled = pooled_load_balancing_loss(layers)
        yield "load_balance_pooled", weights.load_balance_pooled, pooled
    if layers and weights.load_balance_global:
        part = _global_part(routings, step_totals)
        yield "load_balance_global", weights.load_balance_global, part
    if relu_layers:
        sparsity = torch.stack([relu_sparsity_loss(routing) for routing in relu_layers]).mean()
        if sparsity_weight is None:
            sparsity_weight = sparsity.new_tensor(weights.sparsity_rule.initial_weight)
        yield "relu_sparsity", sparsity_weight, sparsity


def _global_part(routings: Mapping[str, Routing], totals: StepTotals | None) -> Tensor:
    """The mean over the layers of this batch's part, times the number of parts."""
    if totals is None:
        return torch.stack([load_balancing_loss(r) for r in routings.values()]).mean()
    parts = [
        global_load_balancing_loss(routing, totals.pairs_E[name], totals.num_tokens[name])
        for name, routing in routings.items()
    ]
    return totals.num_parts * torch.stack(parts).mean()


IGNORED_TARGET = -100
"""The target of positions that are in no loss, such as padding."""

SHOWN_AS_MASK, SHOWN_AS_IS = 0.8, 0.1
"""Of the tokens to guess: shown as the mask, and shown as they are; the rest as some other token."""


def mask_tokens(
    token_ids_BS: Tensor,
    fraction: float,
    mask_token_id: int,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """What the model is shown, and what it has to say where (Devlin et al. 2018, BERT, section 3.1).

    Every sequence has equally many tokens to guess, so that the loss of a batch is the mean of its
    parts' losses however it is divided.

    Args:
        token_ids_BS: int64 (B, S), below `mask_token_id`.
        fraction: share of the tokens to guess, at least one of each sequence.
        mask_token_id: stands for a hidden token; V.
        generator: of the same device; torch's own when None.

    Returns:
        inputs and targets, int64 (B, S); `IGNORED_TARGET` where there is nothing to guess.
    """
    batch, length = token_ids_BS.shape

    def uniform() -> Tensor:
        return torch.rand(batch, length, generator=generator, device=token_ids_BS.device)

    num_guessed = max(round(fraction * length), 1)
    guessed_BS = uniform().argsort(dim=1).argsort(dim=1) < num_guessed
    lot_BS = uniform()
    others_BS = (uniform() * mask_token_id).long().clamp(max=mask_token_id - 1)
    shown_BS = torch.where(lot_BS < SHOWN_AS_MASK, mask_token_id, others_BS)
    shown_BS = torch.where(lot_BS >= 1 - SHOWN_AS_IS, token_ids_BS, shown_BS)
    inputs_BS = torch.where(guessed_BS, shown_BS, token_ids_BS)
    return inputs_BS, token_ids_BS.masked_fill(~guessed_BS, IGNORED_TARGET)


@dataclass(frozen=True)
class StepTotals:
    """What the batches and ranks of one optimizer step have together, for the global-batch rule."""

    pairs_E: dict[str, Tensor]
    """Real pairs per expert of each sparse layer."""

    num_tokens: dict[str, Tensor]
    """Real tokens of each sparse layer."""

    num_parts: int
    """Batches times ranks. Lightning takes the mean over the parts, so each part's loss is multiplied
    by this."""


def count_step(
    batches: Iterable[Mapping[str, Routing]], reduce: Callable[[Tensor], Tensor], num_ranks: int = 1
) -> StepTotals:
    """The totals of a step from its batches' routings on this rank.

    Args:
        batches: the routings by layer of each batch.
        reduce: the sum of a tensor over the ranks.
        num_ranks: how many there are.
    """
    pairs: dict[str, Tensor] = {}
    tokens: dict[str, Tensor] = {}
    num_batches = 0
    for routings in batches:
        num_batches += 1
        for name, routing in routings.items():
            routing = routing.detach()
            pairs_E, num_tokens = pairs_per_expert(routing), routing.num_real_tokens
            pairs[name] = pairs[name] + pairs_E if name in pairs else pairs_E
            tokens[name] = tokens[name] + num_tokens if name in tokens else num_tokens
    if pairs and num_ranks > 1:  # one exchange for all layers
        sizes = [len(pairs_E) for pairs_E in pairs.values()]
        flat = reduce(torch.cat([*pairs.values(), torch.stack(list(tokens.values()))]))
        *summed, summed_tokens = flat.split([*sizes, len(tokens)])
        pairs = dict(zip(pairs, summed, strict=True))
        tokens = dict(zip(tokens, summed_tokens.unbind(), strict=True))
    return StepTotals(pairs, tokens, num_batches * num_ranks)
