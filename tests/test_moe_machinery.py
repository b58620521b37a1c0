"""An MoE layer at its edges, in every precision, and under checkpointing, compilation and dropout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_ffn import TokenContext
from moe_ffn.balancing.losses import BALANCING_LOSSES
from moe_ffn.ffn.dispatch import make_plan
from moe_ffn.kernels.select import BACKENDS

D_MODEL = 8  # of `build_moe`
ALWAYS = ("load_balance", "load_balance_sequence", "importance_cv2", "router_z", "router_entropy")
"""Losses that every router has."""


# -------------------------------------------------------------------------------------- edges


def every_second(x: Tensor) -> Tensor:
    """Return a view with a gap behind each value, and an offset."""
    unused = torch.nan if x.is_floating_point() else 1
    spread = torch.full([2 * size + 1 for size in x.shape], unused, dtype=x.dtype)
    return spread[tuple(slice(1, None, 2) for _ in x.shape)].copy_(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "last axes swapped": lambda x: x.mT.contiguous().mT,
    "first axes swapped": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every second": every_second,
    "the first for all": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_of_tokens_mask_and_gradient_change_nothing(
    backend: str, layout: Callable[[Tensor], Tensor], build_moe: Any, tokens_and_mask: Any
) -> None:
    moe = build_moe(backend, capacity={"factor": 1.0}, shared_expert="swiglu").float()
    tokens, mask = tokens_and_mask(torch.float32, padded=True)
    found: list[list[Tensor]] = []
    for view in (layout, lambda x: layout(x).contiguous()):
        x = view(tokens).requires_grad_()
        hidden = moe(x, TokenContext(view(mask))).hidden
        grads = torch.autograd.grad(hidden, [x, *moe.parameters()], view(tokens.flip(-1)))
        found.append([hidden, *grads])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3), (2, 0, 3), (2, 3)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_and_only_padding_give_zeros_and_gradients_of_zero(
    backend: str, shape: tuple[int, ...], build_moe: Any, dtype_of: Any
) -> None:
    more = {"zero_computation": {"num_copy": 1, "num_constant": 1}, "experts": {"bias": True}}
    moe = build_moe(backend, capacity={"factor": 1.0}, **more)
    x = torch.full((*shape, D_MODEL), torch.nan, dtype=dtype_of(backend), requires_grad=True)
    output = moe(x, TokenContext(torch.zeros(shape, dtype=torch.bool)))
    assert output.hidden.shape == x.shape
    assert output.hidden.count_nonzero() == 0
    losses = [BALANCING_LOSSES[name].value(output.routings) for name in ALWAYS]
    (output.hidden.sum() + sum(loss for loss in losses if loss is not None)).backward()
    for name, parameter in [("x", x), *moe.named_parameters()]:
        assert parameter.grad is not None, name
        assert parameter.grad.count_nonzero() == 0, name


# ------------------------------------------------------------------------------------- dtypes

# bfloat16 keeps 8 bits and float16 11: each of about five roundings costs 2^-9 or 2^-12 of a value.
REDUCED = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return ((got.double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_a_layer_in_half_precision_keeps_its_dtype_and_its_float32_router(
    dtype: torch.dtype, backend: str, build_moe: Any, tokens_and_mask: Any
) -> None:
    moe = build_moe(backend).to(dtype)
    x = tokens_and_mask(torch.float32, padded=False)[0].to(dtype)
    output = moe(x)
    assert output.hidden.dtype == dtype
    assert output.routing is not None
    assert output.routing.logits_TE.dtype == torch.float32
    assert output.routing.weights_N.dtype == torch.float32
    wanted = copy.deepcopy(moe).float()(x.float()).hidden
    assert relative_error(output.hidden, wanted) < REDUCED[dtype]
    output.hidden.sum().backward()
    assert all(parameter.grad is not None for parameter in moe.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_lowers_the_experts_but_not_the_router(
    input_dtype: torch.dtype, backend: str, build_moe: Any, tokens_and_mask: Any
) -> None:
    moe = build_moe(backend, shared_expert="swiglu").float()
    x = tokens_and_mask(torch.float32, padded=False)[0].to(input_dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = moe(x)
    assert output.hidden.dtype == input_dtype
    assert output.routing is not None
    assert output.routing.logits_TE.dtype == torch.float32
    # What float32 gives but for the order of its sums, so no rounding to bfloat16 on the way.
    wanted = moe(x.float())
    assert wanted.routing is not None
    assert relative_error(output.routing.logits_TE, wanted.routing.logits_TE) < 1e-6
    error = relative_error(output.hidden, wanted.hidden)
    assert error < REDUCED[torch.bfloat16]
    assert error > 1e-5  # the products were lowered
    output.hidden.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in moe.parameters())


def test_grouped_mm_rejects_what_it_cannot_compute(build_moe: Any) -> None:
    moe = build_moe("grouped_mm")
    with pytest.raises(ValueError, match=r"takes torch\.float32, .*got torch\.float64.*'loop'"):
        moe.double()(torch.zeros(3, D_MODEL, dtype=torch.float64))
    # 5 float32 are 20 bytes, not a multiple of 16.
    narrow = build_moe("grouped_mm", experts={"d_ff": 5})
    with pytest.raises(ValueError, match=r"multiple of 16 bytes.*d_model 8 and d_ff 5; use 'loop'"):
        narrow(torch.zeros(3, D_MODEL))


# -------------------------------------------------------------------- under other machinery


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_activation_checkpointing_draws_alike_and_changes_no_gradient(
    backend: str,
    use_reentrant: bool,
    build_moe: Any,
    tokens_and_mask: Any,
    gradients: Any,
    dtype_of: Any,
) -> None:
    options = {"experts": {"dropout": 0.5}, "router": {"type": "top_k", "jitter": 0.3}}
    moe = build_moe(backend, capacity={"factor": 1.0}, shared_expert="dense", **options)
    found: list[Any] = []
    for call in (
        lambda x: moe(x).hidden,
        lambda x: checkpoint(lambda x: moe(x).hidden, x, use_reentrant=use_reentrant),
    ):
        moe.zero_grad()
        x = tokens_and_mask(dtype_of(backend), padded=False)[0].requires_grad_()
        torch.manual_seed(1)
        hidden = call(x)
        torch.manual_seed(2)  # where a backward pass does not go on from
        found.append(gradients(moe, x, hidden))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=0)


@pytest.mark.slow  # a compilation takes about half a minute on two cores
@pytest.mark.filterwarnings("ignore")  # what inductor's own imports and tracing warn of
@pytest.mark.parametrize("backend", BACKENDS)
def test_torch_compile_changes_no_gradient(
    backend: str, build_moe: Any, tokens_and_mask: Any, gradients: Any
) -> None:
    # grouped_mm compiles only in bfloat16, where fused steps round less often than separate ones.
    dtype, tolerance = torch.float64, 1e-12  # sums of tens of terms, rounded at 1e-16
    if backend == "grouped_mm":
        dtype, tolerance = torch.bfloat16, REDUCED[torch.bfloat16]
    if backend == "triton":
        dtype, tolerance = torch.float32, 1e-5
    moe = build_moe(backend, capacity={"factor": 1.0}, shared_expert="swiglu").to(dtype)
    x = tokens_and_mask(dtype, padded=False)[0].requires_grad_()
    plain = gradients(moe, x, moe(x).hidden)

    torch.compiler.reset()
    x_again = x.detach().clone().requires_grad_()
    again = copy.deepcopy(moe)
    again.zero_grad()
    compiled = gradients(again, x_again, torch.compile(again)(x_again).hidden)
    for name, gradient in plain.items():
        got = compiled[name]
        assert got is not None, name
        assert gradient is not None, name
        assert relative_error(got, gradient) < tolerance, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_in_the_experts_is_for_training_only(
    backend: str, build_moe: Any, tokens_and_mask: Any, dtype_of: Any
) -> None:
    moe = build_moe(backend, experts={"dropout": 0.5})
    without = build_moe(backend)
    x, _ = tokens_and_mask(dtype_of(backend), padded=False)
    torch.manual_seed(3)
    assert not torch.equal(moe(x).hidden, moe(x).hidden)
    torch.testing.assert_close(moe.eval()(x).hidden, without(x).hidden, rtol=0, atol=0)


def test_pairs_are_sorted_by_expert_and_keep_token_order(make_routing: Any) -> None:
    # pair    0  1  2  3  4  5
    # token   0  0  1  1  2  2
    # expert  2  0  0  1  2  0   ->  expert 0: pairs 1, 2, 5; expert 1: 3; expert 2: 0, 4
    weights = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    plan = make_plan(make_routing([[2, 0], [0, 1], [2, 0]], 3, weights_N=weights))
    assert plan.token_indices_N.tolist() == [0, 1, 2, 1, 0, 2]
    assert plan.weights_N.tolist() == weights[[1, 2, 5, 3, 0, 4]].tolist()
    assert plan.pair_ids_N.tolist() == [1, 2, 5, 3, 0, 4]
    assert plan.offsets_E.tolist() == [3, 4, 6]
    assert plan.offsets_E.dtype == torch.int32


def test_dropped_and_padded_pairs_come_last_with_weight_zero(make_routing: Any) -> None:
    # Tokens 0 to 3 go to experts 1, 0, 1, 0; token 0's pair is dropped, token 3 is padding.
    routing = make_routing(
        [[1], [0], [1], [0]],
        2,
        dropped_N=torch.tensor([True, False, False, False]),
        mask_T=torch.tensor([True, True, True, False]),
    )
    plan = make_plan(routing)
    assert plan.offsets_E.tolist() == [1, 2]
    assert plan.token_indices_N.tolist() == [1, 2, 0, 3]
    assert plan.weights_N.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("num_experts", [1, 7])
def test_plan_is_a_pytree(make_routing: Any, num_experts: int) -> None:
    plan = make_plan(make_routing([[0]] * 4, num_experts))
    leaves, structure = pytree.tree_flatten(plan)
    assert len(leaves) == 4
    assert pytree.tree_unflatten(leaves, structure) == plan
