"""Biases and the sparsity weight move once per step, by what all batches and ranks observed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn.balancing.losses import count_step, load_balancing_loss
from moe_ffn.outputs import Routing, SparsityTargetRouting
from moe_ffn.routing import ReLURouterConfig, SigmoidTopKRouterConfig, TopKRouterConfig
from moe_ffn.routing.base import Router
from moe_ffn.training.objective import BalanceUpdater, ObjectiveConfig

RATE = 1e-3


def alone(value: Tensor) -> Tensor:
    return value


def biased_router() -> Router:
    return SigmoidTopKRouterConfig(k=1, renormalize=False).build(4, 2)


def test_a_bias_moves_by_the_sum_of_the_steps_batches(make_routing: Any) -> None:
    routers = {"layer_00": biased_router()}
    updater = BalanceUpdater(ObjectiveConfig())
    # 3 to 1 for expert 0, then 1 to 2 for expert 1: together 4 to 3.
    updater.observe({"layer_00": make_routing([[0], [0], [0], [1]], 2)}, routers)
    updater.observe({"layer_00": make_routing([[0], [1], [1]], 2)}, routers)
    bias = routers["layer_00"].correction_bias_E
    assert bias is not None
    assert bias.tolist() == [0, 0], "not before the step"
    updater.step(routers, alone)
    assert bias.tolist() == pytest.approx([-RATE, RATE])
    updater.step(routers, alone)
    assert bias.tolist() == pytest.approx([-RATE, RATE]), "what a step observed is used once"


def test_other_ranks_are_asked_for_their_counts(make_routing: Any) -> None:
    routers = {"layer_00": biased_router()}
    updater = BalanceUpdater(ObjectiveConfig())
    updater.observe({"layer_00": make_routing([[0]], 2)}, routers)
    elsewhere = torch.tensor([0, 5])
    updater.step(routers, lambda counts: counts + elsewhere, num_ranks=2)
    bias = routers["layer_00"].correction_bias_E
    assert bias is not None
    assert bias.tolist() == pytest.approx([RATE, -RATE])


@pytest.mark.parametrize("is_named", [True, False])
def test_a_router_without_a_bias_or_a_name_is_left_alone(make_routing: Any, is_named: bool) -> None:
    routers = {"layer_00": TopKRouterConfig(k=1).build(4, 2)} if is_named else {}
    updater = BalanceUpdater(ObjectiveConfig())
    updater.observe({"layer_00": make_routing([[0]], 2)}, routers)
    updater.step(routers, alone)
    assert all(router.correction_bias_E is None for router in routers.values())
    assert updater.sparsity_weight.item() == pytest.approx(1e-8)


def test_the_sparsity_weight_rises_while_too_many_experts_are_chosen() -> None:
    router = ReLURouterConfig(k=1).build(4, 4)
    updater = BalanceUpdater(ObjectiveConfig())

    def step(*experts_per_token: int) -> float:
        for chosen in experts_per_token:
            updater.observe({"layer_00": chosen_by_all(chosen)}, {"layer_00": router})
        updater.step({"layer_00": router}, alone)
        return updater.sparsity_weight.item()

    assert step(3) == pytest.approx(1.2e-8)
    assert step(3, 0) == pytest.approx(1.44e-8)  # 1.5 on average
    assert step(0) == pytest.approx(1.2e-8)
    assert step(1) == pytest.approx(1.2e-8), "on target it stays"


def test_the_density_is_measured_against_the_target_of_each_layer() -> None:
    # 3 experts a token are half too many for a target of 2, and too few for one of 4.
    assert sparsity_weight_after_a_step({"layer_00": chosen_by_all(3, target_k=2.0)}) > 1
    assert sparsity_weight_after_a_step({"layer_00": chosen_by_all(3, target_k=4.0)}) < 1
    assert sparsity_weight_after_a_step({"layer_00": chosen_by_all(2, target_k=2.0)}) == 1


@pytest.mark.parametrize("order", [1, -1], ids=["dense_first", "dense_last"])
def test_the_density_is_the_mean_over_layers(order: int) -> None:
    def after(dense: Routing, *sparse: Routing) -> float:
        layers = [dense, *sparse][::order]
        named = {f"layer_{n:02}": layer for n, layer in enumerate(layers)}
        return sparsity_weight_after_a_step(named)

    # Densities of 2 and 1/2 have a mean of 5/4, of 2, 1/2 and 0 one of 5/6.
    half = chosen_by_all(1, target_k=2.0)
    assert after(chosen_by_all(4, target_k=2.0), half) > 1
    assert after(chosen_by_all(4, target_k=2.0), half, chosen_by_all(0, target_k=2.0)) < 1
    # Each by its own target: 4 of 4 and 1 of 2 have a mean of 3/4.
    assert after(chosen_by_all(4, target_k=4.0), half) < 1
    # Layers count alike, however many tokens each of them sees: 2 and 1/3 have a mean of 7/6.
    many = chosen_by_all(1, target_k=3.0, num_tokens=50)
    assert after(chosen_by_all(4, target_k=2.0), many) > 1


def test_the_density_is_of_the_tokens_of_all_ranks() -> None:
    # Here 2 tokens choose 3 of a target of 2; elsewhere 8 tokens chose nothing: 0.3 of the target.
    routings = {"layer_00": chosen_by_all(3, target_k=2.0)}
    elsewhere = torch.tensor([0.0, 8.0])
    assert sparsity_weight_after_a_step(routings) > 1
    assert sparsity_weight_after_a_step(routings, lambda sums: sums + elsewhere) < 1


def sparsity_weight_after_a_step(
    routings: dict[str, Routing], reduce: Callable[[Tensor], Tensor] = alone
) -> float:
    """Factor on the weight of the sparsity loss: 1.2, 1 / 1.2, or 1 on target."""
    updater = BalanceUpdater(ObjectiveConfig())
    before = updater.sparsity_weight.item()
    updater.observe(routings, {})
    updater.step({}, reduce)
    return updater.sparsity_weight.item() / before


@pytest.mark.parametrize("rule", [{"type": "quantile", "ema": 0.5}, {"type": "global_quantile"}])
@pytest.mark.parametrize(("num_batches", "num_ranks"), [(3, 1), (3, 2)])
def test_quantiles_are_those_of_the_batches_of_all_ranks(
    rule: dict[str, Any], num_batches: int, num_ranks: int, route_logits: Any
) -> None:
    # Every batch of every rank observes the same, so the bias is what one batch alone would make it.
    config = ObjectiveConfig.model_validate({"bias_rule": rule})
    logits_TE = torch.tensor([[3.0, 1.0], [2.0, 0.0], [1.0, 0.5], [0.0, 0.2]])
    routing = route_logits(logits_TE, k=1)
    expected = torch.zeros(2)
    for _ in range(2):
        once = config.bias_rule.observe(routing, expected)
        expected = config.bias_rule.update(expected, once, num_batches=1)
    assert expected.abs().min() > 0.01

    routers = {"layer_00": biased_router()}
    updater = BalanceUpdater(config)
    for _ in range(2):
        for _ in range(num_batches):
            updater.observe({"layer_00": routing}, routers)
        updater.step(routers, lambda sums: num_ranks * sums, num_ranks)
    bias = routers["layer_00"].correction_bias_E
    assert bias is not None
    torch.testing.assert_close(bias, expected)


def chosen_by_all(experts: int, target_k: float = 1.0, num_tokens: int = 2) -> Routing:
    """Tokens, each of which lists four experts and chooses the first `experts`."""
    logits_TE = torch.where(torch.arange(4) < experts, 1.0, -1.0).expand(num_tokens, 4)
    return SparsityTargetRouting(
        token_indices_N=torch.arange(num_tokens).repeat_interleave(4),
        expert_ids_N=torch.arange(4).repeat(num_tokens),
        weights_N=logits_TE.relu().flatten(),
        dropped_N=torch.zeros(4 * num_tokens, dtype=torch.bool),
        logits_TE=logits_TE,
        scores_TE=logits_TE.relu(),
        num_tokens=num_tokens,
        num_experts=4,
        sequence_length=num_tokens,
        selected_N=(logits_TE > 0).flatten(),
        target_k=target_k,
    )


def test_totals_of_a_step_are_those_of_its_batches_on_all_ranks(make_routing: Any) -> None:
    first, second = make_routing([[0], [0]], 2), make_routing([[1]], 2)
    totals = count_step([{"a": first, "b": second}, {"a": second, "b": second}], alone)
    assert totals.pairs_E["a"].tolist() == [2, 1]
    assert totals.pairs_E["b"].tolist() == [0, 2]
    assert (int(totals.num_tokens["a"]), int(totals.num_tokens["b"])) == (3, 2)
    assert totals.num_parts == 2

    doubled = count_step([{"a": first, "b": second}], lambda value: 2 * value, num_ranks=2)
    assert doubled.pairs_E["a"].tolist() == [4, 0]
    assert doubled.pairs_E["b"].tolist() == [0, 2]
    assert (int(doubled.num_tokens["a"]), int(doubled.num_tokens["b"])) == (4, 2)
    assert doubled.num_parts == 2


def test_the_gradient_of_what_was_observed_is_not_kept(route_logits: Any) -> None:
    routing = route_logits(torch.eye(4, requires_grad=True), k=2)
    totals = count_step([{"a": routing}], alone)
    assert not totals.pairs_E["a"].requires_grad
    assert load_balancing_loss(routing).requires_grad
