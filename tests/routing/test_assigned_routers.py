"""Routers that balance by themselves, and routers that learn nothing."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn import build_ffn
from moe_ffn.metrics.functional import max_violation
from moe_ffn.outputs import Routing, TokenContext
from moe_ffn.routing import (
    ExpertChoiceRouterConfig,
    ForcedRouterConfig,
    HashRouterConfig,
    SinkhornRouterConfig,
)
from moe_ffn.routing.hash import hash_of
from moe_ffn.routing.sinkhorn import sinkhorn
from tests.helpers.every_router import (
    experts_of,
    identity_router,
    load_of,
    random_logits,
    real_pairs,
    route,
)

NUM_TOKENS, NUM_EXPERTS = 24, 4


def lopsided_logits(scale: float = 1.0) -> Tensor:
    """Everybody prefers the last expert."""
    logits = random_logits(NUM_TOKENS, NUM_EXPERTS)
    return scale * (logits + torch.arange(NUM_EXPERTS))


def everybody(num_tokens: int = NUM_TOKENS) -> Tensor:
    return torch.ones(num_tokens, dtype=torch.bool)


def naive_sinkhorn(rows: list[list[float]], rounds: int) -> list[list[float]]:
    """Divide rows, then columns, by their sums, over and over; rows last."""
    table = [[math.exp(z) for z in row] for row in rows]
    for _ in range(rounds):
        for row in table:
            total = sum(row)
            row[:] = [value / total for value in row]
        for e in range(len(table[0])):
            total = sum(row[e] for row in table) * len(table[0]) / len(table)
            for row in table:
                row[e] /= total
    return [[value / sum(row) for value in row] for row in table]


def test_it_equals_division_of_rows_and_columns_in_plain_python() -> None:
    logits = lopsided_logits()
    got = sinkhorn(logits, everybody(), tolerance=1e-12, max_iterations=1000).softmax(dim=-1)
    expected = torch.tensor(naive_sinkhorn(logits.tolist(), 200), dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", [10.0, 30.0])
def test_sharp_logits_do_not_stop_it_before_it_is_balanced(scale: float) -> None:
    # One column's factor is e^30 times another's here; all have to settle, not only the largest.
    balanced = sinkhorn(lopsided_logits(scale), everybody(), max_iterations=100_000)
    columns = balanced.softmax(dim=-1).sum(dim=0)
    # The columns' last change was below the tolerance of 1e-4, and shrank slowly.
    torch.testing.assert_close(columns, torch.full_like(columns, 6.0), rtol=0.02, atol=0)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_logits_are_balanced_in_float32(dtype: torch.dtype, autocast: bool) -> None:
    logits = (random_logits(512, 8) + torch.arange(8)).to(dtype)
    counted = everybody(512)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        balanced = sinkhorn(logits, counted)
    assert balanced.dtype == torch.float32
    assert torch.equal(balanced, sinkhorn(logits.float(), counted))
    columns = balanced.softmax(dim=-1).sum(dim=0)
    torch.testing.assert_close(columns, torch.full_like(columns, 64.0), rtol=1e-3, atol=0)


def test_sinkhorn_uses_the_tolerance_and_iterations_of_its_config() -> None:
    logits = random_logits(2000, 8) + torch.arange(8)
    for tolerance, max_iterations in ((1e-1, 100), (1e-6, 100), (1e-6, 2)):
        config = SinkhornRouterConfig(tolerance=tolerance, max_iterations=max_iterations)
        balanced = sinkhorn(logits, everybody(2000), tolerance, max_iterations)
        expected = balanced.argmax(dim=-1, keepdim=True).tolist()
        assert experts_of(route(config, logits, training=True)) == expected


def test_large_logits_do_not_overflow() -> None:
    for dtype in (torch.float32, torch.float64):
        logits = lopsided_logits(1e3).to(dtype)
        assert sinkhorn(logits, everybody()).isfinite().all()
        assert route(SinkhornRouterConfig(), logits, training=True).weights_N.isfinite().all()


@pytest.mark.parametrize("k", [1, 2, 4])
def test_training_takes_the_top_k_of_the_balanced_scores_weighted_by_the_plain_ones(k: int) -> None:
    logits = lopsided_logits()
    config = SinkhornRouterConfig(k=k, tolerance=1e-10, max_iterations=1000)
    got = real_pairs(route(config, logits, training=True))
    table = naive_sinkhorn(logits.tolist(), 200)
    for t, row in enumerate(logits.tolist()):
        chosen = sorted(range(NUM_EXPERTS), key=lambda e: -table[t][e])[:k]
        if k == 1:
            scores = [1 / (1 + math.exp(-z)) for z in row]
        else:
            scores = [math.exp(z) / sum(math.exp(y) for y in row) for z in row]
        assert [e for e, _ in got[t]] == chosen
        assert [w for _, w in got[t]] == pytest.approx([scores[e] for e in chosen])


@pytest.mark.parametrize("k", [1, 2])
def test_evaluation_is_plain_top_k(k: int) -> None:
    logits = lopsided_logits()
    chosen = experts_of(route(SinkhornRouterConfig(k=k), logits))
    for row, experts in zip(logits.tolist(), chosen, strict=True):
        assert experts == sorted(range(NUM_EXPERTS), key=lambda e: -row[e])[:k]


def test_another_k_in_evaluation_keeps_the_scores_of_training() -> None:
    config, logits = SinkhornRouterConfig(k=1), lopsided_logits()
    router: Any = identity_router(config, NUM_EXPERTS)
    router.config = config.with_k(2)  # as `Decoder.set_k`
    routing = router(logits, TokenContext())
    expected = logits.topk(2).values.sigmoid().flatten()
    torch.testing.assert_close(routing.weights_N, expected)


def test_uncounted_tokens_stay_unchanged_and_change_no_other_token() -> None:
    logits = lopsided_logits()
    counted = torch.arange(NUM_TOKENS) % 3 > 0
    got = sinkhorn(logits, counted)
    assert torch.equal(got[~counted], logits[~counted])
    torch.testing.assert_close(got[counted], sinkhorn(logits[counted], everybody(16)))
    assert torch.equal(sinkhorn(logits, torch.zeros_like(counted)), logits)


def test_it_stops_after_the_largest_number_of_rounds() -> None:
    # One round from equal columns: each column is divided by its sum of row softmaxes.
    logits = lopsided_logits()
    sums = logits.softmax(dim=-1).sum(dim=0)
    got = sinkhorn(logits, everybody(), max_iterations=1).softmax(dim=-1)
    torch.testing.assert_close(got, (logits - sums.log()).softmax(dim=-1))


# -- expert choice: each expert's ceil(k * tokens / E) best tokens


def scores_of(row: list[float], score: str) -> list[float]:
    if score == "sigmoid":
        return [1 / (1 + math.exp(-z)) for z in row]
    total = sum(math.exp(z) for z in row)
    return [math.exp(z) / total for z in row]


def naive(
    config: ExpertChoiceRouterConfig, logits_TE: Tensor, length: int, mask: list[bool]
) -> list[list[tuple[int, float]]]:
    """Return the experts and weights of each token, by a loop over groups of tokens and experts."""
    scores = [scores_of(row, config.score) for row in logits_TE.tolist()]
    num_tokens, num_experts = logits_TE.shape
    size = length if config.among == "sequence" else num_tokens
    pairs: list[list[tuple[int, float]]] = [[] for _ in range(num_tokens)]
    for start in range(0, num_tokens, size):
        group = [t for t in range(start, start + size) if mask[t]]
        count = math.ceil(Fraction(str(config.k)) * len(group) / num_experts)
        for e in range(num_experts):
            for t in sorted(group, key=lambda t: -scores[t][e])[:count]:
                pairs[t].append((e, scores[t][e]))
    return pairs


MASKS = {
    "unpadded": [True] * 21,
    # Right, left, and a whole sequence.
    "padded": [True] * 4 + [False] * 3 + [False] * 2 + [True] * 5 + [False] * 7,
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("among", ["sequence", "batch"])
@pytest.mark.parametrize("k", [0.3, 1.0, 1.1, 2.0, 4.0])
def test_it_equals_a_loop_over_groups_and_experts(
    k: float, among: str, score: str, mask: list[bool], training: bool
) -> None:
    config = ExpertChoiceRouterConfig.model_validate({"k": k, "among": among, "score": score})
    logits = random_logits(21, 4)
    routing = route(config, logits, mask=torch.tensor(mask), sequence_length=7, training=training)
    expected = naive(config, logits, 7, mask)
    for got, wanted in zip(real_pairs(routing), expected, strict=True):
        assert [e for e, _ in sorted(got)] == [e for e, _ in wanted]
        assert [w for _, w in sorted(got)] == pytest.approx([w for _, w in wanted])


# 0.3 * 50 is a little more than 15 where 0.3 is taken for what the float stands for.
@pytest.mark.parametrize(
    ("k", "num_tokens", "num_experts", "each"),
    [
        (1.25, 16, 8, 3),
        (0.3, 50, 1, 15),
        (8.0, 5, 8, 5),
        (4e-7, 50, 4, 1),
    ],
)
def test_every_expert_takes_exactly_its_share_rounded_up(
    k: float, num_tokens: int, num_experts: int, each: int
) -> None:
    config = ExpertChoiceRouterConfig(k=k, score="sigmoid")
    assert load_of(route(config, random_logits(num_tokens, num_experts))) == [each] * num_experts


def test_equal_scores_leave_every_expert_its_exact_share() -> None:
    assert load_of(route(ExpertChoiceRouterConfig(k=2), torch.zeros(12, 4))) == [6] * 4


# -- routers that learn nothing: forced routing gives the load it is asked for, hash routing looks at ids


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "k"),
    [(8, 4, 1), (8, 4, 2), (4, 8, 2), (6, 4, 2), (8, 6, 3), (5, 5, 5), (12, 8, 6)],
)
def test_without_skew_the_load_is_perfectly_balanced(
    num_tokens: int, num_experts: int, k: int
) -> None:
    assert num_tokens * k % num_experts == 0
    routing = route(ForcedRouterConfig(k=k), random_logits(num_tokens, num_experts))
    load = load_of(routing)
    assert load == [num_tokens * k // num_experts] * num_experts
    assert max_violation(torch.tensor(load).float()) == 0


@pytest.mark.parametrize("k", [1, 2, 4])
def test_full_skew_sends_every_token_to_the_first_k(k: int) -> None:
    routing = route(ForcedRouterConfig(k=k, skew=1.0), random_logits(10, 4))
    assert experts_of(routing) == [list(range(k))] * 10


def test_half_skew_is_the_list_worked_by_hand() -> None:
    # Of the first n tokens n / 2, rounded down, are skewed: every second one; the others take turns.
    routing = route(ForcedRouterConfig(k=1, skew=0.5), random_logits(8, 3))
    assert experts_of(routing) == [[0], [0], [1], [0], [2], [0], [0], [0]]


@pytest.mark.parametrize("skew", [0.0, 0.07, 0.1, 0.29, 0.3, 0.57, 0.7, 0.99, 1.0])
def test_the_share_of_skewed_tokens_is_exact(skew: float) -> None:
    num_tokens, num_experts = 1000, 10
    load = load_of(
        route(ForcedRouterConfig(k=1, skew=skew), random_logits(num_tokens, num_experts))
    )
    skewed = math.floor(Fraction(str(skew)) * num_tokens)
    turns = num_tokens - skewed
    # The others take turns from expert 0 on.
    expected = [turns // num_experts + (e < turns % num_experts) for e in range(num_experts)]
    expected[0] += skewed
    assert load == expected


def test_weights_are_the_softmax_probabilities_of_the_forced_experts() -> None:
    logits = random_logits(6, 4)
    for row, pairs in zip(
        logits.tolist(), real_pairs(route(ForcedRouterConfig(), logits)), strict=True
    ):
        total = sum(math.exp(z) for z in row)
        assert [w for _, w in pairs] == pytest.approx([math.exp(row[e]) / total for e, _ in pairs])


MASK = 0xFFFFFFFF


def route_ids(ids: Tensor, num_experts: int = 8, k: int = 1, seed: int = 0) -> Routing:
    router = HashRouterConfig(k=k, seed=seed).build(16, num_experts)
    return router(torch.zeros(len(ids), 16), TokenContext(token_ids=ids))


def murmur_finalizer(h: int) -> int:
    """fmix32 of MurmurHash3 (Appleby, public domain)."""
    h ^= h >> 16
    h = h * 0x85EBCA6B & MASK
    h ^= h >> 13
    h = h * 0xC2B2AE35 & MASK
    return h ^ h >> 16


def test_the_mixer_is_that_of_murmurhash3() -> None:
    # MurmurHash3_x86_32 of nothing is fmix32(seed): 0 for 0, 514e28b7 for 1, 81f16f39 for ffffffff.
    offset = 0x9E3779B1
    ids = torch.tensor([0 - offset, 1 - offset, 0xFFFFFFFF - offset])
    assert hash_of(ids, 0).tolist() == [0, 0x514E28B7, 0x81F16F39]


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**31 - 1])
def test_it_equals_whole_numbers_of_any_size_in_plain_python(seed: int) -> None:
    ids = [*range(200), 50_256, 128_255, 2**31 - 1, -100]
    expected = [murmur_finalizer((i + 0x9E3779B1 * (seed + 1)) & MASK) for i in ids]
    assert hash_of(torch.tensor(ids), seed).tolist() == expected
    routing = route_ids(torch.tensor(ids), num_experts=6, seed=seed)
    assert routing.expert_ids_N.tolist() == [h % 6 for h in expected]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8], ids=str)
def test_ids_of_any_whole_dtype_go_where_int64_ids_go(dtype: torch.dtype) -> None:
    ids = torch.arange(200)
    assert torch.equal(route_ids(ids.to(dtype)).expert_ids_N, route_ids(ids).expert_ids_N)


@pytest.mark.parametrize("k", [1, 3, 5])
def test_the_k_experts_of_a_token_differ_and_weigh_the_same(k: int) -> None:
    routing = route_ids(torch.arange(50), num_experts=5, k=k)
    for pairs in real_pairs(routing):
        assert len({e for e, _ in pairs}) == k
        assert [w for _, w in pairs] == pytest.approx([1 / k] * k)
    # The scores say who was named.
    assert routing.logits_TE is not None
    assert routing.scores_TE is not None
    assert torch.equal(routing.scores_TE.count_nonzero(dim=-1), torch.full((50,), k))
    torch.testing.assert_close(routing.scores_TE.sum(dim=-1), torch.ones(50))
    assert routing.logits_TE.count_nonzero() == 0


def test_a_block_without_token_ids_is_rejected() -> None:
    message = (
        "router.type 'hash' routes by token id: call the block with TokenContext(token_ids=...)"
    )
    layer = build_ffn({"type": "moe", "router": "hash"}, d_model=8)
    for context in (None, TokenContext(), TokenContext(mask=torch.ones(2, 3).bool())):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            layer(torch.zeros(2, 3, 8), context)
