"""The routing of one sparse layer over many batches, as a torchmetrics Metric.

E experts
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from moe_ffn.balancing.losses import (
    load_balancing_loss,
    pairs_per_expert,
    router_entropy_loss,
    router_z_loss,
)
from moe_ffn.metrics.functional import max_violation, nonfinite_tokens
from moe_ffn.outputs import Routing


class RoutingMetrics(Metric):
    """Counts over the batches seen, summed over ranks when there are several.

    Load is summed before MaxVio is taken, so MaxVio measures lasting imbalance and not the noise of
    one batch. Entropy and the balancing losses are means over batches, weighted by their real tokens.
    """

    full_state_update = False
    pairs_E: Tensor
    num_dropped: Tensor
    num_places: Tensor
    num_tokens: Tensor
    num_nonfinite: Tensor
    sums: Tensor

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.add_state("pairs_E", torch.zeros(num_experts, dtype=torch.int64), "sum")
        for name in ("num_dropped", "num_places", "num_tokens", "num_nonfinite"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), "sum")
        self.add_state("sums", torch.zeros(len(_PER_TOKEN)), "sum")

    def update(self, routing: Routing) -> None:
        routing = routing.detach()
        num_tokens = routing.num_real_tokens
        self.pairs_E += pairs_per_expert(routing)
        self.num_dropped += (routing.dropped_N & routing.real_N).sum()
        if routing.capacity is not None:
            self.num_places += routing.capacity * routing.num_experts
        self.num_tokens += num_tokens
        self.num_nonfinite += nonfinite_tokens(routing)
        values = torch.stack([function(routing) for function in _PER_TOKEN.values()])
        self.sums += values * num_tokens

    def compute(self) -> dict[str, Tensor]:
        """`load` (E,), and scalars: `max_violation`, `dropped_fraction`, `capacity_used` (nan when
        dropless), `experts_per_token`, `nonfinite_tokens` (whose logits are NaN or infinite), `entropy` in
        nats, and the unweighted losses.
        """
        num_pairs = self.pairs_E.sum()
        load_E = self.pairs_E / num_pairs.clamp(min=1)
        means = self.sums / self.num_tokens.clamp(min=1)
        return {
            "load": load_E,
            "max_violation": max_violation(load_E),
            "dropped_fraction": self.num_dropped / num_pairs.clamp(min=1),
            "capacity_used": (num_pairs - self.num_dropped) / self.num_places.float()
            if self.num_places
            else torch.full_like(means[0], torch.nan),
            "experts_per_token": num_pairs / self.num_tokens.clamp(min=1),
            "nonfinite_tokens": self.num_nonfinite,
            **dict(zip(_PER_TOKEN, means, strict=True)),
        }


_PER_TOKEN = {
    "entropy": router_entropy_loss,
    "load_balance": load_balancing_loss,
    "router_z": router_z_loss,
}
