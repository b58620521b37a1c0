"""What is minimised: the cross-entropy and the weighted balancing losses, in one place.

B batch, S sequence, V vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ffn.balancing.losses import BALANCING_LOSSES
from moe_ffn.outputs import Routing
from moe_ffn.training.config import ObjectiveConfig

IGNORED_TARGET = -100
"""The target of positions that are in no loss, such as padding."""


@dataclass(frozen=True)
class Objective:
    """What a step minimises, and its parts."""

    total: Tensor
    """Scalar, what is differentiated."""

    cross_entropy: Tensor
    """Scalar, nats per token."""

    balancing: dict[str, Tensor]
    """Each of `BALANCING_LOSSES`, unweighted, as a mean over the sparse layers; empty without any."""

    def detach(self) -> Objective:
        """The same values cut from the graph."""
        balancing = {name: value.detach() for name, value in self.balancing.items()}
        return Objective(self.total.detach(), self.cross_entropy.detach(), balancing)


def objective(
    logits_BSV: Tensor,
    target_ids_BS: Tensor,
    routings: Mapping[int, Routing],
    weights: ObjectiveConfig,
) -> Objective:
    """The cross-entropy plus each balancing loss times its weight.

    The balancing losses are computed per layer and averaged: pooling the layers' tokens first would
    let two layers collapse onto opposite halves unseen, and a sum would change the meaning of a
    weight with the depth.
    """
    cross_entropy = F.cross_entropy(
        logits_BSV.flatten(0, 1).float(), target_ids_BS.flatten(), ignore_index=IGNORED_TARGET
    )
    layers = list(routings.values())
    balancing = {
        name: torch.stack([loss(routing) for routing in layers]).mean()
        for name, loss in BALANCING_LOSSES.items()
        if layers
    }
    total = cross_entropy
    for name, value in balancing.items():
        total = total + getattr(weights, name) * value
    return Objective(total, cross_entropy, balancing)
