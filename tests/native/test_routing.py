"""Choosing and sorting: compiled and by torch, the same."""

from __future__ import annotations

import math

import pytest
import torch

from moe_ffn.native import routing
from moe_ffn.native.build import why_not
from moe_ffn.native.routing import sort_by_expert, top_k

pytestmark = pytest.mark.skipif(
    why_not() is not None, reason=f"the compiled kernel {why_not()}: there is one way alone"
)

INF = math.inf


@pytest.mark.parametrize(("num_tokens", "num_experts", "k"), [(700, 37, 4), (1, 8, 8), (300, 1, 1)])
def test_top_k_is_that_of_torch(num_tokens: int, num_experts: int, k: int) -> None:
    scores_TE = (
        torch.randn(num_tokens, num_experts).t().contiguous().t()
    )  # rows need not lie together
    scores_TE[0, 0] = -INF
    ids_TK = top_k(scores_TE, k)
    assert ids_TK.dtype == torch.int64
    assert torch.equal(ids_TK, scores_TE.topk(k).indices)


def test_of_equal_scores_the_first_is_taken_and_nan_is_the_largest() -> None:
    nan = math.nan
    scores_TE = torch.tensor([[1.0, 2, 2, 1], [0, nan, INF, nan], [-INF, -INF, -INF, -INF]])
    assert top_k(scores_TE, 3).tolist() == [[1, 2, 0], [1, 3, 2], [0, 1, 2]]


def test_scores_in_training_and_in_float64_are_taken_too() -> None:
    scores_TE = torch.randn(9, 5)
    expected = scores_TE.topk(2).indices
    assert torch.equal(top_k(scores_TE.requires_grad_(), 2), expected)
    assert torch.equal(top_k(scores_TE.double(), 2), expected)
    assert not top_k(scores_TE, 0).numel()
    assert top_k(scores_TE[:0], 2).shape == (0, 2)


@pytest.mark.parametrize("num_pairs", [0, 1, 1000, 100_000])
@pytest.mark.parametrize("threads", [1, 3])
def test_sorting_is_that_of_torch(
    num_pairs: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids_N = torch.randint(0, 8, (num_pairs,))  # 7 is none of the 7 experts
    torch.set_num_threads(threads)
    try:
        order_N, offsets_E = sort_by_expert(ids_N, 7)
    finally:
        torch.set_num_threads(1)
    monkeypatch.setattr(routing, "why_not", lambda: "is turned off")
    expected_N, expected_E = sort_by_expert(ids_N, 7)
    assert torch.equal(order_N, expected_N)
    assert torch.equal(offsets_E, expected_E)
    assert offsets_E.dtype == expected_E.dtype == torch.int32


def test_an_id_that_is_no_expert_is_refused() -> None:
    with pytest.raises(RuntimeError, match="an id of an expert is none of 0 to 7"):
        sort_by_expert(torch.tensor([3, 8]), 7)
    with pytest.raises(RuntimeError, match="top 6 of 5"):
        top_k(torch.zeros(2, 5), 6)
