"""Top-k routing by softmax or sigmoid scores, with groups of experts and a correction bias.

T tokens, D model width, E experts, K experts per token
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from pydantic import Field, model_validator
from torch import Tensor, nn

from moe_ffn.config.base import MAX_COUNT, Config
from moe_ffn.kernels.routing import top_k
from moe_ffn.outputs import AlwaysRouting, Routing, TokenContext
from moe_ffn.routing.base import (
    LinearRouter,
    LinearTopKConfig,
    Router,
    constant_weight_error,
    routing_of_pairs,
)
from moe_ffn.routing.hash import hash_of


class GroupsConfig(Config, frozen=True):
    """Node-limited routing: a token's experts come from a few groups of consecutive experts (DeepSeek-V3)."""

    num_groups: int = Field(ge=1, le=MAX_COUNT)
    """Number of groups, all of equal size."""
    keep: int = Field(ge=1, le=MAX_COUNT)
    """Number of groups that a token may use: those with the highest scores."""
    score_top: int | None = Field(default=2, ge=1, le=MAX_COUNT)
    """A group's score is the sum of this many of its best expert scores: 2 in DeepSeek-V3; null means
    k / keep, as in Megatron-LM."""

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


class TokenTableConfig(Config, frozen=True):
    """Fixed experts for each token of the vocabulary, as in the first layers of DeepSeek-V4."""

    vocab_size: int = Field(ge=1, le=MAX_COUNT)
    """Number of rows of the table."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the hash function that fills the table, as in the router `hash`."""


class TopKOptionsConfig(LinearTopKConfig, frozen=True):
    """Options that softmax and sigmoid top-k share."""

    omitted_defaults: ClassVar[frozenset[str]] = frozenset(
        {"logit_scale", "renormalize_p", "select_by"}
    )

    renormalize: bool = False
    """Divide the k weights by their sum. Not for k = 1: the weight would be a constant 1."""
    renormalize_p: float = Field(default=1.0, ge=1, le=100)
    """Order of the norm by which `renormalize` divides: 1 is the sum, 2 the Euclidean norm."""
    renormalize_eps: float = Field(default=0.0, ge=0, lt=1)
    """Added to the norm by which `renormalize` divides."""
    scale: float = Field(default=1.0, gt=0, le=MAX_COUNT)
    """Multiplies the weights (DeepSeek's routed scaling factor)."""
    learned_scale: Literal["global", "expert"] | None = None
    """Learned factor of the weights: one for all experts (Inkling), or one per expert (Gemma 4)."""
    select_by: Literal["score", "logit"] = "score"
    """Rank experts by score or by logit (plus the correction bias); the weight is the score either way."""
    num_always: int = Field(default=0, ge=0, le=MAX_COUNT)
    """The last n experts process every token, in addition to its k chosen ones. All k + n weights are
    normalised together. These are shared experts within the router (Inkling); they have no capacity, and
    nothing balances them."""
    token_table: TokenTableConfig | None = None
    """Look up each token's k experts in a fixed table by token id; the router's scores only set the weights.
    Off by default."""
    groups: GroupsConfig | None = None
    """Limit each token to a few groups of experts; off by default."""
    correction_bias: bool = False
    """Select by score + bias and weight by the score alone; `objective.bias_rule` moves the bias
    towards balance (Wang et al. 2024, arXiv:2408.15664)."""

    is_tokenwise: ClassVar[bool] = True

    @model_validator(mode="after")
    def _keep_the_router_gradient(self) -> TopKOptionsConfig:
        option = self.counts[-1]
        if getattr(self, option) + self.num_always == 1 and self.renormalize:
            cause = f"renormalize (true) with {option} (1)"
            raise constant_weight_error(cause, f"renormalize: false or {option} >= 2")
        return self

    @model_validator(mode="after")
    def _reject_options_without_effect(self) -> TopKOptionsConfig:
        for option in ("renormalize_p", "renormalize_eps"):
            value = getattr(self, option)
            if value != type(self).model_fields[option].default and not self.renormalize:
                raise ValueError(
                    f"{option} ({value:g}) has no effect, because renormalize is false; set renormalize: "
                    f"true, or leave {option} out"
                )
        if self.token_table is not None:
            for option, off in (("groups", "null"), ("correction_bias", "false")):
                if getattr(self, option):
                    raise ValueError(
                        f"{option} changes which experts the scores choose, but token_table chooses them "
                        f"by the token's id; set {option}: {off}, or remove token_table"
                    )
        return self

    @property
    def option_that_fixes_choice(self) -> str | None:
        return None if self.token_table is None else "token_table"

    @property
    def option_that_changes_ranking(self) -> str | None:
        if self.select_by == "logit":
            return "select_by (logit)"
        return None if self.groups is None else "groups"

    def experts_per_token(self, num_experts: int) -> float:
        return self.k + self.num_always

    def check_num_experts(self, num_experts: int) -> None:
        for option in self.counts:
            k = getattr(self, option)
            if self.num_always and k > num_experts - self.num_always:
                raise ValueError(
                    f"router.{option} ({k}) must not exceed the experts to choose from "
                    f"({num_experts - self.num_always}: num_experts {num_experts} minus router.num_always "
                    f"{self.num_always}); lower one of them or raise num_experts"
                )
        super().check_num_experts(num_experts)
        if self.groups is not None:
            self.groups.check(self.k, num_experts - self.num_always)

    def num_params(self, d_model: int, num_experts: int) -> int:
        scales = {None: 0, "global": 1, "expert": num_experts}[self.learned_scale]
        return super().num_params(d_model, num_experts) + scales


