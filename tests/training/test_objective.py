from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn import Decoder, DecoderConfig
from moe_ffn.balancing.losses import (
    BALANCING_LOSSES,
    BalancingLoss,
    BalancingWeights,
    StepTotals,
    coupling_loss,
    proxy_tokens,
)
from moe_ffn.outputs import Routing
from moe_ffn.training.objective import (
    IGNORED_TARGET,
    CouplingConfig,
    ObjectiveConfig,
    add_coupling_gradient,
    objective,
)

LOG_3 = 1.0986123


def routing(expert_ids: list[int], scores_TE: Tensor, logits_TE: Tensor) -> Routing:
    """Routing of each token to one expert."""
    num_tokens = len(expert_ids)
    return Routing(
        token_indices_N=torch.arange(num_tokens),
        expert_ids_N=torch.tensor(expert_ids),
        weights_N=torch.ones(num_tokens),
        dropped_N=torch.zeros(num_tokens, dtype=torch.bool),
        logits_TE=logits_TE,
        scores_TE=scores_TE,
        num_tokens=num_tokens,
        num_experts=scores_TE.shape[1],
        sequence_length=num_tokens,
    )


@pytest.fixture
def lopsided() -> Routing:
    # load: shares (1, 0), mean scores (0.625, 0.375): 2 * (1 * 0.625) = 1.25
    # z: logsumexp (log 4, log 2), their squares 1.9218121 and 0.4804530, the mean 1.2011325
    scores = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    return routing([0, 0], scores, torch.tensor([[LOG_3, 0.0], [0.0, 0.0]]))


@pytest.fixture
def balanced() -> Routing:
    # load: 2 * (0.5 * 0.5 + 0.5 * 0.5) = 1; z: (log 2)^2 = 0.4804530
    return routing([0, 1], torch.full((2, 2), 0.5), torch.zeros(2, 2))


@pytest.fixture
def logits_BSV() -> Tensor:
    # With targets 0 and 1: log 2 = 0.6931472, and -log(3/4) = 0.2876821; the mean is 0.4904146.
    return torch.tensor([[[0.0, 0.0], [0.0, LOG_3]]])


def test_every_part_equals_the_one_worked_by_hand(
    logits_BSV: Tensor, lopsided: Routing, balanced: Routing
) -> None:
    weights = ObjectiveConfig(load_balance=0.1, router_z=0.01)

    found = objective(logits_BSV, torch.tensor([[0, 1]]), {"a": lopsided, "b": balanced}, weights)

    assert found.cross_entropy.item() == pytest.approx(0.4904146)
    # (1.25 + 1) / 2
    assert found.balancing["load_balance"].item() == pytest.approx(1.125)
    # (1.2011325 + 0.4804530) / 2
    assert found.balancing["router_z"].item() == pytest.approx(0.8407928)
    # 0.4904146 + 0.1 * 1.125 + 0.01 * 0.8407928
    assert found.total.item() == pytest.approx(0.6113225)


def test_weights_of_zero_leave_the_values_and_not_the_total(
    logits_BSV: Tensor, lopsided: Routing
) -> None:
    weights = ObjectiveConfig(load_balance=0.0, router_z=0.0)
    found = objective(logits_BSV, torch.tensor([[0, 1]]), {"a": lopsided}, weights)
    assert found.total == found.cross_entropy
    assert found.balancing["load_balance"].item() == pytest.approx(1.25)
    assert found.balancing["router_z"].item() == pytest.approx(1.2011325)


def test_layers_collapsed_onto_opposite_experts_do_not_cancel(logits_BSV: Tensor) -> None:
    # Each layer: 2 * (1 * 1) = 2. The tokens of both together would look balanced, and score 1.
    sure = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    layers = {"a": routing([0, 0], sure, sure), "b": routing([1, 1], sure.flip(-1), sure.flip(-1))}
    found = objective(logits_BSV, torch.tensor([[0, 1]]), layers, ObjectiveConfig())
    assert found.balancing["load_balance"].item() == 2


def test_ignored_targets_are_in_no_loss(logits_BSV: Tensor) -> None:
    targets = torch.tensor([[0, IGNORED_TARGET]])

    found = objective(logits_BSV, targets, {}, ObjectiveConfig())

    # log 2, only of the first position
    assert found.cross_entropy.item() == pytest.approx(0.6931472)
    assert found.balancing == {}, "of a dense model"
    assert found.total == found.cross_entropy


