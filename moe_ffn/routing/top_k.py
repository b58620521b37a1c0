"""Top-k routing: softmax and sigmoid scores, within groups of experts and with a correction bias.

T tokens, D model width, E experts, K experts per token
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from einops import rearrange, repeat
from pydantic import Field, model_validator
from torch import Tensor

from moe_ffn.config import MAX_COUNT, Config
from moe_ffn.outputs import Routing, TokenContext
from moe_ffn.routing.base import LinearRouter, LinearTopKConfig, Router, routing_of_pairs


class GroupsConfig(Config, frozen=True):
    """Node-limited routing: a token's experts come from a few groups of neighbours (DeepSeek-V3)."""

    num_groups: int = Field(ge=1, le=MAX_COUNT)
    """Groups of equal size that the experts are divided into."""
    keep: int = Field(ge=1, le=MAX_COUNT)
    """Groups a token may go to, the ones with the highest score."""
    score_top: int | None = Field(default=2, ge=1, le=MAX_COUNT)
    """A group's score is the sum of its best experts' scores, this many of them: 2 in DeepSeek-V3;
    null means k / keep, Megatron-LM's rule."""

    def experts_scored(self, k: int) -> int:
        return k // self.keep if self.score_top is None else self.score_top

    def check(self, k: int, num_experts: int) -> None:
        if num_experts % self.num_groups:
            divisor = next(n for n in range(self.num_groups, 0, -1) if num_experts % n == 0)
            raise ValueError(
                f"router.groups.num_groups ({self.num_groups}) must divide the number of experts "
                f"({num_experts}); use a divisor of it, such as {divisor}"
            )
        if self.keep > self.num_groups:
            raise ValueError(
                f"router.groups.keep ({self.keep}) must not exceed router.groups.num_groups "
                f"({self.num_groups}); lower router.groups.keep"
            )
        size = num_experts // self.num_groups
        if k > self.keep * size:
            raise ValueError(
                f"router.k ({k}) must not exceed the experts a token may choose from "
                f"({self.keep * size}: router.groups.keep {self.keep}, each group of {size}); "
                "raise router.groups.keep or lower router.k"
            )
        if self.experts_scored(k) > size:
            raise ValueError(
                f"router.groups.score_top ({self.score_top}) must not exceed the experts of a group "
                f"({size}); lower router.groups.score_top or router.groups.num_groups"
            )
        if self.experts_scored(k) < 1:
            raise ValueError(
                f"router.groups.score_top (null) scores a group by k / keep experts, but router.k "
                f"({k}) is below router.groups.keep ({self.keep}); set router.groups.score_top: 1 or "
                "lower router.groups.keep"
            )


class TopKOptionsConfig(LinearTopKConfig, frozen=True):
    """The options that softmax and sigmoid top-k share."""

    renormalize: bool = False
    """Divide the k weights by their sum. Not for k = 1: the weight would be a constant 1."""
    scale: float = Field(default=1.0, gt=0, le=MAX_COUNT)
    """Multiplies the weights (DeepSeek's routed scaling factor)."""
    groups: GroupsConfig | None = None
    """Limit each token to a few groups of experts; off by default."""
    correction_bias: bool = False
    """Select by score + bias and weight by the score alone; `objective.bias_rule` moves the bias
    towards balance (Wang et al. 2024, arXiv:2408.15664)."""

    by_token: ClassVar[bool] = True

    @model_validator(mode="after")
    def _keep_the_router_gradient(self) -> TopKOptionsConfig:
        if self.k == 1 and self.renormalize:
            raise ValueError(
                "renormalize (true) with k (1) makes every weight a constant 1, so the router would "
                "never learn; set renormalize: false or k >= 2"
            )
        return self

    @property
    def has_correction_bias(self) -> bool:
        return self.correction_bias

    def check_num_experts(self, num_experts: int) -> None:
        super().check_num_experts(num_experts)
        if self.groups is not None:
            self.groups.check(self.k, num_experts)


class TopKRouterConfig(TopKOptionsConfig, frozen=True):
    """Softmax top-k: each token goes to its k most probable experts.

    k = 1 is Switch (Fedus et al. 2021, arXiv:2101.03961); k = 2 with `renormalize` is Mixtral
    (arXiv:2401.04088), without it OLMoE (arXiv:2409.02060); `softmax: after` is GPT-OSS.
    """

    type: Literal["top_k"] = "top_k"
    softmax: Literal["before", "after"] = "before"
    """before: weights are probabilities among all experts; after: among the k chosen ones."""

    @model_validator(mode="after")
    def _keep_the_router_gradient_after_selection(self) -> TopKRouterConfig:
        if self.k == 1 and self.softmax == "after":
            raise ValueError(
                "softmax (after) with k (1) makes every weight a constant 1, so the router would "
                "never learn; set softmax: before or k >= 2"
            )
        return self

    def build(self, d_model: int, num_experts: int) -> Router:
        return TopKRouter(self, d_model, num_experts)


