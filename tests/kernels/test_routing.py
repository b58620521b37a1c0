"""Logits, choosing and sorting: compiled and by torch, the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moe_ffn.kernels import routing
from moe_ffn.kernels.native.build import unavailable_reason
from moe_ffn.kernels.routing import MAX_K, sort_by_expert, top_k
from moe_ffn.routing.base import RouterLinear

pytestmark = pytest.mark.skipif(
    unavailable_reason() is not None,
    reason=f"the compiled kernel {unavailable_reason()}: there is only one way",
)

INF = math.inf


def grads_of(router: RouterLinear, x_TD: torch.Tensor) -> list[torch.Tensor]:
    """Logits, and the gradients of their squares: of x and of the parameters."""
    x_TD = x_TD.detach().requires_grad_()
    logits_TE = router(x_TD)
    found = torch.autograd.grad(logits_TE.square().sum(), [x_TD, *router.parameters()])
    return [logits_TE, *found]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_tokens", "d_model", "num_experts"),
    [(0, 8, 3), (1, 5, 1), (700, 100, 37), (300, 600, 130), (66, 9, 1030)],
    ids=str,
)
def test_logits_of_narrow_tokens_are_those_of_wider_ones(
    num_tokens: int, d_model: int, num_experts: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    router = RouterLinear(d_model, num_experts, bias=True)
    torch.nn.init.normal_(router.weight, std=d_model**-0.5)
    x_TD = torch.randn(d_model, num_tokens).to(dtype).t()  # rows need not lie together
    logits_TE, grad_x_TD, *grads = grads_of(router, x_TD)
    exact_TE, exact_x_TD, *exact = grads_of(router.double(), x_TD.double())
    assert logits_TE.dtype == torch.float32
    assert grad_x_TD.dtype == dtype
    torch.testing.assert_close(logits_TE.double(), exact_TE, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad_x_TD, exact_x_TD.to(dtype))
    for grad, exactly in zip(grads, exact, strict=True):
        torch.testing.assert_close(grad.double(), exactly, rtol=1e-5, atol=1e-4)


def test_logits_have_the_same_bits_with_any_threads_and_without_gradients() -> None:
    router, x_TD = RouterLinear(200, 20), torch.randn(600, 200).bfloat16()
    one = grads_of(router, x_TD)
    torch.set_num_threads(3)
    try:
        three = grads_of(router, x_TD)
    finally:
        torch.set_num_threads(1)
    assert all(map(torch.equal, one, three))
    with torch.no_grad():  # as a checkpoint's first pass, which is computed again with gradients
        assert torch.equal(router(x_TD), one[0])


@pytest.mark.parametrize("shape", [(2, 16, 16), (3, 5, 16), (16,)], ids=str)
def test_tokens_of_other_shapes_are_left_to_torch(shape: tuple[int, ...]) -> None:
    """The compiled loop knows two axes; with three of which the second is as wide it would read elsewhere."""
    router, x = RouterLinear(16, 4, bias=True), torch.randn(shape).bfloat16()
    exact = torch.nn.functional.linear(x.float(), router.weight, router.bias)
    torch.testing.assert_close(router(x), exact)
    with pytest.raises(RuntimeError, match=r"x is \[2, 16, 16\]"):
        torch.ops.moe_ffn_cpu.float32_linear(
            torch.zeros(2, 16, 16).bfloat16(), router.weight.detach()
        )


def test_logits_are_counted_and_differentiated_twice() -> None:
    router, x_TD = RouterLinear(16, 4), torch.randn(9, 16).bfloat16().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        router(x_TD).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 9 * 16 * 4
    (grad_TD,) = torch.autograd.grad(router(x_TD).square().sum(), x_TD, create_graph=True)
    (second_TD,) = torch.autograd.grad(grad_TD.float().sum(), x_TD)
    weight_ED = router.weight
    torch.testing.assert_close(
        second_TD.float()[0], 2 * weight_ED.t() @ weight_ED.sum(1), rtol=2e-2, atol=2e-2
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "k"), [(700, 37, 4), (1, 8, 8), (300, 1, 1), (5, 40, MAX_K + 1)]
)
def test_top_k_is_that_of_torch(num_tokens: int, num_experts: int, k: int) -> None:
    scores_TE = (
        torch.randn(num_tokens, num_experts).t().contiguous().t()
    )  # rows need not lie together
    scores_TE[0, 0] = -INF
    ids_TK = top_k(scores_TE, k)
    assert ids_TK.dtype == torch.int64
    assert torch.equal(ids_TK, scores_TE.topk(k).indices)


def test_top_k_takes_the_first_of_equal_scores_and_nan_as_the_largest() -> None:
    nan = math.nan
    scores_TE = torch.tensor([[1.0, 2, 2, 1], [0, nan, INF, nan], [-INF, -INF, -INF, -INF]])
    assert top_k(scores_TE, 3).tolist() == [[1, 2, 0], [1, 3, 2], [0, 1, 2]]
    assert top_k(torch.tensor([[-1.0, -0.0, 0.0, -0.0]]), 3).tolist() == [[1, 2, 3]]


def test_scores_in_training_and_in_float64_are_supported() -> None:
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
    monkeypatch.setattr(routing, "unavailable_reason", lambda: "is turned off")
    expected_N, expected_E = sort_by_expert(ids_N, 7)
    assert torch.equal(order_N, expected_N)
    assert torch.equal(offsets_E, expected_E)
    assert offsets_E.dtype == expected_E.dtype == torch.int32


def test_ids_of_another_type_are_sorted_by_torch() -> None:
    order_N, offsets_E = sort_by_expert(torch.tensor([1, 0, 2, 0], dtype=torch.int32), 2)
    assert order_N.tolist() == [1, 3, 0, 2]
    assert offsets_E.tolist() == [2, 3]


def test_expert_ids_and_k_out_of_range_are_rejected() -> None:
    with pytest.raises(RuntimeError, match="expert ids must be from 0 to 7"):
        sort_by_expert(torch.tensor([3, 8]), 7)
    with pytest.raises(RuntimeError, match="top 6 of 5"):
        top_k(torch.zeros(2, 5), 6)
