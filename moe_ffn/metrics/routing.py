"""The metrics of one sparse layer over many batches, as torchmetrics Metrics; what each is, `metrics.table`
says.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torchmetrics import Metric

from moe_ffn.config import require_count
from moe_ffn.metrics.table import Measured, compute, measured_in, statistics_of
from moe_ffn.outputs import Routing, check_routing


class _RoutingMetrics(Metric):
    """Adds up statistics over batches and ranks, and takes ratios of the sums."""

    full_state_update = False
    measured: ClassVar[Measured]

    def __init__(self, num_experts: int, **of_metric: Any) -> None:
        super().__init__(**of_metric)
        require_count(num_experts, "num_experts")
        self.num_experts = num_experts
        for statistic in statistics_of(measured_in(self.measured)):
            self.add_state(statistic.name, statistic.zeros(num_experts), statistic.reduce)

    def update(self, routing: Routing, shared_share: Tensor | None = None) -> None:
        """Add a batch; `shared_share` is that of `FFNOutput.shared_shares`, None without a shared expert."""
        name = type(self).__name__
        check_routing(routing, f"{name}.update")
        if routing.num_experts != self.num_experts:
            raise ValueError(
                f"{name} was made for num_experts {self.num_experts}, but the routing has "
                f"{routing.num_experts}"
            )
        routing = routing.detach()
        for statistic in statistics_of(measured_in(self.measured)):
            before = getattr(self, statistic.name)
            setattr(self, statistic.name, statistic.add(before, routing, shared_share))

    def compute(self) -> dict[str, Tensor]:
        """Key -> value; nan where a layer has no such value, such as the capacity of a dropless one."""
        metrics = measured_in(self.measured)
        return compute(metrics, {s.name: getattr(self, s.name) for s in statistics_of(metrics)})


class LoadMetrics(_RoutingMetrics):
    """What is counted of a routing, from `load` to `nonfinite_tokens`: cheap enough for every batch.

    Counts are summed before ratios are taken, so MaxVio measures lasting imbalance and not the noise of one
    batch.
    """

    measured = "every batch"


class TokenMetrics(_RoutingMetrics):
    """What is measured token by token and sequence by sequence, from `entropy` to `router_z`.

    Several times as much work as `LoadMetrics`.
    """

    measured = "last step"


class CoactivationMetrics(_RoutingMetrics):
    """Which experts are chosen together. It grows with E^2 and costs a matrix product."""

    measured = "validation"