def test_gradients_reach_logits_and_scores_and_detaching_cuts_them(
    logits_BSV: Tensor, balanced: Routing
) -> None:
    logits_BSV.requires_grad_()
    assert balanced.logits_TE is not None
    assert balanced.scores_TE is not None
    balanced.scores_TE.requires_grad_()
    balanced.logits_TE.requires_grad_()

    found = objective(logits_BSV, torch.tensor([[0, 1]]), {"a": balanced}, ObjectiveConfig())
    found.total.backward()

    assert logits_BSV.grad is not None
    assert balanced.scores_TE.grad is not None
    assert balanced.logits_TE.grad is not None
    cut = found.detach()
    parts = [cut.total, cut.cross_entropy, *cut.balancing.values()]
    assert len(parts) == 4
    assert not any(part.requires_grad for part in parts)


def test_the_loss_of_bfloat16_logits_is_computed_in_float32() -> None:
    # 1000 equal logits: log 1000 = 6.9077553, which bfloat16 would round to 6.90625.
    logits = torch.zeros(1, 2, 1000, dtype=torch.bfloat16)
    found = objective(logits, torch.tensor([[0, 1]]), {}, ObjectiveConfig())
    assert found.total.dtype == torch.float32
    assert found.total.item() == pytest.approx(6.9077553)


def test_every_balancing_loss_has_a_weight_and_every_weight_a_loss() -> None:
    weighted = {name for name, loss in BALANCING_LOSSES.items() if not loss.weight_set_by_rule}
    assert weighted == set(BalancingWeights.model_fields)
    assert weighted < set(ObjectiveConfig.model_fields)


