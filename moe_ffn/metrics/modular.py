"""Metrics over batches and ranks, as torchmetrics: of one sparse layer's routing, and of a language model.

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
from moe_ffn.outputs import Routing


class _RoutingMetrics(Metric):
    """Adds up statistics over batches and ranks, and takes ratios of the sums."""

    full_state_update = False
    measured: ClassVar[tuple[Measured, ...]]
    is_listed: ClassVar[bool] = False
    """True where it takes listed routings alone; otherwise it takes routings with tables."""

    def __init__(self, num_experts: int, **of_metric: Any) -> None:
        super().__init__(**of_metric)
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
        """Add a batch.

        Args:
            shared_share: the layer's in `FFNOutput.shared_shares`; None without a shared expert.
            expert_capacity: most pairs of an expert, `CapacityConfig.expert_capacity`; None if unlimited.
        """
        name = type(self).__name__
        check_routing(routing, f"{name}.update")
        if routing.num_experts != self.num_experts:
            raise ValueError(
                f"{name} was made for num_experts {self.num_experts}, but the routing has "
                f"{routing.num_experts}"
            )
        if routing.is_listed != self.is_listed:
            raise ValueError(
                f"{name} takes routings {'without' if self.is_listed else 'with'} a number for each expert, "
                f"but this one has {'them' if self.is_listed else 'the listed pairs alone'}; use "
                f"{'LoadMetrics and TokenMetrics' if self.is_listed else 'ListMetrics'}"
            )
        batch = LayerBatch(routing.detach(), shared_share, expert_capacity)
        for statistic in statistics_of(self._metrics()):
            before = getattr(self, statistic.name)
            setattr(self, statistic.name, statistic.add(before, batch))

    def compute(self) -> dict[str, Tensor]:
        """Return key -> value; nan where a layer lacks a value, such as the capacity of a dropless one."""
        metrics = self._metrics()
        return compute(metrics, {s.name: getattr(self, s.name) for s in statistics_of(metrics)})

    def _metrics(self) -> list[TableMetric]:
        return measured_in(*self.measured, is_listed=self.is_listed)


class LoadMetrics(_RoutingMetrics):
    """The metrics that are counts of a routing, such as `load`: cheap enough for every batch.

    Counts are summed before ratios are taken, so MaxVio measures lasting imbalance and not the noise of one
    batch. `capacity_used` is nan unless `update` gets `expert_capacity`, such as
    `layer.capacity.expert_capacity(routing, training=True)`.
    """

    measured = ("every batch",)


class TokenMetrics(_RoutingMetrics):
    """The metrics that are measured token by token or sequence by sequence, such as `entropy`.

    Several times as much work as `LoadMetrics`.
    """

    measured = ("last step",)


class ListMetrics(_RoutingMetrics):
    """The metrics of a router of too many experts for a number of each, such as `experts_used`.

    What it keeps does not grow with the experts either.
    """

    measured = ("every batch", "last step")
    is_listed = True


class CoactivationMetrics(_RoutingMetrics):
    """Number of tokens that chose each two experts: an (E, E) state, and a matrix product per batch."""

    measured = ("validation",)


class LanguageMetrics(Metric):
    """Cross-entropy per token and bits per byte, over all batches and ranks.

    Bits per byte divides by the bytes of text in the predicted tokens, so it compares tokenizers; tokens
    without text, such as the end of a document, still cost their bits.
    """

    full_state_update = False
    nats: Tensor
    num_tokens: Tensor
    num_bytes: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("nats", "num_tokens", "num_bytes"):
            # float64: a float32 sum over a long validation would lose its last digits.
            self.add_state(name, torch.zeros((), dtype=torch.float64), "sum")

    def update(self, nats: Tensor, num_bytes: Tensor) -> None:
        """Add one batch.

        Args:
            nats: the cross-entropy of each predicted token, any shape.
            num_bytes: how many bytes of text each of those tokens has, the same shape.
        """
        if nats.shape != num_bytes.shape:
            raise ValueError(
                f"num_bytes must have the shape of nats, {tuple(nats.shape)}, but has "
                f"{tuple(num_bytes.shape)}"
            )
        self.nats += nats.sum()
        self.num_tokens += nats.numel()
        self.num_bytes += num_bytes.sum()

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> Any:
        # What converts the model around it, for bf16-true, moves these sums and does not round them.
        return super()._apply(lambda value: value.to(fn(value).device), exclude_state)

    @property
    def loss_so_far(self) -> Tensor:
        """Scalar, nats per token on this rank since the last reset, without waiting for other ranks; nan
        before the first batch.
        """
        return (self.nats / self.num_tokens).float()

    def compute(self) -> dict[str, Tensor]:
        """`loss` in nats per token, and `bits_per_byte`."""
        bits = self.nats / math.log(2)
        return {"loss": self.loss_so_far, "bits_per_byte": (bits / self.num_bytes).float()}
