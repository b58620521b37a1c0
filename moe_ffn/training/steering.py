"""What steers routers from step to step without a gradient: their biases, and the weight of sparsity.

Both are moved once per optimizer step, by what its batches and ranks observed together, and kept in
checkpoints: the biases as buffers of their routers, the weight as a buffer of `RouterSteering`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from moe_ffn.balancing.bias_rules import sparsity_weight_after
from moe_ffn.balancing.losses import pairs_per_expert
from moe_ffn.outputs import Routing
from moe_ffn.routing.base import Router
from moe_ffn.training.objective import ObjectiveConfig

Reduce = Callable[[Tensor], Tensor]
"""The sum of a tensor over the ranks."""


class RouterSteering(nn.Module):
    """Adds up what batches observed; `step` moves biases and the sparsity weight, and starts anew."""

    sparsity_weight: Tensor

    def __init__(self, config: ObjectiveConfig) -> None:
        super().__init__()
        self.rule = config.bias_rule
        self.factor = config.sparsity_rule.factor
        initial = torch.tensor(config.sparsity_rule.initial_weight)
        self.register_buffer("sparsity_weight", initial)
        self._observed: dict[str, Tensor] = {}
        self._densities: dict[str, Tensor] = {}
        self._num_batches = 0

    @torch.no_grad()
    def observe(self, routings: Mapping[str, Routing], routers: Mapping[str, Router]) -> None:
        """Add one batch, routed with the biases that `routers` still have.

        A block of somebody's own may return a routing and name no router: nothing is steered there.
        """
        self._num_batches += 1
        for name, routing in routings.items():
            bias_E = routers[name].correction_bias_E if name in routers else None
            if bias_E is not None:
                observed_E = self.rule.observe(routing, bias_E)
                self._observed[name] = observed_E + self._observed.get(name, 0)
            if routing.target_k is not None:
                used = pairs_per_expert(routing).sum() / routing.target_k
                counts = torch.stack([used, routing.num_real_tokens])
                self._densities[name] = counts + self._densities.get(name, 0)

    @torch.no_grad()
    def step(self, routers: Mapping[str, Router], reduce: Reduce, num_ranks: int = 1) -> None:
        """Move what there is to move. Every rank has to call it, before the optimizer's step."""
        for name, observed_E in self._observed.items():
            bias_E = routers[name].correction_bias_E
            assert bias_E is not None
            num_batches = self._num_batches * num_ranks
            bias_E.copy_(self.rule.update(bias_E, reduce(observed_E), num_batches))
        if self._densities:
            sums = reduce(torch.stack(list(self._densities.values())))
            density = (sums[:, 0] / sums[:, 1].clamp(min=1)).mean()
            weight = sparsity_weight_after(self.sparsity_weight, density, self.factor)
            self.sparsity_weight.copy_(weight)
        self.forget()

    def forget(self) -> None:
        """Drop what was observed: of batches that no step is made of."""
        self._observed, self._densities, self._num_batches = {}, {}, 0
