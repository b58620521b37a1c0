"""What is minimised: the cross-entropy and the weighted balancing losses, in one place.

B batch, S sequence, V vocabulary, E experts
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ffn.balancing.losses import (
    BALANCING_LOSSES,
    global_load_balancing_loss,
    pooled_load_balancing_loss,
    relu_sparsity_loss,
)
from moe_ffn.outputs import Routing
from moe_ffn.training.config import ObjectiveConfig
from moe_ffn.training.masking import IGNORED_TARGET

ALWAYS_SHOWN = ("load_balance", "router_z")
"""Losses that are computed and logged also where their weight is 0."""


@dataclass(frozen=True)
class StepTotals:
    """What the batches and ranks of one optimizer step have together, for the global-batch rule."""

    pairs_E: dict[str, Tensor]
    """Real pairs per expert of each sparse layer."""

    num_tokens: dict[str, Tensor]
    """Real tokens of each sparse layer."""

    num_parts: int
    """Batches times ranks: the loss of a part is multiplied by it, since their mean is taken."""


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
        sparsity_weight: of `relu_sparsity_loss`, as `balancing.sparsity` left it; its `initial` when
            None.
        step_totals: of the optimizer step; None where this batch is the whole step.
    """
    total = cross_entropy = F.cross_entropy(
        logits_BSV.flatten(0, 1).float(), target_ids_BS.flatten(), ignore_index=IGNORED_TARGET
    )
    balancing: dict[str, Tensor] = {}
    if not routings:
        return Objective(total, cross_entropy, balancing)
    layers = list(routings.values())
    relu_layers = [routing for routing in layers if routing.target_k is not None]
    for name, loss in BALANCING_LOSSES.items():
        weight = getattr(weights, name)
        # The z-loss pulls logits down, below 0 a ReLU router chooses nobody, and that ends its gradient.
        concerned = [r for r in layers if r.target_k is None] if name == "router_z" else layers
        if concerned and (weight or name in ALWAYS_SHOWN):
            balancing[name] = torch.stack([loss(routing) for routing in concerned]).mean()
            total = total + weight * balancing[name]
    if weights.load_balance_pooled:
        balancing["load_balance_pooled"] = pooled_load_balancing_loss(layers)
        total = total + weights.load_balance_pooled * balancing["load_balance_pooled"]
    if weights.load_balance_global:
        balancing["load_balance_global"] = _global_part(routings, step_totals)
        total = total + weights.load_balance_global * balancing["load_balance_global"]
    if relu_layers:
        sparsity = torch.stack([relu_sparsity_loss(routing) for routing in relu_layers]).mean()
        balancing["relu_sparsity"] = sparsity
        if sparsity_weight is None:
            sparsity_weight = torch.tensor(weights.relu_sparsity.initial, device=sparsity.device)
        total = total + sparsity_weight * sparsity
    return Objective(total, cross_entropy, balancing)


def _global_part(routings: Mapping[str, Routing], totals: StepTotals | None) -> Tensor:
    """The mean over the layers of this batch's part, times the number of parts."""
    if totals is None:
        return torch.stack([BALANCING_LOSSES["load_balance"](r) for r in routings.values()]).mean()
    parts = [
        global_load_balancing_loss(routing, totals.pairs_E[name], totals.num_tokens[name])
        for name, routing in routings.items()
    ]
    return totals.num_parts * torch.stack(parts).mean()
