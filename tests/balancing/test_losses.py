"""Balancing losses against the published libraries' own numbers, and against the traps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn import load_balancing_loss, router_z_loss
from moe_ffn.outputs import Routing

# Printed to six digits after the point, of float32 sums: 1e-6 apart at most.
PRINTED = 1e-6


@pytest.fixture
def layers(route_logits: Any, published_logits_LTE: Tensor) -> Any:
    """k -> the routing of each of the three published layers."""
    return lambda k: [route_logits(logits_TE, k) for logits_TE in published_logits_LTE]


def losses(routings: list[Routing]) -> list[float]:
    return [load_balancing_loss(routing).item() for routing in routings]


# megatron aux_softmax_k{1,2}_per_layer. Layer 0 is also deepspeed top1_l_aux (1.082632) and
# topk2 l_aux (1.024952), olmo_core lb_local_batch_k2 and sonic_moe switch_k2 (1.024952).
@pytest.mark.parametrize(
    ("k", "published"),
    [(1, [1.082632, 1.024865, 1.147022]), (2, [1.024952, 1.004207, 1.082881])],
    ids=["k1", "k2"],
)
def test_load_balancing_loss_equals_megatrons(layers: Any, k: int, published: list[float]) -> None:
    assert losses(layers(k)) == pytest.approx(published, abs=PRINTED)


def test_load_balancing_loss_of_sigmoid_scores_equals_megatrons(
    make_routing: Any, published_logits_LTE: Tensor
) -> None:
    # megatron aux_sigmoid_k2_per_layer: scores that don't add up to 1 are normalised.
    got = []
    for logits_TE in published_logits_LTE:
        expert_ids_TK = logits_TE.topk(2).indices.tolist()
        scores_TE = logits_TE.sigmoid()
        got.append(load_balancing_loss(make_routing(expert_ids_TK, 8, scores_TE=scores_TE)).item())
    assert got == pytest.approx([1.017988, 1.003404, 1.007019], abs=PRINTED)


def test_mixtral_is_ours_times_k(layers: Any) -> None:
    # hf_mixtral k2_single_layers; Hugging Face counts tokens, not pairs, so balance is k there.
    ours = [2 * loss for loss in losses(layers(2))]
    assert ours == pytest.approx([2.049905, 2.008415, 2.165762], abs=2 * PRINTED)


@pytest.mark.parametrize(("k", "published"), [(1, 1.021135), (2, 2.010882)], ids=["k1", "k2"])
def test_mixtral_pools_all_layers(
    route_logits: Any, published_logits_LTE: Tensor, k: int, published: float
) -> None:
    # hf_mixtral k{1,2}_all_layers
    pooled = route_logits(published_logits_LTE.flatten(0, 1), k)
    assert k * load_balancing_loss(pooled).item() == pytest.approx(published, abs=k * PRINTED)


def test_mixtral_with_padding_is_ours_times_k(
    route_logits: Any, published_logits_LTE: Tensor
) -> None:
    # hf_mixtral k2_all_layers_mask_drop_tokens_3,10,11
    mask_LT = torch.ones(3, 12, dtype=torch.bool)
    mask_LT[:, [3, 10, 11]] = False
    pooled = route_logits(published_logits_LTE.flatten(0, 1), k=2, mask=mask_LT.flatten())
    assert 2 * load_balancing_loss(pooled).item() == pytest.approx(2.03601, abs=2 * PRINTED)


def test_olmo_instance_is_the_mean_over_sequences(
    route_logits: Any, published_logits_LTE: Tensor
) -> None:
    # olmo_core lb_instance_k2_layer0_as_B3_S4: three sequences of four tokens
    sequences = published_logits_LTE[0].view(3, 4, 8)
    ours = losses([route_logits(logits_TE, 2) for logits_TE in sequences])
    assert sum(ours) / 3 == pytest.approx(1.181028, abs=PRINTED)


# megablocks lbl_k{1,2}_w1 and hf_switch top{1,2}_groups=layers (there times k)
@pytest.mark.parametrize(("k", "published"), [(1, 1.084839), (2, 1.037347)], ids=["k1", "k2"])
def test_megablocks_and_switch_are_the_mean_over_layers(
    layers: Any, k: int, published: float
) -> None:
    assert sum(losses(layers(k))) / 3 == pytest.approx(published, abs=PRINTED)


def test_z_loss_equals_megatrons_and_olmos(layers: Any) -> None:
    # megatron z_loss_per_layer, olmo_core z_layer0; their mean is hf_switch z_groups=layers. The
    # values are ten times larger than above, and so is float32's last digit.
    ours = [router_z_loss(routing).item() for routing in layers(1)]
    assert ours == pytest.approx([8.421222, 7.856539, 8.066414], abs=5 * PRINTED)
    assert sum(ours) / 3 == pytest.approx(8.114726, abs=5 * PRINTED)


def test_z_loss_equals_the_one_worked_by_hand(make_routing: Any) -> None:
    # logsumexp(ln 1, ln 2) = ln 3, logsumexp(0, 0) = ln 2: mean of their squares.
    logits = torch.tensor([[1.0, 2.0], [1.0, 1.0]], dtype=torch.float64).log()
    routing = make_routing([[0], [1]], 2, logits_TE=logits)
    # (1.0986123^2 + 0.6931472^2) / 2 = (1.2069490 + 0.4804530) / 2
    assert router_z_loss(routing).item() == pytest.approx(0.8437010, abs=1e-7)


def test_load_balancing_loss_equals_the_one_worked_by_hand(make_routing: Any) -> None:
    # Pairs 0, 0, 0, 1: f = (3/4, 1/4). Scores (.9, .1) twice and (.5, .5) twice: P = (.7, .3).
    # 2 * (.75 * .7 + .25 * .3) = 1.2
    scores = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    routing = make_routing([[0], [0], [0], [1]], 2, scores_TE=scores)
    assert load_balancing_loss(routing).item() == pytest.approx(1.2, abs=1e-12)


@pytest.mark.parametrize("num_experts", [1, 2, 3, 7, 8, 64])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_balanced_router_scores_one(make_routing: Any, k: int, num_experts: int) -> None:
    if k > num_experts:
        k = num_experts
    expert_ids_TK = [[(t + i) % num_experts for i in range(k)] for t in range(num_experts)]
    scores = torch.full((num_experts, num_experts), 1 / num_experts, dtype=torch.float64)
    loss = load_balancing_loss(make_routing(expert_ids_TK, num_experts, scores_TE=scores))
    # float64 throughout: the share of an expert must not be rounded to float32 on the way.
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(1, abs=1e-12)


def test_uneven_choice_with_undecided_scores_is_one_too(make_routing: Any) -> None:
    # Even P makes the sum E * sum_i f_i / E = 1 whatever f is.
    assert load_balancing_loss(make_routing([[0]] * 5, 4)).item() == pytest.approx(1, abs=1e-6)


def test_collapse_onto_one_expert_scores_num_experts(make_routing: Any) -> None:
    scores = torch.tensor([[1.0, 0, 0, 0]] * 5)
    routing = make_routing([[0]] * 5, 4, scores_TE=scores)
    assert load_balancing_loss(routing).item() == 4


def test_collapse_onto_opposite_halves_shows_in_each_layer(route_logits: Any) -> None:
    # E = 4, k = 2: one layer uses experts 0 and 1, the other 2 and 3. Each has f = P = 1/2 on two
    # experts: 4 * 2 * 1/4 = 2. Pooled (Hugging Face) they would be balanced and score 1.
    lower = torch.tensor([[30.0, 30.0, -30.0, -30.0]] * 6)
    upper = -lower
    assert losses([route_logits(lower, 2), route_logits(upper, 2)]) == pytest.approx(
        [2, 2], abs=1e-6
    )
    pooled = route_logits(torch.cat([lower, upper]), 2)
    assert load_balancing_loss(pooled).item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("loss", [load_balancing_loss, router_z_loss], ids=lambda f: f.__name__)
def test_padding_changes_nothing(
    route_logits: Any, published_logits_LTE: Tensor, loss: Any
) -> None:
    real = published_logits_LTE[0]
    padded = torch.cat([1e4 * torch.ones(2, 8).cumsum(1), real, torch.full((5, 8), -50.0)])
    mask = torch.tensor([False] * 2 + [True] * 12 + [False] * 5)
    # The same twelve terms, added in another order: float32 rounding of numbers up to 10.
    torch.testing.assert_close(
        loss(route_logits(padded, 2, mask=mask)), loss(route_logits(real, 2)), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("loss", [load_balancing_loss, router_z_loss], ids=lambda f: f.__name__)
def test_padded_logits_get_no_gradient(
    route_logits: Any, published_logits_LTE: Tensor, loss: Any
) -> None:
    logits = published_logits_LTE[0].clone().requires_grad_()
    mask = torch.arange(12) < 9
    loss(route_logits(logits, 2, mask=mask)).backward()
    assert logits.grad is not None
    assert logits.grad[9:].count_nonzero() == 0
    assert (logits.grad[:9] != 0).any(dim=-1).all()


@pytest.mark.parametrize("loss", [load_balancing_loss, router_z_loss], ids=lambda f: f.__name__)
@pytest.mark.parametrize("num_tokens", [0, 3], ids=["no_tokens", "padding_only"])
def test_no_real_token_scores_zero(route_logits: Any, loss: Any, num_tokens: int) -> None:
    logits = torch.ones(num_tokens, 4, requires_grad=True)
    value = loss(route_logits(logits, 2, mask=torch.zeros(num_tokens, dtype=torch.bool)))
    assert value.item() == 0
    value.backward()
    assert logits.grad is not None
    assert logits.grad.count_nonzero() == 0
    assert loss(route_logits(torch.ones(0, 4), 2)).item() == 0


def test_density_is_measured_before_dropping(make_routing: Any) -> None:
    scores = torch.tensor([[0.9, 0.1]] * 4)
    kept = make_routing([[0]] * 4, 2, scores_TE=scores)
    dropped = make_routing(
        [[0]] * 4, 2, scores_TE=scores, dropped_N=torch.tensor([False, True, True, True])
    )
    assert load_balancing_loss(dropped).item() == load_balancing_loss(kept).item()


def test_counts_carry_no_gradient(route_logits: Any, published_logits_LTE: Tensor) -> None:
    # With f held constant, E * sum_i f_i P_i has the gradient of a fixed linear form of P.
    logits = published_logits_LTE[0].double().requires_grad_()
    routing = route_logits(logits.float(), 2)
    share_E = routing.expert_ids_N.bincount(minlength=8).double() / 24
    (expected,) = torch.autograd.grad(8 * (share_E * logits.softmax(-1).mean(0)).sum(), logits)
    (got,) = torch.autograd.grad(load_balancing_loss(routing), logits)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-7)  # float32 inside


def test_the_loss_pushes_towards_balance(route_logits: Any) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(64, 4) + torch.tensor([2.0, 0, 0, 0])).requires_grad_()
    before = load_balancing_loss(route_logits(logits, 1))
    before.backward()
    assert logits.grad is not None
    assert logits.grad[:, 0].mean() > 0  # down with the crowded one
    after = load_balancing_loss(route_logits((logits - 50 * logits.grad).detach(), 1))
    assert after < before
