"""Hash routing is a fixed, evenly spread function of the token's id."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from moe_ffn import build_ffn
from moe_ffn.outputs import Routing, TokenContext
from moe_ffn.routing import HashRouterConfig
from moe_ffn.routing.hash import hash_of
from tests.helpers.identity_router import real_pairs

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
