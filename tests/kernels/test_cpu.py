"""The backend for CPUs: what the double loop of tests/test_oracle.py, whose layers are tiny, leaves out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from moe_ffn.kernels import base as dtypes
from moe_ffn.kernels import cpu as choice
from moe_ffn.kernels.activations import Activation, ClampedSwiGLU
from moe_ffn.kernels.base import ExpertWeights, dropout_mask
from moe_ffn.kernels.cpu import LOOP, native, run
from moe_ffn.kernels.native.build import unavailable_reason
from moe_ffn.kernels.select import run_experts
from moe_ffn.kernels.torch_products import loop
from moe_ffn.outputs import Plan
from tests.kernels.derivatives import NAMES, Given, assert_close, derive, exact, leaves_of

T, D, E, F = 6, 3, 4, 5

without_compiler = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"native {unavailable_reason()}"
)


def loop_as_operator(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> Tensor:
    return run(LOOP, x_TD, plan, weights)


each_way = pytest.mark.parametrize(
    "cpu", [pytest.param(native, marks=without_compiler), loop_as_operator], ids=["native", "loop"]
)
PLAN: list[list[int | None]] = [[0, 1], [0, 1], [0, 3], [0, 3], [0, None], [0, 0]]
"""12 pairs of 6 tokens: expert 0 has 7, expert 2 none, and one is not computed."""


@pytest.fixture
def make(make_weights: Any, make_plan_of: Any) -> Callable[..., Given]:
    def make(dtype: torch.dtype = torch.float64, **options: Any) -> Given:
        weights = make_weights(E, D, F, dtype=dtype, **{"gated": False, **options})
        plan = make_plan_of(PLAN, E)
        plan = replace(plan, weights_N=plan.weights_N.detach().to(dtype).requires_grad_())
        x_TD = torch.randn(T, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return x_TD.to(dtype).requires_grad_(), plan, weights

    return make


KINDS: dict[str, dict[str, Any]] = {
    **{f"plain_{name}": {"activation": name} for name in get_args(Activation)},
    **{f"gated_{name}": {"activation": name, "gated": True} for name in get_args(Activation)},
    "clamped": {"activation": "silu", "gated": True, "gate_function": ClampedSwiGLU(1.7, 0.5)},
    "adapted": {"activation": "silu", "gated": True, "rank": 2},
    "interleaved_adapted": {"activation": "silu", "gated": True, "rank": 2, "interleaved": True},
}


@each_way
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_every_activation_and_gradient_is_that_of_the_loop(
    cpu: Any, options: dict[str, Any], make: Any
) -> None:
    given = make(**options)
    assert_close(derive(cpu, *given), derive(loop, *given), 1e-11)


def test_an_activation_without_a_kernel_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    monkeypatch.delitem(choice._CODES, "silu")

    assert not choice.has_kernel(make(activation="silu")[2])
    assert choice.has_kernel(make(activation="relu")[2])


def test_adapters_add_to_the_matrices(make: Any) -> None:
    x_TD, plan, weights = make(gated=True, rank=2)

    def materialised(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> Tensor:
        up, down, up_bias, down_bias, up_a, up_b, down_a, down_b = weights.parameters
        adapted = up + up_b @ up_a, down + down_b @ down_a, up_bias, down_bias
        return loop(x_TD, plan, weights.with_parameters(*adapted, *[None] * 4))

    wanted = derive(materialised, x_TD, plan, weights)
    assert_close(derive(loop, x_TD, plan, weights), wanted, 1e-11)


@each_way
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["gated_silu", "clamped", "adapted"])
def test_gradients_are_those_of_finite_differences(
    cpu: Any, kind: str, dropout: float, make: Any
) -> None:
    given = make(**KINDS[kind], dropout=dropout)
    _, plan, weights = given

    def function(x_TD: Tensor, weights_N: Tensor, *parameters: Tensor) -> Tensor:
        torch.manual_seed(3)  # the same units are dropped at every call
        present = iter(parameters)
        given = (None if each is None else next(present) for each in weights.parameters)
        return cpu(x_TD, replace(plan, weights_N=weights_N), weights.with_parameters(*given))

    assert torch.autograd.gradcheck(function, tuple(leaves_of(*given).values()), fast_mode=True)


@each_way
@pytest.mark.parametrize("kind", ["gated_silu", "clamped", "plain_relu"])
def test_dropout_multiplies_the_hidden_units_by_its_mask(cpu: Any, kind: str, make: Any) -> None:
    x_TD, plan, weights = make(**KINDS[kind], dropout=0.5)
    results = []
    for trains in (True, False):
        torch.manual_seed(3)
        with torch.set_grad_enabled(trains):
            results.append(cpu(x_TD, plan, weights))

    torch.manual_seed(3)
    mask_NF = dropout_mask(11, weights, x_TD.dtype, x_TD.device)
    assert mask_NF is not None
    plain, wanted = replace(weights, dropout=0.0), torch.zeros_like(x_TD)
    up, down, up_bias, down_bias, *_ = weights.parameters
    experts = [0] * 7 + [1] * 2 + [3] * 2
    for n, (token, expert) in enumerate(
        zip(plan.token_indices_N[:11].tolist(), experts, strict=True)
    ):
        hidden_F = plain.activate(up[expert] @ x_TD[token] + up_bias[expert]) * mask_NF[n]
        wanted[token] += plan.weights_N[n] * (down[expert] @ hidden_F + down_bias[expert])
    for got in results:
        torch.testing.assert_close(got, wanted)


FROZEN = {
    "experts": NAMES[2:6],
    "all": NAMES[2:],
    "up": ("up", "up_bias"),
    "down": ("down", "down_bias"),
    "x": ("x",),
}


@each_way
@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN)
def test_frozen_inputs_get_no_gradient_and_change_no_other(
    cpu: Any, frozen: tuple[str, ...], make: Any
) -> None:
    given = make(**KINDS["adapted"])
    wanted = derive(cpu, *given)
    for name in frozen:
        leaves_of(*given)[name].requires_grad_(False)
        del wanted[name]
    assert_close(derive(cpu, *given), wanted, 0.0)


def test_dropout_keeps_the_mean() -> None:
    torch.manual_seed(0)
    weights = ExpertWeights("relu", torch.zeros(1, 10, 4), torch.zeros(1, 4, 10), dropout=0.2)
    mask_NF = dropout_mask(4000, weights, torch.float32, torch.device("cpu"))
    assert mask_NF is not None
    assert mask_NF.unique().tolist() == [0.0, 1.25]
    # 40,000 draws of a deviation of 0.5.
    assert mask_NF.mean().item() == pytest.approx(1.0, abs=4 * 0.5 / 200)


# ------------------------------------------------------------------------------ reduced precision


@each_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("native", [False, True], ids=["emulated", "native"])
@pytest.mark.parametrize("options", [KINDS["gated_silu"], KINDS["plain_gelu"]], ids=str)
def test_a_cpu_without_reduced_products_computes_them_in_float32(
    cpu: Any,
    options: dict[str, Any],
    native: bool,
    dtype: torch.dtype,
    make: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has = dict.fromkeys(("amx_bf16", "amx_fp16"), native)
    monkeypatch.setattr(dtypes, "_capabilities", lambda: has)
    assert dtypes.product_dtype_on_cpu(dtype) == (dtype if native else torch.float32)
    given = make(dtype, **options)
    got = derive(cpu, *given)
    assert {value.dtype for value in got.values()} == {dtype}
    # Some five roundings, sums of up to seven terms.
    assert_close(got, derive(loop, *exact(*given)), 16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [({"avx512_bf16": True, "cpu_name": "Intel Xeon"}, torch.bfloat16), ({}, torch.float32)],
    ids=["slow", "emulated"],
)
def test_a_loop_converts_the_experts_only_if_the_cpu_emulates_their_dtype(
    capabilities: dict[str, Any], dtype: torch.dtype, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtypes, "_capabilities", lambda: capabilities)
    run_loop = Mock()
    monkeypatch.setattr(choice, "run_loop", run_loop)
    x_TD, plan, weights = make(torch.bfloat16)
    choice.loop_on_cpu(x_TD, plan, weights, torch.bfloat16, torch.ones(11, F))
    _, _, weights, products, mask_NF = run_loop.call_args.args
    assert {weights.up_EHD.dtype, products, mask_NF.dtype} == {dtype}


@pytest.mark.parametrize(
    ("dtype", "capabilities", "expected"),
    [
        (torch.bfloat16, {"amx_bf16": True}, torch.bfloat16),
        (torch.bfloat16, {"avx512_bf16": True, "cpu_name": "AMD EPYC"}, torch.bfloat16),
        (torch.bfloat16, {"avx512_bf16": True, "cpu_name": "Intel Xeon"}, torch.float32),
        (
            torch.bfloat16,
            {"avx512_bf16": True, "amx_bf16": True, "cpu_name": "Intel Xeon"},
            torch.bfloat16,
        ),
        (torch.bfloat16, {"avx512_f": True, "amx_fp16": True}, torch.float32),
        (torch.float16, {"amx_fp16": True}, torch.float16),
        (torch.float16, {"amx_bf16": True}, torch.float32),
        (torch.float32, {}, torch.float32),
        (torch.float64, {}, torch.float64),
    ],
)
def test_products_are_in_the_dtype_that_the_cpu_multiplies(
    dtype: torch.dtype,
    capabilities: dict[str, bool],
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dtypes, "_capabilities", lambda: capabilities)
    assert dtypes.product_dtype_on_cpu(dtype) == expected


@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize("backend", ["loop", "cpu", "grouped_mm"])
def test_under_autocast_results_are_weighted_and_summed_in_float32(
    backend: str, num_tokens: int
) -> None:
    """y = w 254 x + (1 - w) 2 x, w = 257 / 512: bfloat16 has neither w nor the sum, 128.4921875."""
    eyes = torch.eye(8) * torch.tensor([1.0, 1.0, 254.0, 2.0])[:, None, None]
    weights = ExpertWeights("identity", up_EHD=eyes[:2], down_EDF=eyes[2:])
    ids_N = torch.arange(num_tokens).repeat(2)
    weights_N = torch.tensor([257.0, 255.0]).repeat_interleave(num_tokens) / 512
    loads = torch.tensor([num_tokens, 2 * num_tokens], dtype=torch.int32)
    plan = Plan(ids_N, weights_N, loads, torch.arange(2 * num_tokens))
    with torch.autocast("cpu", torch.bfloat16):
        y_TD = run_experts(torch.ones(num_tokens, 8), plan, weights, backend)
    assert y_TD.unique().tolist() == [128.4921875]


# ------------------------------------------------------------------------------------ autograd


@each_way
def test_weights_changed_before_backward_are_noticed(cpu: Any, make: Any) -> None:
    x_TD, plan, weights = make(**KINDS["gated_silu"])
    y_TD = cpu(x_TD, plan, weights)
    with torch.no_grad():
        weights.up_EHD.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y_TD.sum().backward()


@each_way
def test_backward_twice_is_the_same(cpu: Any, make: Any) -> None:
    given = make(**KINDS["gated_silu"])
    y_TD, leaves = cpu(*given), list(leaves_of(*given).values())
    first = torch.autograd.grad(y_TD.sum(), leaves, retain_graph=True)
    again = torch.autograd.grad(y_TD.sum(), leaves)
    torch.testing.assert_close(again, first, rtol=0, atol=0)


@each_way
def test_nothing_is_kept_without_gradients(cpu: Any, make: Any) -> None:
    packed: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t)
    given = make(**KINDS["gated_silu"])
    for leaf in leaves_of(*given).values():
        leaf.requires_grad_(False)
    with hooks:
        y_TD = cpu(*given)
    assert not y_TD.requires_grad
    assert packed == []


# ---------------------------------------------------------------------------------------- auto


@pytest.mark.parametrize(("why", "expected"), [(None, "native"), ("no compiler", "loop_on_cpu")])
def test_auto_takes_the_compiled_kernels_where_there_are_some(
    why: str | None, expected: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    monkeypatch.setattr(choice, "unavailable_reason", lambda: why)
    for name in ("native", "loop_on_cpu"):
        monkeypatch.setattr(choice, name, lambda x, *_, name=name: taken.append(name) or x)
    x_TD, plan, weights = make()
    run_experts(x_TD, plan, weights, "auto")
    assert taken == [expected]
