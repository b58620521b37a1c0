"""Elastic top-k routing: training draws k, so that evaluation may use any k.

T tokens, D model width, E experts, K listed experts per token
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from moe_ffn.config.base import MAX_COUNT
from moe_ffn.outputs import AlwaysRouting, Routing, TokenContext, VariableKRouting
from moe_ffn.routing.base import Router, routing_of_pairs
from moe_ffn.routing.top_k import BaseTopKRouter, TopKOptionsConfig


class ElasticTopKRouterConfig(TopKOptionsConfig, frozen=True):
    """Softmax top-k whose k is drawn in training, so that evaluation may use any k (Matryoshka MoE).

    Wang et al. 2025, arXiv:2509.26520: every layer draws k from U[k_min, k_max] for each optimizer step, so a
    token's first experts learn to suffice, and further experts refine them. `moe-ffn evaluate --k 1..8`
    compares values of k. Training FLOPs count the mean, (k_min + k_max) / 2.
    """

    type: Literal["elastic_top_k"] = "elastic_top_k"
    k: int = Field(default=2, ge=1, le=MAX_COUNT)
    """Experts per token in evaluation."""
    k_min: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Minimum of the experts per token in training. With `renormalize`, a step with k = 1 trains the router
    only by balancing losses, because the weight is a constant 1."""
    k_max: int = Field(default=3, ge=1, le=MAX_COUNT)
    """Maximum of the experts per token in training."""

    counts: ClassVar[tuple[str, ...]] = ("k", "k_min", "k_max")
    draws_k: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check_range(self) -> ElasticTopKRouterConfig:
        if self.k_min > self.k_max:
            raise ValueError(
                f"k_min ({self.k_min}) must not exceed k_max ({self.k_max}); lower k_min or raise k_max"
            )
        for option in ("groups", "token_table"):
            if getattr(self, option) is not None:
                raise ValueError(
                    f"{option} chooses among the experts for one k, but elastic_top_k draws k; set {option}: "
                    "null, or type: top_k"
                )
        return self

    def pairs_per_token(self, num_experts: int, seq_len: int) -> float:
        """Return the mean number of experts per token in training."""
        return (self.k_min + self.k_max) / 2 + self.num_always

    def with_k(self, k: int) -> Self | None:
        return self.model_copy(update=dict.fromkeys(self.counts, k))

    def describe(self) -> str:
        return f"{super().describe()} of {self.k_min}..{self.k_max}"

    def build(self, d_model: int, num_experts: int) -> Router:
        return ElasticTopKRouter(self, d_model, num_experts)


class ElasticTopKRouter(BaseTopKRouter):
    """p = softmax(W x); in training the k_l experts with the largest p, k_l ~ U[k_min, k_max], of k_max
    listed ones for constant shapes; in evaluation `top_k`.
    """

    replays: ClassVar[bool] = False
    k_of_step: Tensor | None = None
    """k_l of the current optimizer step, int64 scalar on the CPU; None: each forward pass draws one."""

    @property
    def k(self) -> int:
        return self.config.k_max if self.training else self.config.k

    def begin_step(self, generator: torch.Generator) -> None:
        low, high = self.config.k_min, self.config.k_max
        self.k_of_step = torch.randint(low, high + 1, (), generator=generator)

    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        logits_TE = self.logits(x_TD)
        scores_TE = logits_TE.softmax(dim=-1)
        if not self.training:
            return self.route(logits_TE, scores_TE, context)
        k_of_step, device = self.k_of_step, x_TD.device
        if k_of_step is None:
            k_of_step = torch.randint(self.config.k_min, self.k + 1, (), device=device)
        expert_ids_TK = self.select(scores_TE, context, logits_TE)
        ranks_K = torch.arange(expert_ids_TK.shape[-1], device=device)
        # The last experts are those of `num_always`.
        chosen_TK = ((ranks_K < k_of_step) | (ranks_K >= self.k)).expand_as(expert_ids_TK)
        weights_TK = torch.where(chosen_TK, scores_TE.gather(-1, expert_ids_TK), 0)
        fields: dict[str, Any] = {"kind": VariableKRouting}
        if num_always := self.config.num_always:
            fields = {"kind": AlwaysRouting, "num_always": num_always}
        return routing_of_pairs(
            self.normalized(weights_TK, expert_ids_TK),
            expert_ids_TK,
            logits_TE,
            scores_TE,
            context,
            selected_N=chosen_TK.flatten(),
            **fields,
        )
