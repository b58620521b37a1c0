"""Options of routers that compose: what is scored, selected, weighed, each against plain Python."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from moe_ffn import ConfigError, TokenContext
from moe_ffn.balancing.losses import importance_cv2_loss, load_balancing_loss
from moe_ffn.ffn import MoEConfig
from moe_ffn.outputs import NoisyRouting
from moe_ffn.routing import NoisyTopKRouterConfig, ReLURouterConfig, RouterConfig, TopKRouterConfig
from moe_ffn.routing.base import RouterLinear
from moe_ffn.routing.capacity import CapacityConfig
from moe_ffn.routing.noisy_top_k import MIN_NOISE, selection_probabilities
from tests.helpers.every_router import (
    experts_of,
    identity_router,
    random_logits,
    real_pairs,
    route,
)

E = 6
BIAS = [0.3, -0.2, 0.0, 0.5, -0.4, 0.1]
IDS = [3, 0, 8, 3, 5, 1, 8, 2]

OPTIONS: dict[str, dict[str, Any]] = yaml.safe_load("""
before: {type: top_k, k: 3, scale: 2.5}
renormalized: {type: top_k, renormalize: true, correction_bias: true}
after: {type: top_k, k: 3, softmax: after, correction_bias: true}
sigmoid: {type: sigmoid_top_k, k: 3, scale: 1.5}
sigmoid_plain: {type: sigmoid_top_k, renormalize: false}
logit_scale: {type: top_k, logit_scale: 0.25}
logit_cap: {type: sigmoid_top_k, logit_cap: 0.7}
scale_and_cap: {type: top_k, k: 3, logit_scale: 3.0, logit_cap: 2.0}
euclidean: {type: top_k, renormalize: true, renormalize_p: 2.0}
euclidean_after: {type: top_k, softmax: after, renormalize: true, renormalize_p: 2.0}
cubic_eps: {type: sigmoid_top_k, k: 3, renormalize_p: 3.0, renormalize_eps: 0.125, scale: 2.5}
sqrt_softplus: {type: sigmoid_top_k, score: sqrt_softplus, k: 3}
by_logit: {type: sigmoid_top_k, select_by: logit, k: 3}
by_logit_softmax: {type: top_k, select_by: logit, correction_bias: true}
always: {type: sigmoid_top_k, num_always: 2, scale: 2.0}
always_k1: {type: top_k, k: 1, num_always: 1, renormalize: true}
always_after: {type: top_k, k: 2, num_always: 1, softmax: after}
always_groups: {type: sigmoid_top_k, num_always: 2, groups: {num_groups: 2, keep: 1,
  score_top: 1}}
global: {type: top_k, learned_scale: global}
per_expert: {type: sigmoid_top_k, learned_scale: expert, num_always: 1}
per_expert_after: {type: top_k, softmax: after, learned_scale: expert}
table: {type: top_k, token_table: {vocab_size: 9}}
table_always: {type: sigmoid_top_k, correction_bias: false, token_table: {vocab_size: 9, seed: 3},
  num_always: 1}
