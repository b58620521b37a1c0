"""Routing metrics over the batches of a row of training, and metrics that compare it with earlier rows.

T tokens, E experts, R ranks
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

from moe_ffn.metrics.functional import chosen_experts, idle_steps
from moe_ffn.metrics.measures import LayerBatch, RowEnd
from moe_ffn.metrics.table import Measured, compute, compute_row_end, measured_in, statistics_of
from moe_ffn.outputs import PairsOnlyRouting, Routing
from moe_ffn.training.config import LoggingConfig
from moe_ffn.training.recovery import Checkpointed

if TYPE_CHECKING:
    from moe_ffn.training.module import LanguageModel

ByLayer = dict[str, dict[str, Tensor]]
"""Sparse layer -> name -> value."""


LoggedRow = dict[str, float | list[float]]
"""Key -> a value, or one value per expert."""


def routing_row(values: Mapping[str, Mapping[str, Tensor]], prefix: str = "") -> LoggedRow:
    """Flatten `{"layer_03": {"entropy": 1.2, "load": [...]}}` to `routing/layer_03/entropy`, `.../load`.

    Matrices are left out, and so is a scalar NaN, which marks a metric without a value.
    """
    row: LoggedRow = {}
    for layer, metrics in values.items():
        for name, value in metrics.items():
            key = f"{prefix}routing/{layer}/{name}"
            if value.ndim == 1:
                row[key] = value.tolist()
            elif value.ndim == 0 and not value.isnan():
                row[key] = float(value)
    return row


class RoutingByLayer(Checkpointed):
    """Routing metrics of these kinds (see `metrics.table`) of each sparse layer, over batches and ranks."""

    def __init__(self, *measured: Measured) -> None:
        self.metrics = {
            is_pairs_only: measured_in(*measured, is_pairs_only=is_pairs_only)
            for is_pairs_only in (False, True)
        }
        self.statistics = {kind: statistics_of(metrics) for kind, metrics in self.metrics.items()}
        self._is_pairs_only: dict[str, bool] = {}
        self.sums: ByLayer = {}
        self._loaded: ByLayer = {}

    def update(
        self,
        routings: Mapping[str, Routing],
        counted: bool = True,
        shared_shares: Mapping[str, Tensor] = MappingProxyType({}),
        expert_capacities: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Add a batch. If not `counted`, only add sums of zero, so that all ranks reduce the same layers."""
        for layer, routing in routings.items():
            statistics = self.statistics[isinstance(routing, PairsOnlyRouting)]
            if layer not in self.sums:
                self._is_pairs_only[layer] = isinstance(routing, PairsOnlyRouting)
                zeros = {s.name: s.zeros(routing.num_experts) for s in statistics}
                initial = zeros | self._loaded.pop(layer, {})
                device = routing.token_indices_N.device
                self.sums[layer] = {name: value.to(device) for name, value in initial.items()}
            if counted:
                sums = self.sums[layer]
                batch = LayerBatch(routing, shared_shares.get(layer), expert_capacities.get(layer))
                for statistic in statistics:
                    sums[statistic.name] = statistic.add(sums[statistic.name], batch)

    def close(self) -> ByLayer:
        """Return the metrics of each layer over all batches and ranks, on the CPU, and reset the sums."""
        sums, self.sums = self._reduced(), {}
        return {
            layer: compute(self.metrics[self._is_pairs_only[layer]], layer_sums)
            for layer, layer_sums in sums.items()
        }

    def state_dict(self) -> ByLayer:
        """Return the sums since `close`, over all ranks. A collective: every rank has to call this."""
        return self._loaded | self._reduced()

    def load_state_dict(self, state_dict: ByLayer) -> None:
        """Continue from saved sums. Only rank 0 loads them, since the ranks will be summed again."""
        is_first = not distributed.is_initialized() or distributed.get_rank() == 0
        self.sums = {}
        self._loaded = dict(state_dict) if is_first else {}

    def _reduced(self) -> ByLayer:
        """Reduce the statistics over all ranks, with one collective for sums and one for maxima."""
        reduced: ByLayer = {layer: {} for layer in sorted(self.sums)}
        for reduce in ("sum", "max"):
            keys = [
                (layer, statistic.name)
                for layer in reduced
                for statistic in self.statistics[self._is_pairs_only[layer]]
                if statistic.reduce == reduce
            ]
            values = [self.sums[layer][name] for layer, name in keys]
            if not values:
                continue
            # float64 holds every count exactly; Apple's GPUs lack it, so their values move to the CPU.
            values = [value if value.is_cuda else value.cpu() for value in values]
            flat = torch.cat([value.reshape(-1).double() for value in values])
            if num_ranks() > 1:
                distributed.all_reduce(flat, getattr(distributed.ReduceOp, reduce.upper()))
            results = flat.cpu().split([value.numel() for value in values])
            for (layer, name), value, result in zip(keys, values, results, strict=True):
                reduced[layer][name] = result.view_as(value).to(value.dtype)
        return reduced


def num_ranks() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def all_gather_scalar(value: Tensor) -> Tensor:
    """Return the scalar of each rank, (R,). A collective: every rank has to call this."""
    if num_ranks() == 1:
        return value.reshape(1)
    values = [torch.empty_like(value) for _ in range(num_ranks())]
    distributed.all_gather(values, value)
    return torch.stack(values)


