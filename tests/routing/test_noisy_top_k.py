"""Noisy top-k is Shazeer's: its noise in training only, its probabilities those of drawing again."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moe_ffn.outputs import NoisyRouting, TokenContext
from moe_ffn.routing import NoisyTopKRouterConfig
from moe_ffn.routing.noisy_top_k import MIN_NOISE, selection_probabilities
from tests.helpers.identity_router import identity_router, random_logits, real_pairs, route

# The noise's projection starts at zero: softplus(0) = ln 2, plus the least noise.
FIRST_SCALE = math.log(2) + MIN_NOISE


def softmax(values: list[float]) -> list[float]:
    total = sum(math.exp(v) for v in values)
    return [math.exp(v) / total for v in values]


def test_evaluation_is_the_softmax_of_the_k_largest_logits() -> None:
    # (5, 2) / 7
    routing = route(NoisyTopKRouterConfig(k=2), torch.tensor([[1.0, 2.0, 5.0]]).log())
    (pairs,) = real_pairs(routing)
    assert [e for e, _ in pairs] == [2, 1]
    assert [w for _, w in pairs] == pytest.approx([5 / 7, 2 / 7])
    assert not isinstance(routing, NoisyRouting)


def test_training_adds_one_normal_draw_per_logit_and_weighs_with_it() -> None:
    logits = random_logits(30, 5)
    router = identity_router(NoisyTopKRouterConfig(k=3), 5).train()
    torch.manual_seed(7)
    noise = torch.randn(30, 5, dtype=torch.float64)
    torch.manual_seed(7)
    routing = router(logits, TokenContext())
    got = real_pairs(routing)
    for t, (row, drawn) in enumerate(zip(logits.tolist(), noise.tolist(), strict=True)):
        h = [z + FIRST_SCALE * n for z, n in zip(row, drawn, strict=True)]
        chosen = sorted(range(5), key=lambda e: -h[e])[:3]
        assert [e for e, _ in got[t]] == chosen
        assert [w for _, w in got[t]] == pytest.approx(softmax([h[e] for e in chosen]))
        assert routing.scores_TE[t].tolist() == pytest.approx(softmax(h))
    assert torch.equal(routing.logits_TE, logits)  # the z-loss sees them without noise


def test_each_expert_has_its_own_learned_scale() -> None:
    router = identity_router(NoisyTopKRouterConfig(k=2), 3).train()
    with torch.no_grad():
        # Rows of W_noise; the token (1, 0, 0) then has scales softplus(-9), softplus(0), softplus(9).
        router.get_parameter("noise.weight")[:, 0] = torch.tensor([-9.0, 0.0, 9.0])
    x = torch.tensor([[1.0, 0.0, 0.0]]).expand(20_000, 3)
    torch.manual_seed(0)
    scores = router(x, TokenContext()).scores_TE.log()
    # Differences of log-softmax are differences of h: var(h_i - h_j) = s_i^2 + s_j^2.
    s = [math.log1p(math.exp(z)) + MIN_NOISE for z in (-9.0, 0.0, 9.0)]
    for i, j in [(0, 1), (1, 2), (0, 2)]:
        deviation = (scores[:, i] - scores[:, j]).std().item()
        # A standard deviation from 20 000 draws is off by 0.5 %; four times that.
        assert deviation == pytest.approx(math.hypot(s[i], s[j]), rel=0.02)


def kth_largest_of_the_others(row: list[float], expert: int, k: int) -> float:
    others = [h for e, h in enumerate(row) if e != expert]
    return sorted(others, reverse=True)[k - 1]


def probabilities_of(
    num_tokens: int, num_experts: int, k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits = random_logits(num_tokens, num_experts)
    scale = 0.2 + random_logits(num_tokens, num_experts, seed=1).abs()
    noisy = logits + scale * random_logits(num_tokens, num_experts, seed=2)
    return logits, noisy, scale, selection_probabilities(logits, noisy, scale, k)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_selection_probabilities_equal_the_papers_formula(k: int) -> None:
    logits, noisy, scale, got = probabilities_of(20, 5, k)
    for t, row in enumerate(noisy.tolist()):
        for e in range(5):
            threshold = kth_largest_of_the_others(row, e, k)
            z = (logits[t, e].item() - threshold) / scale[t, e].item()
            expected = (1 + math.erf(z / math.sqrt(2))) / 2
            assert got[t, e].item() == pytest.approx(expected, abs=1e-12)


def test_with_k_of_all_experts_each_is_certain() -> None:
    routing = route(NoisyTopKRouterConfig(k=4), random_logits(6, 4), training=True)
    assert isinstance(routing, NoisyRouting)
    assert (routing.selection_probs_TE == 1).all()
    assert all(sorted(e for e, _ in pairs) == [0, 1, 2, 3] for pairs in real_pairs(routing))
