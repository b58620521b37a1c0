"""Balancing losses match hand-computed numbers, and are low for balance and high for collapse."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn import DecoderConfig
from moe_ffn.balancing.losses import (
    BALANCING_LOSSES,
    coupling_loss,
    importance_cv2_loss,
    load_balancing_loss,
    load_cv2_loss,
    pooled_load_balancing_loss,
    proxy_tokens,
    relu_sparsity_loss,
    router_entropy_loss,
    router_z_loss,
    sequence_load_balancing_loss,
)
from moe_ffn.balancing.sums import (
    mean_over_tokens,
    normalized_scores,
    pairs_per_expert,
    pairs_per_sequence,
)
from moe_ffn.outputs import TokenContext
from moe_ffn.routing import ReLURouterConfig
from tests.helpers.every_loss import (
    LOAD_BALANCING,
    LOSSES,
    balanced,
    collapsed,
    random_logits,
    routing_of,
)
from tests.helpers.every_router import identity_router

# Sums of a few float64 numbers of the order of 1.
EXACT = 1e-12

SIZES = [(1, 1), (1, 2), (2, 2), (1, 7), (2, 4), (3, 8), (8, 8), (2, 64)]
"""(k, E), k = E and a single expert among them."""


def float64(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# ------------------------------------------------------------------------------- worked by hand


def test_load_balancing_loss_equals_the_one_worked_by_hand(make_routing: Any) -> None:
    # Pairs 0, 0, 0, 1: f = (3/4, 1/4). Scores (.9, .1) twice and (.5, .5) twice: P = (.7, .3).
    # 2 * (.75 * .7 + .25 * .3) = 1.2
    scores = float64([0.9, 0.1], [0.9, 0.1], [0.5, 0.5], [0.5, 0.5])
    routing = make_routing([[0], [0], [0], [1]], 2, scores_TE=scores)
    assert load_balancing_loss(routing).item() == pytest.approx(1.2, abs=EXACT)


def test_scores_that_do_not_add_up_to_one_are_normalised_by_token(make_routing: Any) -> None:
    # (3, 1) and (1, 4) are (.75, .25) and (.2, .8): P = (.475, .525). f = (1, 0): 2 * .475
    routing = make_routing([[0], [0]], 2, scores_TE=float64([3.0, 1.0], [1.0, 4.0]))
    assert normalized_scores(routing).tolist() == [[0.75, 0.25], [0.2, 0.8]]
    assert load_balancing_loss(routing).item() == pytest.approx(0.95, abs=EXACT)


def test_sequence_loss_equals_the_one_worked_by_hand(make_routing: Any) -> None:
    # Sequence 0: f = (1, 0), P = (.8, .2): 2 * .8 = 1.6. Sequence 1: f = (.5, .5): 1. Their mean: 1.3.
    scores = float64([0.9, 0.1], [0.7, 0.3], [0.9, 0.1], [0.1, 0.9])
    routing = make_routing([[0], [0], [0], [1]], 2, scores_TE=scores, sequence_length=2)
    assert sequence_load_balancing_loss(routing).item() == pytest.approx(1.3, abs=EXACT)


def test_importance_loss_equals_the_one_worked_by_hand(make_routing: Any) -> None:
    # Expert 0 has .6 + .5 = 1.1, expert 1 .4, expert 2 .5: mean 2/3; squares of the deviations
    # .187778, .071111 and .027778 over 2: .143333; over (2/3)^2: .3225.
    weights = torch.tensor([0.6, 0.4, 0.5, 0.5], dtype=torch.float64)
    routing = make_routing([[0, 1], [0, 2]], 3, weights_N=weights)
    assert importance_cv2_loss(routing).item() == pytest.approx(0.3225, abs=EXACT)


def test_load_loss_equals_the_one_worked_by_hand(make_routing: Any) -> None:
    # Sums (1.5, .5): mean 1, sample variance (.25 + .25) / 1 = .5.
    probs = float64([0.9, 0.3], [0.6, 0.2])
    routing = make_routing([[0], [0]], 2, selection_probs_TE=probs)
    assert load_cv2_loss(routing).item() == pytest.approx(0.5, abs=EXACT)


def test_z_loss_equals_the_one_worked_by_hand(make_routing: Any) -> None:
    # logsumexp(ln 1, ln 2) = ln 3, logsumexp(0, 0) = ln 2: mean of their squares.
    logits = float64([1.0, 2.0], [1.0, 1.0]).log()
    routing = make_routing([[0], [1]], 2, logits_TE=logits)
    # (1.0986123^2 + 0.6931472^2) / 2 = (1.2069490 + 0.4804530) / 2
    assert router_z_loss(routing).item() == pytest.approx(0.8437010, abs=1e-7)


def test_entropy_equals_the_one_worked_by_hand(make_routing: Any) -> None:
    # (1/2, 1/4, 1/4) has 3/2 ln 2; a sure token none: 3/4 ln 2 = .5198604 on average.
    routing = make_routing([[0], [1]], 3, scores_TE=float64([0.5, 0.25, 0.25], [0.0, 1.0, 0.0]))
    assert router_entropy_loss(routing).item() == pytest.approx(0.75 * math.log(2), abs=EXACT)


@pytest.mark.parametrize(("k", "expected"), [(2, 3.75), (0.25, 30.0)])
def test_relu_sparsity_loss_equals_the_one_worked_by_hand(k: float, expected: float) -> None:
    # Experts 0, 1, 2 are chosen 2, 1, 0 times, with scores of 4, 2, 0 together:
    # E / (k T^2) sum_i n_i sum_t s_ti = 3 / (k * 4) * (2 * 4 + 1 * 2) = 7.5 / k.
    router = identity_router(ReLURouterConfig(k=k), 3).double()
    logits = float64([1.0, 2.0, -5.0], [3.0, -1.0, 0.0])
    loss = relu_sparsity_loss(router(logits, TokenContext()))
    assert loss.item() == pytest.approx(expected, abs=EXACT)


def test_pairs_are_counted_before_dropping_and_without_padding_or_what_was_not_chosen(
    make_routing: Any,
) -> None:
    routing = make_routing(
        [[0, 1], [0, 2], [0, 3]],
        4,
        mask_T=torch.tensor([True, True, False]),
        dropped_N=torch.tensor([True, False, True, False, False, False]),
        selected_N=torch.tensor([True, False, True, True, True, True]),
    )
    # Left are (token 0, expert 0), (1, 0), (1, 2).
    assert pairs_per_expert(routing).tolist() == [2, 0, 1, 0]
    assert pairs_per_expert(routing).dtype == torch.int64


def test_pairs_of_each_sequence_by_itself(make_routing: Any) -> None:
    # Two sequences of two tokens; the last token is padding.
    routing = make_routing(
        [[0, 1], [0, 2], [2, 1], [2, 0]],
        3,
        sequence_length=2,
        mask_T=torch.tensor([True, True, True, False]),
    )
    assert pairs_per_sequence(routing).tolist() == [[2, 1, 1], [0, 1, 1]]


def test_the_mean_over_tokens_is_of_the_real_ones(make_routing: Any) -> None:
    routing = make_routing([[0]] * 3, 1, mask_T=torch.tensor([True, False, True]))
    values = torch.tensor([[1.0, 2.0], [torch.nan, 50.0], [3.0, 4.0]])
    assert mean_over_tokens(values, routing).tolist() == [2, 3]
    nobody = replace(routing, mask_T=torch.zeros(3, dtype=torch.bool))
    assert mean_over_tokens(values, nobody).tolist() == [0, 0]


# ------------------------------------------------------------------------------- balance, collapse


@pytest.mark.parametrize(("k", "num_experts"), SIZES)
@pytest.mark.parametrize("name", LOAD_BALANCING)
def test_a_balanced_router_scores_one(name: str, k: int, num_experts: int) -> None:
    assert LOSSES[name](balanced(k, num_experts)).item() == pytest.approx(1, abs=EXACT)


@pytest.mark.parametrize(("k", "num_experts"), SIZES)
@pytest.mark.parametrize("name", LOAD_BALANCING)
def test_a_collapsed_router_scores_experts_over_k(name: str, k: int, num_experts: int) -> None:
    # f = P = 1/k on k experts: E * k * 1/k^2. With k = E there is nothing to collapse onto, and it is 1.
    loss = LOSSES[name](collapsed(5, k, num_experts))
    assert loss.item() == pytest.approx(num_experts / k, rel=EXACT)


@pytest.mark.parametrize(("k", "num_experts"), SIZES)
@pytest.mark.parametrize("name", ["importance_cv2", "load_cv2"])
def test_the_variation_is_zero_at_balance_and_high_in_collapse(
    name: str, k: int, num_experts: int
) -> None:
    assert LOSSES[name](balanced(k, num_experts)).item() == pytest.approx(0, abs=EXACT)
    # k values v among E: mean m = kv/E, sample variance v^2 k (1 - k/E) / (E - 1), and their ratio
    # variance / m^2 is E (E/k - 1) / (E - 1).
    expected = num_experts * (num_experts / k - 1) / max(num_experts - 1, 1)
    loss = LOSSES[name](collapsed(5, k, num_experts))
    assert loss.item() == pytest.approx(expected, rel=EXACT, abs=EXACT)


@pytest.mark.parametrize("num_experts", [1, 2, 8])
def test_an_undecided_router_has_the_entropy_and_z_of_even_logits(
    make_routing: Any, num_experts: int
) -> None:
    # Logits of 0: logsumexp = entropy = ln E.
    routing = make_routing([[0]] * 3, num_experts)
    assert router_entropy_loss(routing).item() == pytest.approx(math.log(num_experts), abs=1e-6)
    assert router_z_loss(routing).item() == pytest.approx(math.log(num_experts) ** 2, abs=1e-6)
    assert router_entropy_loss(collapsed(3, 1, num_experts)).item() == 0


def test_layers_collapsed_onto_opposite_halves_hide_only_in_the_pooled_loss() -> None:
    # E = 4, k = 2: f = P = 1/2 on two experts: 4 * 2 * 1/4 = 2 in each layer; even when pooled.
    layers = [collapsed(6, 2, 4), collapsed(6, 2, 4, first=2)]
    assert [load_balancing_loss(layer).item() for layer in layers] == [2, 2]
    assert pooled_load_balancing_loss(layers).item() == 1


def test_the_pooled_loss_is_that_of_all_layers_tokens_as_one_batch() -> None:
    logits = [random_logits(6, 4, seed=0), random_logits(9, 4, seed=1)]
    masks = [torch.arange(6) < 5, torch.arange(9) > 2]
    layers = [routing_of(z, mask=m) for z, m in zip(logits, masks, strict=True)]
    together = routing_of(torch.cat(logits), mask=torch.cat(masks))
    torch.testing.assert_close(
        pooled_load_balancing_loss(layers), load_balancing_loss(together), rtol=0, atol=EXACT
    )


# ------------------------------------------------------------------------------- rejected


def test_pooling_layers_of_different_sizes_is_rejected() -> None:
    message = (
        r"load_balance_pooled needs equally many experts in every layer, got 4, 8; use load_balance"
    )
    with pytest.raises(ValueError, match=message):
        pooled_load_balancing_loss([balanced(1, 4), balanced(1, 8)])


def test_pooling_counts_the_experts_to_choose_from(make_routing: Any) -> None:
    # Expert 3 of `with_always` processes every token.
    with_always = make_routing([[0, 3], [1, 3], [2, 3]], 4, num_always=1)
    without = make_routing([[0], [1], [2]], 3)
    assert pooled_load_balancing_loss([without, with_always]).item() == pytest.approx(1)
    with pytest.raises(ValueError, match=r"equally many experts in every layer, got 4, 3; use"):
        pooled_load_balancing_loss([balanced(1, 4), with_always])
    ffn, always = (
        {"type": "moe", "num_experts": 4, "router": {"type": "top_k", "num_always": n}}
        for n in (0, 1)
    )
    infos = DecoderConfig.model_validate({"ffn": ffn, "ffn_at": {"1": always}}).router_infos()
    routers = [(layer, info.router, info.num_experts) for layer, info in infos.items()]
    reason = BALANCING_LOSSES["load_balance_pooled"].unsupported_reason(routers)
    assert reason is not None
    assert "got 3, 4;" in reason


def test_the_load_loss_of_a_router_without_noise_is_rejected(make_routing: Any) -> None:
    message = (
        r"load_cv2 needs a NoisyRouting, which router\.type 'noisy_top_k' returns in training; "
        r"use load_balance with other routers"
    )
    with pytest.raises(ValueError, match=message):
        load_cv2_loss(make_routing([[0]], 2))


def test_the_sparsity_loss_of_a_router_without_a_target_is_rejected(make_routing: Any) -> None:
    message = r"relu_sparsity needs a SparsityTargetRouting, which router\.type 'relu' returns"
    with pytest.raises(ValueError, match=message):
        relu_sparsity_loss(make_routing([[0]], 2))


# ------------------------------------------------------------------------------- coupling


def coupling_of_loops(proxies_ED: Tensor, gate_EFD: Tensor, alpha: float) -> Tensor:
    """Equation 3 of arXiv:2512.23447, one pair of experts after another."""
    num_experts = len(proxies_ED)
    norms = [[(gate @ proxy).square().sum().sqrt() for gate in gate_EFD] for proxy in proxies_ED]
    total = proxies_ED.new_zeros(())
    for i in range(num_experts):
        for j in range(num_experts):
            if j != i:
                own = alpha * norms[i][i]
                total = total + (norms[i][j] - own).clamp(min=0) + (norms[j][i] - own).clamp(min=0)
    return total / num_experts**2


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_the_coupling_loss_and_its_gradients_are_those_of_loops(alpha: float) -> None:
    torch.manual_seed(0)
    inputs = [
        torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((5, 6), (5, 4, 6))
    ]
    proxies_ED, gate_EFD = inputs
    found, expected = (
        loss(proxies_ED, gate_EFD, alpha) for loss in (coupling_loss, coupling_of_loops)
    )
    assert found.item() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for ours, theirs in zip(
        *(torch.autograd.grad(x, inputs) for x in (found, expected)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_experts_that_respond_only_to_their_own_rows_have_no_coupling_loss() -> None:
    rows_ED = torch.eye(3)
    own, others = torch.diag_embed(rows_ED), torch.diag_embed(1 - rows_ED)
    assert coupling_loss(rows_ED, own, alpha=0.0) == 0
    # M is 0 on its diagonal and 1 elsewhere: 6 pairs of experts, each twice, divided by 9.
    assert coupling_loss(rows_ED, others, alpha=1.0).item() == pytest.approx(12 / 9)
    assert coupling_loss(rows_ED[:1], own[:1], alpha=1.0) == 0


def test_a_proxy_token_is_nearer_to_its_own_row_than_to_any_other() -> None:
    torch.manual_seed(0)
    rows_ED = torch.randn(8, 3) * torch.logspace(-1, 1, 8).unsqueeze(-1)
    drawn = torch.stack([proxy_tokens(rows_ED) for _ in range(500)])
    own = (drawn - rows_ED).norm(dim=-1)
    others = torch.cdist(drawn, rows_ED.expand(500, -1, -1))
    assert (own <= others.amin(dim=-1) + 1e-6).all()
    # U(1 - eps, 1 + eps) has a mean of 1 and reaches nearly both ends.
    torch.testing.assert_close(drawn.mean(0), rows_ED, rtol=0.2, atol=0)
    nearest = torch.cdist(rows_ED, rows_ED).fill_diagonal_(torch.inf).amin(-1)
    eps = nearest / 2 / rows_ED.norm(dim=-1)
    reached = (drawn / rows_ED - 1).abs().amax(dim=(0, 2))
    torch.testing.assert_close(reached, eps, rtol=0.01, atol=0)


@pytest.mark.parametrize("rows", [[[0.0, 0.0], [1.0, 2.0]], [[1.0, 2.0]], [[1.0, 2.0]] * 3])
def test_rows_of_zeros_and_equal_rows_have_no_noise(rows: list[list[float]]) -> None:
    rows_ED = torch.tensor(rows)
    proxies_ED = proxy_tokens(rows_ED)
    assert proxies_ED.isfinite().all()
    assert torch.equal(proxies_ED[0], rows_ED[0])
