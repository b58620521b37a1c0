"""What a row of training tells of routing: the batches it covers, and what lasts beyond them.

E experts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, distributed
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_max, dim_zero_sum

from moe_ffn.metrics.functional import chosen_experts, churn, idle_steps, rank_max_violation
from moe_ffn.metrics.routing import LoadMetrics, TokenMetrics
from moe_ffn.outputs import Routing
from moe_ffn.training.config import LoggingConfig
from moe_ffn.training.module import LanguageModel


class RoutingByLayer:
    """The same metrics for each sparse layer, made when the layer is first seen."""

    def __init__(self, *metrics: Callable[..., Metric]) -> None:
        """`metrics`: classes of `metrics.routing`, which are made of a number of experts."""
        self.metrics = metrics
        self.layers: dict[str, list[Metric]] = {}
        self._loaded: dict[str, list[dict[str, Tensor]]] = {}

    def update(
        self,
        routings: Mapping[str, Routing],
        counted: bool = True,
        shared_shares: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Add a batch; one not `counted` only creates the metrics, so that all ranks reduce the same."""
        for layer, routing in routings.items():
            if layer not in self.layers:
                device = routing.token_ids_N.device
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
                    share = metric._filter_kwargs(shared_share=shared_shares.get(layer))
                    metric.update(routing, **share)

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


PART_OF_BATCH = 1 / 4
"""A look at a quarter of a batch costs about a twelfth of a training step on all of it."""

MOST_TOKENS = 1024
"""More would not make the share of changed tokens much more exact, and checkpoints hold who chose whom."""


class RoutingProbe:
    """Routes the first sequences of the run's batch 0 (of rank 0's part), and remembers who chose whom."""

    def __init__(self) -> None:
        self.chosen: dict[str, Tensor] = {}
        """For each sparse layer, bool (T, E): `chosen_experts` at the last look."""

    @torch.no_grad()
    def look(self, module: LanguageModel) -> dict[str, Tensor]:
        """The churn of each sparse layer since the last look, on the CPU; empty at the first.

        Evaluates, so that nothing is random and no generator moves.
        """
        if module.batch_at is None or not module.decoder.routers():
            return {}
        input_ids = module.batch_at(0)["input_ids"]
        num_sequences = min(int(len(input_ids) * PART_OF_BATCH), MOST_TOKENS // input_ids.shape[1])
        input_ids = input_ids[: max(num_sequences, 1)].to(module.device)
        was_training = module.decoder.training
        module.decoder.eval()
        try:
            # Another shape than the batches', for which a compiled model is not compiled again.
            with torch.compiler.set_stance("force_eager"), module.precision_context():
                routings = module.decoder(input_ids).routings
        finally:
            module.decoder.train(was_training)
        before, self.chosen = self.chosen, {k: chosen_experts(r) for k, r in routings.items()}
        # A mixture of depths hands a number of tokens on that differs from look to look.
        return {
            layer: churn(before[layer].to(now_TE.device), now_TE).cpu()
            for layer, now_TE in self.chosen.items()
            if layer in before and before[layer].shape == now_TE.shape
        }


class RoutingWindow:
    """The load of each sparse layer since the last row; at its last step what tokens say, and what lasts."""

    def __init__(self, config: LoggingConfig) -> None:
        self.dead_after_steps = config.alarms.after_steps
        self.churn_every_n_steps = config.churn_every_n_steps
        self._load = RoutingByLayer(LoadMetrics)
        self._tokens = RoutingByLayer(TokenMetrics)
        self._idle_steps: dict[str, Tensor] = {}
        self._probe = RoutingProbe()
        self._last_look = -config.churn_every_n_steps

    def update(
        self,
        routings: Mapping[str, Routing],
        in_last_step: bool,
        shared_shares: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Add a batch.

        Args:
            in_last_step: whether it belongs to the step that ends the window. Of that alone tokens are
                measured one by one: of every batch it would cost several percent of a small model's
                step.
        """
        self._load.update(routings)
        if in_last_step:
            self._tokens.update(routings, shared_shares=shared_shares)

    def close(
        self, step: int, num_steps: int, module: LanguageModel, num_ranks: int
    ) -> dict[str, dict[str, Tensor]]:
        """The values of each layer, on every rank; the next batch opens a new window.

        Args:
            step: the optimizer step that has been made.
            num_steps: how many of them the window covers.
        """
        values = self._load.close()
        for layer, of_tokens in self._tokens.close().items():
            values[layer] |= of_tokens
        # Forgotten and not only reset: an interrupted window has none of them, and should not say 0.
        self._tokens = RoutingByLayer(TokenMetrics)
        routers, infos = module.decoder.routers(), module.decoder.config.routers()
        for layer, of_layer in values.items():
            load_E = of_layer["load"]
            self._count_idle_steps(layer, load_E, num_steps)
            of_layer["dead_experts"] = (self._idle_steps[layer] >= self.dead_after_steps).sum()
            if num_ranks > 1:
                # Zero-computation experts, which stand last, are on no rank.
                num_networks = infos[layer].num_networks if layer in infos else len(load_E)
                of_ranks = rank_max_violation(load_E[:num_networks], num_ranks)
                of_layer["rank_max_violation"] = of_ranks
            bias_E = routers[layer].correction_bias_E if layer in routers else None
            if bias_E is not None:
                of_layer["bias_spread"] = (bias_E.max() - bias_E.min()).cpu()
        if step - self._last_look >= self.churn_every_n_steps:
            self._last_look = step
            for layer, churn in self._probe.look(module).items():
                values[layer]["churn"] = churn
        return values

    def _count_idle_steps(self, layer: str, load_E: Tensor, num_steps: int) -> None:
        before_E = self._idle_steps.get(layer, torch.zeros_like(load_E, dtype=torch.int64))
        self._idle_steps[layer] = idle_steps(before_E.to(load_E.device), load_E, num_steps)

    def state_dict(self) -> dict[str, Any]:
        """The load since the last row, and what later rows need to know of earlier steps.

        Between steps alone, where no token of a row that is not full has been measured.
        """
        return {
            "load": self._load.state_dict(),
            "idle_steps": self._idle_steps,
            "probe": self._probe.chosen,
            "last_look": self._last_look,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._load.load_state_dict(state["load"])
        self._idle_steps = state["idle_steps"]
        self._probe.chosen = state["probe"]
        self._last_look = state["last_look"]
