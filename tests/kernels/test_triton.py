"""The Triton backend against the loop in float64: output and every gradient.

On a GPU where there is one, otherwise under Triton's interpreter (see `tests/conftest.py`).

T tokens, E experts, N (token, expert) pairs
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from moe_ffn.kernels.activations import Activation, ClampedSwiGLU
from moe_ffn.kernels.base import Backend
from moe_ffn.kernels.select import run_experts
from moe_ffn.kernels.torch_products import loop
from moe_ffn.kernels.triton import backend
from tests.kernels.derivatives import Given, assert_close, derive, exact, leaves_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
D_MODEL = 20

pytest.importorskip("triton", reason="triton is not installed here")

# Rounding to 24, 11 and 8 bits, about five times over sums of tens of terms of size one.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}

PLANS: dict[str, list[list[int | None]]] = {
    # Expert 0 has more rows than a tile of the interpreter, expert 1 none; some are not computed.
    "lopsided": [[0, 2], [0, None], [0, 2], *[[0, None]] * 13, [None, None], [0, 2]],
    "one_expert_takes_all": [[2]] * 9,
    "as_many_pairs_as_the_router_likes": [[0, 1, 2], [], [None, None, None], [1], [2, 0]],
    "nothing_is_computed": [[None, None]] * 3,
    "one_pair": [[1]],
    "tokens_without_pairs": [[], [], []],
    "no_tokens": [],
}


@pytest.fixture(autouse=True)
def _rows_that_were_not_written_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that reads a row that was not computed is found out."""
    from moe_ffn.kernels.triton import launch

    def empty(rows: Any, width: int) -> Tensor:
        shape = (len(rows), width)
        return torch.full(shape, torch.nan, dtype=rows.dtype, device=rows.offsets_E.device)

    monkeypatch.setattr(launch.Rows, "empty", empty)


NARROW = {"d_model": 12, "d_ff": 10}
"""Widths of a tile of the interpreter or less."""


def tokens(num_tokens: int, dtype: torch.dtype = torch.float32, d_model: int = D_MODEL) -> Tensor:
    generator = torch.Generator().manual_seed(6)
    x_TD = torch.randn(num_tokens, d_model, generator=generator)
    return x_TD.to(DEVICE, dtype).requires_grad_()


def check(*given: *Given, run: Backend = backend.triton, tolerance: float | None = None) -> None:
    """Output and gradients are those of the loop in float64, in the dtypes of the tokens and leaves."""
    got = derive(run, *given)
    for name, leaf in leaves_of(*given).items():
        assert got[name].dtype == leaf.dtype, name
    dtype = given[0].dtype
    assert got["y"].dtype == dtype
    assert_close(got, derive(loop, *exact(*given)), tolerance or TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("activation", "gated"),
    [*((name, True) for name in get_args(Activation)), ("gelu", False), ("relu_squared", False)],
)
def test_every_activation_equals_the_loop(
    activation: Activation, gated: bool, make_weights: Any, make_plan_of: Any
) -> None:
    plan = PLANS["one_expert_takes_all"]
    weights = make_weights(activation=activation, gated=gated, bias=gated, **NARROW)
    check(tokens(len(plan), d_model=12), make_plan_of(plan, 3), weights)


@pytest.mark.parametrize(
    ("gated", "dtype", "name"),
    [
        (True, torch.float32, "lopsided"),
        (False, torch.bfloat16, "one_expert_takes_all"),
        pytest.param(True, torch.bfloat16, "lopsided", marks=pytest.mark.slow),
        pytest.param(False, torch.float32, "lopsided", marks=pytest.mark.slow),
    ],
)
def test_adapters_equal_the_loop(
    gated: bool, dtype: torch.dtype, name: str, make_weights: Any, make_plan_of: Any
) -> None:
    plan = PLANS[name]
    weights = make_weights(gated=gated, rank=3, dtype=dtype)
    check(tokens(len(plan), dtype), make_plan_of(plan, 3), weights)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_widths_that_are_multiples_of_a_tile_equal_the_loop(
    gated: bool, make_weights: Any, make_plan_of: Any
) -> None:
    """Widths that need no masks, as in real layers."""
    plan = PLANS["one_expert_takes_all"]
    weights = make_weights(d_model=32, d_ff=48, gated=gated)
    check(tokens(len(plan), d_model=32), make_plan_of(plan, 3), weights)


