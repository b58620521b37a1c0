"""Biases and the sparsity weight move once per step, by what all batches and ranks observed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn.balancing.losses import load_balancing_loss
from moe_ffn.outputs import Routing
from moe_ffn.routing.base import Router
from moe_ffn.routing.config import ReLURouterConfig, SigmoidTopKRouterConfig, TopKRouterConfig
from moe_ffn.training.config import ObjectiveConfig
from moe_ffn.training.steering import RouterSteering
from moe_ffn.training.step_totals import count_step

RATE = 1e-3


def alone(value: Tensor) -> Tensor:
    return value


def biased_router() -> Router:
    return SigmoidTopKRouterConfig(k=1, renormalize=False).build(4, 2)


def test_a_bias_moves_by_the_sum_of_the_steps_batches(make_routing: Any) -> None:
    routers = {"layer_00": biased_router()}
    steering = RouterSteering(ObjectiveConfig())
    # 3 to 1 for expert 0, then 1 to 2 for expert 1: together 4 to 3.
    steering.observe({"layer_00": make_routing([[0], [0], [0], [1]], 2)}, routers)
    steering.observe({"layer_00": make_routing([[0], [1], [1]], 2)}, routers)
    bias = routers["layer_00"].correction_bias_E
    assert bias is not None
    assert bias.tolist() == [0, 0], "not before the step"
    steering.step(routers, alone)
    assert bias.tolist() == pytest.approx([-RATE, RATE])
    steering.step(routers, alone)
    assert bias.tolist() == pytest.approx([-RATE, RATE]), "what a step observed is used once"


def test_other_ranks_are_asked_for_their_counts(make_routing: Any) -> None:
    routers = {"layer_00": biased_router()}
    steering = RouterSteering(ObjectiveConfig())
    steering.observe({"layer_00": make_routing([[0]], 2)}, routers)
    elsewhere = torch.tensor([0, 5])
    steering.step(routers, lambda counts: counts + elsewhere, num_ranks=2)
    bias = routers["layer_00"].correction_bias_E
    assert bias is not None
    assert bias.tolist() == pytest.approx([RATE, -RATE])


def test_ranks_that_observe_the_same_move_a_quantile_as_one_does(route_logits: Any) -> None:
    """What they observed is summed over ranks, and so divided by the batches of all of them."""
    weights = ObjectiveConfig.model_validate({"bias_rule": {"type": "quantile"}})
    generator = torch.Generator().manual_seed(0)
    routing = route_logits(torch.randn(12, 4, generator=generator), 2)
    biases: list[Tensor] = []
    for num_ranks in (1, 2):
        routers = {"layer_00": SigmoidTopKRouterConfig(k=2).build(4, 4)}
        steering = RouterSteering(weights)
        for _ in range(3):
            steering.observe({"layer_00": routing}, routers)
        steering.step(routers, lambda value, ranks=num_ranks: ranks * value, num_ranks)
        bias = routers["layer_00"].correction_bias_E
        assert bias is not None
        biases.append(bias)

    assert biases[0].abs().max() > 1e-4
    torch.testing.assert_close(biases[1], biases[0], rtol=1e-5, atol=0)


def test_a_router_without_a_bias_is_left_alone(make_routing: Any) -> None:
    routers = {"layer_00": TopKRouterConfig(k=1).build(4, 2)}
    steering = RouterSteering(ObjectiveConfig())
    steering.observe({"layer_00": make_routing([[0]], 2)}, routers)
    steering.step(routers, alone)
    assert routers["layer_00"].correction_bias_E is None
    assert steering.sparsity_weight.item() == pytest.approx(1e-8)


def test_a_routing_without_a_named_router_is_left_alone(make_routing: Any) -> None:
    steering = RouterSteering(ObjectiveConfig())
    steering.observe({"layer_00": make_routing([[0]], 2)}, {})
    steering.step({}, alone)
    assert steering.sparsity_weight.item() == pytest.approx(1e-8)


def test_the_sparsity_weight_rises_while_too_many_experts_are_chosen() -> None:
    router = ReLURouterConfig(k=1).build(4, 4)
    steering = RouterSteering(ObjectiveConfig())

    def step(*experts_per_token: int) -> float:
        for chosen in experts_per_token:
            steering.observe({"layer_00": chosen_by_all(chosen)}, {"layer_00": router})
        steering.step({"layer_00": router}, alone)
        return steering.sparsity_weight.item()

    assert step(3) == pytest.approx(1.2e-8)
    assert step(3, 0) == pytest.approx(1.44e-8)  # 1.5 on average
    assert step(0) == pytest.approx(1.2e-8)
    assert step(1) == pytest.approx(1.2e-8), "on target it stays"


def chosen_by_all(experts: int) -> Routing:
    """Two tokens, each of which lists four experts and chooses the first `experts`."""
    logits_TE = torch.where(torch.arange(4) < experts, 1.0, -1.0).expand(2, 4)
    return Routing(
        token_ids_N=torch.arange(2).repeat_interleave(4),
        expert_ids_N=torch.arange(4).repeat(2),
        weights_N=logits_TE.relu().flatten(),
        dropped_N=torch.zeros(8, dtype=torch.bool),
        logits_TE=logits_TE,
        scores_TE=logits_TE.relu(),
        mask_T=None,
        sequence_length=2,
        chosen_N=(logits_TE > 0).flatten(),
        target_k=1.0,
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
