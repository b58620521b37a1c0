"""Rules without a loss: published examples, sums over batches, and what holds of every rule."""

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
from moe_ffn.balancing.losses import pairs_per_expert, relu_sparsity_loss
from moe_ffn.metrics.functional import max_violation
from moe_ffn.outputs import Routing, TokenContext
from moe_ffn.routing import ReLURouterConfig, SigmoidTopKRouterConfig
from tests.helpers import identity_router

# A sum of a few float32 numbers of the order of 1e-3.
FLOAT32 = 1e-9

RULES: list[BiasRuleConfig] = [
    SignRuleConfig(rate=0.01),
    SignRuleConfig(rate=0.01, centre=True),
    QuantileRuleConfig(ema=0.0),
    QuantileRuleConfig(ema=0.9),
]
IDS = ["sign", "sign_centred", "quantile", "quantile_averaged"]


def route(logits_TE: Tensor, k: int, bias_E: Tensor, mask: Tensor | None = None) -> Routing:
    config = SigmoidTopKRouterConfig(k=k, renormalize=False)
    return identity_router.route(config, logits_TE, mask=mask, bias=bias_E.tolist())


def lopsided_logits(num_tokens: int = 512, num_experts: int = 8, seed: int = 0) -> Tensor:
    """Later experts are preferred by nearly everybody."""
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(num_tokens, num_experts, generator=generator)
    return logits_TE + torch.linspace(-1, 1, num_experts)


def step(rule: BiasRuleConfig, bias_E: Tensor, routing: Routing) -> Tensor:
    """A step of one batch."""
    return rule.update(bias_E, rule.observe(routing, bias_E), num_batches=1)


def violation(logits_TE: Tensor, k: int, bias_E: Tensor) -> float:
    return max_violation(pairs_per_expert(route(logits_TE, k, bias_E)).float()).item()


# ------------------------------------------------------------------------------- the sign rule


@pytest.mark.parametrize(
    ("centre", "moves"),
    [
        (False, [-1.0, 1.0, 1.0, 1.0]),  # Megatron-LM, OLMo-core: sign(25 - n)
        (True, [-1.5, 0.5, 0.5, 0.5]),  # torchtitan: minus their mean, 2/4
    ],
    ids=["megatron", "torchtitan"],
)
def test_the_move_is_that_of_the_published_example(centre: bool, moves: list[float]) -> None:
    rule = SignRuleConfig(rate=1e-3, centre=centre)
    bias = torch.tensor([0.5, -0.25, 0.0, 1.0])
    moved = rule.update(torch.zeros(4), torch.tensor([97, 1, 1, 1]), num_batches=1)
    assert moved.tolist() == pytest.approx([1e-3 * move for move in moves], abs=FLOAT32)
    added = rule.update(bias, torch.tensor([97, 1, 1, 1]), num_batches=1)
    torch.testing.assert_close(added, bias + moved, rtol=0, atol=0)


@pytest.mark.parametrize("spare", [1, -1], ids=["one_more", "one_less"])
def test_one_pair_in_very_many_still_has_its_sign(spare: int) -> None:
    # 2^40 + 1 is no float32 number, and the mean, 2^40 + 1/4, is not even a whole one.
    observed = torch.full((4,), 2**40)
    observed[2] += spare
    moved = SignRuleConfig(rate=1e-3).update(torch.zeros(4), observed, num_batches=1)
    assert (moved.sign() * spare).tolist() == [1, 1, -1, 1]


def test_the_sign_rule_counts_before_dropping_and_without_padding(make_routing: Any) -> None:
    rule = SignRuleConfig()
    dropped = make_routing(
        [[0], [0], [1]],
        2,
        dropped_N=torch.tensor([False, True, False]),
        mask_T=torch.tensor([True, True, False]),
    )
    assert rule.observe(dropped, torch.zeros(2)).tolist() == [2, 0]


# ------------------------------------------------------------------------------- the quantile rule


def test_the_average_keeps_its_share_of_the_old_bias_and_takes_the_mean_of_the_batches() -> None:
    # Two batches observed (.3, -.1) together: fresh is -(.15, -.05); .9 * (.2, -.2) + .1 * fresh is
    # (.165, -.175), less its mean -.005: (.17, -.17).
    rule = QuantileRuleConfig(ema=0.9)
    bias = rule.update(torch.tensor([0.2, -0.2]), torch.tensor([0.3, -0.1]), num_batches=2)
    torch.testing.assert_close(bias, torch.tensor([0.17, -0.17]), rtol=0, atol=1e-7)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_one_quantile_step_takes_most_of_the_imbalance_and_a_few_nearly_all(k: int) -> None:
    logits, bias = lopsided_logits(), torch.zeros(8)
    rule = QuantileRuleConfig(ema=0.0)
    violations = [violation(logits, k, bias)]
    for _ in range(10):
        bias = step(rule, bias, route(logits, k, bias))
        violations.append(violation(logits, k, bias))
    assert violations[0] > 0.8
    assert violations[1] < violations[0] / 3, violations
    assert violations[-1] < 0.05, violations


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
        token_indices_N=torch.arange(num_tokens + padding).repeat_interleave(k),
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


