"""Sigmoid top-k is DeepSeek-V3's: its bias chooses and never weighs; groups limit the ranks of a token."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn

from moe_ffn import build_ffn
from moe_ffn.routing import (
    GroupsConfig,
    RouterConfig,
    SigmoidTopKRouterConfig,
    TopKRouterConfig,
    TopPRouterConfig,
)
from moe_ffn.routing.base import Router
from tests.helpers.every_router import (
    experts_of,
    identity_router,
    random_logits,
    route,
)


def test_scores_too_small_for_float32_give_finite_weights() -> None:
    routing = route(SigmoidTopKRouterConfig(), torch.full((1, 4), -1e4))
    assert routing.weights_N.isfinite().all()


# -------------------------------------------------------------------------- the correction bias

BIASED: dict[str, RouterConfig] = {
    "sigmoid_top_k": SigmoidTopKRouterConfig(),
    "top_k": TopKRouterConfig(correction_bias=True),
}
# 1 + 2**-20 needs float32; bfloat16 would round it to 1 and float16 too.
BITS = [1 + 2**-20, -3 - 2**-20, 1e-8, 0.1]


@pytest.fixture(params=BIASED.values(), ids=list(BIASED))
def biased(request: pytest.FixtureRequest) -> Router:
    router = identity_router(request.param, 4)
    assert router.correction_bias_E is not None
    router.correction_bias_E.copy_(torch.tensor(BITS))
    return router


MOVES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bfloat16": lambda module: module.bfloat16(),
    "half_and_back": lambda module: module.half().float(),
    "to_device_and_dtype": lambda module: module.to("cpu", torch.float16),
    "deepcopy": lambda module: copy.deepcopy(module).bfloat16(),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_the_correction_bias_keeps_every_bit(
    biased: Router, move: Callable[[nn.Module], nn.Module]
) -> None:
    moved = move(biased)
    bias = moved.correction_bias_E
    assert isinstance(bias, torch.Tensor)
    assert bias.dtype == torch.float32
    assert torch.equal(bias, torch.tensor(BITS))
    assert dict(moved.named_buffers())["correction_bias_E"] is bias


def test_the_correction_bias_survives_the_meta_device(biased: Router) -> None:
    state = biased.state_dict()
    assert "correction_bias_E" in state
    with torch.device("meta"):
        empty = identity_router(SigmoidTopKRouterConfig(), 4)
    loaded = empty.bfloat16().to_empty(device="cpu")
    loaded.load_state_dict(state)
    assert loaded.correction_bias_E is not None
    assert loaded.correction_bias_E.dtype == torch.float32
    assert torch.equal(loaded.correction_bias_E, torch.tensor(BITS))


def test_forward_leaves_the_correction_bias_alone() -> None:
    layer = build_ffn({"type": "moe", "num_experts": 4, "router": "sigmoid_top_k"}, d_model=8)
    bias = layer.get_buffer("router.correction_bias_E")
    layer.train()(torch.randn(2, 5, 8)).hidden.square().sum().backward()
    assert bias.tolist() == [0, 0, 0, 0]
    assert not bias.requires_grad


def test_a_router_without_the_option_has_no_bias() -> None:
    router = identity_router(SigmoidTopKRouterConfig(correction_bias=False), 4)
    assert router.correction_bias_E is None
    assert list(router.state_dict()) == ["projection.weight"]
    assert not SigmoidTopKRouterConfig(correction_bias=False).has_correction_bias
    assert SigmoidTopKRouterConfig().has_correction_bias
    assert not TopKRouterConfig().has_correction_bias


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


# -- top-p takes the smallest set of most probable experts that reaches p, and no more than max_k


PROBABILITIES = [0.15, 0.5, 0.05, 0.3]


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


def test_a_probability_of_exactly_p_is_enough() -> None:
    # exp(0) / 2 and sums of quarters are exact in binary.
    assert experts_of(route(TopPRouterConfig(p=0.5), torch.zeros(1, 2))) == [[0]]
    (experts,) = experts_of(route(TopPRouterConfig(p=0.75), torch.zeros(1, 4)))
    assert len(experts) == 3


def test_p_of_one_takes_every_expert_in_float32() -> None:
    logits = random_logits(500, 8).float()
    assert all(len(experts) == 8 for experts in experts_of(route(TopPRouterConfig(p=1.0), logits)))
