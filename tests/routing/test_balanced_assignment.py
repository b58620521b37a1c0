"""BASE's assignment gives no expert more than its places and nearly the highest total there is."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn import TokenContext
from moe_ffn.routing import BalancedAssignmentRouterConfig, ExpertThresholdRouterConfig
from moe_ffn.routing.balanced_assignment import assign
from moe_ffn.routing.expert_threshold import ExpertThresholdRouter
from moe_ffn.training.objective import BalanceUpdater, ObjectiveConfig
from tests.helpers.every_router import (
    experts_of,
    identity_router,
    load_of,
    random_logits,
    real_pairs,
    route,
)

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


# -- expert threshold routing: thresholds that move once per step, and what they choose, held to plain loops


THRESHOLDS = [0.3, -0.5, 0.9, 0.0]
NUM_EXPERTS = len(THRESHOLDS)


def router_of(thresholds: list[float] | None = None, **options: Any) -> ExpertThresholdRouter:
    """Router whose logits are its input, with the given thresholds as estimates."""
    router = identity_router(ExpertThresholdRouterConfig(**options), NUM_EXPERTS)
    assert isinstance(router, ExpertThresholdRouter)
    if thresholds is not None:
        router.threshold_E.copy_(torch.tensor(thresholds))
        router.num_updates_E.fill_(router.config.warmup_steps)
    return router


def step(router: ExpertThresholdRouter, *batches: Tensor, elsewhere: Tensor | None = None) -> None:
    """An optimizer step of these logits, by what a trainer does; another rank has those of `elsewhere`."""
    updater, routers = BalanceUpdater(ObjectiveConfig()), {"layer_00": router}
    for logits in batches:
        updater.observe({"layer_00": router(logits, TokenContext())}, routers)
    others = 0 if elsewhere is None else router.observe(router(elsewhere, TokenContext()))
    updater.step(routers, lambda value: value + others, 1 + (elsewhere is not None))
    moved = router.threshold_E.clone()
    updater.step(routers, lambda value: value, 1)
    assert torch.equal(router.threshold_E, moved), "what a step observed is used once"


def quantile(logits: Tensor, k: float) -> list[float]:
    """The ceil(k T / E)-th largest logit of each expert."""
    place = math.ceil(k * len(logits) / NUM_EXPERTS)
    return [sorted(column, reverse=True)[place - 1] for column in logits.t().tolist()]


@pytest.mark.parametrize("k", [1, 2, 0.7, 4])
def test_after_a_step_its_batch_is_balanced_exactly(k: float) -> None:
    router, logits = router_of(k=k), random_logits(50, NUM_EXPERTS).float()
    step(router, logits)
    assert router.threshold_E.tolist() == quantile(logits, k)
    routing = router(logits, TokenContext())
    assert load_of(routing) == [math.ceil(k * 50 / NUM_EXPERTS)] * NUM_EXPERTS
    for row, pairs in zip(logits.tolist(), real_pairs(routing), strict=True):
        of_token = [(e, 1 / (1 + math.exp(-z))) for e, z in enumerate(row)]
        of_token = [(e, w) for e, w in of_token if row[e] >= router.threshold_E[e]]
        assert pairs == [(e, pytest.approx(w, rel=1e-6)) for e, w in of_token]


def test_thresholds_are_the_average_of_the_steps_there_were() -> None:
    router, ema = router_of(ema=0.8), 0.8
    steps = [random_logits(40, NUM_EXPERTS, seed=seed) + seed for seed in range(4)]
    for count, logits in enumerate(steps, start=1):
        step(router, logits)
        shares = [ema ** (count - number) for number in range(1, count + 1)]
        found = [quantile(z, 2) for z in steps[:count]]
        for e in range(NUM_EXPERTS):
            mean = sum(s * q[e] for s, q in zip(shares, found, strict=True)) / sum(shares)
            assert router.threshold_E[e].item() == pytest.approx(mean, rel=1e-6)
        assert router.num_updates_E.tolist() == [count] * NUM_EXPERTS


def test_a_step_is_one_however_many_batches_and_ranks_it_has() -> None:
    """The mean of its batches' thresholds, by their tokens; no batch sees what another moved."""
    parts = [random_logits(size, NUM_EXPERTS, seed=size) for size in (12, 30, 0)]
    for here, elsewhere in ((parts, None), (parts[:1], parts[1]), (parts[::2], parts[1])):
        router = router_of(THRESHOLDS, ema=0.5)
        step(router, *here, elsewhere=elsewhere)
        one, other = quantile(parts[0], 2), quantile(parts[1], 2)
        mean = [(12 * a + 30 * b) / 42 for a, b in zip(one, other, strict=True)]
        # The second of two updates: its weight is (1 - 0.5) / (1 - 0.5^2) = 2/3.
        wanted = [c / 3 + 2 * m / 3 for c, m in zip(THRESHOLDS, mean, strict=True)]
        assert router.threshold_E.tolist() == pytest.approx(wanted, rel=1e-6)
        assert router.num_updates_E.tolist() == [2] * NUM_EXPERTS


def test_padding_and_broken_tokens_move_no_threshold() -> None:
    logits = random_logits(30, NUM_EXPERTS).float()
    broken = logits.clone()
    broken[3, 1], broken[20] = torch.nan, torch.inf
    mask = torch.arange(30) % 7 != 1
    router = router_of()
    observed = router.observe(router(broken, TokenContext(mask=mask)))
    kept = mask.clone()
    kept[[3, 20]] = False
    assert observed[-1] == kept.sum()
    router.update(observed)
    assert router.threshold_E.tolist() == pytest.approx(quantile(logits[kept], 2))
    before = router.threshold_E.clone()
    for x, mask in ((logits, torch.zeros(30).bool()), (logits[:0], None)):
        router.update(router.observe(router(x, TokenContext(mask=mask))))
        assert torch.equal(router.threshold_E, before)
    assert router.num_updates_E.tolist() == [1] * NUM_EXPERTS
    chosen = router(broken, TokenContext()).selected_N.view(30, NUM_EXPERTS)
    assert chosen[3, 1], "a NaN must stay one"


@pytest.mark.parametrize(("k", "most"), [(1, 1), (1.5, 2)])
def test_in_the_first_steps_each_token_takes_its_best_experts(k: float, most: int) -> None:
    router = router_of(k=k, warmup_steps=3)
    logits = random_logits(20, NUM_EXPERTS).float()
    wanted = [sorted(sorted(range(4), key=lambda e: -row[e])[:most]) for row in logits.tolist()]
    for _ in range(3):
        assert [
            [e for e, _ in pairs] for pairs in real_pairs(router(logits, TokenContext()))
        ] == wanted
        step(router, logits)
    assert load_of(router(logits, TokenContext())) == [math.ceil(k * 5)] * NUM_EXPERTS


def test_thresholds_stay_float32_and_are_saved() -> None:
    router = router_of([0.1, 1.001, 2.002, -3.003]).bfloat16()
    assert router.threshold_E.dtype == torch.float32
    other = router_of()
    other.load_state_dict(router.state_dict())
    assert torch.equal(other.threshold_E, torch.tensor([0.1, 1.001, 2.002, -3.003]))
    assert torch.equal(other.num_updates_E, router.num_updates_E)
    assert router.to("meta").to_empty(device="cpu").threshold_E.dtype == torch.float32
    assert set(router_of().expert_rows()) == {"projection.weight", "threshold_E", "num_updates_E"}
