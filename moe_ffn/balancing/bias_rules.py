"""Auxiliary-loss-free balancing: rules that update a router's correction bias between optimizer steps.

A rule has two methods. `observe` returns a tensor for one batch's Routing, which the trainer sums over the
batches and ranks of a step. `update` returns the new bias from that sum.

T tokens, E experts
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from moe_ffn.balancing.sums import pairs_per_expert
from moe_ffn.config.base import Config, TaggedConfig
from moe_ffn.outputs import Routing


class BiasRuleConfig(TaggedConfig, frozen=True):
    """Rule that moves the correction bias of routers towards balance, once per optimizer step.

    A rule has no state: the router owns the bias, and the trainer the sums.
    """

    @property
    def advice(self) -> str | None:
        """Advice for routers that stay unbalanced: an option and its current value; None if there is none."""
        return None

    @abstractmethod
    def observe(self, routing: Routing, bias_E: Tensor) -> Tensor:
        """Return (E,) values to sum over the batches of a step; the router used `bias_E` for this batch."""

    @abstractmethod
    def update(self, bias_E: Tensor, observed_E: Tensor, num_batches: int) -> Tensor:
        """Return the next step's bias from the sum of `observe` over `num_batches` batches."""


class SignRuleConfig(BiasRuleConfig, frozen=True):
    """bias += rate * sign(mean(pairs) - pairs): DeepSeek-V3's loss-free balancing.

    Wang et al. 2024 (arXiv:2408.15664), algorithm 1, as in Megatron-LM and OLMo-core; with `centre`, as in
    torchtitan. `pairs` counts the pairs of each expert in the step, before dropping.
    """

    type: Literal["sign"] = "sign"
    rate: float = Field(default=1e-3, gt=0)
    """Change of an expert's bias per optimizer step."""
    centre: bool = False
    """Subtract the mean over the experts from each update of the biases, as torchtitan does."""

    @property
    def advice(self) -> str:
        return f"raise objective.bias_rule.rate (now {self.rate:g})"

    def observe(self, routing: Routing, bias_E: Tensor) -> Tensor:
        return pairs_per_expert(routing)

    def update(self, bias_E: Tensor, observed_E: Tensor, num_batches: int) -> Tensor:
        # mean - n as the integer sum - E * n, so that rounding cannot change the sign.
        deficit_E = observed_E.sum() - len(observed_E) * observed_E
        update_E = self.rate * deficit_E.sign().to(bias_E.dtype)
        if self.centre:
            update_E = update_E - update_E.mean()
        return bias_E + update_E


class QuantileRuleConfig(BiasRuleConfig, frozen=True):
    """Quantile balancing: the bias with which each expert would have an equal share (Megatron-LM).

    For each token, let c be its (k+1)-th largest score + bias; the token chooses expert i if
    score_i + bias_i > c. Sort score_i - c over the T tokens and take value number floor(T k / E) + 1 from the
    top. Minus this value is the new bias_i, with which T k / E tokens choose expert i. The step is
    coordinate descent on the dual of balanced assignment. The bias is a moving average with mean 0; quantiles
    are averaged over the batches of a step, as in Megatron-LM (`qb_dual_update`).
    """

    type: Literal["quantile"] = "quantile"
    ema: float = Field(default=0.9, ge=0, lt=1)
    """Weight of the old bias in the moving average, at each optimizer step."""

    def observe(self, routing: Routing, bias_E: Tensor) -> Tensor:
        scores_TE = routing.require("scores_TE", "objective.bias_rule 'quantile'").detach()
        num_tokens, num_experts = scores_TE.shape
        k = len(routing.token_indices_N) // max(num_tokens, 1)
        if num_tokens == 0 or k == num_experts:  # no choice: keep the bias
            return -bias_E
        cutoff_T1 = (scores_TE + bias_E).topk(k + 1, dim=-1).values[:, -1:]
        excess_TE = scores_TE - cutoff_T1
        if routing.mask_T is not None:
            excess_TE = excess_TE.masked_fill(~routing.mask_T.unsqueeze(-1), -torch.inf)
        num_real = routing.num_real_tokens
        rank = (num_real * k // num_experts).clamp(max=num_tokens - 1)
        quantile_E = excess_TE.sort(dim=0, descending=True).values[rank]
        return torch.where(quantile_E.isfinite(), quantile_E, -bias_E).to(bias_E.dtype)

    def update(self, bias_E: Tensor, observed_E: Tensor, num_batches: int) -> Tensor:
        target_E = -observed_E / num_batches
        moved_E = self.ema * bias_E + (1 - self.ema) * target_E
        return moved_E - moved_E.mean()


class SparsityRuleConfig(Config, frozen=True):
    """ReMoE's rule for the weight of the ReLU sparsity loss, for 'relu' routers only.

    Wang et al. 2024 (arXiv:2412.14711), equation 8: one weight for the whole model.
    """

    initial_weight: float = Field(default=1e-8, gt=0)
    """Weight of the ReLU sparsity loss in the first step."""
    factor: float = Field(default=1.2, gt=1)
    """Factor that multiplies the weight of the ReLU sparsity loss after a step with more than k experts per
    token, and divides it after a step with fewer."""


def sparsity_weight_after(weight: Tensor, density: Tensor, factor: float) -> Tensor:
    """Return the weight of `relu_sparsity_loss` for the next step (ReMoE, arXiv:2412.14711, equation 8).

    Args:
        weight: weight of the current step.
        density: experts per token divided by `SparsityTargetRouting.target_k`, averaged over the step's
            batches, ranks and layers; above 1 the sparsity is below its target, 1 - k / E.
        factor: multiplies the weight if the density is above 1, and divides it if below.
    """
    return weight * factor ** (density - 1).sign()
