"""Node-limited routing keeps a token's experts within its best groups, by either published score."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from moe_ffn.routing import GroupsConfig, SigmoidTopKRouterConfig, TopKRouterConfig
from tests.helpers.identity_router import experts_of, random_logits, route

NUM_EXPERTS = 12


def naive(ranking: list[float], groups: GroupsConfig, k: int) -> tuple[list[int], list[int]]:
    """The kept groups and the k experts, best first."""
    size = len(ranking) // groups.num_groups
    num_scored = k // groups.keep if groups.score_top is None else groups.score_top
    group_scores = [
        sum(sorted(ranking[g * size : (g + 1) * size], reverse=True)[:num_scored])
        for g in range(groups.num_groups)
    ]
    kept = sorted(range(groups.num_groups), key=lambda g: -group_scores[g])[: groups.keep]
    allowed = [e for e in range(len(ranking)) if e // size in kept]
    return kept, sorted(allowed, key=lambda e: -ranking[e])[:k]


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "deepseek": (4, {"num_groups": 4, "keep": 2}),
    "megatron": (4, {"num_groups": 4, "keep": 2, "score_top": None}),
    "megatron_rounded_down": (3, {"num_groups": 4, "keep": 2, "score_top": None}),
    "best_one": (2, {"num_groups": 4, "keep": 2, "score_top": 1}),
    "one_group_kept": (3, {"num_groups": 4, "keep": 1}),
    "groups_of_one": (3, {"num_groups": 12, "keep": 3, "score_top": 1}),
    "all_groups_kept": (3, {"num_groups": 3, "keep": 3}),
    "one_group": (3, {"num_groups": 1, "keep": 1}),
    "k_fills_the_kept": (6, {"num_groups": 4, "keep": 2}),
}
BIASES = {
    "no_bias": [0.0] * NUM_EXPERTS,
    "small": [0.3 * math.cos(e) for e in range(NUM_EXPERTS)],
    # Under which a mask of 0 instead of -inf would let the experts of other groups win.
    "very_negative": [-100.0 + 0.1 * e for e in range(NUM_EXPERTS)],
}


@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize(("k", "groups"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("cls", [SigmoidTopKRouterConfig, TopKRouterConfig])
def test_groups_and_experts_equal_a_loop_in_plain_python(
    cls: Any, k: int, groups: dict[str, Any], bias: list[float]
) -> None:
    config = cls(k=k, groups=GroupsConfig(**groups), correction_bias=True)
    logits = random_logits(30, NUM_EXPERTS)
    routing = route(config, logits, bias=bias)
    # The bias is float32; the scores are float64.
    assert routing.scores_TE is not None
    ranking = (routing.scores_TE + torch.tensor(bias)).tolist()
    size = NUM_EXPERTS // groups["num_groups"]
    for row, chosen in zip(ranking, experts_of(routing), strict=True):
        kept, expected = naive(row, config.groups, k)
        assert chosen == expected
        assert {e // size for e in chosen} <= set(kept)


def test_both_score_rules_as_worked_by_hand() -> None:
    # Scores 0.9 0.1 | 0.6 0.5, k = 1 of 1 group: the sum of two prefers the second group (1.1 over
    # 1.0), the best k / keep = 1 the first.
    logits = torch.tensor([[0.9, 0.1, 0.6, 0.5]]).logit()
    for score_top, expert in [(2, 2), (None, 0)]:
        groups = GroupsConfig(num_groups=2, keep=1, score_top=score_top)
        config = SigmoidTopKRouterConfig(k=1, renormalize=False, groups=groups)
        assert experts_of(route(config, logits)) == [[expert]]
