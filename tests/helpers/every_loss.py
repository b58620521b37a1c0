"""Balancing losses as functions of one Routing, and Routings with the tables that they read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from moe_ffn.balancing.losses import BALANCING_LOSSES, BalancingLoss
from moe_ffn.outputs import NoisyRouting, Routing, SparsityTargetRouting, TokenContext
from moe_ffn.routing.base import routing_of_pairs


@dataclass(frozen=True, kw_only=True)
class RoutingForEveryLoss(NoisyRouting, SparsityTargetRouting):
    """Routing that has what any loss reads."""


def for_every_loss(routing: Routing, **more: Any) -> RoutingForEveryLoss:
    """Return a routing with a target and selection probabilities added, where it has none."""
    added = {
        "selected_N": torch.ones_like(routing.dropped_N),
        "target_k": 2,
        "selection_probs_TE": routing.scores_TE,
    }
    own = {field.name: getattr(routing, field.name) for field in fields(routing)}
    return RoutingForEveryLoss(**{**added, **own, **more})


def of_one_layer(loss: BalancingLoss) -> Callable[[Routing], Tensor]:
    """Return the loss of a model with one layer, whose step is one batch, even if it skips that layer."""
    everywhere = replace(loss, applies_to=lambda _: True)

    def value(routing: Routing) -> Tensor:
        found = everywhere.value({"layer_00": routing})
        assert found is not None
        return found

    return value


LOSSES = {name: of_one_layer(loss) for name, loss in BALANCING_LOSSES.items()}

LOAD_BALANCING = ["load_balance", "load_balance_sequence", "load_balance_pooled"]
LOAD_BALANCING += ["load_balance_global"]
"""Losses that are E * sum_i f_i P_i."""


def routing_of(
    logits_TE: Tensor, k: int = 2, mask: Tensor | None = None, sequence_length: int | None = None
) -> Routing:
    """Softmax top-k, with a `target_k` and the selection probabilities of some noise."""
    scores_TE = logits_TE.softmax(dim=-1)
    weights_TK, expert_ids_TK = scores_TE.topk(k, dim=-1)
    context = TokenContext(mask=mask, sequence_length=sequence_length)
    routing = routing_of_pairs(weights_TK, expert_ids_TK, logits_TE, scores_TE, context)
    return for_every_loss(routing, target_k=k, selection_probs_TE=logits_TE.sigmoid())


def collapsed(num_tokens: int, k: int, num_experts: int, first: int = 0) -> Routing:
    """Routing of every token to experts `first` .. `first + k - 1`, which share all of the score."""
    scores_TE = torch.zeros(num_tokens, num_experts, dtype=torch.float64)
    scores_TE[:, first : first + k] = 1 / k
    return _decided(scores_TE, k)


def balanced(k: int, num_experts: int) -> Routing:
    """E tokens that take turns: token t goes to experts t .. t + k - 1, counted in a circle."""
    scores_TE = torch.zeros(num_experts, num_experts, dtype=torch.float64)
    for token in range(num_experts):
        for i in range(k):
            scores_TE[token, (token + i) % num_experts] = 1 / k
    return _decided(scores_TE, k)


def _decided(scores_TE: Tensor, k: int) -> Routing:
    weights_TK, expert_ids_TK = scores_TE.topk(k, dim=-1)
    routing = routing_of_pairs(
        weights_TK, expert_ids_TK, scores_TE.log(), scores_TE, TokenContext()
    )
    return for_every_loss(routing, target_k=k, selection_probs_TE=k * scores_TE)


def random_logits(num_tokens: int, num_experts: int, seed: int = 0) -> Tensor:
    """float64, lopsided: later experts are preferred."""
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    return logits_TE + torch.linspace(0, 2, num_experts, dtype=torch.float64)