def test_halves_of_a_wide_tile_equal_the_loop(
    monkeypatch: pytest.MonkeyPatch, make_weights: Any, make_plan_of: Any
) -> None:
    from moe_ffn.kernels.triton import launch

    tiles = {
        **launch.find_tiles(torch.float32),
        "hidden_gradient": {0: launch.Tile(16, 64, 16, 1, 4)},
    }
    monkeypatch.setattr(launch, "find_tiles", lambda dtype: tiles)
    plan = PLANS["one_expert_takes_all"]
    check(tokens(len(plan), d_model=12), make_plan_of(plan, 3), make_weights(d_model=12, d_ff=70))


def test_clamped_swiglu_equals_the_loop(make_weights: Any, make_plan_of: Any) -> None:
    plan = PLANS["one_expert_takes_all"]
    # A limit at which about half of the values are clamped.
    weights = make_weights(gate_function=ClampedSwiGLU(alpha=1.702, limit=0.5), **NARROW)
    check(tokens(len(plan), d_model=12), make_plan_of(plan, 3), weights)


LIKE_OTHERS = {"one_pair", "tokens_without_pairs"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in LIKE_OTHERS else []) for name in PLANS],
)
def test_every_plan_equals_the_loop(name: str, make_weights: Any, make_plan_of: Any) -> None:
    plan = PLANS[name]
    check(tokens(len(plan)), make_plan_of(plan, 3), make_weights())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_adds_up_in_float32(
    dtype: torch.dtype, make_weights: Any, make_plan_of: Any
) -> None:
    plan = PLANS["one_expert_takes_all"]
    check(tokens(len(plan), dtype), make_plan_of(plan, 3), make_weights(dtype=dtype))


def test_autocast_lowers_the_products_and_not_the_gradients(
    make_weights: Any, make_plan_of: Any
) -> None:
    plan, weights = make_plan_of(PLANS["one_expert_takes_all"], 3), make_weights()
    x_TD = tokens(len(PLANS["one_expert_takes_all"]))

    def lowered(*arguments: Any) -> Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return backend.triton(*arguments)

    check(x_TD, plan, weights, run=lowered, tolerance=TOLERANCE[torch.bfloat16])
    assert not torch.equal(lowered(x_TD, plan, weights), backend.triton(x_TD, plan, weights))


def test_tokens_may_have_any_strides(make_weights: Any, make_plan_of: Any) -> None:
    plan, weights = make_plan_of(PLANS["one_expert_takes_all"], 3), make_weights()
    x_TD = tokens(len(PLANS["one_expert_takes_all"])).detach()
    wanted = backend.triton(x_TD, plan, weights)
    columns_first = x_TD.t().contiguous().t()
    every_other_row = x_TD.repeat_interleave(2, dim=0)[::2]
    for x in (columns_first, every_other_row):
        assert not x.is_contiguous()
        torch.testing.assert_close(backend.triton(x, plan, weights), wanted, rtol=0, atol=0)


