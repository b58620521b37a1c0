"""Rules without a loss: published examples, sums over batches, and what holds of every rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn.balancing.bias_rules import (
    BiasRuleConfig,
    GlobalQuantileRuleConfig,
    QuantileRuleConfig,
    SignRuleConfig,
    sparsity_weight_after,
)
from moe_ffn.balancing.losses import pairs_per_expert, relu_sparsity_loss
from moe_ffn.metrics.functional import max_violation
from moe_ffn.outputs import Routing, TokenContext
from moe_ffn.routing import ReLURouterConfig, RouterConfig, SigmoidTopKRouterConfig
from tests.helpers import every_router

# A sum of a few float32 numbers of the order of 1e-3.
FLOAT32 = 1e-9

RULES: list[BiasRuleConfig] = [
    SignRuleConfig(rate=0.01),
    SignRuleConfig(rate=0.01, centre=True),
    QuantileRuleConfig(ema=0.0),
    QuantileRuleConfig(ema=0.9),
    GlobalQuantileRuleConfig(),
]
IDS = ["sign", "sign_centred", "quantile", "quantile_averaged", "global_quantile"]


def route(logits_TE: Tensor, k: int, bias_E: Tensor, mask: Tensor | None = None) -> Routing:
    config = SigmoidTopKRouterConfig(k=k, renormalize=False)
    return every_router.route(config, logits_TE, mask=mask, bias=bias_E.tolist())


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
    # Two batches observed (-.3, .1) together: fresh is (-.15, .05); .9 * (.2, -.2) + .1 * fresh is
    # (.165, -.175), less its mean -.005: (.17, -.17).
    rule = QuantileRuleConfig(ema=0.9)
    bias = rule.update(torch.tensor([0.2, -0.2]), torch.tensor([-0.3, 0.1]), num_batches=2)
    torch.testing.assert_close(bias, torch.tensor([0.17, -0.17]), rtol=0, atol=1e-7)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(
    "rule", [QuantileRuleConfig(ema=0.0), GlobalQuantileRuleConfig()], ids=lambda rule: rule.type
)
def test_one_quantile_step_takes_most_of_the_imbalance_and_a_few_nearly_all(
    rule: BiasRuleConfig, k: int
) -> None:
    logits, bias = lopsided_logits(), torch.zeros(8)
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
def test_a_fractional_share_is_rounded_down(
    num_tokens: int, k: int, num_experts: int, place: int, padding: int
) -> None:
    # The (T k / E + 1)-th smallest: of 5 tokens and one of two experts the third, place 2 from 0.
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
        required = [sorted(row, reverse=True)[k] - row[expert] for row in rows]
        assert observed_E[expert].item() == pytest.approx(sorted(required)[place])


# ------------------------------------------------------------------------------- the global quantile rule


def observed_bins(counts: dict[tuple[int, int], int], num_bins: int, pairs: list[int]) -> Tensor:
    """Histograms with `counts` at (expert, bin), and the pairs of each expert."""
    observed = torch.zeros(len(pairs), num_bins + 1, dtype=torch.int64)
    for cell, count in counts.items():
        observed[cell] = count
    observed[:, -1] = torch.tensor(pairs)
    return observed


def exact_quantiles(logits_TE: Tensor, k: int, bias_E: Tensor) -> Tensor:
    """The ceil(T k / E)-th smallest required bias of each expert, in float64."""
    scores_TE = logits_TE.double().sigmoid()
    cutoff_T1 = (scores_TE + bias_E.double()).sort(dim=-1, descending=True).values[:, k, None]
    num_tokens, num_experts = scores_TE.shape
    rank = -(-num_tokens * k // num_experts)
    return (cutoff_T1 - scores_TE).sort(dim=0).values[rank - 1]


def test_the_quantiles_are_those_of_the_published_tests() -> None:
    # torchtitan, test_quantile_balance.py: 8 tokens, k = 1, 10 bins of width 0.2.
    counts = {(i, 2 * i + 2): 2 for i in range(4)} | {(i, 2 * i + 3): 6 for i in range(4)}
    found = GlobalQuantileRuleConfig(num_bins=10).update(
        torch.zeros(4), observed_bins(counts, 10, [8, 0, 0, 0]), 1
    )
    torch.testing.assert_close(found, torch.tensor([-0.6, -0.2, 0.2, 0.6]))
    # Megatron-LM, test_qb_histogram_recovery: 4 tokens, k = 1, 4 bins of width 0.5.
    counts = {(0, 1): 2, (0, 2): 2, (1, 0): 2, (1, 1): 2}
    found = GlobalQuantileRuleConfig(num_bins=4).update(
        torch.zeros(2), observed_bins(counts, 4, [3, 1]), 1
    )
    torch.testing.assert_close(found, torch.tensor([0.25, -0.25]))


def test_inside_a_bin_the_quantile_is_interpolated() -> None:
    # 8 tokens and 8 pairs of 2 experts, so the 4th token; bins of width 0.5 begin at -1.
    counts = {(0, 1): 8, (1, 0): 3, (1, 1): 5}
    found = GlobalQuantileRuleConfig(num_bins=4).quantiles(
        torch.zeros(2), observed_bins(counts, 4, [6, 2])
    )
    # Expert 0: 4 of the 8 in the second bin. Expert 1: 3 below it, so 1 of 5.
    torch.testing.assert_close(found, torch.tensor([-0.5 + 0.5 * 4 / 8, -0.5 + 0.5 * 1 / 5]))


def test_ranks_move_the_bias_as_in_the_published_test() -> None:
    # torchtitan, test_quantile_balancing_distributed.py: each rank alone, and both together.
    scores = torch.tensor([[0.92, 0.68, 0.31, 0.07], [0.07, 0.31, 0.92, 0.68]])
    rule, bias = GlobalQuantileRuleConfig(num_bins=10), torch.zeros(4)
    observed = [rule.observe(route(row.logit().expand(4, -1), 1, bias), bias) for row in scores]
    alone = [rule.update(bias, one, 1) for one in observed]
    torch.testing.assert_close(alone[0], torch.tensor([-0.5, -0.1, 0.1, 0.5]))
    torch.testing.assert_close(alone[1], torch.tensor([0.5, 0.1, -0.5, -0.1]))
    together = rule.update(bias, observed[0] + observed[1], 2)
    torch.testing.assert_close(together, torch.tensor([-0.2, 0.2, -0.2, 0.2]))


@pytest.mark.parametrize("num_bins", [2, 50, 1000])
@pytest.mark.parametrize(("num_tokens", "k"), [(512, 2), (37, 3), (5, 1)])
def test_a_histogram_is_within_one_bin_of_the_exact_quantile(
    num_tokens: int, k: int, num_bins: int
) -> None:
    logits, bias = lopsided_logits(num_tokens), torch.linspace(0.3, -0.5, 8)
    rule = GlobalQuantileRuleConfig(num_bins=num_bins)
    found = rule.quantiles(bias, rule.observe(route(logits, k, bias), bias))
    width = 2.8 / num_bins
    assert (found - exact_quantiles(logits, k, bias)).abs().max() <= width + 1e-6


@pytest.mark.parametrize("parts", [[512], [128] * 4, [1, 300, 7, 204]], ids=len)
def test_parts_of_a_step_have_the_histogram_of_the_whole(parts: list[int]) -> None:
    logits, bias = lopsided_logits(), torch.linspace(-0.1, 0.1, 8)
    mask = torch.arange(512) % 5 > 0
    rule = GlobalQuantileRuleConfig()
    whole = rule.observe(route(logits, 2, bias, mask), bias)
    pairs = zip(logits.split(parts), mask.split(parts), strict=True)
    observed = [rule.observe(route(part, 2, bias, real), bias) for part, real in pairs]
    assert torch.equal(torch.stack(observed).sum(0), whole)
    assert whole[:, :-1].sum(-1).tolist() == [int(mask.sum())] * 8
    assert whole[:, -1].sum() == 2 * mask.sum()


def test_scores_beyond_the_range_move_the_bias_further_at_each_step() -> None:
    # All 8 tokens prefer expert 0 by 3, outside of [-1, 1]: the range follows the bias.
    routing = route(torch.zeros(8, 2), 1, torch.zeros(2))
    routing = replace(routing, scores_TE=torch.tensor([3.0, 0.0]).expand(8, 2))
    bias, rule = torch.zeros(2), GlobalQuantileRuleConfig()
    for _ in range(4):
        bias = step(rule, bias, routing)
    assert (bias[1] - bias[0]).item() == pytest.approx(3, abs=0.02)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"score": "sqrt_softplus"}, "has score (sqrt_softplus)"),
        ({"select_by": "logit"}, "has select_by (logit)"),
        ({"groups": {"num_groups": 4, "keep": 2}}, "has groups"),
        ({"groups": {"num_groups": 4, "keep": 2}, "correction_bias": False}, None),
        ({"num_always": 1}, None),
        (
            {"type": "elastic_top_k", "correction_bias": True},
            "has a k that is drawn (k_min, k_max)",
        ),
    ],
)
def test_the_global_quantile_needs_the_k_largest_biased_scores(
    options: dict[str, Any], reason: str | None
) -> None:
    router = RouterConfig.model_validate({"type": "sigmoid_top_k", **options})
    got = GlobalQuantileRuleConfig().unsupported_reason([("0", router, 8)])
    assert got is None if reason is None else f"router of layer 0 {reason}; remove it" in str(got)


def test_the_quantile_rule_needs_experts_ranked_by_score() -> None:
    for options, reason in (({}, None), ({"select_by": "logit"}, "has select_by (logit)")):
        router = RouterConfig.model_validate({"type": "sigmoid_top_k", **options})
        got = QuantileRuleConfig().unsupported_reason([("0", router, 8)])
        assert (
            got is None if reason is None else f"router of layer 0 {reason}; remove it" in str(got)
        )


# ------------------------------------------------------------------------------- all rules


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
def test_the_bias_stays_when_there_is_no_choice(config: BiasRuleConfig, case: str) -> None:
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
    assert observed.shape[0] == 8
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