class TopKRouterConfig(TopKOptionsConfig, frozen=True):
    """Softmax top-k: each token goes to its k most probable experts.

    k = 1 is Switch (Fedus et al. 2021, arXiv:2101.03961); k = 2 with `renormalize` is Mixtral
    (arXiv:2401.04088); k = 8 without `renormalize` is OLMoE (arXiv:2409.02060); `softmax: after` is GPT-OSS.
    """

    type: Literal["top_k"] = "top_k"
    softmax: Literal["before", "after"] = "before"
    """Softmax `before` the selection, over all experts, or `after` it, over the k chosen experts."""

    @model_validator(mode="after")
    def _keep_the_router_gradient_after_selection(self) -> TopKRouterConfig:
        if self.k + self.num_always == 1 and self.softmax == "after":
            raise constant_weight_error("softmax (after) with k (1)", "softmax: before or k >= 2")
        return self

    def build(self, d_model: int, num_experts: int) -> Router:
        return TopKRouter(self, d_model, num_experts)


class SigmoidTopKRouterConfig(TopKOptionsConfig, frozen=True):
    """Sigmoid top-k: each expert is scored independently, as in DeepSeek-V3 (arXiv:2412.19437)."""

    omitted_defaults: ClassVar[frozenset[str]] = TopKOptionsConfig.omitted_defaults | {"score"}

    type: Literal["sigmoid_top_k"] = "sigmoid_top_k"
    score: Literal["sigmoid", "sqrt_softplus"] = "sigmoid"
    """The score of a logit z: sigmoid(z), or sqrt(log(1 + exp(z))), as in DeepSeek-V4."""
    renormalize: bool = True
    """Divide the k weights by their sum. Not for k = 1: the weight would be a constant 1."""
    correction_bias: bool = True
    """Select by score + bias and weight by the score alone; `objective.bias_rule` moves the bias
    towards balance (Wang et al. 2024, arXiv:2408.15664)."""

    @property
    def option_that_changes_ranking(self) -> str | None:
        return (
            super().option_that_changes_ranking
            if self.score == "sigmoid"
            else "score (sqrt_softplus)"
        )

    def build(self, d_model: int, num_experts: int) -> Router:
        return SigmoidTopKRouter(self, d_model, num_experts)


class BaseTopKRouter(LinearRouter):
    """Base of top-k routers: score + correction bias ranks the experts, the score alone weights them.

    With `groups`, only experts of the best groups are ranked.

    `TokenContext.expert_ids` replaces the selection; the weights still come from the router's scores, with
    gradient (R3, arXiv:2510.11370, section 3).
    """

    replays: ClassVar[bool] = True

    def __init__(self, config: TopKOptionsConfig, d_model: int, num_experts: int) -> None:
        super().__init__(config, d_model, num_experts)
        self.weight_scale = None
        if config.learned_scale is not None:
            size = num_experts if config.learned_scale == "expert" else 1
            self.weight_scale = nn.Parameter(torch.ones(size))
        self.num_selectable = num_experts - config.num_always
        self.table_VK: Tensor | None
        self.register_buffer("table_VK", None)
        if config.token_table is not None:
            ids_V1 = torch.arange(config.token_table.vocab_size).unsqueeze(-1)
            first_V1 = hash_of(ids_V1, config.token_table.seed)
            self.table_VK = (first_V1 + torch.arange(config.k)) % self.num_selectable

    @property
    def k(self) -> int:
        """Number of experts to choose, without those of `num_always`."""
        return self.config.k

    def route(self, logits_TE: Tensor, scores_TE: Tensor, context: TokenContext) -> Routing:
        """Select experts, weigh them, and build the Routing."""
        expert_ids_TK = self.select(scores_TE, context, logits_TE)
        weights_TK = self.weigh(scores_TE, expert_ids_TK, logits_TE)
        fields: dict[str, Any] = {}
        if num_always := self.config.num_always:
            all_N = torch.ones_like(expert_ids_TK, dtype=torch.bool).flatten()
            fields = {"kind": AlwaysRouting, "selected_N": all_N, "num_always": num_always}
        return routing_of_pairs(weights_TK, expert_ids_TK, logits_TE, scores_TE, context, **fields)

    def select(self, scores_TE: Tensor, context: TokenContext, logits_TE: Tensor) -> Tensor:
        """Return the experts of each token, int64 (T, K): `context.expert_ids`, or the best ones in order."""
        if context.expert_ids is not None:
            return context.expert_ids
        config, first_always = self.config, self.num_selectable
        if self.table_VK is not None:
            chosen_TK = _rows_of_ids(self.table_VK, context)
        else:
            values_TE = scores_TE if config.select_by == "score" else logits_TE
            ranking_TE = self.ranking(values_TE)[:, :first_always]
            if config.groups is not None:
                allowed_TE = experts_of_best_groups(ranking_TE, config.groups, self.k)
                # Not 0: experts with a negative score + bias would lose against masked experts.
                ranking_TE = ranking_TE.masked_fill(~allowed_TE, -torch.inf)
            chosen_TK = top_k(ranking_TE, self.k)
        if not config.num_always:
            return chosen_TK
        end = first_always + config.num_always
        always = torch.arange(first_always, end, device=chosen_TK.device)
        # Not `len(chosen_TK)`: torch.export would fix the number of tokens.
        return torch.cat([chosen_TK, always.expand(chosen_TK.shape[0], -1)], dim=-1)

    def weigh(self, scores_TE: Tensor, expert_ids_TK: Tensor, logits_TE: Tensor) -> Tensor:
        """Return the weights (T, K): the experts' scores, renormalised if configured, times the scales."""
        return self.normalized(scores_TE.gather(-1, expert_ids_TK), expert_ids_TK)

    def normalized(self, weights_TK: Tensor, expert_ids_TK: Tensor) -> Tensor:
        """Divide the weights by their norm if configured, and multiply them by the scales."""
        config = self.config
        if config.renormalize:
            norm_T1 = weights_TK.sum(dim=-1, keepdim=True)
            if config.renormalize_p != 1:
                norm_T1 = torch.linalg.vector_norm(
                    weights_TK, ord=config.renormalize_p, dim=-1, keepdim=True
                )
            norm_T1 = norm_T1 + config.renormalize_eps if config.renormalize_eps else norm_T1
            weights_TK = weights_TK / norm_T1.clamp(min=torch.finfo(weights_TK.dtype).tiny)
        if self.weight_scale is not None:
            scale = self.weight_scale.to(weights_TK.dtype)
            weights_TK = weights_TK * (scale[expert_ids_TK] if len(scale) > 1 else scale)
        return weights_TK if config.scale == 1 else weights_TK * config.scale


