"""Auxiliary-loss-free balancing: rules that update a router's correction bias between optimizer steps.

A rule has two methods. `observe` returns a tensor for one batch's Routing, which the trainer sums over the
batches and ranks of a step. `update` returns the new bias from that sum.

T tokens, E experts, B bins of a histogram
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from moe_ffn.balancing.sums import Routers, pairs_per_expert, real_only
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

    def unsupported_reason(self, routers: Routers) -> str | None:
        """Return the reason why the rule cannot balance routers, with an alternative; None if it can."""
        biased = ((layer, router) for layer, router, _ in routers if router.has_correction_bias)
        return next(filter(None, (self._conflict(*each) for each in biased)), None)

    def _conflict(self, layer: str, router: Any) -> str | None:
        """Return `unsupported_reason` for one router with a correction bias."""
        return None

    @abstractmethod
    def observe(self, routing: Routing, bias_E: Tensor) -> Tensor:
        """Return a tensor to sum over the batches of a step; the router used `bias_E` for this batch."""

    @abstractmethod
    def update(self, bias_E: Tensor, observed: Tensor, num_batches: int) -> Tensor:
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

    def update(self, bias_E: Tensor, observed: Tensor, num_batches: int) -> Tensor:
        # mean - n as the integer sum - E * n, so that rounding cannot change the sign.
        deficit_E = observed.sum() - len(observed) * observed
        update_E = self.rate * deficit_E.sign().to(bias_E.dtype)
        if self.centre:
            update_E = update_E - update_E.mean()
        return bias_E + update_E


class QuantileRuleConfig(BiasRuleConfig, frozen=True):
    """Quantile balancing: the bias with which each expert would have an equal share (Megatron-LM).

    For each token, let c be its (k+1)-th largest score + bias; the token chooses expert i if
    score_i + bias_i > c. Sort c - score_i over the T tokens. Value number floor(T k / E) + 1 is the new
    bias_i, with which T k / E tokens choose expert i. The step is coordinate descent on the dual of balanced
    assignment. The bias is a moving average with mean 0; quantiles are averaged over the batches of a step,
    as in Megatron-LM (`qb_dual_update`).
    """

    type: Literal["quantile"] = "quantile"
    ema: float = Field(default=0.9, ge=0, lt=1)
    """Weight of the old bias in the moving average, at each optimizer step."""

    def _conflict(self, layer: str, router: Any) -> str | None:
        if getattr(router, "select_by", "score") == "logit":
            return (
                "assumes that a token chooses its k largest scores + bias, but the router of layer "
                f"{layer} has select_by (logit); remove it, or use bias_rule.type 'sign'"
            )
        if not router.draws_k:
            return None
        return (
            f"assumes one k, but the router of layer {layer} draws it (k_min, k_max); use bias_rule.type "
            "'sign'"
        )

    def observe(self, routing: Routing, bias_E: Tensor) -> Tensor:
        required_TE = required_biases(routing, bias_E, "objective.bias_rule 'quantile'")
        if required_TE is None:
            return bias_E.clone()
        if routing.mask_T is not None:
            required_TE = required_TE.masked_fill(~routing.mask_T.unsqueeze(-1), torch.inf)
        num_tokens, num_experts = required_TE.shape
        k = len(routing.token_indices_N) // num_tokens
        rank = (routing.num_real_tokens * k // num_experts).clamp(max=num_tokens - 1)
        quantile_E = required_TE.sort(dim=0).values[rank]
        return torch.where(quantile_E.isfinite(), quantile_E, bias_E).to(bias_E.dtype)

    def update(self, bias_E: Tensor, observed: Tensor, num_batches: int) -> Tensor:
        target_E = observed / num_batches
        moved_E = self.ema * bias_E + (1 - self.ema) * target_E
        return moved_E - moved_E.mean()


class GlobalQuantileRuleConfig(BiasRuleConfig, frozen=True):
    """Quantile balancing over all batches and ranks of an optimizer step, by a histogram (Kimi K3).

    For token t, let alpha_t be its (k+1)-th largest score + bias; expert i needs a bias of
    r_ti = alpha_t - score_ti for the token to choose it. The new bias_i is the k / E quantile of r_ti over
    the tokens of the step, minus the mean over the experts. Bins of equal width count r_ti between
    min(bias) - 1 and max(bias) + 1, where it lies if scores are between 0 and 1; the quantile is interpolated
    within its bin. Kimi K3's report, section 2.3.3 and appendix D, as in torchtitan (#4577) and Megatron-LM
    (#6637, `global_batch`).
    """

    type: Literal["global_quantile"] = "global_quantile"
    num_bins: int = Field(default=1000, ge=2, le=10**6)
    """Bins of each expert's histogram."""

    def _conflict(self, layer: str, router: Any) -> str | None:
        option = (
            "a k that is drawn (k_min, k_max)"
            if router.draws_k
            else router.option_that_changes_ranking
        )
        if option is None:
            return None
        return (
            "assumes that a token chooses its k largest scores + bias, with scores between 0 and 1, but the "
            f"router of layer {layer} has {option}; remove it, or use bias_rule.type 'sign'"
        )

    def observe(self, routing: Routing, bias_E: Tensor) -> Tensor:
        """Return int64 (E, num_bins + 1): the histogram of r_ti, then the number of pairs of each expert."""
        histogram_EB = torch.zeros(
            len(bias_E), self.num_bins, dtype=torch.int64, device=bias_E.device
        )
        required_TE = required_biases(routing, bias_E, "objective.bias_rule 'global_quantile'")
        if required_TE is not None:
            lowest, width = self._range(bias_E)
            bins_TE = ((required_TE - lowest) / width).floor().long().clamp(0, self.num_bins - 1)
            counted_TE = real_only(torch.ones_like(bins_TE), routing)
            histogram_EB.scatter_add_(1, bins_TE.t(), counted_TE.t())
        return torch.cat([histogram_EB, pairs_per_expert(routing).unsqueeze(-1)], dim=-1)

    def update(self, bias_E: Tensor, observed: Tensor, num_batches: int) -> Tensor:
        quantile_E = self.quantiles(bias_E, observed)
        return quantile_E - quantile_E.mean()

    def quantiles(self, bias_E: Tensor, observed: Tensor) -> Tensor:
        """Return the k / E quantile of each expert's histogram, (E,); `bias_E` where nothing was counted."""
        histogram_EB, pairs_E = observed[:, :-1], observed[:, -1]
        counted_EB = histogram_EB.cumsum(dim=-1)
        # k / E of the tokens is pairs / E; both sides are multiplied by E, since integers have no rounding.
        num_pairs, num_experts = pairs_E.sum(), len(pairs_E)
        bin_E1 = (num_experts * counted_EB < num_pairs).sum(dim=-1, keepdim=True)
        bin_E1 = bin_E1.clamp(max=self.num_bins - 1)
        inside_E1 = histogram_EB.gather(-1, bin_E1)
        missing_E1 = num_pairs - num_experts * (counted_EB.gather(-1, bin_E1) - inside_E1)
        fraction_E1 = missing_E1 / (num_experts * inside_E1).clamp(min=1)
        lowest, width = self._range(bias_E)
        quantile_E = lowest + width * (bin_E1 + fraction_E1).squeeze(-1)
        return torch.where(counted_EB[:, -1] > 0, quantile_E.to(bias_E.dtype), bias_E)

    def _range(self, bias_E: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lower end of the histogram, and the width of a bin."""
        lowest, highest = bias_E.min() - 1, bias_E.max() + 1
        return lowest, (highest - lowest) / self.num_bins


def required_biases(routing: Routing, bias_E: Tensor, needed_by: str) -> Tensor | None:
    """Return the bias above which each token would choose each expert, (T, E); see `quantile` rules.

    Args:
        bias_E: the bias that the router used.
        needed_by: name of the rule, for `Routing.require`.

    Returns:
        The (k+1)-th largest score + bias of the token, minus the score. None if there is no choice: no
        tokens, or k = E.
    """
    scores_TE = routing.require("scores_TE", needed_by).detach()
    num_tokens, num_experts = scores_TE.shape
    k = len(routing.token_indices_N) // max(num_tokens, 1)
    if num_tokens == 0 or k == num_experts:
        return None
    return (scores_TE + bias_E).topk(k + 1, dim=-1).values[:, -1:] - scores_TE


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
