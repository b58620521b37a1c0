"""Torchmetrics that accumulate over batches and ranks: routing of a sparse layer, and language-model loss.

E experts
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import Metric

from moe_ffn.balancing.sums import check_routing
from moe_ffn.config.base import require_count
from moe_ffn.metrics.measures import LayerBatch
from moe_ffn.metrics.table import Measured, compute, measured_in, statistics_of
from moe_ffn.metrics.table import Metric as TableMetric
from moe_ffn.outputs import PairsOnlyRouting, Routing


class _SummedMetrics(Metric):
    """Base class of metrics that are sums, which keep their dtype in a converted model."""

    full_state_update = False

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> Any:
        # Converting the model, for example to bf16-true, may move these sums but must not round them.
        return super()._apply(lambda value: value.to(fn(value).device), exclude_state)


class _RoutingMetrics(_SummedMetrics):
    """Base class that sums statistics over batches and ranks, and computes metrics from the sums."""

    measured: ClassVar[tuple[Measured, ...]]
    is_pairs_only: ClassVar[bool] = False
    """True if `update` takes a `PairsOnlyRouting`; otherwise it takes a routing with (T, E) tables."""

    def __init__(self, num_experts: int, **options: Any) -> None:
        super().__init__(**options)
        require_count(num_experts, "num_experts")
        self.num_experts = num_experts
        for statistic in statistics_of(self._metrics()):
            self.add_state(statistic.name, statistic.zeros(num_experts), statistic.reduce)

    def update(
        self,
        routing: Routing,
        shared_share: Tensor | None = None,
        expert_capacity: Tensor | None = None,
    ) -> None:
        """Add a batch: its routing, its entry in `FFNOutput.shared_shares`, if any, and the maximum pairs of
        an expert, if limited (`CapacityConfig.expert_capacity`).
        """
        name = type(self).__name__
        check_routing(routing, f"{name}.update")
        if routing.num_experts != self.num_experts:
            raise ValueError(
                f"{name} has num_experts {self.num_experts}, but the routing has {routing.num_experts}; "
                "create one for each layer"
            )
        if isinstance(routing, PairsOnlyRouting) != self.is_pairs_only:
            kinds = ("PairsOnlyRouting", "a routing with (T, E) tables")
            takes, got = kinds if self.is_pairs_only else kinds[::-1]
            raise ValueError(
                f"{name} takes {takes}, but got {got}; use "
                f"{'LoadMetrics and TokenMetrics' if self.is_pairs_only else 'PairsOnlyMetrics'}"
            )
        batch = LayerBatch(routing.detach(), shared_share, expert_capacity)
        for statistic in statistics_of(self._metrics()):
            before = getattr(self, statistic.name)
            setattr(self, statistic.name, statistic.add(before, batch))

    def compute(self) -> dict[str, Tensor]:
        """Return key -> value of each metric that applies: no `capacity_used` without a capacity."""
        metrics = self._metrics()
        values = compute(metrics, {s.name: getattr(self, s.name) for s in statistics_of(metrics)})
        for metric in metrics:
            if metric.requires and values[metric.key].isnan():
                del values[metric.key]
        return values

    def _metrics(self) -> list[TableMetric]:
        return measured_in(*self.measured, is_pairs_only=self.is_pairs_only)


class LoadMetrics(_RoutingMetrics):
    """Metrics computed from counts of pairs, such as `load`; cheap enough for every batch.

    Counts are summed before ratios are taken, so MaxVio measures lasting imbalance, not the noise of one
    batch. `capacity_used` needs the `expert_capacity` of each `update`, such as
    `layer.capacity.expert_capacity(routing, training=True)`.
    """

    measured = ("every batch",)


class TokenMetrics(_RoutingMetrics):
    """Metrics computed for each token or sequence, such as `entropy`.

    They cost several times as much as `LoadMetrics`.
    """

    measured = ("last step",)


class PairsOnlyMetrics(_RoutingMetrics):
    """Metrics of a `PairsOnlyRouting`, which has no value for every expert, such as `experts_used`.

    The size of the state does not depend on the number of experts.
    """

    measured = ("every batch", "last step")
    is_pairs_only = True


class CoactivationMetrics(_RoutingMetrics):
    """Co-activation of each pair of experts; the state is (E, E), and each batch costs a matrix product."""

    measured = ("validation",)


class LanguageMetrics(_SummedMetrics):
    """Cross-entropy per token and bits per byte, over all batches and ranks.

    Bits per byte divides by the bytes of the predicted tokens, so models with different tokenizers can be
    compared. Tokens without bytes, such as the end of a document, still add their bits.
    """

    nats: Tensor
    num_tokens: Tensor
    num_bytes: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("nats", "num_tokens", "num_bytes"):
            # float64: a float32 sum over a long validation would lose its last digits.
            self.add_state(name, torch.zeros((), dtype=torch.float64), "sum")

    def update(self, nats: Tensor, num_bytes: Tensor) -> None:
        """Add the cross-entropy of each predicted token, any shape, and its bytes of text, same shape."""
        if nats.shape != num_bytes.shape:
            raise ValueError(
                f"num_bytes must have the shape of nats, {tuple(nats.shape)}, but has "
                f"{tuple(num_bytes.shape)}"
            )
        self.nats += nats.sum()
        self.num_tokens += nats.numel()
        self.num_bytes += num_bytes.sum()

    @property
    def loss_so_far(self) -> Tensor:
        """Loss of this rank alone since the last reset, nats per token; nan before the first batch."""
        return (self.nats / self.num_tokens).float()

    def compute(self) -> dict[str, Tensor]:
        """Return `loss` in nats per token, and `bits_per_byte`."""
        bits = self.nats / math.log(2)
        return {"loss": self.loss_so_far, "bits_per_byte": (bits / self.num_bytes).float()}
