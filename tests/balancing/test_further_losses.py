"""The losses beside Switch's: worked by hand, at balance, under padding, and what their parts add up to."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn.balancing.losses import (
    BALANCING_LOSSES,
    cv_squared,
    global_load_balancing_loss,
    importance_loss,
    load_balancing_loss,
    load_loss,
    pairs_per_expert,
    pooled_load_balancing_loss,
    relu_sparsity_loss,
    router_entropy,
    sequence_load_balancing_loss,
)
from moe_ffn.outputs import Routing, TokenContext
from moe_ffn.routing.config import NoisyTopKRouterConfig

# -- worked by hand


def test_each_sequence_is_balanced_by_itself(make_routing: Any) -> None:
    # Two sequences of two tokens. The first: both to expert 0, scores (.8, .2): 2 * (1 * .8) = 1.6.
    # The second: both to expert 1, scores (.4, .6): 2 * (1 * .6) = 1.2. The mean is 1.4, where the
    # batch as a whole has f = (1/2, 1/2) and scores 1.
    scores = torch.tensor([[0.8, 0.2]] * 2 + [[0.4, 0.6]] * 2)
    routing = make_routing([[0], [0], [1], [1]], 2, scores_TE=scores, sequence_length=2)
    assert sequence_load_balancing_loss(routing).item() == pytest.approx(1.4)
    assert load_balancing_loss(routing).item() == pytest.approx(1)


def test_sequences_of_nothing_but_padding_do_not_count(make_routing: Any) -> None:
    scores = torch.tensor([[0.8, 0.2]] * 2 + [[0.4, 0.6]] * 2)
    mask = torch.tensor([True, False, False, False])
    routing = make_routing([[0]] * 4, 2, scores_TE=scores, sequence_length=2, mask_T=mask)
    assert sequence_load_balancing_loss(routing).item() == pytest.approx(1.6)


def test_pooled_layers_on_opposite_halves_look_balanced(make_routing: Any) -> None:
    # E = 4, k = 2: each layer scores 2 (f = P = 1/2 on two experts: 4 * 2 / 4), together 1.
    lower = torch.tensor([[0.5, 0.5, 0, 0]] * 3)
    layers = [
        make_routing([[0, 1]] * 3, 4, scores_TE=lower),
        make_routing([[2, 3]] * 3, 4, scores_TE=lower.flip(-1)),
    ]
    assert [load_balancing_loss(layer).item() for layer in layers] == [2, 2]
    assert pooled_load_balancing_loss(layers).item() == 1


def test_pooling_layers_of_different_sizes_is_refused(make_routing: Any) -> None:
    message = (
        "load_balance_pooled needs equally many experts in every layer, got 2, 3; use load_balance"
    )
    with pytest.raises(ValueError, match=message):
        pooled_load_balancing_loss([make_routing([[0]], 2), make_routing([[0]], 3)])


def test_cv_squared_is_the_variance_of_a_sample_over_the_squared_mean() -> None:
    # 1, 2, 3: mean 2, variance ((-1)^2 + 0 + 1^2) / 2 = 1; 1 / 4.
    assert cv_squared(torch.tensor([1.0, 2.0, 3.0])).item() == pytest.approx(0.25)
    assert cv_squared(torch.tensor([5.0])).item() == 0
    assert cv_squared(torch.zeros(3)).item() == 0


def test_importance_sums_the_weights_of_real_pairs(make_routing: Any) -> None:
    # Experts get .9 + .7 = 1.6 and .1: mean .85, variance 2 * .75^2 / 1 = 1.125; / .7225.
    weights = torch.tensor([0.9, 0.1, 0.7, 0.3])
    chosen = torch.tensor([True, True, True, False])
    routing = make_routing([[0, 1], [0, 1]], 2, weights_N=weights, chosen_N=chosen)
    assert importance_loss(routing).item() == pytest.approx(1.125 / 0.7225)


def test_importance_of_a_collapsed_router(make_routing: Any) -> None:
    # All of the weight on k of E experts: E (E / k - 1) / (E - 1); k = 1 and E = 4 give 4.
    assert importance_loss(make_routing([[0]] * 3, 4)).item() == pytest.approx(4)
    assert importance_loss(make_routing([[0, 1]] * 3, 4)).item() == pytest.approx(4 / 3)


def test_smooth_load_is_the_sum_of_selection_probabilities(make_routing: Any) -> None:
    # Loads .9 + .5 = 1.4 and .1 + .5 = .6: mean 1, variance 2 * .4^2 = .32.
    probs = torch.tensor([[0.9, 0.1], [0.5, 0.5]])
    routing = make_routing([[0], [1]], 2, selection_probs_TE=probs)
    assert load_loss(routing).item() == pytest.approx(0.32)


def test_smooth_load_needs_a_router_with_noise(make_routing: Any) -> None:
    message = (
        r"load_cv2 needs selection_probs_TE, which router.type 'noisy_top_k' returns in training"
    )
    with pytest.raises(ValueError, match=message):
        load_loss(make_routing([[0]], 2))


def test_entropy_is_the_mean_over_tokens(make_routing: Any) -> None:
    # log 2 of an undecided token, 0 of a sure one; scores need not add up to 1.
    routing = make_routing([[0], [0]], 2, scores_TE=torch.tensor([[3.0, 3.0], [0.5, 0.0]]))
    assert router_entropy(routing).item() == pytest.approx(math.log(2) / 2)


def test_relu_sparsity_is_remoes_formula(make_routing: Any) -> None:
    # E = 2, k = 1, T = 2. Pairs: both tokens to expert 0, one to expert 1: f = (2, 1) / (k T) = (1, .5).
    # Mean scores (1.5, .5): 2 * (1 * 1.5 + .5 * .5) = 3.5.
    scores = torch.tensor([[2.0, 1.0], [1.0, 0.0]])
    routing = make_routing(
        [[0, 1], [0, 1]], 2, scores_TE=scores, target_k=1.0, chosen_N=(scores > 0).flatten()
    )
    assert relu_sparsity_loss(routing).item() == pytest.approx(3.5)
    with pytest.raises(ValueError, match="relu_sparsity needs a router that has a target_k"):
        relu_sparsity_loss(make_routing([[0]], 2))


# -- at balance, and nowhere


@pytest.mark.parametrize("num_experts", [1, 2, 5, 8])
@pytest.mark.parametrize("k", [1, 2, 8])
def test_balance_scores_one_or_zero_for_any_k_and_number_of_experts(
    make_routing: Any, k: int, num_experts: int
) -> None:
    k = min(k, num_experts)
    ids = [[(t + i) % num_experts for i in range(k)] for t in range(num_experts)]
    scores = torch.full((num_experts, num_experts), 1 / num_experts, dtype=torch.float64)
    routing = make_routing(ids, num_experts, scores_TE=scores)
    assert sequence_load_balancing_loss(routing).item() == pytest.approx(1)
    assert pooled_load_balancing_loss([routing, routing]).item() == pytest.approx(1)
    assert importance_loss(routing).item() == pytest.approx(0, abs=1e-12)
    whole = global_load_balancing_loss(routing, pairs_per_expert(routing), routing.num_real_tokens)
    assert whole.item() == pytest.approx(1)


NOISY = NoisyTopKRouterConfig(k=2)


def noisy(logits_TE: Tensor, mask: Tensor | None = None, sequence_length: int = 4) -> Routing:
    """A routing that every loss takes; the same noise every time."""
    torch.manual_seed(0)
    router = NOISY.build(logits_TE.shape[-1], logits_TE.shape[-1])
    with torch.no_grad():
        router.get_parameter("projection.weight").copy_(torch.eye(logits_TE.shape[-1]))
    return router(logits_TE, TokenContext(mask=mask, sequence_length=sequence_length))


@pytest.mark.parametrize("name", BALANCING_LOSSES)
@pytest.mark.parametrize("num_tokens", [0, 8], ids=["no_tokens", "padding_only"])
def test_without_real_tokens_a_loss_is_zero_and_so_is_its_gradient(
    name: str, num_tokens: int
) -> None:
    logits = torch.ones(num_tokens, 4, requires_grad=True)
    loss = BALANCING_LOSSES[name](noisy(logits, torch.zeros(num_tokens, dtype=torch.bool)))
    assert loss.item() == 0
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.count_nonzero() == 0


@pytest.mark.parametrize("name", BALANCING_LOSSES)
def test_padding_changes_neither_value_nor_gradient(
    name: str, published_logits_LTE: Tensor
) -> None:
    # Each sequence of 4 is followed by 2 padded tokens. Noise is drawn for all, so it is left out.
    def value_and_gradient(padding: int) -> tuple[float, Tensor]:
        logits = published_logits_LTE[0].clone().requires_grad_()
        padded = torch.nn.functional.pad(logits.view(3, 4, 8), (0, 0, 0, padding), value=5.0)
        mask = (torch.arange(4 + padding) < 4).repeat(3)
        routing = noisy(padded.reshape(-1, 8), mask, sequence_length=4 + padding)
        loss = BALANCING_LOSSES[name](routing)
        loss.backward()
        assert logits.grad is not None
        return loss.item(), logits.grad

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn_like", torch.zeros_like)
        (plain, gradient), (padded, padded_gradient) = map(value_and_gradient, (0, 2))
    assert padded == pytest.approx(plain, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(padded_gradient, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", BALANCING_LOSSES)
def test_float64_stays_float64(name: str, published_logits_LTE: Tensor) -> None:
    torch.manual_seed(0)
    router = NOISY.build(8, 8).double()
    loss = BALANCING_LOSSES[name](router(published_logits_LTE[0].double(), TokenContext()))
    assert loss.dtype == torch.float64


# -- the parts of a step


def test_the_parts_of_a_step_add_up_to_the_loss_of_the_whole(
    route_logits: Any, published_logits_LTE: Tensor
) -> None:
    logits = published_logits_LTE[0].double().requires_grad_()
    mask = torch.arange(12) % 5 > 0  # uneven parts, and padding in them
    whole = load_balancing_loss(route_logits(logits.float(), 2, mask=mask))
    (wanted,) = torch.autograd.grad(whole, logits)

    bounds = [0, 2, 7, 12]
    parts = [
        route_logits(logits[a:b].float(), 2, mask=mask[a:b]) for a, b in itertools.pairwise(bounds)
    ]
    pairs_E = torch.stack([pairs_per_expert(part) for part in parts]).sum(0)
    num_tokens = torch.stack([part.num_real_tokens for part in parts]).sum()
    total = torch.stack([global_load_balancing_loss(p, pairs_E, num_tokens) for p in parts]).sum()
    (got,) = torch.autograd.grad(total, logits)
    # float32 inside: sums of twelve terms of size one.
    assert total.item() == pytest.approx(whole.item(), abs=1e-6)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


SURVIVES = {
    "load_balance": False,
    "load_balance_sequence": True,
    "importance_cv2": False,
    "router_z": True,
    "router_entropy": True,
}


@pytest.mark.parametrize(("name", "survives"), SURVIVES.items())
def test_the_mean_over_equal_parts_is_the_whole_where_the_docs_say_so(
    route_logits: Any, published_logits_LTE: Tensor, name: str, survives: bool
) -> None:
    loss, logits = BALANCING_LOSSES[name], published_logits_LTE[0]

    def value(logits_TE: Tensor) -> float:
        context = {"sequence_length": 3}
        routing = route_logits(logits_TE, 2)
        return loss(Routing(**{**vars(routing), **context})).item()

    parts = [value(part) for part in logits.split(3)]
    whole = value(logits)
    assert (sum(parts) / 4 == pytest.approx(whole, rel=1e-5)) == survives
