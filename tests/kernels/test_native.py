"""The compiled experts at the ends of tiles, chunks, panels, blocks and groups, against `loop` in float64.

Tiles are 64 or 96 rows, panels 32 or 64 columns, by the kind of CPU; chunks are 512 rows, sums 512 numbers,
blocks 128 rows, groups 8 MiB.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn.ffn.dispatch import plan_of_pairs
from moe_ffn.kernels import cpu as backend
from moe_ffn.kernels.activations import ClampedSwiGLU
from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.kernels.cpu import NATIVE, Gradients, Implementation, native, run
from moe_ffn.kernels.native import build
from moe_ffn.kernels.native.build import Kind, unavailable_reason
from moe_ffn.kernels.torch_products import loop
from moe_ffn.outputs import Plan
from tests.kernels.derivatives import NAMES, Given, assert_close, derive, exact, leaves_of

pytestmark = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"native {unavailable_reason()}"
)

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

    def given(self) -> Given:
        generator = torch.Generator().manual_seed(0)
        num_experts, d_model, d_ff = len(self.loads), self.d_model, self.d_ff
        options = {"activation": "silu", "bias": True, **self.options}
        rows = d_ff * (2 if options.get("gated") else 1)
        num_pairs = sum(self.loads) + (LEFT_OUT if self.num_tokens else 0)

        def leaf(*shape: int, scale: int = 1) -> Tensor:
            drawn = torch.randn(shape, generator=generator) / scale**0.5
            return drawn.to(self.dtype).requires_grad_()

        x_TD, weights_N = leaf(self.num_tokens, d_model), leaf(num_pairs)
        up_EHD = leaf(num_experts, rows, d_model, scale=d_model)
        down_EDF = leaf(num_experts, d_model, d_ff, scale=d_ff)
        if options.pop("bias"):
            options["up_bias_EH"] = leaf(num_experts, rows)
            options["down_bias_ED"] = leaf(num_experts, d_model)
        if rank := options.pop("rank", 0):
            options["up_a_ERD"] = leaf(num_experts, rank, d_model, scale=d_model)
            options["up_b_EHR"] = leaf(num_experts, rows, rank, scale=rank)
            options["down_a_ERF"] = leaf(num_experts, rank, d_ff, scale=d_ff)
            options["down_b_EDR"] = leaf(num_experts, d_model, rank, scale=rank)
        return (
            x_TD,
            self.plan(weights_N),
            ExpertWeights(up_EHD=up_EHD, down_EDF=down_EDF, **options),
        )

    def plan(self, weights_N: Tensor) -> Plan:
        """Plan of pairs in random order, some of which are not computed; its weights are a leaf."""
        generator = torch.Generator().manual_seed(1)
        num_experts, num_pairs = len(self.loads), len(weights_N)
        ids_N = torch.arange(num_experts).repeat_interleave(torch.tensor(self.loads))
        ids_N = torch.cat([ids_N, torch.full((num_pairs - len(ids_N),), num_experts)])
        ids_N = ids_N[torch.randperm(num_pairs, generator=generator)]
        tokens_N = torch.randint(max(self.num_tokens, 1), (num_pairs,), generator=generator)
        return replace(
            plan_of_pairs(tokens_N, ids_N, weights_N.detach(), num_experts), weights_N=weights_N
        )


def evaluate(*given: *Given) -> dict[str, Tensor]:
    """The output without gradients, for which few rows of each expert are computed another way."""
    with torch.no_grad():
        return {"y": native(*given)}


TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


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
    "adapted": {"gated": True, "rank": 5},
}


@pytest.fixture
def threads() -> Iterator[Any]:
    yield torch.set_num_threads
    torch.set_num_threads(1)


@pytest.fixture(params=[1, 7], ids=["one thread's experts", "all threads' experts"])
def _num_threads(request: pytest.FixtureRequest, threads: Any) -> None:
    """Set the number of threads; none of seven has an expert of these shapes for itself."""
    threads(request.param)


def is_quick(shape: str, num_threads: int, dtype: torch.dtype) -> bool:
    """True but for threads that `test_any_number_of_threads_gives_the_same_bits` has, and long float16."""
    is_long = shape in ("long sums", "groups", "parts")
    if num_threads == 1:
        return not is_long or dtype != torch.float16
    return not is_long and dtype == torch.float64


@pytest.mark.parametrize(
    ("shape", "num_threads", "dtype"),
    [
        pytest.param(*case, marks=[] if is_quick(*case) else pytest.mark.slow)
        for case in itertools.product(SHAPES, (1, 7), TOLERANCES)
    ],
)
def test_every_shape_is_that_of_the_loop(
    shape: str, num_threads: int, dtype: torch.dtype, threads: Any
) -> None:
    """Shapes on one thread, and on more threads than they have experts."""
    threads(num_threads)
    kinds = list(KINDS.values())
    is_long = sum(SHAPES[shape][3]) > 1000 or shape in ("long sums", "groups")
    is_long |= dtype not in (torch.float64, torch.bfloat16)
    for kind in kinds[:1] if is_long else kinds:
        case = Case(*SHAPES[shape], dtype, kind)
        given = case.given()
        wanted = derive(loop, *exact(*given))
        got = derive(native, *given)
        assert {value.dtype for value in got.values()} == {dtype}
        assert_close(got, wanted, TOLERANCES[dtype])
        assert_close(evaluate(*given), {"y": wanted["y"]}, TOLERANCES[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["long sums", "groups"])
def test_long_shapes_of_every_kind_are_those_of_the_loop(shape: str, kind: str) -> None:
    given = Case(*SHAPES[shape], torch.float64, KINDS[kind]).given()
    assert_close(derive(native, *given), derive(loop, *exact(*given)), TOLERANCES[torch.float64])


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
    given = case.given()
    assert_close(derive(native, *given), derive(loop, *given), 1e-5)


def test_rows_too_large_for_a_thread_to_keep_are_those_of_the_loop() -> None:
    """Rows of 64 MiB and more are allocated in each pass."""
    given = Case(30, 1024, 2, (16400,), torch.float32, {"gated": True}).given()
    assert_close(derive(native, *given), derive(loop, *given), 1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_clamped_units_are_those_of_the_loop(interleaved: bool) -> None:
    options = {"gated": True, "gate_function": ClampedSwiGLU(1.7, 0.5), "interleaved": interleaved}
    case = Case(*SHAPES["tails"], torch.float64, options)
    given = case.given()
    assert_close(derive(native, *given), derive(loop, *exact(*given)), 1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", ["tails", "long sums", "groups", "parts", "few rows"])
def test_any_number_of_threads_gives_the_same_bits(
    shape: str, dtype: torch.dtype, threads: Any
) -> None:
    case = Case(*SHAPES[shape], dtype, {"gated": True})
    given = case.given()
    results: list[dict[str, Tensor]] = []
    for count in (1, 2, 7, 7):
        threads(count)
        results.append({**derive(native, *given), "evaluated": evaluate(*given)["y"]})
    for other in results[1:]:
        assert_close(other, results[0], 0.0)


@pytest.mark.usefixtures("_num_threads")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", ["tails", "few rows"])
def test_leftovers_in_memory_do_not_reach_the_next_call(shape: str, dtype: torch.dtype) -> None:
    case = Case(*SHAPES[shape], dtype, {"gated": True})
    given = case.given()
    wanted = derive(native, *given)
    # Whole tiles of numbers that are none, in all memory that threads keep and much of what they free.
    full = replace(case, loads=(512, 0, 0, 0, 0))
    broken = full.given()
    for leaf in leaves_of(*broken).values():
        leaf.data.fill_(torch.nan)
    for name, value in derive(native, *broken).items():
        assert value.isnan().any(), name
    assert_close(derive(native, *given), wanted, 0.0)


@pytest.mark.usefixtures("_num_threads")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", ["tails", "few rows"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf], ids=str)
def test_a_nonfinite_token_changes_no_other_token(
    number: float, shape: str, dtype: torch.dtype
) -> None:
    case = Case(*SHAPES[shape], dtype, {"gated": True})
    given = case.given()
    x_TD, plan, _ = given
    token = int(plan.token_indices_N[0])
    others_T = torch.arange(case.num_tokens) != token
    wanted = {**derive(native, *given), "evaluated": evaluate(*given)["y"]}
    with torch.no_grad():
        x_TD[token] = number
    got = {**derive(native, *given), "evaluated": evaluate(*given)["y"]}
    for name in ("y", "evaluated", "x"):
        assert torch.equal(got[name][others_T], wanted[name][others_T]), name
        assert not got[name][token].isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_of_python_compute_at_once(dtype: torch.dtype, threads: Any) -> None:
    shapes = ("tails", "long sums") * 2
    given = [Case(*SHAPES[shape], dtype, {"gated": True}).given() for shape in shapes]
    wanted = [derive(native, *each) for each in given]

    def compute(number: int) -> dict[str, Tensor]:
        threads(2)  # of this thread's own
        return derive(native, *given[number % 4])

    with ThreadPoolExecutor(4) as pool:
        for number, got in enumerate(pool.map(compute, range(16))):
            assert_close(got, wanted[number % 4], 0.0)


def test_the_number_of_threads_may_change_before_backward(threads: Any) -> None:
    case = Case(*SHAPES["tails"], torch.float32, {"gated": True})
    given = case.given()
    leaves = list(leaves_of(*given).values())
    wanted = torch.autograd.grad(native(*given).sum(), leaves)
    threads(7)
    y_TD = native(*given)
    threads(2)
    found = torch.autograd.grad(y_TD.sum(), leaves)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_inference_mode_changes_no_bit() -> None:
    case = Case(*SHAPES["tails"], torch.float32, {"gated": True})
    given = case.given()
    x_TD, plan, weights = given
    wanted = evaluate(*given)["y"]
    with torch.inference_mode():
        for x in (x_TD, x_TD.clone()):  # the second is a tensor of this mode
            assert torch.equal(native(x, plan, weights), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_float32_is_read_and_written(dtype: torch.dtype) -> None:
    case = Case(*SHAPES["tails"], torch.float32, {"gated": True})
    given = case.given()
    with torch.autocast("cpu", dtype):
        got = derive(native, *given)
    assert {value.dtype for value in got.values()} == {torch.float32}
    assert_close(got, derive(loop, *exact(*given)), TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensors_need_not_be_contiguous(dtype: torch.dtype) -> None:
    case = Case(*SHAPES["tails"], dtype, {"gated": True})
    given = case.given()
    x_TD, plan, weights = given

    def turned(leaf: Tensor) -> Tensor:
        return leaf.detach().mT.contiguous().mT.requires_grad_()

    parameters = [None if leaf is None else turned(leaf) for leaf in weights.parameters]
    spread_N = plan.weights_N.detach().repeat_interleave(2)[::2].requires_grad_()
    other = turned(x_TD), replace(plan, weights_N=spread_N), weights.with_parameters(*parameters)
    assert not any(leaf.is_contiguous() for leaf in leaves_of(*other).values())
    assert_close(derive(native, *other), derive(native, *given), 0.0)
    leaves = list(leaves_of(*given).values())
    expanded = native(*given).sum()  # its gradient has strides of 0
    whole = (native(*given) * torch.ones(97, 65, dtype=dtype)).sum()
    found, wanted = (torch.autograd.grad(y, leaves) for y in (expanded, whole))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_the_tensors_of_a_plan_need_not_be_contiguous() -> None:
    options = {"gated": True, "bias": False}
    x_TD, plan, weights = Case(*SHAPES["tails"], torch.float32, options).given()
    names = ("token_indices_N", "weights_N", "offsets_E", "pair_ids_N")
    spread = {name: getattr(plan, name).repeat_interleave(2)[::2] for name in names}
    assert not any(tensor.is_contiguous() for tensor in spread.values())
    assert torch.equal(native(x_TD, replace(plan, **spread), weights), native(x_TD, plan, weights))


@pytest.mark.parametrize("frozen", [(), ("x",), ("up",), NAMES[2:6], NAMES[2:]], ids=str)
def test_no_gradient_is_computed_for_frozen_inputs(frozen: tuple[str, ...]) -> None:
    case = Case(*SHAPES["one token"], torch.float32, KINDS["adapted"])
    given = case.given()
    for name, leaf in leaves_of(*given).items():
        leaf.requires_grad_(name not in frozen)
    computed: list[set[str]] = []

    def backward(*args: Any) -> Gradients:
        found = NATIVE.backward(*args)
        computed.append({name for name, g in zip(NAMES, found, strict=True) if g is not None})
        return found

    implementation = Implementation(NATIVE.forward, backward)
    run(implementation, *given).sum().backward()
    assert computed == [{*NAMES} - {*frozen}]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [*build.KINDS.values(), Kind("", onednn=0, panel=256, tile=128)])
@pytest.mark.parametrize("shape", ["tails", "long sums", "groups", "few rows"])
def test_the_sizes_of_every_kind_of_cpu_give_the_results_of_the_loop(
    shape: str, sizes: Kind
) -> None:
    """Products by oneDNN and by torch."""
    row = replace(sizes, flags=build.KINDS[build.kind_of_cpu()].flags)
    implementation = backend.compiled(build.load_sizes(row))
    given = Case(*SHAPES[shape], torch.float32, {"gated": True}).given()
    got = derive(lambda *layer: run(implementation, *layer), *given)
    assert_close(got, derive(loop, *exact(*given)), TOLERANCES[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", ["tails", "long sums", "groups", "few rows"])
def test_it_does_without_onednn(
    shape: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on ARM, where oneDNN multiplies no tiles, or where `torch.backends.mkldnn` is turned off.
    case = Case(*SHAPES[shape], dtype, {"gated": True})
    given = case.given()
    monkeypatch.setattr(backend, "product_dtype_on_cpu", lambda dtype: dtype)
    torch._C._set_mkldnn_enabled(False)
    try:
        got = derive(native, *given)
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert_close(got, derive(loop, *exact(*given)), TOLERANCES[dtype])


def test_an_error_of_one_thread_ends_all(threads: Any) -> None:
    case = Case(*SHAPES["groups"], torch.float32, {"gated": True})
    x_TD, plan, weights = case.given()
    wrong = replace(weights, up_EHD=weights.up_EHD.detach().int())
    threads(3)
    with torch.no_grad(), pytest.raises(RuntimeError, match="moe_ffn's kernels do not support Int"):
        native(x_TD, plan, wrong)


def test_a_plan_that_does_not_fit_is_rejected() -> None:
    x_TD, plan, weights = Case(*SHAPES["one token"], torch.float32, {"bias": False}).given()

    def rejected(message: str, x_TD: Tensor = x_TD, **changed: Any) -> None:
        with pytest.raises(RuntimeError, match=message):
            native(x_TD, replace(plan, **changed), weights)

    rejected(
        r"a token id that is not in \[0, 1\), the tokens of x",
        token_indices_N=plan.token_indices_N + 1,
    )
    rejected(
        r"a token id that is not in \[0, 1\), the tokens of x",
        token_indices_N=plan.token_indices_N - 1,
    )
    rejected("the plan is for 2 experts, but there are 3", offsets_E=torch.tensor([1, 3]).int())
    grow = r"the plan's offsets must grow from 0 to at most its 3 pairs"
    rejected(grow, offsets_E=torch.tensor([-1, 0, 3]).int())
    rejected(grow, offsets_E=torch.tensor([2, 1, 3]).int())
    rejected(
        grow, offsets_E=torch.tensor([1, 1, 3]).int(), token_indices_N=plan.token_indices_N[:2]
    )
    for bias in ("up_bias_EH", "down_bias_ED"):
        height = 65 if bias == "up_bias_EH" else 64
        for shape in ((1, height), (3, height - 1), (height,)):
            wrong = replace(weights, **{bias: torch.zeros(shape)})
            with pytest.raises(RuntimeError, match=rf"but must be \[3, {height}\]"):
                native(x_TD, plan, wrong)
    sizes = r"x is \[1, 63\], but the experts' matrices are \[3, 65, 64\] and \[3, 64, 65\]"
    rejected(sizes, x_TD[:, 1:])
