"""Balancing losses and expert usage of routings without (T, E) tables (product keys), from only their pairs.

No tensor here has length E. The pairs of one expert form a group, and there are at most N groups.

T tokens, E experts, N (token, expert) pairs, B sequences
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ffn.balancing.sums import divisor, finite_log
from moe_ffn.outputs import PairsOnlyRouting, Routing


@dataclass(frozen=True)
class Groups:
    """The pairs of each expert, or of each expert and sequence."""

    ids_N: Tensor
    """int64, the group of each pair, below N."""
    is_first_N: Tensor
    """bool, True for one real pair of each group."""
    active_N: Tensor
    shares_N: Tensor
    """Each pair's weight over the sum of its token's weights; 0 for pairs that are not real."""

    def sums(self, values_N: Tensor) -> Tensor:
        """Return the sum over the real pairs of each group, (N,), indexed by group."""
        values_N = torch.where(self.active_N, values_N, 0)
        return torch.zeros_like(values_N).index_add(0, self.ids_N, values_N)


def groups_of(routing: Routing, *, by_sequence: bool = False) -> Groups:
    """Group a routing's pairs by expert, or by expert and sequence."""
    cells_N, active_N = routing.expert_ids_N, routing.active_N
    if by_sequence:
        sequence_N = routing.token_indices_N // max(routing.sequence_length, 1)
        cells_N = sequence_N * routing.num_experts + cells_N
    cells_N = cells_N.masked_fill(~active_N, -1)
    sorted_N, order_N = cells_N.sort(stable=True)
    ids_N = torch.searchsorted(sorted_N, cells_N)
    ranks_N = torch.empty_like(order_N).scatter_(
        0, order_N, torch.arange(len(order_N), device=order_N.device)
    )
    return Groups(ids_N, active_N & (ranks_N == ids_N), active_N, _shares(routing))


def _shares(routing: Routing) -> Tensor:
    weights_N = torch.where(routing.active_N, routing.weights_N, 0)
    zeros_T = weights_N.new_zeros(routing.num_tokens)
    totals_T = zeros_T.index_add(0, routing.token_indices_N, weights_N)
    return weights_N / divisor(totals_T)[routing.token_indices_N]


def load_balance_from_pairs(routing: Routing, *, by_sequence: bool = False) -> Tensor:
    """Return Switch's E * sum_i f_i P_i of the batch, or its mean over sequences, from only the pairs.

    f_i is as in `load_balancing_loss`; P_i is the mean over tokens of expert i's share of a token's weights.
    The loss is 1 at balance too.
    """
    groups = groups_of(routing, by_sequence=by_sequence)
    length = max(routing.sequence_length, 1) if by_sequence else max(routing.num_tokens, 1)
    counts_N = groups.sums(torch.ones_like(groups.shares_N))[groups.ids_N]
    # E / (pairs * tokens) * sum over pairs of (number of pairs in the pair's group) * (share of the pair).
    sequence_ids_N = routing.token_indices_N // length
    zeros_B = counts_N.new_zeros(routing.num_tokens // length)
    products_B = zeros_B.index_add(0, sequence_ids_N, counts_N * groups.shares_N)
    pairs_B = zeros_B.index_add(0, sequence_ids_N, groups.active_N.to(zeros_B.dtype))
    tokens_B = torch.full_like(zeros_B, length)
    if routing.mask_T is not None:
        tokens_B = routing.mask_T.view(-1, length).sum(dim=1).to(zeros_B.dtype)
    losses_B = routing.num_experts * products_B / (pairs_B * tokens_B).clamp(min=1)
    return losses_B.sum() / (tokens_B > 0).sum().clamp(min=1)


def importance_from_pairs(routing: Routing) -> tuple[Tensor, Tensor]:
    """Return the mean and the sample variance of the experts' summed weights, 0 for unused experts."""
    num_experts, groups = routing.num_experts, groups_of(routing)
    importance_N = groups.sums(routing.weights_N)
    mean = importance_N.sum() / num_experts
    # Add the terms of the unused experts, whose importance is 0.
    squares = torch.where(groups.is_first_N, (importance_N[groups.ids_N] - mean).square(), 0).sum()
    squares = squares + (num_experts - groups.is_first_N.sum()) * mean.square()
    return mean, squares / max(num_experts - 1, 1)


def logsumexp_from_pairs(routing: PairsOnlyRouting) -> Tensor:
    """Return the logsumexp over the logits of each token's pairs, (T,)."""
    logits_N = routing.logits_N
    lowest_T = logits_N.new_full((routing.num_tokens,), -torch.inf)
    max_T = lowest_T.scatter_reduce(0, routing.token_indices_N, logits_N.detach(), "amax")
    max_T = max_T.masked_fill(~max_T.isfinite(), 0)
    parts_N = (logits_N - max_T[routing.token_indices_N]).exp()
    return max_T + torch.zeros_like(max_T).index_add(0, routing.token_indices_N, parts_N).log()


def entropy_from_pairs(routing: Routing) -> Tensor:
    """Return the mean over real tokens of the entropy of the shares of a token's pairs, in nats."""
    shares_N = _shares(routing)
    return -(shares_N * finite_log(shares_N)).sum() / routing.num_real_tokens.clamp(min=1)


def num_used(routing: Routing) -> Tensor:
    """Return the number of experts that at least one real token chose, int64 scalar."""
    return groups_of(routing).is_first_N.sum()


def usage_kl(routing: Routing) -> Tensor:
    """Return the KL divergence of the experts' usage from uniform, log E + sum_i z_i log z_i, in nats.

    z_i is the mean over tokens of expert i's share of a token's weights. The divergence is 0 if all experts
    are used equally, log E if all tokens use one expert (Lample et al. 2019, arXiv:1907.05242, section 4).
    """
    groups = groups_of(routing)
    usage_N = groups.sums(groups.shares_N) / routing.num_real_tokens.clamp(min=1)
    return (usage_N * finite_log(usage_N)).sum() + math.log(routing.num_experts)
