"""The compiled experts where tiles, chunks, panels, blocks and groups end, held to `loop` in float64.

Tiles are 64 rows, chunks 512, panels 64 columns, sums 512 numbers, blocks 128 rows, groups 8 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn.dispatch import plan_of_pairs
from moe_ffn.kernels import cpu as backend
from moe_ffn.kernels.activations import ClampedSwiGLU
from moe_ffn.kernels.base import Backend, ExpertWeights
from moe_ffn.kernels.cpu import NATIVE, Gradients, Implementation, native, run
from moe_ffn.kernels.native.build import unavailable_reason
from moe_ffn.kernels.torch_products import loop
from moe_ffn.outputs import Plan

pytestmark = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"native {unavailable_reason()}"
)

NAMES = ("x", "weights", "up", "down", "up_bias", "down_bias")
LEFT_OUT = 7
"""Pairs that are not computed."""


@dataclass(frozen=True)
class Case:
    num_tokens: int
    d_model: int
    d_ff: int
    loads: tuple[int, ...]
    """Rows of each expert."""
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)

    def leaves(self) -> list[Tensor]:
        """Tensors by NAMES."""
        generator = torch.Generator().manual_seed(0)
        num_experts, rows = len(self.loads), self.d_ff * (2 if self.options.get("gated") else 1)
        num_pairs = sum(self.loads) + (LEFT_OUT if self.num_tokens else 0)
        shapes = {
            "x": (self.num_tokens, self.d_model),
            "weights": (num_pairs,),
            "up": (num_experts, rows, self.d_model),
            "down": (num_experts, self.d_model, self.d_ff),
            "up_bias": (num_experts, rows),
            "down_bias": (num_experts, self.d_model),
        }
        drawn = [torch.randn(shapes[name], generator=generator) for name in NAMES]
        drawn[2] /= self.d_model**0.5
        drawn[3] /= self.d_ff**0.5
        return [tensor.to(self.dtype).requires_grad_() for tensor in drawn]

    def plan(self, weights_N: Tensor) -> Plan:
        generator = torch.Generator().manual_seed(1)
        num_experts, num_pairs = len(self.loads), len(weights_N)
        ids_N = torch.arange(num_experts).repeat_interleave(torch.tensor(self.loads))
        ids_N = torch.cat([ids_N, torch.full((num_pairs - len(ids_N),), num_experts)])
        ids_N = ids_N[torch.randperm(num_pairs, generator=generator)]
        tokens_N = torch.randint(max(self.num_tokens, 1), (num_pairs,), generator=generator)
        return plan_of_pairs(tokens_N, ids_N, weights_N, num_experts)

    def compute(self, run: Backend, leaves: list[Tensor]) -> Tensor:
        x_TD, weights_N, up, down, up_bias, down_bias = leaves
        given = {"activation": "silu", **self.options}
        bias = {"up_bias_EH": up_bias, "down_bias_ED": down_bias}
        bias = bias if given.pop("bias", True) else {}
        weights = ExpertWeights(up_EHD=up, down_EDF=down, **bias, **given)
        return run(x_TD, self.plan(weights_N), weights)

    def derive(self, run: Backend, leaves: list[Tensor]) -> dict[str, Tensor]:
        """The output, and the gradients of a sum of it."""
        y_TD = self.compute(run, leaves)
        probe = torch.randn(y_TD.shape, generator=torch.Generator().manual_seed(2)).to(y_TD)
        wanted = leaves if self.options.get("bias", True) else leaves[:4]
        named = zip(NAMES, torch.autograd.grad(y_TD, wanted, probe), strict=False)
        return {"y": y_TD.detach(), **dict(named)}


def exact(leaves: list[Tensor]) -> list[Tensor]:
    return [leaf.detach().double().requires_grad_() for leaf in leaves]


TOLERANCES = {
    torch.float64: 1e-13,
    torch.float32: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 3e-2,
}


def close(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        difference = (got[name].double() - value).abs()
        assert not difference.isnan().any(), name
        largest = value.abs().max().item() if value.numel() else 0.0
        error = difference.max().item() if value.numel() else 0.0
        assert error <= tolerance * largest, f"{name}: {error} of {largest}"


Shape = tuple[int, int, int, tuple[int, ...]]

SHAPES: dict[str, Shape] = {
    "tails": (97, 65, 67, (577, 0, 1, 63, 0)),
    "whole": (40, 128, 64, (512, 64)),
    "long sums": (30, 521, 523, (66, 3)),
    "groups": (50, 260, 300, (9, 70, 0, *(5,) * 9)),
    "one expert": (300, 33, 150, (0, 1200, 0)),
    "parts": (90, 20, 800, (1900, 4201, 9)),
    "one token": (1, 64, 65, (1, 0, 2)),
    "few rows": (16, 37, 19, (0, *range(8), *(0,) * 20)),
    "tiny": (5, 1, 1, (3, 2)),
    "no pairs": (4, 8, 6, (0, 0)),
    "no tokens": (0, 8, 6, (0, 0)),
}
KINDS: dict[str, dict[str, Any]] = {
    "gated": {"gated": True},
    "plain": {"activation": "gelu"},
    "interleaved": {"gated": True, "interleaved": True},
    "no biases": {"gated": True, "bias": False},
}


@pytest.fixture
def threads() -> Iterator[Any]:
    yield torch.set_num_threads
    torch.set_num_threads(1)


@pytest.fixture(params=[1, 7], ids=["one thread's experts", "all threads' experts"])
def _who(request: pytest.FixtureRequest, threads: Any) -> None:
    """Set the number of threads; none of seven has an expert of these shapes for itself."""
    threads(request.param)


@pytest.mark.usefixtures("_who")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_shape_is_that_of_the_loop(shape: Shape, dtype: torch.dtype) -> None:
    kinds = list(KINDS.values())
    for kind in kinds[:1] if sum(shape[3]) > 1000 else kinds:
        case = Case(*shape, dtype, kind)
        leaves = case.leaves()
        wanted = case.derive(loop, exact(leaves))
        got = case.derive(native, leaves)
        assert {value.dtype for value in got.values()} == {dtype}
        close(got, wanted, TOLERANCES[dtype])
        with torch.no_grad():
            y_TD = case.compute(native, leaves)
        close({"y": y_TD}, {"y": wanted["y"]}, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_are_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    """Products of y = w x and dx = w dy have no more digits than float32."""
    x_TD, weights_T, probe_TD = (torch.randn(shape).to(dtype) for shape in ((40, 37), 40, (40, 37)))
    x_TD.requires_grad_()
    eye = torch.eye(37, dtype=dtype)[None]
    weights = ExpertWeights("identity", up_EHD=eye, down_EDF=eye)
    plan = plan_of_pairs(torch.arange(40), torch.zeros(40, dtype=torch.int64), weights_T, 1)
    y_TD = native(x_TD, plan, weights)
    (grad_TD,) = torch.autograd.grad(y_TD, x_TD, probe_TD)

    weights_T1 = weights_T[:, None].float()
    assert torch.equal(y_TD, (weights_T1 * x_TD.float()).to(dtype))
    assert torch.equal(grad_TD, (weights_T1 * probe_TD.float()).to(dtype))


@pytest.mark.parametrize("d_model", [256, 260])
def test_gradients_too_large_for_a_cache_are_those_of_the_loop(d_model: int) -> None:
    """Gradients of 32 MiB or more, in whole cache lines and not."""
    case = Case(30, d_model, 128, (*(3,) * 127, 0, 300), torch.float32, {"gated": True})
    leaves = case.leaves()
    close(case.derive(native, leaves), case.derive(loop, leaves), 1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_clamped_units_are_those_of_the_loop(interleaved: bool) -> None:
    options = {"gated": True, "gate_function": ClampedSwiGLU(1.7, 0.5), "interleaved": interleaved}
    case = Case(*SHAPES["tails"], torch.float64, options)
    leaves = case.leaves()
    close(case.derive(native, leaves), case.derive(loop, exact(leaves)), 1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", ["tails", "long sums", "groups", "parts", "few rows"])
def test_any_number_of_threads_gives_the_same_bits(
    shape: str, dtype: torch.dtype, threads: Any
) -> None:
    case = Case(*SHAPES[shape], dtype, {"gated": True})
    leaves = case.leaves()
    results: list[dict[str, Tensor]] = []
    for count in (1, 2, 7, 7, 1):
        threads(count)
        results.append(case.derive(native, leaves))
        with torch.no_grad():
            results[-1]["y of no gradients"] = case.compute(native, leaves)
    for other in results[1:]:
        for name, value in results[0].items():
            assert torch.equal(value, other[name]), name


@pytest.mark.usefixtures("_who")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", ["tails", "few rows"])
def test_what_a_call_leaves_in_memory_reaches_no_other(shape: str, dtype: torch.dtype) -> None:
    case = Case(*SHAPES[shape], dtype, {"gated": True})
    leaves = case.leaves()
    wanted = case.derive(native, leaves)
    # Whole tiles of numbers that are none, in all memory that threads keep and much of what they free.
    full = replace(case, loads=(512, 0, 0, 0, 0))
    broken = [torch.full_like(leaf, torch.nan).requires_grad_() for leaf in full.leaves()]
    for name, value in full.derive(native, broken).items():
        assert value.isnan().any(), name
    for name, value in case.derive(native, leaves).items():
        assert torch.equal(value, wanted[name]), name


@pytest.mark.usefixtures("_who")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", ["tails", "few rows"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf], ids=str)
def test_a_token_that_is_no_number_reaches_no_other(
    number: float, shape: str, dtype: torch.dtype
) -> None:
    case = Case(*SHAPES[shape], dtype, {"gated": True})
    leaves = case.leaves()
    plan = case.plan(leaves[1])
    token = int(plan.token_ids_N[0])
    others_T = torch.arange(case.num_tokens) != token
    wanted = case.derive(native, leaves)
    with torch.no_grad():
        wanted["y of no gradients"] = case.compute(native, leaves)
        leaves[0][token] = number
    got = case.derive(native, leaves)
    with torch.no_grad():
        got["y of no gradients"] = case.compute(native, leaves)
    for name in ("y", "y of no gradients", "x"):
        assert torch.equal(got[name][others_T], wanted[name][others_T]), name
        assert not got[name][token].isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_of_python_compute_at_once(dtype: torch.dtype, threads: Any) -> None:
    cases = [Case(*SHAPES[shape], dtype, {"gated": True}) for shape in ("tails", "long sums") * 2]
    all_leaves = [case.leaves() for case in cases]
    wanted = [case.derive(native, leaves) for case, leaves in zip(cases, all_leaves, strict=True)]

    def compute(number: int) -> dict[str, Tensor]:
        threads(2)  # of this thread's own
        return cases[number % 4].derive(native, all_leaves[number % 4])

    with ThreadPoolExecutor(4) as pool:
        for number, got in enumerate(pool.map(compute, range(16))):
            for name, value in got.items():
                assert torch.equal(value, wanted[number % 4][name]), name


def test_the_number_of_threads_may_change_before_backward(threads: Any) -> None:
    case = Case(*SHAPES["tails"], torch.float32, {"gated": True})
    leaves = case.leaves()
    wanted = torch.autograd.grad(case.compute(native, leaves).sum(), leaves)
    threads(7)
    y_TD = case.compute(native, leaves)
    threads(2)
    for got, one in zip(torch.autograd.grad(y_TD.sum(), leaves), wanted, strict=True):
        assert torch.equal(got, one)


def test_inference_mode_changes_no_bit() -> None:
    case = Case(*SHAPES["tails"], torch.float32, {"gated": True})
    leaves = case.leaves()
    with torch.no_grad():
        wanted = case.compute(native, leaves)
    with torch.inference_mode():
        for given in (leaves, [leaf.clone() for leaf in leaves]):
            assert torch.equal(case.compute(native, given), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_float32_is_read_and_written(dtype: torch.dtype) -> None:
    case = Case(*SHAPES["tails"], torch.float32, {"gated": True})
    leaves = case.leaves()
    with torch.autocast("cpu", dtype):
        got = case.derive(native, leaves)
    assert {value.dtype for value in got.values()} == {torch.float32}
    close(got, case.derive(loop, exact(leaves)), TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensors_need_not_be_contiguous(dtype: torch.dtype) -> None:
    case = Case(*SHAPES["tails"], dtype, {"gated": True})
    leaves = case.leaves()
    turned = [t.detach().mT.contiguous().mT if t.dim() > 1 else t.detach() for t in leaves]
    turned[1] = leaves[1].detach().repeat_interleave(2)[::2]
    assert not any(tensor.is_contiguous() for tensor in turned)
    got = case.derive(native, [tensor.requires_grad_() for tensor in turned])
    for name, value in case.derive(native, leaves).items():
        assert torch.equal(got[name], value), name
    expanded = case.compute(native, leaves).sum()  # its gradient has strides of 0
    given = (case.compute(native, leaves) * torch.ones(97, 65, dtype=dtype)).sum()
    for one, other in zip(
        torch.autograd.grad(expanded, leaves), torch.autograd.grad(given, leaves), strict=True
    ):
        assert torch.equal(one, other)


def test_the_tensors_of_a_plan_need_not_be_contiguous() -> None:
    case = Case(*SHAPES["tails"], torch.float32, {"gated": True})
    x_TD, weights_N, up, down, *_ = (leaf.detach() for leaf in case.leaves())
    plan, weights = case.plan(weights_N), ExpertWeights("silu", up, down, gated=True)
    names = ("token_ids_N", "weights_N", "offsets_E", "pair_ids_N")
    spread = {name: getattr(plan, name).repeat_interleave(2)[::2] for name in names}
    assert not any(tensor.is_contiguous() for tensor in spread.values())
    assert torch.equal(native(x_TD, replace(plan, **spread), weights), native(x_TD, plan, weights))


@pytest.mark.parametrize("frozen", [(), ("x",), ("up",), NAMES[2:]], ids=str)
def test_what_is_frozen_costs_no_gradient(frozen: tuple[str, ...]) -> None:
    case = Case(*SHAPES["one token"], torch.float32)
    leaves = case.leaves()
    for name, leaf in zip(NAMES, leaves, strict=True):
        leaf.requires_grad_(name not in frozen)
    computed: list[set[str]] = []

    def backward(*args: Any) -> Gradients:
        found = NATIVE.backward(*args)
        computed.append({name for name, g in zip(NAMES, found, strict=True) if g is not None})
        return found

    implementation = Implementation(NATIVE.forward, backward)
    case.compute(partial(run, implementation), leaves).sum().backward()
    assert computed == [{*NAMES} - {*frozen}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_does_without_onednn(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # As on ARM, where oneDNN multiplies no tiles, or where `torch.backends.mkldnn` is turned off.
    case = Case(*SHAPES["tails"], dtype, {"gated": True})
    leaves = case.leaves()
    monkeypatch.setattr(backend, "product_dtype_on_cpu", lambda dtype: dtype)
    torch._C._set_mkldnn_enabled(False)
    try:
        got = case.derive(native, leaves)
    finally:
        torch._C._set_mkldnn_enabled(True)
    close(got, case.derive(loop, exact(leaves)), TOLERANCES[dtype])


def test_an_error_of_one_thread_ends_all(threads: Any) -> None:
    case = Case(*SHAPES["groups"], torch.float32, {"gated": True})
    leaves = [leaf.detach() for leaf in case.leaves()]
    leaves[2] = leaves[2].int()
    threads(3)
    with pytest.raises(RuntimeError, match="moe_ffn's kernels take no Int"):
        case.compute(native, leaves)


def test_a_plan_that_does_not_fit_is_refused() -> None:
    case = Case(*SHAPES["one token"], torch.float32)
    x_TD, weights_N, up, down, *_ = (leaf.detach() for leaf in case.leaves())
    plan, weights = case.plan(weights_N), ExpertWeights("silu", up, down)

    def refused(message: str, x_TD: Tensor = x_TD, **changed: Any) -> None:
        with pytest.raises(RuntimeError, match=message):
            native(x_TD, replace(plan, **changed), weights)

    refused("a token that is none of the 1 of x", token_ids_N=plan.token_ids_N + 1)
    refused("a token that is none of the 1 of x", token_ids_N=plan.token_ids_N - 1)
    refused("a plan for 2 experts, but there are 3", offsets_E=torch.tensor([1, 3]).int())
    grow = r"the plan's offsets have to grow from 0 to at most its 3 pairs"
    refused(grow, offsets_E=torch.tensor([-1, 0, 3]).int())
    refused(grow, offsets_E=torch.tensor([2, 1, 3]).int())
    refused(grow, offsets_E=torch.tensor([1, 1, 3]).int(), token_ids_N=plan.token_ids_N[:2])
    for bias in ("up_bias_EH", "down_bias_ED"):
        height = 65 if bias == "up_bias_EH" else 64
        for shape in ((1, height), (3, height - 1), (height,)):
            wrong = replace(weights, **{bias: torch.zeros(shape)})
            with pytest.raises(RuntimeError, match=rf"where \[3, {height}\] is needed"):
                native(x_TD, plan, wrong)
    sizes = r"x is \[1, 63\], but the experts' matrices are \[3, 65, 64\] and \[3, 64, 65\]"
    refused(sizes, x_TD[:, 1:])
