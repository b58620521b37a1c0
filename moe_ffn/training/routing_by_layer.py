"""The metrics of every sparse layer, over the batches of a window."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor, distributed
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_max, dim_zero_sum

from moe_ffn.outputs import Routing


class RoutingByLayer:
    """The same metrics for each sparse layer, made when the layer is first seen."""

    def __init__(self, *metrics: Callable[..., Metric]) -> None:
        """`metrics`: classes of `metrics.routing`, which are made of a number of experts."""
        self.metrics = metrics
        self.layers: dict[str, list[Metric]] = {}
        self._loaded: dict[str, list[dict[str, Tensor]]] = {}

    def update(self, routings: Mapping[str, Routing], counted: bool = True) -> None:
        """Add a batch; one not `counted` only creates the metrics, so that all ranks reduce the same."""
        for layer, routing in routings.items():
            if layer not in self.layers:
                device = routing.logits_TE.device
                # Not when they compute: `close` does it for all of them at once.
                made = [
                    metric(routing.num_experts, sync_on_compute=False).to(device)
                    for metric in self.metrics
                ]
                for metric, states in zip(made, self._loaded.pop(layer, []), strict=False):
                    for name, value in states.items():
                        setattr(metric, name, value.to(device))
                self.layers[layer] = made
            if counted:
                for metric in self.layers[layer]:
                    metric.update(routing)

    def close(self) -> dict[str, dict[str, Tensor]]:
        """The values of each layer over all batches and ranks, on the CPU; then everything begins anew."""
        metrics = [metric for layer in sorted(self.layers) for metric in self.layers[layer]]
        reduce_over_ranks(metrics)
        values = {layer: _values(self.layers[layer]) for layer in sorted(self.layers)}
        for metric in metrics:
            metric.reset()
        return on_host(values)

    def state_dict(self) -> dict[str, list[dict[str, Tensor]]]:
        """What was added since `close`, over all ranks, each of which has to ask."""
        copies = {layer: deepcopy(of_layer) for layer, of_layer in self.layers.items()}
        reduce_over_ranks([metric for layer in sorted(copies) for metric in copies[layer]])
        states = {layer: [_states(metric) for metric in copies[layer]] for layer in sorted(copies)}
        counted = {layer: of_layer for layer, of_layer in states.items() if _any_counts(of_layer)}
        return self._loaded | counted

    def load_state_dict(self, state: dict[str, list[dict[str, Tensor]]]) -> None:
        """Go on from there; what one rank has counts for all, since they are added up.

        Exact for counts, as those of `LoadMetrics` are, in whatever order.
        """
        is_first = not distributed.is_initialized() or distributed.get_rank() == 0
        self.layers = {}
        self._loaded = dict(state) if is_first else {}


def of_every_rank(value: Tensor) -> Tensor:
    """The values (R,) that R ranks have of a scalar; every rank has to ask, and gets the same."""
    num_ranks = _num_ranks()
    if num_ranks == 1:
        return value.reshape(1)
    values = [torch.empty_like(value) for _ in range(num_ranks)]
    distributed.all_gather(values, value)
    return torch.stack(values)


def of_this_rank(values_R: Tensor) -> Tensor:
    """What this rank had when `of_every_rank` was asked; the mean where there were more or fewer of them.

    Numbers that are added up are so kept apart: a sum that begins with another rank's, or with a mean, is
    rounded in another order.
    """
    if len(values_R) != _num_ranks():
        return values_R.mean()
    return values_R[distributed.get_rank() if distributed.is_initialized() else 0]


def _num_ranks() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def _states(metric: Metric) -> dict[str, Tensor]:
    return {name: getattr(metric, name) for name in metric._defaults}


def _any_counts(states: list[dict[str, Tensor]]) -> bool:
    return any(bool(value.any()) for of_metric in states for value in of_metric.values())


def reduce_over_ranks(metrics: Sequence[Metric]) -> None:
    """Give the states of all metrics the sum or the maximum over the ranks, in one exchange for each.

    torchmetrics by itself exchanges every state on its own: hundreds of times for a deep model.
    """
    if _num_ranks() == 1:
        return
    operations = (
        (dim_zero_sum, distributed.ReduceOp.SUM),
        (dim_zero_max, distributed.ReduceOp.MAX),
    )
    for reduction, operation in operations:
        states = [
            state
            for metric in metrics
            for name, its_reduction in metric._reductions.items()
            if its_reduction is reduction and isinstance(state := getattr(metric, name), Tensor)
        ]
        if states:
            # float64 holds every count exactly.
            flat = torch.cat([state.reshape(-1).double() for state in states])
            distributed.all_reduce(flat, operation)
            for state, reduced in zip(states, flat.split([s.numel() for s in states]), strict=True):
                state.copy_(reduced.view_as(state))


def on_host(values: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """All of it on the CPU in one copy: whoever reads a number later waits for no device."""
    tensors = [value for of_layer in values.values() for value in of_layer.values()]
    if not tensors or tensors[0].device.type == "cpu":
        return values
    flat = torch.cat([tensor.reshape(-1).float() for tensor in tensors]).cpu()
    parts = iter(flat.split([tensor.numel() for tensor in tensors]))
    return {
        layer: {name: next(parts).view(value.shape) for name, value in of_layer.items()}
        for layer, of_layer in values.items()
    }


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
