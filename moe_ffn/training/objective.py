"""What is minimised: the cross-entropy and the weighted balancing losses, in one place.

B batch, S sequence, V vocabulary, E experts
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ffn.balancing.losses import (
    BALANCING_LOSSES,
    global_load_balancing_loss,
    load_balancing_loss,
    pooled_load_balancing_loss,
    relu_sparsity_loss,
)
from moe_ffn.outputs import Routing
from moe_ffn.training.config import ObjectiveConfig
from moe_ffn.training.masking import IGNORED_TARGET
from moe_ffn.training.step_totals import StepTotals

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
