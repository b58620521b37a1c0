"""What a row of training tells of routing: the batches it covers, and what lasts beyond them.

E experts
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_ffn.metrics.functional import idle_steps, rank_max_violation
from moe_ffn.metrics.routing import LoadMetrics, TokenMetrics
from moe_ffn.outputs import Routing
from moe_ffn.training.config import LoggingConfig
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.probe import RoutingProbe
from moe_ffn.training.routing_by_layer import RoutingByLayer


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

    def update(self, routings: Mapping[str, Routing], in_last_step: bool) -> None:
        """Add a batch.

        Args:
            in_last_step: whether it belongs to the step that ends the window. Of that alone tokens are
                measured one by one: of every batch it would cost several percent of a small model's
                step.
        """
        self._load.update(routings)
        if in_last_step:
            self._tokens.update(routings)

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
        routers = module.decoder.routers()
        for layer, of_layer in values.items():
            load_E = of_layer["load"]
            self._count_idle_steps(layer, load_E, num_steps)
            of_layer["dead_experts"] = (self._idle_steps[layer] >= self.dead_after_steps).sum()
            if num_ranks > 1:
                # Zero-computation experts, which stand last, are on no rank.
                ffn = module.decoder.config.routed_ffn(layer)
                computing_E = load_E[: getattr(ffn, "num_experts", len(load_E))]
                of_layer["rank_max_violation"] = rank_max_violation(computing_E, num_ranks)
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
