"""Expert threshold routing: thresholds that move once per step, and what they choose, held to plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn import TokenContext
from moe_ffn.routing import ExpertThresholdRouterConfig
from moe_ffn.routing.expert_threshold import ExpertThresholdRouter
from moe_ffn.training.objective import BalanceUpdater, ObjectiveConfig
from tests.helpers.identity_router import identity_router, load_of, random_logits, real_pairs

THRESHOLDS = [0.3, -0.5, 0.9, 0.0]
NUM_EXPERTS = len(THRESHOLDS)


def router_of(thresholds: list[float] | None = None, **options: Any) -> ExpertThresholdRouter:
    """Its logits are its input; estimated already, where thresholds are given."""
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
