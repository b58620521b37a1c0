"""The routing of one sparse layer over many batches, as torchmetrics Metrics.

E experts, B sequences
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from moe_ffn.balancing.losses import (
    load_times_scores,
    normalized_scores,
    pairs_per_expert,
    pairs_per_sequence,
    real_only,
    router_z_loss,
    token_entropy,
)
from moe_ffn.config import require_count
from moe_ffn.metrics.functional import (
    coactivation,
    coactivation_counts,
    load_cv,
    logit_max,
    max_violation,
    nonfinite_tokens,
    top1_margin,
)
from moe_ffn.outputs import Routing, check_routing


def _check(metric: Metric, routing: Routing, num_experts: int) -> None:
    name = type(metric).__name__
    check_routing(routing, f"{name}.update")
    if routing.num_experts != num_experts:
        raise ValueError(
            f"{name} was made for num_experts {num_experts}, but the routing has {routing.num_experts}"
        )


class LoadMetrics(Metric):
    """What is counted of a routing: cheap enough for every batch.

    Counts are summed over batches and ranks before ratios are taken, so MaxVio measures lasting imbalance
    and not the noise of one batch.
    """

    full_state_update = False
    pairs_E: Tensor
    num_dropped: Tensor
    num_places: Tensor
    num_tokens: Tensor
    num_nonfinite: Tensor

    def __init__(self, num_experts: int, **of_metric: Any) -> None:
        super().__init__(**of_metric)
        require_count(num_experts, "num_experts")
        self.add_state("pairs_E", torch.zeros(num_experts, dtype=torch.int64), "sum")
        for name in ("num_dropped", "num_places", "num_tokens", "num_nonfinite"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), "sum")

    def update(self, routing: Routing) -> None:
        _check(self, routing, len(self.pairs_E))
        self.pairs_E += pairs_per_expert(routing)
        self.num_dropped += (routing.dropped_N & routing.real_N).sum()
        if routing.capacity is not None:
            self.num_places += routing.capacity * routing.num_experts
        self.num_tokens += routing.num_real_tokens
        self.num_nonfinite += nonfinite_tokens(routing)

    def compute(self) -> dict[str, Tensor]:
        """`load` (E,), and scalars: `max_violation` and `load_cv` of it; `dropped_fraction`;
        `capacity_used`, nan when dropless; `experts_per_token`; `nonfinite_tokens`, whose logits are NaN or
        infinite.
        """
        num_pairs = self.pairs_E.sum()
        load_E = self.pairs_E / num_pairs.clamp(min=1)
        num_computed = (num_pairs - self.num_dropped).float()
        return {
            "load": load_E,
            "max_violation": max_violation(load_E),
            "load_cv": load_cv(load_E),
            "dropped_fraction": self.num_dropped / num_pairs.clamp(min=1),
            "capacity_used": num_computed / self.num_places
            if self.num_places
            else torch.full_like(num_computed, torch.nan),
            "experts_per_token": num_pairs / self.num_tokens.clamp(min=1),
            "nonfinite_tokens": self.num_nonfinite,
        }


class TokenMetrics(Metric):
    """What is measured token by token, and sequence by sequence: means over all batches and ranks.

    Several times as much work as `LoadMetrics`.
    """

    full_state_update = False
    scores_E: Tensor
    num_tokens: Tensor
    num_sequences: Tensor
    sequence_violations: Tensor
    entropies: Tensor
    top1_margins: Tensor
    load_balance: Tensor
    router_z: Tensor
    shared_shares: Tensor
    logit_max: Tensor

    def __init__(self, num_experts: int, **of_metric: Any) -> None:
        super().__init__(**of_metric)
        require_count(num_experts, "num_experts")
        self.add_state("scores_E", torch.zeros(num_experts, dtype=torch.float32), "sum")
        for name in ("num_tokens", "num_sequences"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), "sum")
        of_tokens = ("entropies", "top1_margins", "load_balance", "router_z", "shared_shares")
        for name in ("sequence_violations", *of_tokens):
            self.add_state(name, torch.zeros((), dtype=torch.float32), "sum")
        self.add_state("logit_max", torch.zeros((), dtype=torch.float32), "max")

    def update(self, routing: Routing, shared_share: Tensor | None = None) -> None:
        """Add a batch; `shared_share` is that of `FFNOutput.shared_shares`, None without a shared expert."""
        _check(self, routing, len(self.scores_E))
        routing = routing.detach()
        num_tokens = routing.num_real_tokens
        self.num_tokens += num_tokens
        pairs_BE = pairs_per_sequence(routing)
        self.num_sequences += pairs_BE.any(dim=-1).sum()
        self.sequence_violations += max_violation(pairs_BE.float()).clamp(min=0).sum()
        scores_TE = real_only(normalized_scores(routing, "TokenMetrics"), routing)
        scores_E = scores_TE.sum(dim=0)
        self.scores_E += scores_E
        # Padding has scores of 0, and so neither entropy nor margin.
        self.entropies += token_entropy(scores_TE).sum()
        self.top1_margins += top1_margin(scores_TE).sum()
        balance = load_times_scores(pairs_BE.sum(dim=0), scores_E, num_tokens)
        self.load_balance += balance * num_tokens
        self.router_z += router_z_loss(routing) * num_tokens
        self.logit_max = self.logit_max.maximum(logit_max(routing))
        self.shared_shares += (torch.nan if shared_share is None else shared_share) * num_tokens

    def compute(self) -> dict[str, Tensor]:
        """Scalars: `entropy` of a token's scores and `entropy_of_mean`, of the mean of them all, in nats
        (a router that knows what it wants and uses everything has a low and a high one); `top1_margin`;
        `logit_max`; the unweighted losses `load_balance` and `router_z`; `sequence_max_violation`, the mean
        over sequences of the MaxVio of each by itself; `shared_share`, of the block's output what the
        shared expert made, nan without one.
        """
        num_tokens = self.num_tokens.clamp(min=1)
        all_scores = self.scores_E.sum().clamp(min=torch.finfo(self.scores_E.dtype).tiny)
        return {
            "entropy": self.entropies / num_tokens,
            "entropy_of_mean": token_entropy(self.scores_E / all_scores),
            "top1_margin": self.top1_margins / num_tokens,
            "logit_max": self.logit_max,
            "load_balance": self.load_balance / num_tokens,
            "router_z": self.router_z / num_tokens,
            "sequence_max_violation": self.sequence_violations / self.num_sequences.clamp(min=1),
            "shared_share": self.shared_shares / num_tokens,
        }


class CoactivationMetrics(Metric):
    """Which experts are chosen together, over the batches seen and summed over ranks.

    It grows with E^2 and costs a matrix product.
    """

    full_state_update = False
    counts_EE: Tensor

    def __init__(self, num_experts: int, **of_metric: Any) -> None:
        super().__init__(**of_metric)
        require_count(num_experts, "num_experts")
        shape = (num_experts, num_experts)
        self.add_state("counts_EE", torch.zeros(shape, dtype=torch.int64), "sum")

    def update(self, routing: Routing) -> None:
        _check(self, routing, len(self.counts_EE))
        self.counts_EE += coactivation_counts(routing)

    def compute(self) -> dict[str, Tensor]:
        """`coactivation` (E, E), and `coactivation_max`, the largest share off its diagonal: 1 where two
        experts always come together.
        """
        share_EE = coactivation(self.counts_EE)
        return {
            "coactivation": share_EE,
            "coactivation_max": share_EE.clone().fill_diagonal_(0).max(),
        }
