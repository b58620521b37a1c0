"""What is minimised: the cross-entropy and the weighted balancing losses, in one place.

B batch, S sequence, V vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ffn.balancing.losses import load_balancing_loss, router_z_loss
from moe_ffn.outputs import Routing
from moe_ffn.training.config import ObjectiveConfig

IGNORED_TARGET = -100
"""The target of positions that are in no loss, such as padding."""


@dataclass(frozen=True)
class Objective:
    """Attributes:
    total: scalar, what is differentiated.
    cross_entropy: scalar, nats per token.
    load_balance, router_z: scalars, unweighted means over the sparse layers; 0 without any.
    """

    total: Tensor
    cross_entropy: Tensor
    load_balance: Tensor
    router_z: Tensor

    def detach(self) -> Objective:
        """The same values cut from the graph."""
        return Objective(*(getattr(self, field.name).detach() for field in fields(self)))


def objective(
    logits_BSV: Tensor,
    target_ids_BS: Tensor,
    routings: Mapping[int, Routing],
    weights: ObjectiveConfig,
) -> Objective:
    """cross_entropy + weights.load_balance * load_balance + weights.router_z * router_z.

    The balancing losses are computed per layer and averaged: pooling the layers' tokens first would
    let two layers collapse onto opposite experts unseen, and a sum would change the meaning of a
    weight with the depth.
    """
    cross_entropy = F.cross_entropy(
        logits_BSV.flatten(0, 1).float(), target_ids_BS.flatten(), ignore_index=IGNORED_TARGET
    )
    zero = cross_entropy.new_zeros(())
    layers = list(routings.values())
    load_balance = torch.stack([load_balancing_loss(r) for r in layers]).mean() if layers else zero
    router_z = torch.stack([router_z_loss(r) for r in layers]).mean() if layers else zero
    total = cross_entropy + weights.load_balance * load_balance + weights.router_z * router_z
    return Objective(total, cross_entropy, load_balance, router_z)