class SigmoidTopKRouterConfig(TopKOptionsConfig, frozen=True):
    """Sigmoid top-k: every expert is scored by itself, as in DeepSeek-V3 (arXiv:2412.19437)."""

    type: Literal["sigmoid_top_k"] = "sigmoid_top_k"
    renormalize: bool = True
    """Divide the k weights by their sum. Not for k = 1: the weight would be a constant 1."""
    correction_bias: bool = True
    """Select by score + bias and weight by the score alone; `objective.bias_rule` moves the bias
    towards balance (Wang et al. 2024, arXiv:2408.15664)."""

    def build(self, d_model: int, num_experts: int) -> Router:
        return SigmoidTopKRouter(self, d_model, num_experts)


class SelectingRouter(LinearRouter):
    """A router that selects by score + correction bias, within the best groups, and weighs by the score.

    `TokenContext.expert_ids` take the place of the selection; the weights, and their gradient, are those of
    the scores all the same (R3, arXiv:2510.11370, section 3).
    """

    replays: ClassVar[bool] = True

    def __init__(self, config: TopKOptionsConfig, d_model: int, num_experts: int) -> None:
        super().__init__(config, d_model, num_experts)
        if config.correction_bias:
            bias_E = torch.zeros(num_experts, dtype=torch.float32)  # whatever torch's default is
            self.register_buffer("correction_bias_E", bias_E)

    def select(self, scores_TE: Tensor, context: TokenContext) -> Tensor:
        """int64 (T, K), the best expert first; or those that the context names."""
        if context.expert_ids is not None:
            return context.expert_ids
        k, groups = self.config.k, self.config.groups
        ranking_TE = scores_TE.detach()
        if self.correction_bias_E is not None:
            ranking_TE = ranking_TE + self.correction_bias_E
        if groups is not None:
            allowed_TE = experts_of_best_groups(ranking_TE, groups, k)
            # -inf and not 0, under which a negative bias would let the masked experts win.
            ranking_TE = ranking_TE.masked_fill(~allowed_TE, -torch.inf)
        return ranking_TE.topk(k, dim=-1).indices

    def weigh(self, scores_TE: Tensor, expert_ids_TK: Tensor) -> Tensor:
        """(T, K), the scores of these experts, divided by their sum if asked, times the scale."""
        weights_TK = scores_TE.gather(-1, expert_ids_TK)
        if self.config.renormalize:
            tiny = torch.finfo(weights_TK.dtype).tiny
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True).clamp(min=tiny)
        scale = self.config.scale
        return weights_TK if scale == 1 else weights_TK * scale


class TopKRouter(SelectingRouter):
    """p = softmax(W x); a token's k largest p choose its experts and are their weights.

    With `softmax: after`, the weights are the softmax of the k chosen logits instead.
    """

    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        logits_TE = self.logits(x_TD)
        scores_TE = logits_TE.softmax(dim=-1)
        expert_ids_TK = self.select(scores_TE, context)
        if self.config.softmax == "after":
            weights_TK = logits_TE.gather(-1, expert_ids_TK).softmax(dim=-1) * self.config.scale
        else:
            weights_TK = self.weigh(scores_TE, expert_ids_TK)
        return routing_of_pairs(weights_TK, expert_ids_TK, logits_TE, scores_TE, context)


class SigmoidTopKRouter(SelectingRouter):
    """s = sigmoid(W x); the k largest s + bias choose the experts, weighted by s (equations 12 to 16)."""

    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        logits_TE = self.logits(x_TD)
        scores_TE = logits_TE.sigmoid()
        expert_ids_TK = self.select(scores_TE, context)
        weights_TK = self.weigh(scores_TE, expert_ids_TK)
        return routing_of_pairs(weights_TK, expert_ids_TK, logits_TE, scores_TE, context)


def experts_of_best_groups(ranking_TE: Tensor, groups: GroupsConfig, k: int) -> Tensor:
    """Bool (T, E): True in the `keep` groups with the highest scores (DeepSeek-V3, section 2.1.2).

    A group's score is the sum over its best experts: two of them in DeepSeek-V3 and its copies in
    torchtitan and Hugging Face, k / keep of them in Megatron-LM.
    """
    ranking_TGM = rearrange(ranking_TE, "t (g m) -> t g m", g=groups.num_groups)
    best_TGM = ranking_TGM.topk(groups.experts_scored(k), dim=-1).values
    best_groups = best_TGM.sum(dim=-1).topk(groups.keep, dim=-1).indices
    kept_TG = torch.zeros_like(ranking_TGM[..., 0], dtype=torch.bool).scatter_(1, best_groups, True)
    return repeat(kept_TG, "t g -> t (g m)", m=ranking_TGM.shape[-1])
