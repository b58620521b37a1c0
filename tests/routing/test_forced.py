"""Forced routing gives exactly the load it is asked for, at the cost of top-k."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from moe_ffn.metrics.functional import max_violation
from moe_ffn.routing import ForcedRouterConfig
from tests.helpers.identity_router import experts_of, load_of, random_logits, real_pairs, route


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "k"),
    [(8, 4, 1), (8, 4, 2), (4, 8, 2), (6, 4, 2), (8, 6, 3), (5, 5, 5), (12, 8, 6)],
)
def test_without_skew_the_load_is_perfectly_balanced(
    num_tokens: int, num_experts: int, k: int
) -> None:
    assert num_tokens * k % num_experts == 0
    routing = route(ForcedRouterConfig(k=k), random_logits(num_tokens, num_experts))
    load = load_of(routing)
    assert load == [num_tokens * k // num_experts] * num_experts
    assert max_violation(torch.tensor(load).float()) == 0


@pytest.mark.parametrize("k", [1, 2, 4])
def test_full_skew_sends_every_token_to_the_first_k(k: int) -> None:
    routing = route(ForcedRouterConfig(k=k, skew=1.0), random_logits(10, 4))
    assert experts_of(routing) == [list(range(k))] * 10


def test_half_skew_is_the_list_worked_by_hand() -> None:
    # Of the first n tokens n / 2, rounded down, are skewed: every second one; the others take turns.
    routing = route(ForcedRouterConfig(k=1, skew=0.5), random_logits(8, 3))
    assert experts_of(routing) == [[0], [0], [1], [0], [2], [0], [0], [0]]


@pytest.mark.parametrize("skew", [0.0, 0.07, 0.1, 0.29, 0.3, 0.57, 0.7, 0.99, 1.0])
def test_the_share_of_skewed_tokens_is_exact(skew: float) -> None:
    num_tokens, num_experts = 1000, 10
    load = load_of(
        route(ForcedRouterConfig(k=1, skew=skew), random_logits(num_tokens, num_experts))
    )
    skewed = math.floor(Fraction(str(skew)) * num_tokens)
    turns = num_tokens - skewed
    # The others take turns from expert 0 on.
    expected = [turns // num_experts + (e < turns % num_experts) for e in range(num_experts)]
    expected[0] += skewed
    assert load == expected


def test_weights_are_the_softmax_probabilities_of_the_forced_experts() -> None:
    logits = random_logits(6, 4)
    for row, pairs in zip(
        logits.tolist(), real_pairs(route(ForcedRouterConfig(), logits)), strict=True
    ):
        total = sum(math.exp(z) for z in row)
        assert [w for _, w in pairs] == pytest.approx([math.exp(row[e]) / total for e, _ in pairs])


@pytest.mark.parametrize("skew", [0.0, 0.3, 1.0])
def test_padding_takes_no_turn(skew: float) -> None:
    config = ForcedRouterConfig(k=2, skew=skew)
    logits = random_logits(12, 4)
    mask = torch.tensor([False] * 2 + [True] * 3 + [False] * 2 + [True] * 5)  # 8 real tokens
    padded = route(config, logits, mask=mask)
    real = [
        experts for experts, kept in zip(experts_of(padded), mask.tolist(), strict=True) if kept
    ]
    assert real == experts_of(route(config, logits[mask]))
    if skew == 0:
        assert load_of(padded) == [4, 4, 4, 4]
