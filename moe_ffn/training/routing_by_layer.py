"""The metrics of every sparse layer, over the batches of a window."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor
from torchmetrics import Metric

from moe_ffn.outputs import Routing


class RoutingByLayer:
    """The same metrics for each sparse layer, made when the layer is first seen."""

    def __init__(self, *metrics: Callable[[int], Metric]) -> None:
        """`metrics`: classes of `metrics.routing`, which are made of a number of experts."""
        self.metrics = metrics
        self.layers: dict[str, list[Metric]] = {}

    def update(self, routings: Mapping[str, Routing], counted: bool = True) -> None:
        """Add a batch; one not `counted` only creates the metrics, so that all ranks reduce the same."""
        for layer, routing in routings.items():
            if layer not in self.layers:
                device = routing.logits_TE.device
                made = [metric(routing.num_experts).to(device) for metric in self.metrics]
                self.layers[layer] = made
            if counted:
                for metric in self.layers[layer]:
                    metric.update(routing)

    def compute(self) -> dict[str, dict[str, Tensor]]:
        """The values of each layer since the last reset, on every rank."""
        return {layer: _values(metrics) for layer, metrics in sorted(self.layers.items())}

    def reset(self) -> None:
        for metrics in self.layers.values():
            for metric in metrics:
                metric.reset()


def _values(metrics: list[Metric]) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    for metric in metrics:
        values |= metric.compute()
    # torchmetrics squeezes what has one element, and so what is measured of a single expert.
    if "load" in values:
        values["load"] = values["load"].reshape(-1)
    if "coactivation" in values:
        num_experts = len(values["load"])
        values["coactivation"] = values["coactivation"].reshape(num_experts, num_experts)
    return values
