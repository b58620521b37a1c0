"""An MoE layer at its edges, in every precision, and under checkpointing, compilation and dropout."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_ffn import TokenContext, build_ffn
from moe_ffn.kernels.select import BACKENDS

D_MODEL = 8  # of `build_moe`


# -------------------------------------------------------------------------------------- edges


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_only_gives_zero_output_and_zero_gradients(
    backend: str, build_moe: Any, tokens_and_mask: Any, gradients: Any, dtype_of: Any
) -> None:
    moe = build_moe(backend, capacity={"factor": 1.0})
    x, mask = tokens_and_mask(dtype_of(backend), padded=False)
    x.requires_grad_()
    output = moe(x, TokenContext(mask=torch.zeros_like(mask)))
    assert output.hidden.count_nonzero() == 0
    for name, gradient in gradients(moe, x, output.hidden).items():
        assert gradient is not None, name
        assert gradient.count_nonzero() == 0, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, D_MODEL), (2, 0, D_MODEL), (0, 3, D_MODEL)], ids=str)
def test_no_tokens_give_no_output_and_zero_gradients(
    shape: tuple[int, ...], backend: str, build_moe: Any, dtype_of: Any
) -> None:
    moe = build_moe(backend, capacity={"factor": 1.0})
    output = moe(torch.zeros(shape, dtype=dtype_of(backend)))
    assert output.hidden.shape == shape
    output.hidden.sum().backward()
    for name, parameter in moe.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.count_nonzero() == 0, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_expanded_gradient_is_taken(
    backend: str, build_moe: Any, tokens_and_mask: Any, dtype_of: Any
) -> None:
    # y.sum() hands back one number with strides of 0, which F.grouped_mm itself refuses.
    moe = build_moe(backend)
    x, _ = tokens_and_mask(dtype_of(backend), padded=False)
    x.requires_grad_()
    moe(x).hidden.sum().backward()
    expanded = x.grad
    assert expanded is not None

    x_again = x.detach().clone().requires_grad_()
    moe(x_again).hidden.backward(torch.ones_like(x))
    assert x_again.grad is not None
    torch.testing.assert_close(expanded, x_again.grad, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_transposed_input_is_taken(
    backend: str, build_moe: Any, tokens_and_mask: Any, dtype_of: Any
) -> None:
    moe = build_moe(backend)
    x, _ = tokens_and_mask(dtype_of(backend), padded=False)
    transposed = x.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(moe(transposed).hidden, moe(x).hidden, rtol=0, atol=0)


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


def test_grouped_mm_refuses_what_it_cannot_compute(build_moe: Any) -> None:
    moe = build_moe("grouped_mm")
    with pytest.raises(ValueError, match=r"takes torch\.float32, .*got torch\.float64.*'loop'"):
        moe.double()(torch.zeros(3, D_MODEL, dtype=torch.float64))
    # 5 float32 are 20 bytes, not a multiple of 16.
    narrow = build_moe("grouped_mm", experts={"d_ff": 5})
    with pytest.raises(ValueError, match=r"multiple of 16 bytes.*d_model 8 and d_ff 5; use 'loop'"):
        narrow(torch.zeros(3, D_MODEL))


def test_grouped_mm_under_compilation_is_for_bfloat16(
    monkeypatch: pytest.MonkeyPatch, build_moe: Any
) -> None:
    # torch 2.13 traces it in bfloat16 alone: "Expected inputs of BF16 type".
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match=r"takes torch\.bfloat16 and rows.*got torch\.float32"):
        build_moe("grouped_mm")(torch.zeros(3, D_MODEL))


def test_auto_takes_what_grouped_mm_refuses(build_moe: Any) -> None:
    moe = build_moe("auto", experts={"d_ff": 5}).double()
    assert moe(torch.zeros(3, D_MODEL, dtype=torch.float64)).hidden.dtype == torch.float64


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
    # grouped_mm compiles in bfloat16 alone, where fused steps round less often than separate ones.
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_keeps_the_mean(
    backend: str, build_moe: Any, tokens_and_mask: Any, dtype_of: Any
) -> None:
    if backend == "triton":
        pytest.skip("takes minutes under the interpreter; tests/kernels has its mean")
    moe = build_moe(backend, experts={"dropout": 0.5, "d_ff": 512})
    x = tokens_and_mask(dtype_of(backend), padded=False)[0][:1]
    torch.manual_seed(4)
    dropped = torch.stack([moe(x).hidden for _ in range(64)]).mean(0)
    # 64 draws of 512 units: the mean is known to about 1 / sqrt(64) of one draw's deviation.
    spread = torch.stack([moe(x).hidden for _ in range(8)]).std(0).mean()
    error = (dropped - moe.eval()(x).hidden).abs().mean()
    assert error < 3 * spread / math.sqrt(64)


def test_what_stands_in_the_padding_reaches_neither_outputs_nor_gradients() -> None:
    ffn = build_ffn({"type": "moe", "num_experts": 4}, d_model=8)
    x = torch.randn(2, 3, 8)
    x[1, 2] = torch.nan
    mask = torch.ones(2, 3, dtype=torch.bool)
    mask[1, 2] = False

    ffn(x, TokenContext(mask=mask)).hidden[mask].square().sum().backward()

    for name, parameter in ffn.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all(), name
