"""Measures compared with hand-computed numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch

from moe_ffn.metrics.functional import (
    chosen_experts,
    churn,
    coactivation,
    coactivation_counts,
    load_cv,
    load_entropy,
    logit_max,
    max_violation,
    nonfinite_tokens,
    rank_max_violation,
    top1_margin,
)
from moe_ffn.outputs import Routing
from moe_ffn.routing.capacity import by_position, drop_over_capacity

# -- of a load


@pytest.mark.parametrize(
    ("load", "violation", "cv"),
    [
        ([0.25, 0.25, 0.25, 0.25], 0, 0),
        # (0.5 - 0.25) / 0.25; deviations 1/4, 0, 0, -1/4: sqrt(2/16 / 4) / (1/4) = sqrt(1/2)
        ([0.5, 0.25, 0.25, 0.0], 1, math.sqrt(0.5)),
        # E - 1 and sqrt(E - 1)
        ([1.0, 0.0, 0.0, 0.0], 3, math.sqrt(3)),
        ([1.0], 0, 0),
        ([0.0, 0.0], 0, 0),
    ],
    ids=["balanced", "twice the mean", "collapsed", "one expert", "nothing routed"],
)
def test_imbalance_of_a_load(load: list[float], violation: float, cv: float) -> None:
    assert max_violation(torch.tensor(load)).item() == pytest.approx(violation)
    assert load_cv(torch.tensor(load)).item() == pytest.approx(cv)


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ([0.25, 0.25, 0.25, 0.25], 1),
        ([5.0, 5.0, 0.0, 0.0], 0.5),  # log 2 / log 4; counts are taken too
        ([1.0, 0.0], 0),
        ([1.0], 1),
        ([0.0, 0.0], math.nan),
    ],
)
def test_the_entropy_of_a_load(load: list[float], expected: float) -> None:
    found = load_entropy(torch.tensor(load)).item()
    assert found == pytest.approx(expected, nan_ok=True)


def test_ranks_wait_for_the_busiest_of_them() -> None:
    # Experts 0 and 1 on rank 0: 0.75 of the pairs, half as much again as its half.
    load_E = torch.tensor([0.5, 0.25, 0.25, 0.0])
    assert rank_max_violation(load_E, 2).item() == pytest.approx(0.5)
    # Experts 0 and 1 again, and not 0 and 2, with which it would be balanced.
    assert rank_max_violation(torch.tensor([0.4, 0.4, 0.1, 0.1]), 2).item() == pytest.approx(0.6)
    assert rank_max_violation(load_E, 4).item() == pytest.approx(1)
    assert rank_max_violation(load_E, 1).item() == 0
    assert rank_max_violation(load_E, 3).isnan(), "4 experts cannot be split over 3 ranks"


# -- of tokens


def test_the_margin_is_between_the_two_best_scores() -> None:
    scores_TE = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.5, 0.0], [0.6, 0.2, 0.2], [0.0, 0.0, 0.0]])
    kept = scores_TE.clone()
    assert top1_margin(scores_TE).tolist() == pytest.approx([0.5, 0, 0.4, 0])
    assert torch.equal(scores_TE, kept)
    assert top1_margin(torch.ones(2, 1)).isnan().all(), "a single expert has none"


def test_the_largest_logit_is_of_real_tokens_and_finite(make_routing: Any) -> None:
    logits = torch.tensor([[1.0, -7.0], [torch.inf, torch.nan], [50.0, 0.0]])
    mask = torch.tensor([True, True, False])
    ids = [[0], [0], [0]]
    assert logit_max(make_routing(ids, 2, logits_TE=logits)).item() == 50
    assert logit_max(make_routing(ids, 2, logits_TE=logits, mask_T=mask)).item() == 7


def test_broken_tokens_are_counted_without_padding(make_routing: Any) -> None:
    logits = torch.zeros(4, 2)
    logits[0, 1], logits[1, 0], logits[3, 0] = torch.nan, torch.inf, torch.nan
    mask = torch.tensor([True, True, True, False])
    ids = [[0], [0], [1], [1]]
    assert nonfinite_tokens(make_routing(ids, 2, logits_TE=logits)) == 3
    assert nonfinite_tokens(make_routing(ids, 2, logits_TE=logits, mask_T=mask)) == 2


# -- of who goes where


def test_chosen_experts_are_those_of_real_pairs_dropped_or_not(make_routing: Any) -> None:
    routing = make_routing(
        [[0, 1], [2, 0], [1, 2]],
        3,
        dropped_N=torch.tensor([True, False, False, False, False, False]),
        selected_N=torch.tensor([True, True, True, False, True, True]),
        mask_T=torch.tensor([True, True, False]),
    )
    assert chosen_experts(routing).int().tolist() == [[1, 1, 0], [0, 0, 1], [0, 0, 0]]


def test_a_pair_listed_twice_is_chosen_if_it_is_once(make_routing: Any) -> None:
    routing = make_routing([[0, 0]], 2, selected_N=torch.tensor([True, False]))
    assert chosen_experts(routing).int().tolist() == [[1, 0]]


def test_coactivation_is_of_the_experts_tokens(make_routing: Any) -> None:
    # Expert 0 has three tokens: two with 1, one with 2.
    counts = coactivation_counts(make_routing([[0, 1], [1, 0], [0, 2]], 4))
    assert counts.tolist() == [[3, 2, 1, 0], [2, 2, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
    shares = coactivation(counts)
    assert shares[0].tolist() == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert shares[1].tolist() == [1, 1, 0, 0]
    assert shares[3].tolist() == [0, 0, 0, 0], "an expert without tokens goes with nobody"


def test_coactivation_counts_exactly_under_autocast(make_routing: Any) -> None:
    # bfloat16 knows no 257.
    routing = make_routing([[0, 1]] * 257, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert coactivation_counts(routing).tolist() == [[257, 257], [257, 257]]


def test_churn_is_the_share_of_tokens_whose_experts_changed(make_routing: Any) -> None:
    before = chosen_experts(make_routing([[0, 1], [1, 2], [2, 3], [0, 3]], 4))
    # The order of a token's experts says nothing: only the third token has others.
    after = chosen_experts(make_routing([[1, 0], [1, 2], [2, 1], [3, 0]], 4))
    assert churn(before, after).item() == 0.25
    assert churn(before, before).item() == 0


def test_detach_cuts_every_tensor_from_the_graph(route_logits: Any) -> None:
    routing = drop_over_capacity(
        route_logits(torch.eye(4, requires_grad=True), 2), 1.0, by_position
    )
    assert routing.weights_N.requires_grad
    detached = routing.detach()
    for name in ("weights_N", "logits_TE", "scores_TE"):
        value = getattr(detached, name)
        assert not value.requires_grad, name
        assert torch.equal(value, getattr(routing, name)), name
    assert detached.sequence_length == routing.sequence_length
    assert torch.equal(detached.dropped_N, routing.dropped_N)


@pytest.mark.parametrize(
    "function", [logit_max, nonfinite_tokens, chosen_experts, coactivation_counts]
)
def test_functions_reject_values_that_are_not_a_routing(function: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{function.__name__} takes a Routing, but got None, "):
        function(None)


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        (max_violation, "LoadMetrics measures the load of a Routing, over many batches"),
        (load_cv, "LoadMetrics measures the load of a Routing, over many batches"),
        (rank_max_violation, "LoadMetrics measures the load of a Routing, over many batches"),
        (top1_margin, "use routing.scores_TE, normalised to sum to 1"),
        (coactivation, "use coactivation_counts(routing)"),
        (churn, "use chosen_experts(routing)"),
    ],
)
def test_functions_of_tensors_reject_a_routing(
    make_routing: Callable[..., Routing], function: Any, advice: str
) -> None:
    routing = make_routing([[0]], 2)
    with pytest.raises(TypeError) as refused:
        function(*[routing] * len(signature(function).parameters))
    assert str(refused.value) == (
        f"{function.__name__} takes tensors, but got a value of type Routing; {advice}"
    )


def test_churn_compares_the_same_tokens_and_experts() -> None:
    before, after = torch.zeros(4, 8, dtype=torch.bool), torch.zeros(4, 6, dtype=torch.bool)
    message = (
        r"^churn compares two routings of the same tokens and experts, but got shapes \(4, 8\) and "
        r"\(4, 6\)$"
    )
    with pytest.raises(ValueError, match=message):
        churn(before, after)