class TopKRouter(BaseTopKRouter):
    """p = softmax(W x) weights the k experts with the largest p; `softmax: after`, of their logits only."""

    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        logits_TE = self.logits(x_TD)
        return self.route(logits_TE, logits_TE.softmax(dim=-1), context)

    def weigh(self, scores_TE: Tensor, expert_ids_TK: Tensor, logits_TE: Tensor) -> Tensor:
        if self.config.softmax == "before":
            return super().weigh(scores_TE, expert_ids_TK, logits_TE)
        return self.normalized(logits_TE.gather(-1, expert_ids_TK).softmax(dim=-1), expert_ids_TK)


class SigmoidTopKRouter(BaseTopKRouter):
    """s = sigmoid(W x); the k experts with the largest s + bias are chosen, with weights s (eq. 12 to 16)."""

    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        logits_TE = self.logits(x_TD)
        if self.config.score == "sigmoid":
            return self.route(logits_TE, logits_TE.sigmoid(), context)
        return self.route(logits_TE, F.softplus(logits_TE).sqrt(), context)


def _rows_of_ids(table_VK: Tensor, context: TokenContext) -> Tensor:
    """Return the row of each token id, and row 0 for padding, whose ids may be out of range; ValueError
    without ids, or, on a CPU and not compiled, for an id that has no row.
    """
    if context.token_ids is None:
        raise ValueError(
            "router.token_table routes by token id: call the block with TokenContext(token_ids=...)"
        )
    ids_T = context.token_ids.long()
    ids_T = ids_T if context.mask is None else ids_T.masked_fill(~context.mask, 0)
    try:
        # Not table_VK[ids_T], which reads the last row for -1.
        return table_VK.index_select(0, ids_T)
    except IndexError as error:
        raise ValueError(
            f"token_ids must lie in [0, {len(table_VK)}), the rows of router.token_table, but range from "
            f"{int(ids_T.min())} to {int(ids_T.max())}"
        ) from error


def experts_of_best_groups(ranking_TE: Tensor, groups: GroupsConfig, k: int) -> Tensor:
    """Return bool (T, E), True in the `keep` groups with the highest scores (DeepSeek-V3, section 2.1.2). A
    score sums a group's best experts: two in DeepSeek-V3 and torchtitan, k / keep in Megatron-LM.
    """
    ranking_TGM = rearrange(ranking_TE, "t (g m) -> t g m", g=groups.num_groups)
    best_TGM = ranking_TGM.topk(groups.experts_scored(k), dim=-1).values
    best_groups = best_TGM.sum(dim=-1).topk(groups.keep, dim=-1).indices
    kept_TG = torch.zeros_like(ranking_TGM[..., 0], dtype=torch.bool).scatter_(1, best_groups, True)
    return repeat(kept_TG, "t g -> t (g m)", m=ranking_TGM.shape[-1])
