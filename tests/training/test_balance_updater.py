"""Biases and the sparsity weight move once per step, and balancing rules undo the collapse of a router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn import Decoder, DecoderConfig, TokenContext
from moe_ffn.balancing.losses import (
    BALANCING_LOSSES,
    count_step,
    importance_cv2_loss,
    load_balancing_loss,
)
from moe_ffn.metrics.functional import max_violation
from moe_ffn.metrics.modular import LoadMetrics
from moe_ffn.outputs import Routing, SparsityTargetRouting
from moe_ffn.routing import (
    ReLURouterConfig,
    RouterConfig,
    SigmoidTopKRouterConfig,
    TopKRouterConfig,
)
from moe_ffn.routing.base import Router
from moe_ffn.routing.capacity import CapacityConfig
from moe_ffn.training.objective import BalanceUpdater, ObjectiveConfig, objective
from tests.helpers.every_router import identity_router

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


# -- experts that process every token (`num_always`)


def test_choices_leave_out_experts_of_every_token_in_any_order(make_routing: Any) -> None:
    routing = make_routing([[0, 3], [3, 1], [2, 3]], 4, num_always=1).choices()
    assert routing.expert_ids_N.tolist() == [0, 1, 2]
    assert routing.num_experts == 3


CHOSEN: dict[str, Any] = {"k": 2, "renormalize": False}


def with_always(num_experts: int, training: bool = False, **options: Any) -> tuple[Routing, Router]:
    """A routing of 24 tokens, in four sequences, to the first experts of six."""
    logits_TE = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))[:, :num_experts]
    config: Any = RouterConfig.model_validate({**CHOSEN, **options})
    router = identity_router(config, num_experts).train(training)
    router.begin_step(torch.Generator().manual_seed(0))
    return router(logits_TE, TokenContext(sequence_length=6)), router


@pytest.mark.parametrize("rule", ["sign", "quantile", "global_quantile"])
def test_a_bias_is_that_of_the_chosen_experts_alone(rule: str) -> None:
    biases: list[Tensor] = []
    for num_always in (0, 2):
        routing, router = with_always(4 + num_always, type="sigmoid_top_k", num_always=num_always)
        updater = BalanceUpdater(ObjectiveConfig.model_validate({"bias_rule": rule}))
        updater.observe({"layer_00": routing}, {"layer_00": router})
        updater.step({"layer_00": router}, alone)
        assert router.correction_bias_E is not None
        biases.append(router.correction_bias_E)
    assert biases[0].count_nonzero() > 0
    assert biases[1].tolist() == pytest.approx([*biases[0].tolist(), 0, 0])


BALANCING = [name for name in BALANCING_LOSSES if name.startswith(("load_balance", "importance"))]


@pytest.mark.parametrize("name", BALANCING)
@pytest.mark.parametrize("router_type", ["sigmoid_top_k", "elastic_top_k"])
def test_a_balancing_loss_is_that_of_the_chosen_experts_alone(name: str, router_type: str) -> None:
    values: list[float] = []
    for num_always in (0, 2):
        options = {"type": router_type, "num_always": num_always}
        routing, _ = with_always(4 + num_always, training=True, **options)
        if router_type == "elastic_top_k":  # its softmax is over all experts
            scores_TE = routing.require("scores_TE", name)
            sums_T1 = scores_TE[:, :4].sum(-1, keepdim=True)
            weights_N = routing.weights_N / sums_T1[routing.token_indices_N, 0]
            routing = replace(routing, scores_TE=scores_TE / sums_T1, weights_N=weights_N)
        value = BALANCING_LOSSES[name].value({"layer_00": routing})
        assert value is not None
        values.append(value.item())
    assert values[1] == pytest.approx(values[0])


@pytest.mark.parametrize("limit", [{"factor": 1.0, "renormalize": True}, {"per_sequence": 2}])
def test_a_capacity_is_that_of_the_chosen_experts_alone(limit: dict[str, Any]) -> None:
    kept: list[list[tuple[int, int]]] = []
    for num_always in (0, 2):
        routing, _ = with_always(4 + num_always, type="sigmoid_top_k", num_always=num_always)
        limited = CapacityConfig.model_validate(limit).apply_to(routing, training=True)
        pairs_N2 = torch.stack([limited.token_indices_N, limited.expert_ids_N], dim=-1)
        kept.append([(t, e) for t, e in pairs_N2[limited.computed_N].tolist()])
    assert len(kept[0]) < 48
    assert [pair for pair in kept[1] if pair[1] < 4] == kept[0]
    assert len(kept[1]) == len(kept[0]) + 48


# -- rules at work on a tiny task; without one the router stays collapsed


VOCAB, NUM_EXPERTS, HEAD_START = 16, 4, 4.0
NO_RULE: dict[str, Any] = {"load_balance": 0.0, "router_z": 0.0}


def batch(step: int) -> torch.Tensor:
    """(8, 17): sequences in which each token decides the next, 3 t + 1 modulo the vocabulary."""
    generator = torch.Generator().manual_seed(step)
    tokens = [torch.randint(VOCAB, (8,), generator=generator)]
    for _ in range(16):
        tokens.append((3 * tokens[-1] + 1) % VOCAB)
    return torch.stack(tokens, dim=1)


def collapsed_decoder(router: dict[str, Any], num_layers: int = 1) -> Decoder:
    """A decoder in which expert 0 of each layer starts `HEAD_START` ahead for every token."""
    torch.manual_seed(0)
    ffn = {"type": "moe", "num_experts": NUM_EXPERTS, "router": {"bias": True, **router}}
    config = {"d_model": 16, "num_layers": num_layers, "attention": {"num_heads": 2}, "ffn": ffn}
    decoder = DecoderConfig.model_validate(config).build(VOCAB, 16)
    with torch.no_grad():
        for built in decoder.routers().values():
            built.get_parameter("projection.bias")[0] = HEAD_START
    return decoder


def train(decoder: Decoder, rule: dict[str, Any], steps: int) -> dict[str, dict[str, Any]]:
    """Train, and return the `LoadMetrics` of each layer over the last 20 steps."""
    weights = ObjectiveConfig.model_validate({**NO_RULE, **rule})
    updater = BalanceUpdater(weights)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
    metrics = {name: LoadMetrics(NUM_EXPERTS) for name in decoder.routers()}
    for step in range(steps):
        tokens = batch(step)
        output = decoder(tokens[:, :-1])
        losses = objective(
            output.logits,
            tokens[:, 1:],
            output.routings,
            weights,
            sparsity_weight=updater.sparsity_weight,
        )
        optimizer.zero_grad()
        losses.total.backward()
        updater.observe(output.routings, decoder.routers())
        updater.step(decoder.routers(), reduce=lambda value: value)
        optimizer.step()
        if step >= steps - 20:
            for name, routing in output.routings.items():
                metrics[name].update(routing)
    return {name: metric.compute() for name, metric in metrics.items()}


TOP_1 = {"type": "top_k", "k": 1}
RULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "load_balance": (TOP_1, {"load_balance": 0.1}),
    "load_balance_global": (TOP_1, {"load_balance_global": 0.1}),
    "load_balance_sequence": (TOP_1, {"load_balance_sequence": 0.1}),
    "importance_and_load_cv2": (
        {"type": "noisy_top_k", "k": 2},
        {"importance_cv2": 0.1, "load_cv2": 0.1},
    ),
    "sign_rule-sigmoid": (
        {"type": "sigmoid_top_k", "k": 2},
        {"bias_rule": {"type": "sign", "rate": 0.02}},
    ),
    "sign_rule-centred": (
        {"type": "sigmoid_top_k", "k": 2},
        {"bias_rule": {"type": "sign", "rate": 0.02, "centre": True}},
    ),
    "quantile_rule-softmax": (
        {**TOP_1, "correction_bias": True},
        {"bias_rule": {"type": "quantile"}},
    ),
    "global_quantile_rule-sigmoid": (
        {"type": "sigmoid_top_k", "k": 2},
        {"bias_rule": {"type": "global_quantile"}},
    ),
}


LIKE_OTHERS = {
    *("load_balance", "load_balance_sequence", "importance_and_load_cv2", "sign_rule-centred"),
}
"""Rules whose terms `tests/balancing` compares with formulas, and that act as others here do."""


@pytest.mark.parametrize(
    ("router", "rule"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in LIKE_OTHERS))
        for name, case in RULES.items()
    ],
)
def test_a_rule_takes_a_collapsed_router_apart(
    router: dict[str, Any], rule: dict[str, Any]
) -> None:
    found = train(collapsed_decoder(router), rule, steps=80)
    assert found["layer_00"]["max_violation"] < 0.5


def test_the_pooled_rule_balances_the_layers_together_and_not_each() -> None:
    decoder = collapsed_decoder(TOP_1, num_layers=2)
    found = train(decoder, {"load_balance_pooled": 0.1}, steps=100)
    together_E = torch.stack([values["load"] for values in found.values()]).mean(dim=0)
    apart = max(values["max_violation"] for values in found.values())
    assert max_violation(together_E) < 0.35
    assert apart > 1.2 * max_violation(together_E)


def test_importance_alone_balances_weights_rather_than_pairs() -> None:
    router = {"type": "top_k", "k": 2}
    decoder = collapsed_decoder(router, num_layers=2)
    before = decoder(batch(0)[:, :-1]).routings["layer_00"]
    found = train(decoder, {"importance_cv2": 0.1}, steps=100)
    after = decoder(batch(200)[:, :-1]).routings["layer_00"]
    assert importance_cv2_loss(before) > 2
    assert importance_cv2_loss(after) < 0.1
    # Of k = 2 a collapsed router has (1/2 - 1/4) / (1/4) = 1.
    assert all(values["max_violation"] < 0.75 for values in found.values()), found


SIGMOID = {"type": "sigmoid_top_k", "k": 1, "renormalize": False}


@pytest.mark.parametrize(
    "router", [TOP_1, pytest.param(SIGMOID, marks=pytest.mark.slow)], ids=["softmax", "sigmoid"]
)
def test_without_a_rule_it_stays_collapsed(router: dict[str, Any]) -> None:
    # A rule that moves by next to nothing: sigmoid_top_k has a bias that some rule always moves.
    rule = {"bias_rule": {"type": "sign", "rate": 1e-9}}
    found = train(collapsed_decoder(router), rule, steps=80)
    # All tokens to one of four experts is (1 - 1/4) / (1/4) = 3.
    assert found["layer_00"]["max_violation"] > 2


def test_the_sparsity_rule_brings_relu_routing_to_its_k() -> None:
    decoder = collapsed_decoder({"type": "relu", "k": 1})
    before = decoder(batch(0)[:, :-1]).routings["layer_00"]
    assert before.active_N.sum() > 1.5 * before.num_tokens
    found = train(decoder, {"sparsity_rule": {"initial_weight": 1e-4}}, steps=200)["layer_00"]
    assert found["experts_per_token"].item() == pytest.approx(1, abs=0.15)
    assert found["max_violation"] < 1


def test_forced_routers_have_the_configured_imbalance() -> None:
    for skew, expected in ((0.0, 0.0), (1.0, 3.0), (0.5, 1.5)):
        decoder = collapsed_decoder({"type": "forced", "k": 1, "skew": skew})
        routing = decoder(batch(0)[:, :-1]).routings["layer_00"]
        load_E = torch.bincount(routing.expert_ids_N, minlength=NUM_EXPERTS).float()
        assert max_violation(load_E).item() == pytest.approx(expected, abs=0.05)
