"""The routing of one sparse layer over many batches, as torchmetrics Metrics.

E experts, B sequences
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torchmetrics import Metric

from moe_ffn.balancing.losses import (
    load_balancing_loss,
    mean_over_tokens,
    normalized_scores,
    pairs_per_sequence,
    router_entropy_loss,
    router_z_loss,
)
from moe_ffn.metrics.functional import (
    coactivation,
    coactivation_counts,
    load_cv,
    logit_max,
    max_violation,
    nonfinite_tokens,
    top1_margin,
)
from moe_ffn.outputs import Routing


class RoutingMetrics(Metric):
    """Counts over the batches seen, summed over ranks when there are several.

    Load is summed before MaxVio is taken, so MaxVio measures lasting imbalance and not the noise of
    one batch. What is a mean over tokens, such as the entropy, stays one over all of them.
    """

    full_state_update = False
    pairs_E: Tensor
    scores_E: Tensor
    num_dropped: Tensor
    num_places: Tensor
    num_tokens: Tensor
    num_nonfinite: Tensor
    num_sequences: Tensor
    sequence_violations: Tensor
    logit_max: Tensor
    sums: Tensor

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.add_state("pairs_E", torch.zeros(num_experts, dtype=torch.int64), "sum")
        self.add_state("scores_E", torch.zeros(num_experts), "sum")
        for name in ("num_dropped", "num_places", "num_tokens", "num_nonfinite", "num_sequences"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), "sum")
        self.add_state("sequence_violations", torch.zeros(()), "sum")
        self.add_state("logit_max", torch.zeros(()), "max")
        self.add_state("sums", torch.zeros(len(_PER_TOKEN)), "sum")

    def update(self, routing: Routing) -> None:
        routing = routing.detach()
        num_tokens = routing.num_real_tokens
        pairs_BE = pairs_per_sequence(routing)
        self.pairs_E += pairs_BE.sum(dim=0)
        self.num_dropped += (routing.dropped_N & routing.real_N).sum()
        if routing.capacity is not None:
            self.num_places += routing.capacity * routing.num_experts
        self.num_tokens += num_tokens
        self.num_nonfinite += nonfinite_tokens(routing)
        self.num_sequences += pairs_BE.any(dim=-1).sum()
        self.sequence_violations += max_violation(pairs_BE.float()).clamp(min=0).sum()
        self.logit_max = self.logit_max.maximum(logit_max(routing))
        self.scores_E += mean_over_tokens(normalized_scores(routing), routing) * num_tokens
        values = torch.stack([function(routing) for function in _PER_TOKEN.values()])
        self.sums += values * num_tokens

    def compute(self) -> dict[str, Tensor]:
        """`load` (E,), and these scalars.

        `max_violation`, `load_cv`: imbalance of the load. `sequence_max_violation`: the mean over
        sequences of the MaxVio of each by itself. `dropped_fraction`; `capacity_used`, nan when dropless.
        `experts_per_token`. `entropy` of a token's scores and `entropy_of_mean`, of the mean of them all,
        in nats: a router that knows what it wants and uses everything has a low and a high one.
        `top1_margin`; `logit_max`; `nonfinite_tokens`, whose logits are NaN or infinite; the unweighted
        losses `load_balance` and `router_z`. `shared_share`: of the block's output, what the shared
        expert made; nan without one.
        """
        num_pairs = self.pairs_E.sum()
        load_E = self.pairs_E / num_pairs.clamp(min=1)
        means = self.sums / self.num_tokens.clamp(min=1)
        return {
            "load": load_E,
            "max_violation": max_violation(load_E),
            "load_cv": load_cv(load_E),
            "sequence_max_violation": self.sequence_violations / self.num_sequences.clamp(min=1),
            "dropped_fraction": self.num_dropped / num_pairs.clamp(min=1),
            "capacity_used": (num_pairs - self.num_dropped) / self.num_places.float()
            if self.num_places
            else torch.full_like(means[0], torch.nan),
            "experts_per_token": num_pairs / self.num_tokens.clamp(min=1),
            "nonfinite_tokens": self.num_nonfinite,
            "entropy_of_mean": torch.special.entr(
                self.scores_E / self.scores_E.sum().clamp(min=torch.finfo(torch.float32).tiny)
            ).sum(),
            "logit_max": self.logit_max,
            **dict(zip(_PER_TOKEN, means, strict=True)),
        }


class CoactivationMetrics(Metric):
    """Which experts are chosen together, over the batches seen and summed over ranks.

    Apart from `RoutingMetrics` because it alone grows with E^2 and costs a matrix product.
    """

    full_state_update = False
    counts_EE: Tensor

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        shape = (num_experts, num_experts)
        self.add_state("counts_EE", torch.zeros(shape, dtype=torch.int64), "sum")

    def update(self, routing: Routing) -> None:
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


def _mean_margin(routing: Routing) -> Tensor:
    return mean_over_tokens(top1_margin(routing), routing)


def _shared_share(routing: Routing) -> Tensor:
    share = routing.shared_share
    return routing.scores_TE.new_tensor(torch.nan) if share is None else share


_PER_TOKEN: dict[str, Callable[[Routing], Tensor]] = {
    "entropy": router_entropy_loss,
    "top1_margin": _mean_margin,
    "load_balance": load_balancing_loss,
    "router_z": router_z_loss,
    "shared_share": _shared_share,
}
"""What is a mean over the tokens of a batch."""
