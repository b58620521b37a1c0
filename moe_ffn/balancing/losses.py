"""Balancing losses: pure functions of one layer's Routing, with coefficient 1.

T tokens, E experts, N (token, expert) pairs
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_ffn.outputs import Routing, count_pairs


def load_balancing_loss(routing: Routing) -> Tensor:
    """E * sum_i f_i P_i (Fedus et al. 2021, Switch Transformer, equation 4).

    f_i is the share of the pairs that name expert i, counted before dropping and without padding;
    P_i is the mean normalised score of expert i. The counts carry no gradient: it flows through P
    alone. A balanced router scores 1 for every k and E (Switch's reference code counts tokens
    instead of pairs, and scores k there).

    Returns:
        a scalar; 0 where no token is real.
    """
    return routing.num_experts * (expert_load(routing) * mean_scores(routing)).sum()


def router_z_loss(routing: Routing) -> Tensor:
    """mean_t logsumexp(logits_t)^2 (Zoph et al. 2022, ST-MoE, equation 5): keeps logits small."""
    return mean_over_tokens(routing.logits_TE.logsumexp(dim=-1).square(), routing)


BALANCING_LOSSES: dict[str, Callable[[Routing], Tensor]] = {
    "load_balance": load_balancing_loss,
    "router_z": router_z_loss,
}
"""Every balancing loss under the name of its weight in the objective and of its metric."""


def pairs_per_expert(routing: Routing) -> Tensor:
    """int64 (E,): the real pairs that name each expert, before dropping."""
    expert_ids_N = routing.expert_ids_N.masked_fill(~routing.real_N, routing.num_experts)
    return count_pairs(expert_ids_N, routing.num_experts + 1)[:-1]


def expert_load(routing: Routing) -> Tensor:
    """(E,): the share of the real pairs that name each expert, before dropping; 1/E at balance."""
    pairs_E = pairs_per_expert(routing).to(routing.scores_TE.dtype)
    return pairs_E / pairs_E.sum().clamp(min=1)


def normalized_scores(routing: Routing) -> Tensor:
    """(T, E): each token's scores, divided by their sum."""
    scores_TE = routing.scores_TE
    tiny = torch.finfo(scores_TE.dtype).tiny
    return scores_TE / scores_TE.sum(dim=-1, keepdim=True).clamp(min=tiny)


def mean_scores(routing: Routing) -> Tensor:
    """(E,): each expert's score, normalised over the experts and averaged over the real tokens."""
    return mean_over_tokens(normalized_scores(routing), routing)


def mean_over_tokens(values: Tensor, routing: Routing) -> Tensor:
    """The mean of (T, ...) values over the real tokens; 0 where there are none."""
    if routing.mask_T is None:
        return values.sum(dim=0) / max(routing.num_tokens, 1)
    real = routing.mask_T.view(-1, *[1] * (values.ndim - 1))
    return values.masked_fill(~real, 0).sum(dim=0) / routing.num_real_tokens.clamp(min=1)