def scalar_of_this_rank(values_R: Tensor) -> Tensor:
    """Return this rank's entry of `all_gather_scalar`, or the mean if the number of ranks has changed.

    Each rank resumes with its own sum, so that a resumed run rounds like an uninterrupted run.
    """
    if len(values_R) != num_ranks():
        return values_R.mean()
    return values_R[distributed.get_rank() if distributed.is_initialized() else 0]


def gather_by_index(by_index: Mapping[int, Tensor]) -> Tensor:
    """Concatenate the values of all batches of all ranks, sorted by batch index, on the CPU. A collective."""
    gathered = [{index: values.tolist() for index, values in by_index.items()}] * num_ranks()
    if num_ranks() > 1:
        distributed.all_gather_object(gathered, gathered[0])
    merged = {index: values for of_rank in gathered for index, values in of_rank.items()}
    return torch.tensor([value for index in sorted(merged) for value in merged[index]])


PROBE_FRACTION = 1 / 4
"""Fraction of a batch to route; a quarter costs about a twelfth of a training step on the whole batch."""

MAX_PROBE_TOKENS = 1024
"""Largest number of tokens to route, since checkpoints hold one bool for each token and expert."""


@torch.no_grad()
def probe(module: LanguageModel) -> dict[str, Tensor]:
    """Return `chosen_experts`, bool (T, E), of each sparse layer for the first sequences of batch 0.

    The result is on the CPU. The model runs in evaluation mode, so no random numbers are drawn.
    """
    if not module.decoder.routers():
        return {}
    input_ids = module.batch_at(0)["input_ids"]
    num_sequences = min(
        int(len(input_ids) * PROBE_FRACTION), MAX_PROBE_TOKENS // input_ids.shape[1]
    )
    input_ids = input_ids[: max(num_sequences, 1)].to(module.device)
    was_training = module.decoder.training
    module.decoder.eval()
    try:
        # torch.compile would compile the model again for this batch shape.
        with torch.compiler.set_stance("force_eager"), module.precision_context():
            routings = module.decoder(input_ids).routings
    finally:
        module.decoder.train(was_training)
    return {
        layer: chosen_experts(routing).cpu()
        for layer, routing in routings.items()
        if not isinstance(routing, PairsOnlyRouting)
    }


class RoutingRowSums(Checkpointed):
    """Metrics of one row: loads over all steps, token metrics over the last, which no checkpoint holds."""

    in_checkpoint = ("_load", "_idle_steps", "_probe", "_last_look")

    def __init__(self, config: LoggingConfig) -> None:
        self.dead_after_steps = config.alarms.after_steps
        self.churn_every_n_steps = config.churn_every_n_steps
        self._load = RoutingByLayer("every batch")
        self._tokens = RoutingByLayer("last step")
        self._idle_steps: dict[str, Tensor] = {}
        self._probe: dict[str, Tensor] = {}  # of step `_last_look`
        self._last_look = -config.churn_every_n_steps

    def update(
        self,
        routings: Mapping[str, Routing],
        in_last_step: bool,
        shared_shares: Mapping[str, Tensor] = MappingProxyType({}),
        expert_capacities: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Add a batch; `in_last_step` is true if it belongs to the step that ends the row."""
        self._load.update(routings, expert_capacities=expert_capacities)
        if in_last_step:
            self._tokens.update(routings, shared_shares=shared_shares)

    def close(
        self, step: int, num_steps: int, module: LanguageModel | None, num_ranks: int
    ) -> ByLayer:
        """Return the metrics of each layer over `num_steps` steps, on every rank, and begin a new row.

        Without a `module` there are no churn and no correction bias.
        """
        values = self._load.close()
        # Token metrics are missing if training ended before the last step of the row.
        for layer, token_metrics in self._tokens.close().items():
            values[layer] |= token_metrics
        probe_choices: dict[str, tuple[Tensor, Tensor]] = {}
        if module is not None and step - self._last_look >= self.churn_every_n_steps:
            before, self._probe, self._last_look = self._probe, probe(module), step
            # Shapes differ if a mixture of depths passes a different number of tokens to its inner layer.
            probe_choices = {
                layer: (before[layer], now_TE)
                for layer, now_TE in self._probe.items()
                if layer in before and before[layer].shape == now_TE.shape
            }
        routers = {} if module is None else module.decoder.routers()
        infos = {} if module is None else module.decoder.config.router_infos()
        for layer, metrics in values.items():
            if "load" not in metrics:  # the router lists pairs
                continue
            load_E = metrics["load"]
            idle_E = self._idle_steps.get(layer, torch.zeros_like(load_E, dtype=torch.int64))
            self._idle_steps[layer] = idle_steps(idle_E, load_E, num_steps)
            row = RowEnd(
                load_E=load_E,
                idle_steps_E=self._idle_steps[layer],
                dead_after_steps=self.dead_after_steps,
                num_ranks=num_ranks,
                num_networks=infos[layer].num_networks if layer in infos else len(load_E),
                bias_E=routers[layer].correction_bias_E if layer in routers else None,
                probe_choices=probe_choices.get(layer),
            )
            metrics |= {key: value.cpu() for key, value in compute_row_end(row).items()}
        return values