""")


def expected_pairs(router: Any, row: list[float], token_id: int) -> list[tuple[int, float]]:
    """(expert, weight) of one token, only from the options."""
    c = router.config
    z = [c.logit_scale * value for value in row]
    if c.logit_cap:
        z = [c.logit_cap * math.tanh(value / c.logit_cap) for value in z]
    if c.type == "top_k":
        total = sum(map(math.exp, z))
        scores = [math.exp(value) / total for value in z]
    elif c.score == "sigmoid":
        scores = [1 / (1 + math.exp(-value)) for value in z]
    else:
        scores = [math.sqrt(math.log(1 + math.exp(value))) for value in z]
    left = E - c.num_always
    if c.token_table is not None:
        chosen = router.table_VK[token_id].tolist()
    else:
        bias = BIAS if c.correction_bias else [0.0] * E
        ranking = [
            a + b for a, b in zip(scores if c.select_by == "score" else z, bias, strict=True)
        ]
        allowed = range(left)
        if c.groups is not None:  # two halves, by their best
            size = left // 2
            best = max(range(left), key=ranking.__getitem__) // size
            allowed = range(best * size, (best + 1) * size)
        chosen = sorted(allowed, key=lambda e: -ranking[e])[: c.k]
    chosen = [*chosen, *range(left, E)]
    weights = [scores[e] for e in chosen]
    if c.type == "top_k" and c.softmax == "after":
        weights = [weight / sum(weights) for weight in weights]
    if c.renormalize:
        norm = sum(weight**c.renormalize_p for weight in weights) ** (1 / c.renormalize_p)
        weights = [weight / (norm + c.renormalize_eps) for weight in weights]
    learned = [1.0] * E
    if c.learned_scale is not None:
        given = router.weight_scale.tolist()
        learned = given if c.learned_scale == "expert" else given * E
    return [(e, c.scale * learned[e] * w) for e, w in zip(chosen, weights, strict=True)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_option_equals_a_loop_in_plain_python(options: dict[str, Any]) -> None:
    config = RouterConfig.model_validate(options)
    router: Any = identity_router(config, E).double()
    if router.correction_bias_E is not None:
        router.correction_bias_E.copy_(torch.tensor(BIAS))
    if router.weight_scale is not None:
        with torch.no_grad():
            router.weight_scale.copy_(torch.linspace(0.5, 2.0, len(router.weight_scale)))
    logits_TE = random_logits(len(IDS), E, scale=2.0)

    routing = router(logits_TE, TokenContext(token_ids=torch.tensor(IDS)))

    expected = [
        expected_pairs(router, row, token_id)
        for row, token_id in zip(logits_TE.tolist(), IDS, strict=True)
    ]
    found = real_pairs(routing)
    assert [[e for e, _ in pairs] for pairs in found] == [[e for e, _ in p] for p in expected]
    weights = [w for pairs in found for _, w in pairs]
    assert weights == pytest.approx([w for pairs in expected for _, w in pairs], rel=1e-6)
    assert config.experts_per_token(E) == len(found[0])
    assert config.num_params(E, E) == sum(p.numel() for p in router.parameters())


def test_a_token_table_routes_only_by_token_id() -> None:
    router = identity_router(RouterConfig.model_validate(OPTIONS["table"]), E)
    ids = torch.tensor([4, 4, 7])
    routing = router(torch.randn(3, E), TokenContext(token_ids=ids))
    assert routing.expert_ids_N[:2].tolist() == routing.expert_ids_N[2:4].tolist()
    assert len({*routing.expert_ids_N[:2].tolist()}) == 2
    with pytest.raises(ValueError, match=r"router\.token_table routes by token id: call the block"):
        router(torch.randn(3, E), TokenContext())
    for low, high in ((-1, 4), (4, 9)):
        message = re.escape(
            f"token_ids must lie in [0, 9), the rows of router.token_table, but range from {low} to {high}"
        )
        unknown = torch.tensor([low, 4, high])
        with pytest.raises(ValueError, match=f"^{message}$"):
            router(torch.randn(3, E), TokenContext(token_ids=unknown))
        router(torch.randn(3, E), TokenContext(mask=unknown == 4, token_ids=unknown))


@pytest.mark.parametrize("depth", [0, 2])
def test_the_network_before_the_projection_is_its_formula(depth: int) -> None:
    torch.manual_seed(0)
    mlp = {"width": 5, "depth": depth, "eps": 1e-3}
    options = {"type": "top_k", "input_norm": {"eps": 0.01}, "mlp": mlp, "bias": True}
    config = RouterConfig.model_validate(options)
    router: Any = config.build(8, E).double()
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter)
    x_TD = torch.randn(4, 8, dtype=torch.float64)

    h = x_TD / (x_TD.square().mean(-1, keepdim=True) + 0.01).sqrt() * router.input_norm.weight
    h = h @ router.mlp.into.weight.T + router.mlp.into.bias
    h = h / (h.square().mean(-1, keepdim=True) + 1e-3).sqrt() * router.mlp.norm.weight
    for layer in router.mlp.layers:
        z = h @ layer.weight.T + layer.bias
        h = z * torch.special.ndtr(z)
    expected = h @ router.projection.weight.T + router.projection.bias

    torch.testing.assert_close(router(x_TD, TokenContext()).logits_TE, expected, rtol=0, atol=1e-12)
    assert config.num_params(8, E) == sum(p.numel() for p in router.parameters())
    flops = config.flops_per_token(8, E)
    assert flops == 2 * (8 * 5 + depth * 25 + 5 * E)
    noisy = RouterConfig.model_validate({**options, "type": "noisy_top_k"})
    assert noisy.flops_per_token(8, E) == flops + 2 * 8 * E  # the noise reads the token itself
    with pytest.raises(ConfigError, match="has no row for each expert"):
        router.expert_rows()
    lower = router.bfloat16()
    assert lower(x_TD.bfloat16(), TokenContext()).logits_TE.dtype == torch.float32


# -- k that training draws

DRAWN: dict[str, dict[str, Any]] = yaml.safe_load("""
plain: {}
renormalized: {renormalize: true, correction_bias: true, renormalize_p: 2.0}
always: {num_always: 1, renormalize: true, learned_scale: expert, scale: 2.0}
""")


def drawn(**options: Any) -> Any:
    return RouterConfig.model_validate({"type": "elastic_top_k", "k_max": 4, **options})


def plain(k: int, **options: Any) -> Any:
    """Softmax top-k; a config with k = 1 and renormalised weights is rejected."""
    return RouterConfig.model_validate({"type": "top_k", "k": 2, **options}).with_k(k)


@pytest.mark.parametrize("options", DRAWN.values(), ids=DRAWN)
def test_a_step_with_a_drawn_k_is_one_of_top_k(options: dict[str, Any]) -> None:
    """The step has the pairs, balancing losses and capacity drops of top_k."""
    logits_TE = random_logits(40, E, scale=2.0)
    mask = torch.arange(40) % 5 != 0
    router: Any = identity_router(drawn(**options), E).train()
    seen: set[int] = set()
    for seed in range(12):
        router.begin_step(torch.Generator().manual_seed(seed))
        k = int(router.k_of_step)
        seen.add(k)
        routing = router(logits_TE, TokenContext(mask=mask))
        expected = route(plain(k, **options), logits_TE, mask=mask)
        for got, wanted in zip(real_pairs(routing), real_pairs(expected), strict=True):
            assert [e for e, _ in got] == [e for e, _ in wanted]
            assert [w for _, w in got] == pytest.approx([w for _, w in wanted], rel=1e-12)
        for loss in (load_balancing_loss, importance_cv2_loss):
            torch.testing.assert_close(loss(routing), loss(expected), rtol=1e-12, atol=0)
        limited, wanted = (
            CapacityConfig(factor=1.0).apply_to(r, training=True) for r in (routing, expected)
        )
        assert wanted.dropped_N.any()
        assert torch.equal(limited.dropped_N[routing.selected_N], wanted.dropped_N)
    assert seen == {1, 2, 3, 4}


@pytest.mark.parametrize("options", DRAWN.values(), ids=DRAWN)
def test_evaluation_at_any_k_is_top_k_to_the_bit(options: dict[str, Any]) -> None:
    logits_TE = random_logits(40, E, scale=2.0).float()
    for k in range(1, 6):
        config = drawn(k=k, **options)
        for found in (config, drawn(**options).with_k(k)):
            routing, expected = route(found, logits_TE), route(plain(k, **options), logits_TE)
            assert type(routing) is type(expected)
            assert torch.equal(routing.expert_ids_N, expected.expert_ids_N)
            assert torch.equal(routing.weights_N, expected.weights_N)
        assert config.experts_per_token(E) == len(routing.weights_N) / 40


def test_k_is_uniform_and_without_a_step_each_pass_draws_one() -> None:
    router: Any = identity_router(drawn(k_min=2, k_max=5), E).train()
    generator = torch.Generator().manual_seed(0)
    counts = dict.fromkeys(range(2, 6), 0)
    for _ in range(4000):
        router.begin_step(generator)
        counts[int(router.k_of_step)] += 1
    # Four standard deviations of a count: 4 sqrt(4000 / 4 * 3 / 4).
    assert all(abs(count - 1000) < 110 for count in counts.values())

    router.k_of_step = None
    torch.manual_seed(0)
    passes = [router(random_logits(3, E), TokenContext()) for _ in range(40)]
    assert {int(routing.active_N.sum()) / 3 for routing in passes} == {2, 3, 4, 5}


def test_flops_are_those_of_the_mean_in_training_and_of_k_in_evaluation() -> None:
    def moe(router: Any) -> MoEConfig:
        return MoEConfig(router=router, experts={"type": "swiglu", "d_ff": 24})  # pyright: ignore[reportArgumentType]

    of_k = {k: moe(plain(k)).flops_per_token(16, 8) for k in (1, 2, 3, 4)}
    config = moe(drawn(k=2))
    assert config.flops_per_token(16, 8) == sum(of_k.values()) / 4
    assert config.num_active_params(16) == moe(plain(2)).num_active_params(16)
    assert {k: config.with_k(k, 16).flops_per_token(16, 8) for k in of_k} == of_k


# -- picks one by one


def mixed_pairs(row: list[float], k: int, threshold: float) -> list[tuple[int, float]]:
    picked: list[tuple[int, float]] = []
    for _ in range(k):
        left = [e for e in range(len(row)) if e not in [expert for expert, _ in picked]]
        best = max(left, key=row.__getitem__)
        near = [e for e in left if (row[best] - row[e]) / max(abs(row[e]), row[best]) <= threshold]
        total = sum(math.exp(row[e]) for e in near)
        picked.append((best, math.exp(row[best]) / total))
    return picked


@pytest.mark.parametrize("k", [1, 2, 4])
def test_sparse_mixer_in_evaluation_equals_picks_in_plain_python(k: int) -> None:
    logits_TE = random_logits(40, E)
    config = RouterConfig.model_validate({"type": "sparse_mixer", "k": k, "threshold": 0.6})
    found = real_pairs(route(config, logits_TE))
    for row, pairs in zip(logits_TE.tolist(), found, strict=True):
        expected = mixed_pairs(row, k, 0.6)
        assert [e for e, _ in pairs] == [e for e, _ in expected]
        assert [w for _, w in pairs] == pytest.approx([w for _, w in expected])


def test_sparse_mixer_in_training_samples_and_keeps_the_gradient_of_the_softmax() -> None:
    # Logits (ln 3, ln 1): near enough both; softmax (3/4, 1/4).
    config = RouterConfig.model_validate({"type": "sparse_mixer", "k": 1, "threshold": 1.9})
    torch.manual_seed(0)
    logits_TE = torch.tensor([[3.0, 1.0]]).log().repeat(4000, 1).requires_grad_()

    routing = route(config, logits_TE, training=True)

    second_T = routing.expert_ids_N == 1
    assert second_T.double().mean().item() == pytest.approx(0.25, abs=0.025)
    assert {round(weight, 5) for weight in routing.weights_N[~second_T].tolist()} == {0.75}
    whole_T = routing.weights_N[second_T] > 0.2
    assert whole_T.double().mean().item() == pytest.approx(0.25, abs=0.06)
    weights = {round(weight, 5) for weight in routing.weights_N[second_T].tolist()}
    assert weights == {0.25, round(0.25 * 0.3333, 5)}
    routing.weights_N.sum().backward()
    # p (1 - p) = 3/16 towards the expert that was drawn, whether or not its output is a third.
    sign_T = torch.where(second_T, -1.0, 1.0)
    assert logits_TE.grad is not None
    torch.testing.assert_close(logits_TE.grad, 3 / 16 * torch.stack([sign_T, -sign_T], -1))


def test_padding_may_have_any_id_in_a_table() -> None:
    router = identity_router(RouterConfig.model_validate(OPTIONS["table"]), E)
    mask = torch.tensor([True, False])
    ids = torch.tensor([1, 10**6])
    routing = router(torch.randn(2, E), TokenContext(token_ids=ids, mask=mask))
    assert isinstance(routing.weights_N, Tensor)
    assert routing.active_N.tolist() == [True, True, False, False]


@torch.no_grad()
def test_a_unit_of_each_expert_chooses_and_weighs_and_no_weight_is_negative() -> None:
    # s = softmax(|silu(gate x) * up x|) of three experts; the two largest s + bias, each weighing 1 + u s.
    built: Any = RouterConfig.model_validate(
        {"type": "neuron_top_k", "k": 2, "correction_bias": True}
    ).build(1, 3)
    built.gate.weight.copy_(torch.tensor([[1.0], [2.0], [-1.0]]))
    built.projection.weight.copy_(torch.tensor([[1.0], [-1.0], [3.0]]))
    built.slope_E.copy_(torch.tensor([0.5, -9.0, 2.0]))
    built.correction_bias_E.copy_(torch.tensor([0.9, 0.0, 0.0]))
    units = [1 / (1 + math.exp(-1)), 2 / (1 + math.exp(-2)), 3 / (1 + math.exp(1))]
    total = sum(map(math.exp, units))
    first, second, third = (math.exp(unit) / total for unit in units)
    assert second > third > first > second - 0.9  # the bias lifts the worst one above the best

    routing = built(torch.ones(1, 1), TokenContext())

    assert routing.expert_ids_N.tolist() == [0, 1]
    assert 1 - 9 * second < 0
    assert routing.weights_N.tolist() == pytest.approx([1 + 0.5 * first, 0])


def test_the_pairs_equal_those_worked_by_hand() -> None:
    logits = torch.tensor([[0.5, -1.0, 0.0, 2.0], [-1.0, -2.0, -0.5, 0.0], [1.0, 1.0, 1.0, 1.0]])
    for training in (True, False):
        routing = route(ReLURouterConfig(), logits, training=training)
        assert real_pairs(routing) == [
            [(0, 0.5), (3, 2.0)],  # 0 is not positive
            [],
            [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0)],
        ]
        assert routing.logits_TE is not None
        assert routing.scores_TE is not None
        assert torch.equal(routing.scores_TE, logits.clamp(min=0))
        assert torch.equal(routing.logits_TE, logits)


def test_k_is_a_target_for_the_rule_and_changes_no_pair() -> None:
    logits = random_logits(30, 5)
    few, many = (route(ReLURouterConfig(k=k), logits) for k in (0.5, 4.0))
    assert real_pairs(few) == real_pairs(many)
    assert [getattr(routing, "target_k", None) for routing in (few, many)] == [0.5, 4.0]


def test_a_token_with_nan_does_not_count_as_one_without_experts() -> None:
    logits = torch.zeros(2, 3)
    logits[1] = torch.nan
    chosen = [[e for e, _ in pairs] for pairs in real_pairs(route(ReLURouterConfig(), logits))]
    assert chosen == [[], [0, 1, 2]]


def test_a_learned_bias_is_added_to_the_logits_and_starts_at_zero() -> None:
    router = identity_router(TopKRouterConfig(k=2, bias=True), 3)
    bias = router.get_parameter("projection.bias")
    logits = random_logits(4, 3)
    assert torch.equal(router(logits, TokenContext()).logits_TE, logits)
    with torch.no_grad():
        bias.copy_(torch.tensor([0.5, -0.25, 0.0]))  # exact in float32
    routing = router(logits, TokenContext())
    torch.testing.assert_close(routing.logits_TE, logits + bias.double(), rtol=0, atol=1e-15)
    assert experts_of(routing) == experts_of(route(TopKRouterConfig(k=2), logits + bias.double()))
    assert TopKRouterConfig(bias=True).num_params(16, 8) == 16 * 8 + 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_jitter_multiplies_the_input_of_the_router_only_in_training(dtype: torch.dtype) -> None:
    router = identity_router(TopKRouterConfig(k=2, jitter=0.25), 4)
    x = torch.full((500, 4), 2.0, dtype=dtype)
    assert (router(x, TokenContext()).logits_TE == 2).all()
    torch.manual_seed(0)
    jittered = router.train()(x, TokenContext()).logits_TE
    assert (x == 2).all()  # the experts see the token as it was
    # U(1.5, 2.5): deviation 1 / sqrt(12) = 0.2887; of 2000 draws the mean is off by 0.0065.
    assert 1.5 <= jittered.min() < 1.51
    assert 2.49 < jittered.max() <= 2.5
    assert jittered.mean().item() == pytest.approx(2, abs=0.026)
    assert jittered.std().item() == pytest.approx(12**-0.5, rel=0.05)
    assert len(jittered.unique()) > 1900  # drawn for every value, finer than bfloat16


def test_projection_starts_as_nn_linear_does() -> None:
    torch.manual_seed(0)
    weight = RouterLinear(100, 1000).weight
    # U(-1/sqrt(100), 1/sqrt(100)): bound 0.1, deviation 0.1 / sqrt(3) = 0.0577.
    assert weight.abs().max().item() == pytest.approx(0.1, rel=1e-3)
    assert weight.std().item() == pytest.approx(0.0577, rel=1e-2)


# -- noisy top-k

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
