"""Top-p takes the smallest set of most probable experts that reaches p, and no more than max_k."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
import torch

from moe_ffn.routing import TopPRouterConfig
from tests.helpers.identity_router import experts_of, random_logits, real_pairs, route

PROBABILITIES = [0.15, 0.5, 0.05, 0.3]


@pytest.mark.parametrize(
    ("options", "experts"),
    [
        ({"p": 0.4}, [1]),
        ({"p": 0.6}, [1, 3]),  # 0.5 < 0.6 <= 0.8
        ({"p": 0.85}, [1, 3, 0]),  # 0.8 < 0.85 <= 0.95
        ({"p": 0.97}, [1, 3, 0, 2]),
        ({"p": 0.97, "max_k": 2}, [1, 3]),
    ],
    ids=str,
)
def test_the_experts_equal_those_worked_by_hand(
    options: dict[str, Any], experts: list[int]
) -> None:
    routing = route(TopPRouterConfig(**options), torch.tensor([PROBABILITIES]).log())
    (pairs,) = real_pairs(routing)
    assert [e for e, _ in pairs] == experts
    assert [w for _, w in pairs] == pytest.approx([PROBABILITIES[e] for e in experts])


def test_renormalized_weights_add_up_to_one_over_the_chosen() -> None:
    # (0.5, 0.3) / 0.8; the third, listed and not chosen, weighs nothing.
    config = TopPRouterConfig(p=0.6, max_k=3, renormalize=True)
    routing = route(config, torch.tensor([PROBABILITIES]).log())
    assert routing.weights_N.tolist() == pytest.approx([0.625, 0.375, 0.0])
    assert routing.active_N.tolist() == [True, True, False]


@pytest.mark.parametrize("p", [0.2, 0.45, 0.7, 0.9])
def test_no_smaller_set_of_experts_reaches_p(p: float) -> None:
    logits = random_logits(50, 6)
    sizes = set()
    routing = route(TopPRouterConfig(p=p), logits)
    for row, experts in zip(logits.tolist(), experts_of(routing), strict=True):
        total = sum(math.exp(z) for z in row)
        probabilities = [math.exp(z) / total for z in row]
        assert sum(probabilities[e] for e in experts) >= p
        smaller = combinations(probabilities, len(experts) - 1)
        assert all(sum(few) < p for few in smaller)
        # Of the sets of that size, the most probable one.
        most = sum(sorted(probabilities, reverse=True)[: len(experts)])
        assert sum(probabilities[e] for e in experts) == pytest.approx(most)
        sizes.add(len(experts))
    assert len(sizes) > 1


def test_a_probability_that_is_exactly_p_is_enough() -> None:
    # exp(0) / 2 and sums of quarters are exact in binary.
    assert experts_of(route(TopPRouterConfig(p=0.5), torch.zeros(1, 2))) == [[0]]
    (experts,) = experts_of(route(TopPRouterConfig(p=0.75), torch.zeros(1, 4)))
    assert len(experts) == 3


def test_p_of_one_takes_every_expert_in_float32() -> None:
    logits = random_logits(500, 8).float()
    assert all(len(experts) == 8 for experts in experts_of(route(TopPRouterConfig(p=1.0), logits)))
