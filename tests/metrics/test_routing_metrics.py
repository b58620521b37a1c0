from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ffn.capacity import by_position, limit
from moe_ffn.metrics.routing import RoutingMetrics


def test_values_are_means_over_batches(make_routing: Any) -> None:
    metrics = RoutingMetrics(num_experts=2)
    # Two batches collapsed onto opposite experts: each has MaxVio 1, together they are balanced.
    # C = ceil(4 / 2) = 2 in the first, so half of its pairs are dropped and 2 of 4 places taken.
    metrics.update(limit(make_routing([[0]] * 4, 2), 1.0, by_position))
    # C = ceil(1.5 * 4 / 2) = 3: a quarter is dropped, 3 of 6 places taken.
    metrics.update(limit(make_routing([[1]] * 4, 2), 1.5, by_position))
    values = metrics.compute()
    assert values["load"].tolist() == [0.5, 0.5]
    assert values["max_violation"].item() == 0
    assert values["dropped_fraction"].item() == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert values["capacity_used"].item() == pytest.approx((2 / 4 + 3 / 6) / 2)
    # Undecided scores: entropy ln 2, load_balance 1; logits 0: z = (ln 2)^2.
    assert values["entropy"].item() == pytest.approx(0.693147, abs=1e-6)
    assert values["load_balance"].item() == pytest.approx(1, abs=1e-6)
    assert values["router_z"].item() == pytest.approx(0.480453, abs=1e-6)


def test_every_measure_is_there_and_capacity_used_is_nan_when_dropless(make_routing: Any) -> None:
    metrics = RoutingMetrics(num_experts=3)
    metrics.update(make_routing([[0], [1]], 3))
    values = metrics.compute()
    assert set(values) == {
        "load",
        "max_violation",
        "experts_per_token",
        "nonfinite_tokens",
        "dropped_fraction",
        "entropy",
        "capacity_used",
        "load_balance",
        "router_z",
    }
    assert values["capacity_used"].isnan()
    assert values["load"].shape == (3,)


def test_nothing_of_the_graph_is_kept(route_logits: Any) -> None:
    metrics = RoutingMetrics(num_experts=4)
    logits = torch.eye(4, requires_grad=True)
    metrics.update(route_logits(logits, 2))
    for name, state in metrics.metric_state.items():
        assert isinstance(state, torch.Tensor)
        assert not state.requires_grad, name
    assert not any(value.requires_grad for value in metrics.compute().values())


def test_reset_forgets_earlier_batches(make_routing: Any) -> None:
    metrics = RoutingMetrics(num_experts=2)
    metrics.update(make_routing([[0]], 2))
    metrics.compute()
    metrics.reset()
    metrics.update(make_routing([[1]], 2))
    assert metrics.compute()["load"].tolist() == [0, 1]


def test_float64_routing_is_taken(make_routing: Any) -> None:
    metrics = RoutingMetrics(num_experts=2)
    scores = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    metrics.update(make_routing([[0]], 2, scores_TE=scores, logits_TE=scores.log()))
    assert metrics.compute()["load_balance"].item() == pytest.approx(1, abs=1e-6)


def test_batches_weigh_by_their_pairs(make_routing: Any) -> None:
    metrics = RoutingMetrics(num_experts=2)
    metrics.update(make_routing([[0]] * 99, 2))
    metrics.update(make_routing([[1]], 2))
    assert metrics.compute()["load"].tolist() == pytest.approx([0.99, 0.01])