# ------------------------------------------------------------------------------- both


@pytest.mark.parametrize("config", [c for c in RULES if c != RULES[0]], ids=IDS[1:])
def test_the_mean_of_the_bias_stays_zero(config: BiasRuleConfig) -> None:
    # Except under the plain sign rule, whose example above moves by 2 in all.
    rule, bias = config, torch.zeros(8)
    for seed in range(5):
        bias = step(rule, bias, route(lopsided_logits(seed=seed), 2, bias))
        assert bias.count_nonzero() > 0
        assert bias.mean().abs() < 1e-7


@pytest.mark.parametrize("config", RULES, ids=IDS)
def test_padding_is_not_observed(config: BiasRuleConfig) -> None:
    logits = lopsided_logits(num_tokens=64)
    padded = torch.cat([torch.full((9, 8), 50.0), logits, -logits[:30]])
    mask = torch.tensor([False] * 9 + [True] * 64 + [False] * 30)
    bias, rule = torch.linspace(-0.1, 0.1, 8), config
    expected = rule.observe(route(logits, 2, bias), bias)
    assert torch.equal(rule.observe(route(padded, 2, bias, mask), bias), expected)


@pytest.mark.parametrize("case", ["k_is_all", "no_tokens", "padding_only"])
@pytest.mark.parametrize("config", RULES, ids=IDS)
def test_where_there_is_nothing_to_choose_the_bias_stays(config: BiasRuleConfig, case: str) -> None:
    num_tokens, k, mask = {
        "k_is_all": (6, 4, None),
        "no_tokens": (0, 2, None),
        "padding_only": (6, 2, torch.zeros(6, dtype=torch.bool)),
    }[case]
    bias = torch.tensor([0.25, -0.25, 0.5, -0.5])
    routing = route(lopsided_logits(num_tokens, 4), k, bias, mask)
    # The average of a bias with itself: a unit in the last place of 0.5.
    torch.testing.assert_close(step(config, bias, routing), bias, rtol=0, atol=1e-7)


@pytest.mark.parametrize("config", RULES, ids=IDS)
def test_the_bias_keeps_its_dtype_and_has_no_gradient(config: BiasRuleConfig) -> None:
    logits = lopsided_logits(16).double().requires_grad_()
    bias = torch.zeros(8)
    routing = route(logits, 2, bias)
    rule = config
    observed = rule.observe(routing, bias)
    assert not observed.requires_grad
    assert observed.shape == (8,)
    assert rule.update(bias, observed, num_batches=1).dtype == torch.float32
    assert bias.count_nonzero() == 0


@pytest.mark.parametrize(
    ("density", "expected"),
    [(1.5, 3.6), (1.0001, 3.6), (1.0, 3.0), (0.9999, 2.5), (0.0, 2.5)],  # 3 * 1.2, 3 / 1.2
    ids=["far_above", "above", "at_the_target", "below", "nobody"],
)
def test_the_weight_is_multiplied_above_the_target_and_divided_below(
    density: float, expected: float
) -> None:
    weight = torch.tensor(3.0, dtype=torch.float64)
    after = sparsity_weight_after(weight, torch.tensor(density, dtype=torch.float64), factor=1.2)
    assert after.item() == pytest.approx(expected, rel=1e-12)
    assert after.dtype == torch.float64
    assert weight.item() == 3


def test_loss_and_rule_together_bring_a_router_to_its_number_of_experts() -> None:
    torch.manual_seed(0)
    router = ReLURouterConfig(k=2, bias=True).build(16, 8)  # the bias moves every token at once
    x_TD = torch.randn(256, 16)
    weight = torch.tensor(1e-3)
    optimizer = torch.optim.SGD(router.parameters(), lr=0.1)
    densities = []
    for _ in range(400):
        routing = router(x_TD, TokenContext())
        density = pairs_per_expert(routing).sum() / (2 * 256)
        densities.append(density.item())
        # Something to learn pulls the scores up; the loss has to hold them down against it.
        wish = -0.1 * routing.scores_TE.sum(dim=-1).clamp(max=4).mean()
        optimizer.zero_grad()
        (wish + weight * relu_sparsity_loss(routing)).backward()
        optimizer.step()
        weight = sparsity_weight_after(weight, density, factor=1.05)
    assert densities[0] > 1.5  # about half of the 8 experts
    # The rule swings about its target: the mean of the last quarter.
    assert sum(densities[-100:]) / 100 == pytest.approx(1, abs=0.1)
