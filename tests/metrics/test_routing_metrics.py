from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from moe_ffn.balancing.losses import load_balancing_loss, router_z_loss
from moe_ffn.capacity import by_position, limit
from moe_ffn.metrics.routing import CoactivationMetrics, RoutingMetrics


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
        "load_cv",
        "sequence_max_violation",
        "entropy_of_mean",
        "top1_margin",
        "logit_max",
        "shared_share",
    }
    assert values["capacity_used"].isnan()
    assert values["shared_share"].isnan(), "there is no shared expert"
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


def test_dropping_is_of_the_real_pairs(make_routing: Any) -> None:
    # Three real pairs of expert 0, C = ceil(3 / 3) = 1: two of three are dropped.
    mask = torch.tensor([True, True, True, False])
    metrics = RoutingMetrics(num_experts=3)
    metrics.update(limit(make_routing([[0]] * 4, 3, mask_T=mask), 1.0, by_position))
    assert metrics.compute()["dropped_fraction"].item() == pytest.approx(2 / 3)


def test_nothing_but_padding_measures_zeros(make_routing: Any) -> None:
    metrics = RoutingMetrics(num_experts=2)
    metrics.update(make_routing([[0]], 2, mask_T=torch.tensor([False])))
    values = metrics.compute()
    for name in ("dropped_fraction", "max_violation", "load_cv", "entropy", "entropy_of_mean"):
        assert values[name].item() == 0, name


def test_sequences_are_balanced_each_by_itself(make_routing: Any) -> None:
    # Two sequences, each of them on one expert alone: MaxVio 1 each, and 0 together. A third is balanced.
    routing = make_routing([[0], [0], [1], [1], [0], [1]], 2, sequence_length=2)
    metrics = RoutingMetrics(num_experts=2)
    metrics.update(routing)
    values = metrics.compute()
    assert values["max_violation"].item() == 0
    assert values["sequence_max_violation"].item() == pytest.approx((1 + 1 + 0) / 3)


def test_a_sequence_of_padding_is_no_sequence(make_routing: Any) -> None:
    mask = torch.tensor([True, True, False, False])
    metrics = RoutingMetrics(num_experts=2)
    metrics.update(make_routing([[0]] * 4, 2, sequence_length=2, mask_T=mask))
    assert metrics.compute()["sequence_max_violation"].item() == 1


def test_entropy_of_the_mean_tells_specialists_from_the_undecided(make_routing: Any) -> None:
    # Each token is sure of itself, and together they use both experts: 0 and ln 2.
    sure = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    metrics = RoutingMetrics(num_experts=2)
    metrics.update(make_routing([[0], [1]], 2, scores_TE=sure))
    values = metrics.compute()
    assert values["entropy"].item() == pytest.approx(0, abs=1e-6)
    assert values["entropy_of_mean"].item() == pytest.approx(math.log(2))
    assert values["top1_margin"].item() == 1


def test_what_the_scores_say_is_of_real_tokens_and_normalised(make_routing: Any) -> None:
    # 0.6, 0.2, 0.2 once it sums to 1; the second token is padding.
    scores = torch.tensor([[1.2, 0.4, 0.4], [0.0, 9.0, 0.0]])
    mask = torch.tensor([True, False])
    metrics = RoutingMetrics(num_experts=3)
    routing = make_routing([[0], [1]], 3, scores_TE=scores, mask_T=mask)
    metrics.update(routing)
    values = metrics.compute()
    entropy = -(0.6 * math.log(0.6) + 0.4 * math.log(0.2))
    assert values["entropy"].item() == pytest.approx(entropy, rel=1e-6)
    assert values["entropy_of_mean"].item() == pytest.approx(entropy, rel=1e-6)
    assert values["top1_margin"].item() == pytest.approx(0.4)
    assert values["load_balance"].item() == pytest.approx(load_balancing_loss(routing).item())
    assert values["router_z"].item() == pytest.approx(router_z_loss(routing).item())


def test_the_largest_logit_is_of_all_batches(make_routing: Any) -> None:
    metrics = RoutingMetrics(num_experts=2)
    for size in (3.0, -9.0, 4.0):
        metrics.update(make_routing([[0]], 2, logits_TE=torch.tensor([[size, 0.0]])))
    assert metrics.compute()["logit_max"].item() == 9


def test_the_shared_share_is_a_mean_over_tokens(make_routing: Any) -> None:
    metrics = RoutingMetrics(num_experts=2)
    metrics.update(make_routing([[0]], 2, shared_share=torch.tensor(0.2)))
    metrics.update(make_routing([[0]] * 3, 2, shared_share=torch.tensor(0.6)))
    assert metrics.compute()["shared_share"].item() == pytest.approx((0.2 + 3 * 0.6) / 4)


def test_coactivation_over_batches_and_its_largest(make_routing: Any) -> None:
    metrics = CoactivationMetrics(num_experts=3)
    metrics.update(make_routing([[0, 1]], 3))
    metrics.update(make_routing([[0, 2]], 3))
    values = metrics.compute()
    assert values["coactivation"].tolist() == [[1, 0.5, 0.5], [1, 1, 0], [1, 0, 1]]
    assert values["coactivation_max"].item() == 1


def test_coactivation_of_one_expert_is_nothing(make_routing: Any) -> None:
    metrics = CoactivationMetrics(num_experts=1)
    metrics.update(make_routing([[0]], 1))
    assert metrics.compute()["coactivation_max"].item() == 0


def test_ranks_together_measure_what_one_would_of_all_batches(route_logits: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [
        limit(route_logits(5 * torch.randn(12, 4, generator=generator), 2), factor, by_position)
        for factor in (0.5, 1.0, 0.75)
    ]
    together = RoutingMetrics(num_experts=4)
    for batch in batches:
        together.update(batch)
    ranks = [RoutingMetrics(num_experts=4) for _ in range(2)]
    ranks[0].update(batches[0])
    ranks[1].update(batches[1])
    ranks[1].update(batches[2])

    ranks[0].merge_state(ranks[1])  # as `dist_reduce_fx` says

    found, expected = ranks[0].compute(), together.compute()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, equal_nan=True, msg=name)
