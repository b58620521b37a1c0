from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from moe_ffn.balancing.losses import expert_load, router_entropy_loss
from moe_ffn.capacity import by_position, limit
from moe_ffn.metrics.functional import (
    capacity_used,
    dropped_fraction,
    max_violation,
    nonfinite_tokens,
)


def test_load_is_the_share_of_pairs(make_routing: Any) -> None:
    # Pairs 0, 1, 0, 2 over four experts.
    load = expert_load(make_routing([[0, 1], [0, 2]], 4))
    assert load.tolist() == [0.5, 0.25, 0.25, 0]


def test_load_is_counted_before_dropping_and_without_padding(make_routing: Any) -> None:
    routing = make_routing(
        [[0], [0], [1], [1]],
        2,
        dropped_N=torch.tensor([False, True, False, False]),
        mask_T=torch.tensor([True, True, True, False]),
    )
    assert expert_load(routing).tolist() == pytest.approx([2 / 3, 1 / 3])


@pytest.mark.parametrize(
    ("load", "violation"),
    [
        ([0.25, 0.25, 0.25, 0.25], 0),
        ([0.5, 0.25, 0.25, 0.0], 1),  # (0.5 - 0.25) / 0.25
        ([1.0, 0.0, 0.0, 0.0], 3),  # E - 1
        ([1.0], 0),
        ([0.0, 0.0], 0),  # nothing was routed
    ],
    ids=["balanced", "twice_the_mean", "collapsed", "one_expert", "nothing"],
)
def test_max_violation_is_the_excess_over_the_mean_load(
    load: list[float], violation: float
) -> None:
    assert max_violation(torch.tensor(load)).item() == pytest.approx(violation)


def test_dropped_fraction_is_of_the_real_pairs(make_routing: Any) -> None:
    # Three real pairs of expert 0, C = ceil(3 / 3) = 1: two of three are dropped.
    mask = torch.tensor([True, True, True, False])
    routing = make_routing([[0]] * 4, 3, mask_T=mask)
    assert dropped_fraction(routing).item() == 0
    assert dropped_fraction(limit(routing, 1.0, by_position)).item() == pytest.approx(2 / 3)


def test_dropped_fraction_of_nothing_is_zero(make_routing: Any) -> None:
    routing = make_routing([[0]], 2, mask_T=torch.tensor([False]))
    assert dropped_fraction(routing).item() == 0


def test_entropy_is_the_mean_over_tokens_in_nats(make_routing: Any) -> None:
    # ln 4 when undecided, 0 when sure, and for (1/2, 1/4, 1/4, 0): 1/2 ln 2 + 1/2 ln 4 = 1.5 ln 2.
    scores = torch.tensor([[0.25] * 4, [1.0, 0, 0, 0], [0.5, 0.25, 0.25, 0.0]])
    routing = make_routing([[0]] * 3, 4, scores_TE=scores)
    expected = (math.log(4) + 0 + 1.5 * math.log(2)) / 3
    assert router_entropy_loss(routing).item() == pytest.approx(expected, rel=1e-6)


def test_entropy_normalises_scores_and_skips_padding(make_routing: Any) -> None:
    scores = torch.tensor([[0.9, 0.9], [1.0, 0.0]])  # sigmoid-like; the second token is padding
    mask = torch.tensor([True, False])
    routing = make_routing([[0], [0]], 2, scores_TE=scores, mask_T=mask)
    assert router_entropy_loss(routing).item() == pytest.approx(math.log(2), rel=1e-6)


def test_capacity_used_is_the_share_of_places_taken(make_routing: Any) -> None:
    # Four pairs over two experts, factor 1.5: C = 3, so 6 places. Expert 0 takes three of its four.
    routing = limit(make_routing([[0]] * 4, 2), 1.5, by_position)
    assert capacity_used(routing).item() == pytest.approx(3 / 6)


def test_capacity_used_is_nan_when_dropless(make_routing: Any) -> None:
    assert capacity_used(make_routing([[0]], 2)).isnan()


def test_detach_cuts_every_tensor_from_the_graph(route_logits: Any) -> None:
    routing = limit(route_logits(torch.eye(4, requires_grad=True), 2), 1.0, by_position)
    assert routing.weights_N.requires_grad
    detached = routing.detach()
    for name in ("weights_N", "logits_TE", "scores_TE"):
        value = getattr(detached, name)
        assert not value.requires_grad, name
        assert torch.equal(value, getattr(routing, name)), name
    assert detached.sequence_length == routing.sequence_length
    assert detached.capacity == routing.capacity


def test_broken_tokens_are_counted_without_padding(make_routing: Any) -> None:
    logits = torch.zeros(4, 2)
    logits[0, 1], logits[1, 0], logits[3, 0] = torch.nan, torch.inf, torch.nan
    mask = torch.tensor([True, True, True, False])
    ids = [[0], [0], [1], [1]]
    assert nonfinite_tokens(make_routing(ids, 2, logits_TE=logits)) == 3
    assert nonfinite_tokens(make_routing(ids, 2, logits_TE=logits, mask_T=mask)) == 2