def test_a_new_entry_of_the_table_is_weighed_and_shown(
    logits_BSV: Tensor, lopsided: Routing, balanced: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The highest weight of a pair, as a class of weights with one more field would name it."""
    highest = BalancingLoss(
        lambda routing: routing.require("scores_TE", "highest_score").max(),
        applies_to=lambda routing: routing.expert_ids_N.tolist() == [0, 0],
    )
    monkeypatch.setitem(BALANCING_LOSSES, "highest_score", highest)
    monkeypatch.setattr(ObjectiveConfig, "highest_score", 2.0, raising=False)
    weights = ObjectiveConfig(load_balance=0.0, router_z=0.0)

    found = objective(logits_BSV, torch.tensor([[0, 1]]), {"a": lopsided, "b": balanced}, weights)

    assert found.balancing["highest_score"].item() == 0.75, "of the layer that it concerns"
    assert found.total.item() == pytest.approx(0.4904146 + 2 * 0.75)


def test_the_global_rule_is_of_the_steps_counts_and_the_mean_of_its_parts(
    make_routing: Any,
) -> None:
    # Two parts of one token each: all to expert 0, scores (.9, .1); all to expert 1, scores (.5, .5).
    # Together f = (1/2, 1/2), so the loss is 1 whatever P; apart they would be 1.8 and 1.
    first = make_routing([[0]], 2, scores_TE=torch.tensor([[0.9, 0.1]]))
    second = make_routing([[1]], 2, scores_TE=torch.tensor([[0.5, 0.5]]))
    totals = StepTotals({"a": torch.tensor([1, 1])}, {"a": torch.tensor(2)}, num_parts=2)
    weights = ObjectiveConfig(load_balance=0.0, router_z=0.0, load_balance_global=0.5)
    logits, targets = torch.zeros(1, 1, 3), torch.tensor([[0]])
    parts = [
        objective(logits, targets, {"a": part}, weights, step_totals=totals)
        for part in (first, second)
    ]
    values = [part.balancing["load_balance_global"].item() for part in parts]
    assert sum(values) / 2 == pytest.approx(1)
    assert parts[0].total.item() == pytest.approx(math.log(3) + 0.5 * values[0])
    alone = objective(logits, targets, {"a": first}, weights)
    assert alone.balancing["load_balance_global"].item() == pytest.approx(1.8)
    two = StepTotals(
        totals.pairs_E | {"b": torch.tensor([2, 0])}, totals.num_tokens | {"b": torch.tensor(2)}, 2
    )
    both = objective(logits, targets, {"a": first, "b": first}, weights, step_totals=two)
    # Layer b: f = (1, 0) and P = (.9, .1) of one of two tokens: 2 parts * 2 * .9 / 2 = 1.8; layer a: 1.
    assert both.balancing["load_balance_global"].item() == pytest.approx((values[0] + 1.8) / 2)


def test_the_sparsity_loss_is_for_relu_layers_and_weighted_by_the_rule(make_routing: Any) -> None:
    # Layer a: one token, both experts chosen with scores 2 and 1, k = 1: E / (k T) = 2, f = (1, 1):
    # 2 * (2 + 1) = 6. Layer b has no target and takes no part.
    scores = torch.tensor([[2.0, 1.0]])
    relu = make_routing([[0, 1]], 2, scores_TE=scores, target_k=1.0)
    plain = make_routing([[0]], 2)
    weights = ObjectiveConfig(load_balance=0.0, router_z=0.0)
    found = objective(
        torch.zeros(1, 1, 3),
        torch.tensor([[0]]),
        {"a": relu, "b": plain},
        weights,
        sparsity_weight=torch.tensor(0.01),
    )
    assert found.balancing["relu_sparsity"].item() == pytest.approx(6)
    assert found.total.item() == pytest.approx(math.log(3) + 0.06)
    # Layer c chooses one expert with score 3: 2 * 3 = 6 with f = (1, 0); the mean of 6 and 6, then of 12.
    more = make_routing([[0]], 2, scores_TE=torch.tensor([[9.0, 0.0]]), target_k=1.0)
    layers = {"a": relu, "b": plain, "c": more}
    found = objective(torch.zeros(1, 1, 3), torch.tensor([[0]]), layers, weights)
    assert found.balancing["relu_sparsity"].item() == pytest.approx((6 + 18) / 2)


def test_the_z_loss_leaves_relu_layers_alone(make_routing: Any) -> None:
    # logsumexp(0, 0)^2 = (ln 2)^2 of the plain layer; the other one's logits of 5 do not count.
    relu = make_routing([[0, 1]], 2, logits_TE=torch.full((1, 2), 5.0), target_k=1.0)
    plain = make_routing([[0]], 2)
    logits, targets = torch.zeros(1, 1, 3), torch.tensor([[0]])
    found = objective(logits, targets, {"a": relu, "b": plain}, ObjectiveConfig())
    assert found.balancing["router_z"].item() == pytest.approx(math.log(2) ** 2)
    assert "router_z" not in objective(logits, targets, {"a": relu}, ObjectiveConfig()).balancing


def test_losses_without_a_weight_are_not_computed(make_routing: Any) -> None:
    # load_cv2 would reject this router.
    found = objective(
        torch.zeros(1, 1, 3), torch.tensor([[0]]), {"a": make_routing([[0]], 2)}, ObjectiveConfig()
    )
    assert set(found.balancing) == {"load_balance", "router_z"}


COUPLED_FFNS: dict[str, dict[str, Any]] = {
    "gated": {"router": {"type": "top_k", "k": 2}},
    "mlp": {
        "router": {"type": "sigmoid_top_k", "bias": True},
        "experts": {"type": "mlp", "d_ff": 5},
    },
    "latent": {
        "experts": {"type": "latent", "width": 4, "experts": {"type": "normed", "input": {}}}
    },
    "zero_computation": {"zero_computation": {"num_copy": 2}},
}


def coupled_decoder(**ffn: Any) -> Decoder:
    torch.manual_seed(0)
    mixture = {"type": "moe", "num_experts": 4, **ffn}
    model = {"d_model": 8, "num_layers": 3, "attention": {"num_heads": 2}, "ffn_at": {"1": "dense"}}
    return DecoderConfig.model_validate({**model, "ffn": mixture}).build(
        vocab_size=7, max_seq_len=4
    )


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("ffn", COUPLED_FFNS.values(), ids=COUPLED_FFNS)
def test_the_gradient_of_coupling_is_that_of_the_mean_over_layers(
    ffn: dict[str, Any], noise: bool
) -> None:
    decoder = coupled_decoder(**ffn)
    config = CouplingConfig(weight=0.3, alpha=0.5, noise=noise)
    generator, losses = torch.Generator().manual_seed(5), list[Tensor]()
    for layer in (0, 2):
        mixture: Any = decoder.layers[layer].get_submodule("ffn")
        rows_ED = mixture.router.projection.weight[:4]
        proxies_ED = proxy_tokens(rows_ED, generator) if noise else rows_ED
        inner = mixture.experts.innermost
        gate_EFD = inner.gate if hasattr(inner, "gate") else inner.up
        proxies_ED = mixture.experts.before_dispatch(proxies_ED)
        losses.append(coupling_loss(proxies_ED, gate_EFD, config.alpha))
    named = dict(decoder.named_parameters())
    expected = torch.autograd.grad(
        0.3 * torch.stack(losses).mean(), list(named.values()), allow_unused=True
    )

    before = torch.ones_like(named["layers.0.ffn.router.projection.weight"])
    named["layers.0.ffn.router.projection.weight"].grad = before.clone()
    named["layers.2.ffn.router.projection.weight"].requires_grad_(False)
    value = add_coupling_gradient(decoder, config, seed=5)

    torch.testing.assert_close(value, torch.stack(losses).mean().detach())
    coupled = set[str]()
    for (name, parameter), gradient in zip(named.items(), expected, strict=True):
        if not parameter.requires_grad:
            assert parameter.grad is None
        elif gradient is None or not gradient.any():
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            coupled.add(name.split(".", 3)[-1])
            assert parameter.grad is not None
            added = parameter.grad - before if "router.proj" in name else parameter.grad
            torch.testing.assert_close(added, gradient, rtol=1e-4, atol=1e-6, msg=name)
    assert {"router.projection.weight"} < coupled
    assert not any("down" in name or "out_of" in name for name in coupled)
