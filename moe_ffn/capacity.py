"""How many pairs an expert takes: pure functions Routing -> Routing.

T tokens, E experts, N (token, expert) pairs, C capacity
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from moe_ffn.outputs import Routing, count_pairs


def limit_by_position(routing: Routing, factor: float | None) -> Routing:
    """Mark as dropped what exceeds each expert's capacity C = ceil(factor * N / E).

    N counts the pairs of real tokens, so C is what a perfectly balanced router would need, times
    `factor` (k is inside N, as in Megatron-LM and DeepSpeed; Switch and ST-MoE leave it out). None is
    dropless and returns the routing as it is.

    Pairs are served by position in their sequence, then by sequence, then by the token's own order of
    preference. Position first is what keeps a causal model causal: in a batch, a late token of one
    sequence never displaces an early token of another, nor of its own. What is dropped loses its
    weight; the survivors are not renormalised.
    """
    if factor is None:
        return routing
    # In whole numbers: in floating point 0.3 * 50 is a little over 15, and its ceiling 16.
    per_pair = Fraction(factor).limit_denominator(1_000_000) / routing.num_experts
    capacity = -(-routing.real_N.sum() * per_pair.numerator // per_pair.denominator)
    place_N = place_in_queue(routing)
    return replace(routing, dropped_N=routing.real_N & (place_N >= capacity), capacity=capacity)


def place_in_queue(routing: Routing) -> Tensor:
    """int64 (N,): how many real pairs stand before each pair at the same expert."""
    position_N = routing.token_ids_N % max(routing.sequence_length, 1)
    # One key sorts by expert, then position; stability leaves the rest in pair order. Padding comes
    # last, under an expert of its own, so that it takes nobody's place.
    expert_ids_N = routing.expert_ids_N.masked_fill(~routing.real_N, routing.num_experts)
    key_N = expert_ids_N * max(routing.sequence_length, 1) + position_N
    order_N = key_N.argsort(stable=True)
    counts_E = count_pairs(expert_ids_N, routing.num_experts + 1)
    starts_E = counts_E.cumsum(0) - counts_E
    ranks_N = torch.arange(len(order_N), device=order_N.device)
    place_N = ranks_N - starts_E[expert_ids_N[order_N]]
    return torch.empty_like(place_N).scatter_(0, order_N, place_N)
