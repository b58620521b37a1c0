"""Measures of a routing and metrics over batches and ranks, against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from inspect import signature
from itertools import zip_longest
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import Metric

from moe_ffn.balancing.losses import load_balancing_loss, router_z_loss
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
from moe_ffn.metrics.modular import CoactivationMetrics, LoadMetrics, TokenMetrics
from moe_ffn.outputs import Routing
from moe_ffn.routing.capacity import by_position, capacity_of, drop_over_capacity

KINDS = (LoadMetrics, TokenMetrics, CoactivationMetrics)


def measure(
    num_experts: int, *routings: Routing, factors: Sequence[float] = ()
) -> dict[str, Tensor]:
    """Return all metrics of some batches of a layer."""
    values: dict[str, Tensor] = {}
    for metric in (kind(num_experts) for kind in KINDS):
        for routing, factor in zip_longest(routings, factors):
            metric.update(
                routing, expert_capacity=None if factor is None else capacity_of(routing, factor)
            )
        values |= metric.compute()
    return values


def test_values_are_means_over_batches(make_routing: Any) -> None:
    values = measure(
        2,
        # Two batches collapsed onto opposite experts: each has MaxVio 1, together they are balanced.
        # C = ceil(4 / 2) = 2 in the first, so half of its pairs are dropped and 2 of 4 places taken.
        drop_over_capacity(make_routing([[0]] * 4, 2), 1.0, by_position),
        # C = ceil(1.5 * 4 / 2) = 3: a quarter is dropped, 3 of 6 places taken.
        drop_over_capacity(make_routing([[1]] * 4, 2), 1.5, by_position),
        factors=(1.0, 1.5),
    )
    assert values["load"].tolist() == [0.5, 0.5]
    assert values["max_violation"].item() == 0
    assert values["dropped_fraction"].item() == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert values["capacity_used"].item() == pytest.approx((2 / 4 + 3 / 6) / 2)
    # Undecided scores: entropy ln 2, load_balance 1; logits 0: z = (ln 2)^2.
    assert values["entropy"].item() == pytest.approx(0.693147, abs=1e-6)
    assert values["load_balance"].item() == pytest.approx(1, abs=1e-6)
    assert values["router_z"].item() == pytest.approx(0.480453, abs=1e-6)


def test_experts_of_every_token_count_in_the_load_but_not_in_its_balance(make_routing: Any) -> None:
    # Three of four tokens choose expert 0, one expert 1, none expert 2; expert 3 processes all of them.
    routing = make_routing([[0, 3], [0, 3], [0, 3], [1, 3]], 4, sequence_length=2, num_always=1)
    # C = ceil(4 / 3) = 2 pairs of each chosen expert: one of 4 is dropped, 3 of 6 places taken.
    dropped = drop_over_capacity(routing, 1.0, by_position)
    values = measure(4, dropped, dropped, factors=(1.0, 1.0))
    assert values["load"].tolist() == [3 / 8, 1 / 8, 0, 4 / 8]
    assert values["experts_per_token"].item() == 2
    assert values["max_violation"].item() == pytest.approx(3 / (4 / 3) - 1)
    assert values["load_cv"].item() == pytest.approx(math.sqrt(42 / 27) / (4 / 3))
    # The first sequence chooses expert 0 alone, the second one 0 and 1.
    assert values["sequence_max_violation"].item() == pytest.approx((2 + 0.5) / 2)
    assert values["capacity_used"].item() == pytest.approx(3 / 6)


def test_every_measure_that_applies_is_there(make_routing: Any) -> None:
    values = measure(3, make_routing([[0], [1]], 3))
    assert set(values) == {
        *("load", "max_violation", "load_cv", "dropped_fraction"),
        *("experts_per_token", "nonfinite_tokens"),
        *("entropy", "entropy_of_mean", "top1_margin", "logit_max", "load_balance", "router_z"),
        "sequence_max_violation",
        *("coactivation", "coactivation_max"),
    }, "neither capacity_used nor shared_share, as in the rows of a run"
    assert values["load"].shape == (3,)


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_keep_no_autograd_graph(route_logits: Any, kind: Callable[[int], Metric]) -> None:
    metric = kind(4)
    metric.update(route_logits(torch.eye(4, requires_grad=True), 2))
    for name, state in metric.metric_state.items():
        assert isinstance(state, Tensor)
        assert not state.requires_grad, name
    assert not any(value.requires_grad for value in metric.compute().values())


def test_sums_are_not_rounded_in_a_converted_model(make_routing: Any) -> None:
    routing = make_routing([[0], [1]] * 50, 2)
    metrics, converted = TokenMetrics(2), TokenMetrics(2)
    torch.nn.ModuleDict({"metrics": converted}).to(torch.bfloat16)
    for metric in (metrics, converted):
        for _ in range(600):  # in bfloat16, a sum stops growing at 256 times a summand
            metric.update(routing)
    assert converted.compute() == metrics.compute()


def test_batches_weigh_by_their_pairs(make_routing: Any) -> None:
    values = measure(2, make_routing([[0]] * 99, 2), make_routing([[1]], 2))
    assert values["load"].tolist() == pytest.approx([0.99, 0.01])


def test_dropping_is_of_the_real_pairs(make_routing: Any) -> None:
    # Three real pairs of expert 0, C = ceil(3 / 3) = 1: two of three are dropped.
    mask = torch.tensor([True, True, True, False])
    values = measure(
        3, drop_over_capacity(make_routing([[0]] * 4, 3, mask_T=mask), 1.0, by_position)
    )
    assert values["dropped_fraction"].item() == pytest.approx(2 / 3)
    # Somebody's own router may mark padding as dropped.
    marked = make_routing([[0]] * 4, 3, mask_T=mask, dropped_N=~mask)
    assert measure(3, marked)["dropped_fraction"].item() == 0


def test_nothing_but_padding_measures_zeros(make_routing: Any) -> None:
    values = measure(2, make_routing([[0]], 2, mask_T=torch.tensor([False])))
    for name in ("dropped_fraction", "max_violation", "load_cv", "entropy", "entropy_of_mean"):
        assert values[name].item() == 0, name


# -- sequences


def test_sequences_are_balanced_each_by_itself(make_routing: Any) -> None:
    # Two sequences, each of them on a single expert: MaxVio 1 each, and 0 together. A third is balanced.
    values = measure(2, make_routing([[0], [0], [1], [1], [0], [1]], 2, sequence_length=2))
    assert values["max_violation"].item() == 0
    assert values["sequence_max_violation"].item() == pytest.approx((1 + 1 + 0) / 3)


def test_a_sequence_of_padding_is_no_sequence(make_routing: Any) -> None:
    mask = torch.tensor([True, True, False, False])
    values = measure(2, make_routing([[0]] * 4, 2, sequence_length=2, mask_T=mask))
    assert values["sequence_max_violation"].item() == 1


# -- scores and logits


def test_entropy_of_the_mean_separates_specialised_from_uniform_routers(make_routing: Any) -> None:
    # Each token is sure of itself, and together they use both experts: 0 and ln 2.
    sure = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    values = measure(2, make_routing([[0], [1]], 2, scores_TE=sure))
    assert values["entropy"].item() == pytest.approx(0, abs=1e-6)
    assert values["entropy_of_mean"].item() == pytest.approx(math.log(2))
    assert values["top1_margin"].item() == 1


def test_a_token_that_no_expert_scores_is_in_no_mean_distribution(make_routing: Any) -> None:
    # As ReLU may leave one: the mean of the others is still a distribution.
    scores = torch.tensor([[0.5, 0.5], [0.0, 0.0], [0.0, 0.0]])
    values = measure(2, make_routing([[0], [1], [1]], 2, scores_TE=scores, target_k=1.0))
    assert values["entropy_of_mean"].item() == pytest.approx(math.log(2))


def test_score_metrics_normalise_scores_and_ignore_padding(make_routing: Any) -> None:
    # 0.6, 0.2, 0.2 once it sums to 1; the second token is padding.
    scores = torch.tensor([[1.2, 0.4, 0.4], [0.0, 9.0, 0.0]])
    mask = torch.tensor([True, False])
    routing = make_routing([[0], [1]], 3, scores_TE=scores, mask_T=mask)
    values = measure(3, routing)
    entropy = -(0.6 * math.log(0.6) + 0.4 * math.log(0.2))
    assert values["entropy"].item() == pytest.approx(entropy, rel=1e-6)
    assert values["entropy_of_mean"].item() == pytest.approx(entropy, rel=1e-6)
    assert values["top1_margin"].item() == pytest.approx(0.4)
    assert values["load_balance"].item() == pytest.approx(load_balancing_loss(routing).item())
    assert values["router_z"].item() == pytest.approx(router_z_loss(routing).item())


def test_the_largest_logit_is_of_all_batches(make_routing: Any) -> None:
    logits = (torch.tensor([[size, 0.0]]) for size in (3.0, -9.0, 4.0))
    values = measure(2, *(make_routing([[0]], 2, logits_TE=x) for x in logits))
    assert values["logit_max"].item() == 9


def test_the_shared_share_is_a_mean_over_tokens(make_routing: Any) -> None:
    metric = TokenMetrics(2)
    metric.update(make_routing([[0]], 2), torch.tensor(0.2))
    metric.update(make_routing([[0]] * 3, 2), torch.tensor(0.6))
    assert metric.compute()["shared_share"].item() == pytest.approx((0.2 + 3 * 0.6) / 4)


# -- who comes with whom


def test_coactivation_over_batches_and_its_largest(make_routing: Any) -> None:
    values = measure(3, make_routing([[0, 1]], 3), make_routing([[0, 2]], 3))
    assert values["coactivation"].tolist() == [[1, 0.5, 0.5], [1, 1, 0], [1, 0, 1]]
    assert values["coactivation_max"].item() == 1
    assert measure(1, make_routing([[0]], 1))["coactivation_max"].item() == 0


# -- ranks


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_together_measure_the_same_as_one_rank_with_all_batches(
    route_logits: Any, kind: Callable[[int], Metric]
) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [
        drop_over_capacity(
            route_logits(5 * torch.randn(12, 4, generator=generator), 2), factor, by_position
        )
        for factor in (0.5, 1.0, 0.75)
    ]
    together, first, second = (kind(4) for _ in range(3))
    for batch in batches:
        together.update(batch)
    first.update(batches[0])
    second.update(batches[1])
    second.update(batches[2])

    first.merge_state(second)  # as `dist_reduce_fx` says

    found, expected = first.compute(), together.compute()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, equal_nan=True, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_the_routing_of_a_dense_block_is_rejected_by_name(kind: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{kind.__name__}\.update takes a Routing, but got None"):
        kind(2).update(None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_routing_over_other_experts_is_rejected_with_both_numbers(
    kind: Any, make_routing: Callable[..., Routing]
) -> None:
    routing = make_routing([[0]], 3)
    with pytest.raises(
        ValueError,
        match=rf"^{kind.__name__} has num_experts 2, .* has 3; create one for each layer$",
    ):
        kind(2).update(routing)


# -- measures of one routing


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
    with pytest.raises(TypeError) as rejected:
        function(*[routing] * len(signature(function).parameters))
    assert str(rejected.value) == (
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