def test_an_expanded_gradient_is_supported(make_weights: Any, make_plan_of: Any) -> None:
    # y.sum() hands back one number with strides of 0.
    plan, weights, x_TD = make_plan_of(PLANS["one_pair"], 3), make_weights(), tokens(1)
    gradients = [
        torch.autograd.grad(run(x_TD, plan, weights).sum(), x_TD) for run in (backend.triton, loop)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_a_second_derivative_is_rejected(make_weights: Any, make_plan_of: Any) -> None:
    plan, weights = make_plan_of(PLANS["one_pair"], 3), make_weights()
    x_TD = tokens(1)
    (gradient,) = torch.autograd.grad(
        backend.triton(x_TD, plan, weights).sum(), x_TD, create_graph=True
    )
    with pytest.raises(RuntimeError, match=r"experts\.backend 'triton' has no second derivative"):
        torch.autograd.grad(gradient.sum(), x_TD)


def test_backward_keeps_the_inputs_and_one_product(make_weights: Any, make_plan_of: Any) -> None:
    experts = PLANS["lopsided"]
    plan, weights = make_plan_of(experts, 3), make_weights()
    x_TD, kept = tokens(len(experts)), []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        backend.triton(x_TD, plan, weights)
    inputs = [x_TD, plan.weights_N, weights.up_EHD, weights.down_EDF]
    inputs += [b for b in (weights.up_bias_EH, weights.down_bias_ED) if b is not None]
    known = {tensor.data_ptr() for tensor in inputs}
    rest = [t for t in kept if t.data_ptr() not in known and t.is_floating_point()]
    num_pairs = plan.token_indices_N.shape[0]
    assert [tuple(tensor.shape) for tensor in rest] == [(num_pairs, 2 * weights.d_ff)]


def test_training_and_evaluation_give_the_same_bits(make_weights: Any, make_plan_of: Any) -> None:
    plan, weights = (
        make_plan_of(PLANS["one_expert_takes_all"], 3),
        make_weights(dtype=torch.float16),
    )
    x_TD = tokens(len(PLANS["one_expert_takes_all"]), torch.float16)
    trained = backend.triton(x_TD, plan, weights)
    assert trained.requires_grad
    with torch.no_grad():
        evaluated = backend.triton(x_TD, plan, weights)
    assert torch.equal(trained, evaluated)
    assert torch.equal(trained, backend.triton(x_TD, plan, weights))


def test_frozen_weights_get_no_gradient(make_weights: Any, make_plan_of: Any) -> None:
    plan, weights = make_plan_of(PLANS["one_expert_takes_all"], 3), make_weights()
    frozen = weights.with_parameters(
        weights.up_EHD.detach(), weights.down_EDF.detach(), *[None] * 6
    )
    given = tokens(9), replace(plan, weights_N=plan.weights_N.detach()), frozen
    assert_close(derive(backend.triton, *given), derive(loop, *given), 1e-5)


def test_dropout_multiplies_the_hidden_units_in_both_directions(
    monkeypatch: pytest.MonkeyPatch, make_weights: Any, make_plan_of: Any
) -> None:
    experts = PLANS["lopsided"]
    plan, weights = make_plan_of(experts, 3), make_weights(dropout=0.5)
    num_pairs = plan.token_indices_N.shape[0]
    generator = torch.Generator().manual_seed(7)
    mask_NF = torch.randint(2, (num_pairs, weights.d_ff), generator=generator).to(DEVICE) * 2.0
    monkeypatch.setattr(backend, "dropout_mask", lambda *_: mask_NF)
    remaining = mask_NF.double()

    def next_rows(hidden: Tensor, probability: float) -> Tensor:
        # The loop goes over the experts in the plan's order.
        nonlocal remaining
        assert probability == 0.5
        mine, remaining = remaining[: len(hidden)], remaining[len(hidden) :]
        return hidden * mine

    monkeypatch.setattr("torch.nn.functional.dropout", next_rows)
    check(tokens(len(experts)), plan, weights)


@pytest.mark.filterwarnings("ignore")  # what torch's own tracing warns of
def test_torch_compile_takes_the_operator_whole(make_weights: Any, make_plan_of: Any) -> None:
    plan, weights = make_plan_of(PLANS["one_pair"], 3), make_weights(**NARROW)
    torch.compiler.reset()
    compiled: Any = torch.compile(
        lambda x_TD, plan, weights: run_experts(x_TD, plan, weights, "triton"),
        fullgraph=True,
        backend="inductor" if DEVICE == "cuda" else "aot_eager",  # inductor takes half a minute
    )
    given = tokens(1, d_model=12), plan, weights
    assert_close(derive(compiled, *given), derive(backend.triton, *given), 1e-6)


def test_unsupported_inputs_are_rejected_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, make_weights: Any, make_plan_of: Any
) -> None:
    plan, weights = make_plan_of(PLANS["one_pair"], 3), make_weights()
    wide = make_weights(dtype=torch.float64)
    with pytest.raises(ValueError, match=r"'triton' takes torch\.float32, .* got torch\.float64"):
        run_experts(tokens(1, torch.float64), plan, wide, "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="'triton' runs on GPUs, but the tokens are on the cpu"):
        run_experts(tokens(1).cpu(), plan, weights, "triton")
    monkeypatch.setattr(backend, "INSTALLED", False)
    with pytest.raises(ValueError, match="needs the package triton, which is not installed"):
        run_experts(tokens(1), plan, weights, "triton")


pytest.importorskip("triton", reason="triton is not installed here")

REPOSITORY = Path(__file__).parents[2]
SHARED_MEMORY = {80: 99, 90: 227, 100: 227}
"""Compute capability -> KiB that one program may have; GPUs of 8.6, 8.9 and 12.0 have the tiles of 8.0."""


def test_operands_of_tf32_are_rounded_to_ten_bits_of_fraction() -> None:
    """Halves go away from zero, as in `cvt.rna.tf32.f32` of PTX; no NaN becomes a number."""
    from moe_ffn.kernels.triton import launch

    place = 2.0**-10
    given = [1 + 0.49 * place, 1 + 0.5 * place, -1 - 1.5 * place, 2 - 0.5 * place, 3e-42, torch.inf]
    wanted = [1.0, 1 + place, -1 - 2 * place, 2.0, 0.0, torch.inf]
    x = torch.tensor([*given, torch.nan], device=DEVICE)
    x.view(torch.int32)[-1] = 0x7FFFFFFF  # the NaN of a GPU's arithmetic
    rounded = torch.empty_like(x)
    launch._round_kernel[(1,)](x, rounded, x.numel(), BLOCK=16)
    torch.testing.assert_close(rounded[:-1].cpu(), torch.tensor(wanted), rtol=0, atol=0)
    assert rounded[-1].isnan()


@pytest.mark.parametrize(("num_pairs", "rows"), [(0, 16), (71, 16), (72, 128), (9000, 128)])
def test_a_tile_is_chosen_by_rows_per_expert(
    num_pairs: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_ffn.kernels.triton import launch

    tiles = {"product": {0: launch.Tile(16, 64, 128, 3, 4), 24: launch.Tile(128, 128, 64, 3, 8)}}
    monkeypatch.setattr(launch, "find_tiles", lambda dtype: tiles)
    of_three = launch.Rows(torch.zeros(num_pairs), torch.zeros(3), torch.bfloat16)
    assert of_three.tile("product").m == rows


def compile_for_gpus(*words: str) -> list[dict[str, Any]]:
    """Compile the launches of real models in a new process without the interpreter."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])}
    environment.pop("TRITON_INTERPRET", None)
    finished = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_for_gpus", *words],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return [json.loads(line) for line in finished.stdout.splitlines()]


def check_compiled(row: dict[str, Any]) -> None:
    assert row["spilled"] == 0, row
    assert row["shared"] <= SHARED_MEMORY[row["architecture"]] * 1024, row
    multiplies = row["kernel"] not in ("combine", "bias_gradient", "round")
    instruction = None
    if multiplies and row["dtype"] != "float32":
        # Hopper and Blackwell have faster instructions for tiles of 64 rows and more.
        fast = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[row["architecture"]]
        instruction = fast if row["tile"][0] >= 64 else "mma.sync"
    assert row["instruction"] == instruction, row
    if multiplies and "LoRA" not in row["model"]:  # sums over a rank have no second term to load
        assert row["buffers"] >= 2, row
        assert row["waits"] > 0, row


def test_the_kernels_of_decoding_compile_for_hopper() -> None:
    rows = compile_for_gpus("sm_90", "decoding")
    assert sorted(row["kernel"] for row in rows) == ["combine", "hidden", "product"]
    for row in rows:
        check_compiled(row)


@pytest.mark.slow  # 450 compilations of about two seconds each, on all cores
def test_every_kernel_compiles_at_the_sizes_of_real_models_without_spilling() -> None:
    from moe_ffn.kernels.triton.launch import TILES

    rows = compile_for_gpus()
    for row in rows:
        check_compiled(row)
    launched = {(row["dtype"], row["kernel"], *row["tile"]) for row in rows}
    for (_, precision), tiles in TILES.items():
        dtype = "bfloat16" if precision == "half" else precision
        for kernel, by_rows in tiles.items():
            name = "weight_gradient" if kernel in ("up_gradient", "down_gradient") else kernel
            for tile in by_rows.values():
                assert (dtype, name, *astuple(tile)) in launched, "no model launches this tile"
