"""The rules without a loss: which way a bias or a weight moves, and that it ends in balance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn.balancing.bias_rules import (
    BiasRuleConfig,
    QuantileRuleConfig,
    SignRuleConfig,
    sparsity_weight_after,
)
from moe_ffn.balancing.losses import pairs_per_expert
from moe_ffn.metrics.functional import max_violation
from moe_ffn.outputs import Routing, TokenContext
from moe_ffn.routing import SigmoidTopKRouterConfig
from moe_ffn.routing.base import Router

NUM_EXPERTS = 8


def uneven_router(k: int = 2) -> Router:
    """Logits as given; expert e starts with e / 2 added, so the last ones have nearly everything."""
    router = SigmoidTopKRouterConfig(k=k, renormalize=False, bias=True).build(
        NUM_EXPERTS, NUM_EXPERTS
    )
    with torch.no_grad():
        router.get_parameter("projection.weight").copy_(torch.eye(NUM_EXPERTS))
        router.get_parameter("projection.bias").copy_(torch.arange(NUM_EXPERTS) / 2)
    return router


def tokens(seed: int, num_tokens: int = 2048) -> Tensor:
    return torch.randn(num_tokens, NUM_EXPERTS, generator=torch.Generator().manual_seed(seed))


def apply(rule: BiasRuleConfig, router: Router, steps: int) -> list[float]:
    """MaxVio before each step and after the last, every step on fresh tokens."""
    found = []
    for step in range(steps + 1):
        routing = router(tokens(step), TokenContext())
        found.append(max_violation(pairs_per_expert(routing).float()).item())
        bias_E = router.correction_bias_E
        assert bias_E is not None
        bias_E.copy_(rule.update(bias_E, rule.observe(routing, bias_E), 1))
    return found


# -- sign


def test_the_sign_rule_moves_every_bias_by_its_rate(make_routing: Any) -> None:
    # 3, 1, 2 and 2 pairs; the mean is 2.
    ids = [[0], [0], [0], [1], [2], [2], [3], [3]]
    rule = SignRuleConfig(rate=0.25)
    bias_E = torch.tensor([1.0, 0.0, -1.0, 0.5])
    observed_E = rule.observe(make_routing(ids, 4), bias_E)
    assert observed_E.tolist() == [3, 1, 2, 2]
    assert rule.update(bias_E, observed_E, 1).tolist() == [0.75, 0.25, -1.0, 0.5]


def test_the_sign_rule_counts_before_dropping_and_without_padding(make_routing: Any) -> None:
    rule = SignRuleConfig()
    dropped = make_routing(
        [[0], [0], [1]],
        2,
        dropped_N=torch.tensor([False, True, False]),
        mask_T=torch.tensor([True, True, False]),
    )
    assert rule.observe(dropped, torch.zeros(2)).tolist() == [2, 0]


def test_large_counts_keep_their_sign() -> None:
    # In float32 the mean of these would be one of them.
    observed_E = torch.tensor([2**40, 2**40 + 1, 2**40 + 2])
    moved = SignRuleConfig(rate=1.0).update(torch.zeros(3), observed_E, 1)
    assert moved.tolist() == [1, 0, -1]


def test_the_sign_rule_balances_an_uneven_router() -> None:
    violations = apply(SignRuleConfig(rate=0.01), uneven_router(), steps=100)
    assert violations[0] > 1.2
    assert violations[-1] < 0.2


# -- quantile


def test_one_step_to_the_quantile_balances_at_once() -> None:
    violations = apply(QuantileRuleConfig(ema=0.0), uneven_router(), steps=6)
    assert violations[0] > 1.2
    assert violations[1] < 0.5 * violations[0]
    # 512 pairs an expert: its count deviates by 1 / 23, the quantile of other tokens by as much, and the
    # largest of eight such sums by about twice that.
    assert violations[-1] < 0.2


def test_a_moving_average_gets_there_more_slowly() -> None:
    violations = apply(QuantileRuleConfig(ema=0.9), uneven_router(), steps=60)
    assert violations[1] > 0.5 * violations[0]
    assert violations[-1] < 0.2


def test_the_quantile_is_where_an_expert_gets_its_share() -> None:
    # k = 1 of 2 experts, 4 tokens, no bias. Expert 0's scores minus what it takes to be chosen, the
    # second largest score: .5 - .2, .6 - .3, .7 - .1, and for the last token .3 - .3 = 0.
    # Descending: .6, .3, .3, 0; the (4 * 1 / 2 + 1)-th is .3. Expert 1 was second in the first three,
    # .6 - .3 = .3 ahead in the last: .3, 0, 0, 0; the third is 0.
    scores = torch.tensor([[0.5, 0.2], [0.6, 0.3], [0.7, 0.1], [0.3, 0.6]])
    routing = Routing(
        token_ids_N=torch.arange(4),
        expert_ids_N=torch.tensor([0, 0, 0, 1]),
        weights_N=torch.ones(4),
        dropped_N=torch.zeros(4, dtype=torch.bool),
        logits_TE=scores,
        scores_TE=scores,
        num_tokens=4,
        num_experts=2,
        sequence_length=4,
    )
    rule = QuantileRuleConfig(ema=0.0)
    observed_E = rule.observe(routing, torch.zeros(2))
    assert observed_E.tolist() == pytest.approx([0.3, 0.0])
    # The bias is the negative of it, minus the mean.
    assert rule.update(torch.zeros(2), observed_E, 1).tolist() == pytest.approx([-0.15, 0.15])


@pytest.mark.parametrize(
    ("num_tokens", "k", "num_experts", "place"),
    [(5, 1, 2, 2), (7, 1, 3, 2), (7, 2, 3, 4), (4, 1, 8, 0), (11, 3, 4, 8), (6, 1, 3, 2)],
)
@pytest.mark.parametrize("padding", [0, 3])
def test_a_share_that_is_no_whole_number_is_rounded_down(
    num_tokens: int, k: int, num_experts: int, place: int, padding: int
) -> None:
    # The (T k / E + 1)-th largest excess: of 5 tokens and one of two experts the third, place 2 from 0.
    generator = torch.Generator().manual_seed(num_tokens)
    scores_TE = torch.rand(num_tokens + padding, num_experts, generator=generator)
    mask_T = torch.arange(num_tokens + padding) < num_tokens
    routing = Routing(
        token_ids_N=torch.arange(num_tokens + padding).repeat_interleave(k),
        expert_ids_N=scores_TE.topk(k).indices.flatten(),
        weights_N=torch.ones((num_tokens + padding) * k),
        dropped_N=torch.zeros((num_tokens + padding) * k, dtype=torch.bool),
        logits_TE=scores_TE,
        scores_TE=scores_TE,
        mask_T=mask_T if padding else None,
        num_tokens=num_tokens + padding,
        num_experts=num_experts,
        sequence_length=num_tokens + padding,
    )
    observed_E = QuantileRuleConfig().observe(routing, torch.zeros(num_experts))
    for expert in range(num_experts):
        rows = scores_TE[:num_tokens].tolist()
        excess = [row[expert] - sorted(row, reverse=True)[k] for row in rows]
        assert observed_E[expert].item() == pytest.approx(sorted(excess, reverse=True)[place])


def test_padding_does_not_move_the_quantile() -> None:
    router, rule = uneven_router(), QuantileRuleConfig()
    bias_E = torch.linspace(-0.1, 0.1, NUM_EXPERTS)
    x = tokens(0, 40)
    alone = rule.observe(router(x, TokenContext()), bias_E)
    padded = torch.cat([x, 9 * tokens(1, 24)])
    mask = torch.arange(64) < 40
    with_padding = rule.observe(router(padded, TokenContext(mask=mask)), bias_E)
    torch.testing.assert_close(with_padding, alone)


@pytest.mark.parametrize("case", ["no tokens", "padding only", "k is all experts"])
def test_with_nothing_to_choose_the_bias_stays(case: str) -> None:
    router = uneven_router(k=NUM_EXPERTS if case == "k is all experts" else 2)
    x = tokens(0, 0 if case == "no tokens" else 6)
    mask = torch.zeros(6, dtype=torch.bool) if case == "padding only" else None
    bias_E = torch.linspace(-0.5, 0.5, NUM_EXPERTS)
    rule = QuantileRuleConfig()
    observed_E = rule.observe(router(x, TokenContext(mask=mask)), bias_E)
    torch.testing.assert_close(rule.update(bias_E, observed_E, 1), bias_E)


# -- every rule


@pytest.mark.parametrize("rule", BiasRuleConfig.members)
def test_what_a_rule_observes_has_no_gradient_and_changes_nothing(rule: str) -> None:
    built = BiasRuleConfig.model_validate(rule)
    router = uneven_router()
    bias_E = torch.zeros(NUM_EXPERTS)
    routing = router(tokens(0).requires_grad_(), TokenContext())
    observed_E = built.observe(routing, bias_E)
    assert not observed_E.requires_grad
    assert observed_E.shape == (NUM_EXPERTS,)
    updated_E = built.update(bias_E, observed_E, 1)
    assert updated_E.dtype == torch.float32
    assert bias_E.count_nonzero() == 0


# -- sparsity


@pytest.mark.parametrize(("density", "expected"), [(1.5, 1.2), (0.5, 1 / 1.2), (1.0, 1.0)])
def test_the_sparsity_weight_rises_above_its_target_and_falls_below(
    density: float, expected: float
) -> None:
    found = sparsity_weight_after(torch.tensor(1.0), torch.tensor(density), factor=1.2)
    assert found.item() == pytest.approx(expected)
