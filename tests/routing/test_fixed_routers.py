"""Routers that learn nothing: forced routing gives the load it is asked for, hash routing looks at ids."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from moe_ffn import build_ffn
from moe_ffn.metrics.functional import max_violation
from moe_ffn.outputs import Routing, TokenContext
from moe_ffn.routing import ForcedRouterConfig, HashRouterConfig
from moe_ffn.routing.hash import hash_of
from tests.helpers.every_router import experts_of, load_of, random_logits, real_pairs, route


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


@pytest.mark.parametrize("skew", [0.0, 0.3, 1.0])
def test_padding_takes_no_turn(skew: float) -> None:
    config = ForcedRouterConfig(k=2, skew=skew)
    logits = random_logits(12, 4)
    mask = torch.tensor([False] * 2 + [True] * 3 + [False] * 2 + [True] * 5)  # 8 real tokens
    padded = route(config, logits, mask=mask)
    real = [
        experts for experts, kept in zip(experts_of(padded), mask.tolist(), strict=True) if kept
    ]
    assert real == experts_of(route(config, logits[mask]))
    if skew == 0:
        assert load_of(padded) == [4, 4, 4, 4]


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


def test_a_block_without_token_ids_is_refused() -> None:
    message = (
        "router.type 'hash' routes by token id: call the block with TokenContext(token_ids=...)"
    )
    layer = build_ffn({"type": "moe", "router": "hash"}, d_model=8)
    for context in (None, TokenContext(), TokenContext(mask=torch.ones(2, 3).bool())):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            layer(torch.zeros(2, 3, 8), context)
