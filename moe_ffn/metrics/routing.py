"""The routing of one sparse layer over many batches, as a torchmetrics Metric.

E experts
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from moe_ffn.balancing.losses import BALANCING_LOSSES
from moe_ffn.metrics.functional import (
    capacity_used,
    dropped_fraction,
    expert_load,
    max_violation,
    routing_entropy,
)
from moe_ffn.outputs import Routing


class RoutingMetrics(Metric):
    """Means over the batches seen, summed over ranks when there are several.

    Load is averaged before MaxVio is taken, so MaxVio tells of lasting imbalance and not of the
    noise of one batch.
    """

    full_state_update = False
    load_E: Tensor
    sums: Tensor
    num_batches: Tensor

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.add_state("load_E", torch.zeros(num_experts), dist_reduce_fx="sum")
        self.add_state("sums", torch.zeros(len(_SCALARS)), dist_reduce_fx="sum")
        self.add_state("num_batches", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, routing: Routing) -> None:
        routing = routing.detach()
        self.load_E += expert_load(routing)
        self.sums += torch.stack([function(routing) for function in _SCALARS.values()])
        self.num_batches += 1

    def compute(self) -> dict[str, Tensor]:
        """`load` (E,), and scalars: `max_violation`, `dropped_fraction`, `entropy` in nats,
        `capacity_used` (nan when dropless), and the unweighted `load_balance` and `router_z`.
        """
        load_E = self.load_E / self.num_batches
        means = dict(zip(_SCALARS, self.sums / self.num_batches, strict=True))
        return {"load": load_E, "max_violation": max_violation(load_E), **means}


_SCALARS = {
    "dropped_fraction": dropped_fraction,
    "entropy": routing_entropy,
    "capacity_used": capacity_used,
    **BALANCING_LOSSES,
}
