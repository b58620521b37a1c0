"""Balancing rules undo the collapse of a router on a tiny task; without one it stays collapsed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ffn import Decoder, DecoderConfig
from moe_ffn.balancing.losses import importance_cv2_loss
from moe_ffn.metrics.functional import max_violation
from moe_ffn.metrics.modular import LoadMetrics
from moe_ffn.training.objective import BalanceUpdater, ObjectiveConfig, objective

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
    """In each layer expert 0 starts `HEAD_START` ahead of the others for every token."""
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
