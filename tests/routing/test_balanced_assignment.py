"""BASE's assignment gives no expert more than its places and nearly the highest total there is."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from moe_ffn.routing import BalancedAssignmentRouterConfig
from moe_ffn.routing.balanced_assignment import assign
from tests.helpers.identity_router import experts_of, load_of, random_logits, real_pairs, route

CONFIG = BalancedAssignmentRouterConfig()
PRECISION = 0.02


def best_total(values: list[list[float]], num_experts: int) -> float:
    """The highest total over all assignments with at most ceil(T / E) tokens per expert."""
    places = math.ceil(len(values) / num_experts)
    return max(
        sum(row[e] for row, e in zip(values, experts, strict=True))
        for experts in itertools.product(range(num_experts), repeat=len(values))
        if all(experts.count(e) <= places for e in range(num_experts))
    )


def check_balanced(expert_ids_T: Tensor, num_experts: int) -> None:
    assert ((expert_ids_T >= 0) & (expert_ids_T < num_experts)).all()
    load = expert_ids_T.bincount(minlength=num_experts)
    assert load.max().item() <= math.ceil(len(expert_ids_T) / num_experts)


SMALL = {
    f"{num_tokens}_tokens_{num_experts}_experts": (num_tokens, num_experts)
    for num_tokens, num_experts in [(2, 2), (5, 2), (6, 2), (6, 3), (7, 3), (4, 4), (6, 4), (3, 5)]
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("num_tokens", "num_experts"), SMALL.values(), ids=SMALL)
def test_the_total_is_within_its_bound_of_the_best_of_all_assignments(
    num_tokens: int, num_experts: int, seed: int
) -> None:
    # A wish that all share, so that many have to give way.
    values = random_logits(num_tokens, num_experts, seed) + torch.arange(num_experts)
    for table in (values, values.round()):  # the second has many ties
        chosen = assign(table, PRECISION)
        check_balanced(chosen, num_experts)
        total = table.gather(1, chosen.unsqueeze(1)).sum().item()
        spread = (table.amax(dim=-1) - table.amin(dim=-1)).max().item()
        best = best_total(table.tolist(), num_experts)
        assert best - num_tokens * PRECISION * spread <= total <= best + 1e-9


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_narrow_values_are_assigned_as_the_same_ones_in_float64(
    dtype: torch.dtype, autocast: bool
) -> None:
    values = (random_logits(256, 8) + torch.arange(8)).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        chosen = assign(values)
    check_balanced(chosen, 8)
    assert torch.equal(chosen, assign(values.double()))


def naive_auction(values: list[list[float]], precision: float) -> list[int]:
    """Bertsekas and Castanon's auction, token by token, in Python's floats."""
    num_experts, places = len(values[0]), math.ceil(len(values) / len(values[0]))
    largest = max(max(row) - min(row) for row in values)
    table = [[(value - min(row)) / largest for value in row] for row in values]
    expert_of: list[int | None] = [None] * len(values)
    bids, prices = [0.0] * len(values), [0.0] * num_experts
    while None in expert_of:
        for t in [t for t, expert in enumerate(expert_of) if expert is None]:
            gains = sorted(((table[t][e] - prices[e], e) for e in range(num_experts)), reverse=True)
            (best, expert), (second, _) = gains[:2]
            bids[t], expert_of[t] = prices[expert] + best - second + precision, expert
        for expert in range(num_experts):
            bidders = [t for t, chosen in enumerate(expert_of) if chosen == expert]
            if len(bidders) < places:
                continue
            bidders.sort(key=lambda t: -bids[t])
            prices[expert] = bids[bidders[places - 1]]
            for t in bidders[places:]:
                expert_of[t] = None
    return [expert for expert in expert_of if expert is not None]


@pytest.mark.parametrize("precision", [PRECISION, 0.1, 0.3])
def test_it_equals_the_auction_in_plain_python(precision: float) -> None:
    found = set()
    for seed in range(10):
        values = random_logits(14, 4, seed) + torch.arange(4)
        expected = naive_auction(values.tolist(), precision)
        assert assign(values, precision).tolist() == expected
        found.add(expected == assign(values, precision / 3).tolist())
    assert False in found  # a finer auction ends elsewhere


def test_the_default_precision_is_two_hundredths_of_the_largest_difference() -> None:
    values = random_logits(200, 5) + torch.arange(5)
    assert torch.equal(assign(values), assign(values, PRECISION))
    assert not torch.equal(assign(values), assign(values, 10 * PRECISION))


@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(13, 4),
        torch.full((13, 4), -7.5),
        torch.tensor([[3.0, 2.0, 1.0, 0.0]]).expand(13, 4),
        torch.full((13, 4), 1e30),
        torch.tensor([[1e30, -1e30, 0.0, 1.0]]).expand(13, 4),
        1 + 1e-7 * torch.eye(4).repeat(4, 1)[:13],
    ],
    ids=["zeros", "equal", "same_wish", "huge", "huge_spread", "tiny_spread"],
)
def test_ties_and_extremes_end_balanced(values: Tensor) -> None:
    check_balanced(assign(values), 4)


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(0, 4), (0, 1), (5, 1), (1, 4), (1, 1)])
def test_the_smallest_sizes(num_tokens: int, num_experts: int) -> None:
    values = random_logits(num_tokens, num_experts)
    chosen = assign(values)
    assert chosen.dtype == torch.int64
    assert chosen.shape == (num_tokens,)
    if num_tokens == 1:
        assert chosen.tolist() == [values.argmax().item()]


def test_training_weighs_the_assigned_expert_by_its_sigmoid() -> None:
    logits = random_logits(12, 4) + torch.arange(4)
    routing = route(CONFIG, logits, training=True)
    chosen = assign(logits).tolist()
    assert experts_of(routing) == [[e] for e in chosen]
    assert load_of(routing) == [3, 3, 3, 3]
    for row, e, pairs in zip(logits.tolist(), chosen, real_pairs(routing), strict=True):
        assert pairs[0][1] == pytest.approx(1 / (1 + math.exp(-row[e])))


def test_evaluation_takes_the_largest_logit_however_unbalanced() -> None:
    logits = random_logits(12, 4) + 10 * torch.arange(4)
    assert experts_of(route(CONFIG, logits)) == [[3]] * 12
