"""A forward and a backward operator: tile sizes, buffers, grids and arguments of the kernels.

The operators are opaque to torch: torch.compile and torch.export include them without a graph break, and know
only their output shapes. Nothing here waits for the device.

T tokens, D model width, E experts, F hidden width, N (token, expert) pairs, H rows of the first
matrix (F without a gate; 2 F with one, the F gate rows first, then the F up rows), I input width, O output
width
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from moe_ffn.kernels.activations import ClampedSwiGLU
from moe_ffn.kernels.autograd import DIFFERENTIABLE, Gradients, Inputs, define
from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.kernels.triton.backward import (
    bias_gradient_kernel,
    hidden_gradient_kernel,
    weight_gradient_kernel,
)
from moe_ffn.kernels.triton.forward import (
    combine_kernel,
    hidden_kernel,
    product_kernel,
    round_kernel,
)

# ------------------------------------------------------------------------------ tile sizes


@dataclass(frozen=True)
class Tile:
    """A tile of M rows by O columns, of which a program sums K terms at a time."""

    m: int
    o: int
    k: int
    stages: int
    """Number of buffers on Hopper and Blackwell, otherwise one more. Loads run ahead of the products."""
    warps: int

    @property
    def options(self) -> dict[str, int]:
        blocks = {"BLOCK_M": self.m, "BLOCK_O": self.o, "BLOCK_K": self.k}
        return {**blocks, "num_stages": self.stages, "num_warps": self.warps}


Tiles = dict[str, dict[int, Tile]]
"""Kernel -> rows per expert from which a tile is used -> that tile."""


def _same(tile: Tile) -> Tiles:
    kernels = ("hidden", "product", "hidden_gradient", "up_gradient", "down_gradient")
    return {kernel: {0: tile} for kernel in kernels}


# Chosen by what is known before a launch, never by a stopwatch: the tile sets the order of sums, so times
# would make the bits of a run depend on what else the machine does. docs/performance has the times.

TILES: dict[tuple[str, str], Tiles] = {
    ("hopper", "half"): {
        "hidden": {
            0: Tile(16, 64, 128, 3, 4),
            24: Tile(64, 64, 64, 4, 4),
            192: Tile(128, 128, 64, 3, 8),
        },
        "product": {
            0: Tile(16, 64, 128, 3, 4),
            24: Tile(64, 128, 64, 4, 4),
            192: Tile(128, 256, 64, 4, 8),
        },
        "hidden_gradient": {0: Tile(64, 64, 64, 4, 4), 192: Tile(128, 128, 64, 4, 8)},
        "up_gradient": {0: Tile(128, 128, 64, 3, 8), 1024: Tile(256, 128, 64, 4, 8)},
        "down_gradient": {0: Tile(128, 128, 64, 3, 8)},
    },
    ("hopper", "tf32"): {
        **_same(Tile(128, 128, 32, 3, 8)),
        "hidden": {0: Tile(128, 64, 32, 4, 8)},
        "hidden_gradient": {0: Tile(128, 64, 32, 3, 8)},
    },
    ("hopper", "float32"): {
        **_same(Tile(128, 128, 32, 3, 8)),
        "hidden": {0: Tile(128, 64, 16, 3, 8)},
        "hidden_gradient": {0: Tile(64, 64, 32, 3, 8)},
    },
    ("ampere", "half"): {
        "hidden": {
            0: Tile(16, 64, 128, 3, 4),
            24: Tile(64, 64, 64, 3, 4),
            192: Tile(128, 64, 64, 3, 8),
        },
        "product": {
            0: Tile(16, 64, 128, 3, 4),
            24: Tile(64, 128, 64, 3, 4),
            192: Tile(128, 256, 64, 3, 8),
        },
        "hidden_gradient": {0: Tile(64, 128, 64, 3, 8)},
        "up_gradient": {0: Tile(128, 128, 64, 3, 8)},
        "down_gradient": {0: Tile(128, 128, 64, 3, 8)},
    },
    ("ampere", "tf32"): {
        **_same(Tile(128, 128, 32, 3, 8)),
        "hidden": {0: Tile(64, 64, 32, 3, 4)},
        "hidden_gradient": {0: Tile(64, 64, 32, 3, 8)},
    },
    ("ampere", "float32"): {
        **_same(Tile(64, 64, 32, 3, 8)),
        "product": {0: Tile(128, 128, 32, 3, 8)},
    },
}
"""(kind of GPU, precision) -> tiles. Compiled by Triton 3.9 for 8.0, 9.0 and 10.0, none spills registers.

"hopper" (compute capability 9.x to 11.x) multiplies from shared memory, of which a program may have 227 KiB.
Its tiles for bfloat16 and float16 were measured on an H200, where two tiles of 96 KiB share a multiprocessor.
"ampere" (8.x, 12.x) multiplies from registers. Its tiles fit the 99 KiB of the smallest GPUs; no such GPU
measured them.
"""

INTERPRETED = _same(Tile(16, 16, 16, 1, 1))
"""The smallest, so that the small layers of tests have several tiles."""

GROUP = 2 if knobs.runtime.interpret else 8
"""Number of slots of rows in a group; see `forward.find_tile`."""

_FUSED = {"enable_fp_fusion": True}
"""Fused multiply-add, set explicitly because Triton's default is about to change."""

_hidden_kernel: Any = hidden_kernel
_hidden_gradient_kernel: Any = hidden_gradient_kernel
_product_kernel: Any = product_kernel
_weight_gradient_kernel: Any = weight_gradient_kernel
_bias_gradient_kernel: Any = bias_gradient_kernel
_combine_kernel: Any = combine_kernel
_round_kernel: Any = round_kernel


def find_tiles(dtype: torch.dtype) -> Tiles:
    """Return the tiles of all kernels for this dtype on the current GPU."""
    if knobs.runtime.interpret:
        return INTERPRETED
    target: Any = driver.active.get_current_target()
    kind = "ampere" if target.arch // 10 in (8, 12) else "hopper"
    return TILES[kind, _precision(dtype)]


def _precision(dtype: torch.dtype) -> str:
    """Return "half", or torch's setting for products of float32: "float32" or "tf32"."""
    if dtype != torch.float32:
        return "half"
    return "float32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


# ------------------------------------------------------------------------------- launches


@dataclass(frozen=True)
class Rows:
    """Pairs in the order of the plan."""

    token_indices_N: Tensor
    offsets_E: Tensor
    dtype: torch.dtype
    """Dtype of all tensors with a row per pair."""

    def __len__(self) -> int:
        return self.token_indices_N.shape[0]

    @property
    def num_experts(self) -> int:
        return self.offsets_E.shape[0]

    def empty(self, width: int) -> Tensor:
        return self.offsets_E.new_empty(len(self), width, dtype=self.dtype)

    def tile(self, kernel: str) -> Tile:
        """Return the tile of a kernel; the host knows the mean load of an expert, not each load."""
        mean = len(self) // self.num_experts
        by_rows = find_tiles(self.dtype)[kernel]
        return by_rows[max(least for least in by_rows if least <= mean)]

    def grid(self, tile: Tile, width: int) -> tuple[int]:
        """Return the grid, with enough programs for the tiles of any loads of the experts."""
        slots = len(self) // tile.m + self.num_experts
        return (slots * triton.cdiv(width, tile.o),)

    def arguments(self, tile: Tile) -> dict[str, Any]:
        loads = {"offsets_ptr": self.offsets_E, "E": self.num_experts, "GROUP": GROUP}
        return loads | tile.options | _product_options(self.dtype)


def _product_options(dtype: torch.dtype) -> dict[str, Any]:
    """Return the precision of products of this dtype."""
    precision = "tf32" if _precision(dtype) == "tf32" else "ieee"
    return {"PRECISION": "interpreted" if knobs.runtime.interpret else precision, **_FUSED}


def _activation(weights: ExpertWeights) -> dict[str, Any]:
    gate = weights.gate_function
    clamped = gate if isinstance(gate, ClampedSwiGLU) else None
    return {
        "alpha": 0.0 if clamped is None else clamped.alpha,
        "limit": 0.0 if clamped is None else clamped.limit,
        "ACTIVATION": weights.activation if clamped is None else "clamped_swiglu",
        "GATED": weights.gated,
    }


def _product(
    rows: Rows, input_NI: Tensor, matrix_EOI: Tensor, bias_EO: Tensor | None = None
) -> Tensor:
    """Return output_NO; `matrix_EOI` may be a transposed view."""
    width_in, width_out = input_NI.shape[1], matrix_EOI.shape[1]
    output_NO, tile = rows.empty(width_out), rows.tile("product")
    _product_kernel[rows.grid(tile, width_out)](
        input_NI,
        matrix_EOI,
        _contiguous(bias_EO),
        output_ptr=output_NO,
        out_stride=matrix_EOI.stride(1),
        in_stride=matrix_EOI.stride(2),
        IN=width_in,
        OUT=width_out,
        **rows.arguments(tile),
    )
    return output_NO


def _adapter(rows: Rows, input_NI: Tensor, a_ERI: Tensor, b_EOR: Tensor) -> Tensor:
    """Return B (A x) of each row."""
    return _product(rows, _product(rows, input_NI, a_ERI), b_EOR)


def _combine(
    rows: Rows,
    rows_ND: Tensor,
    weights_N: Tensor | None,
    ranks_N: Tensor,
    starts: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return output_TD in `dtype`; `starts` has the start of each token's pairs in `ranks_N`, then N."""
    num_tokens, d_model = starts.shape[0] - 1, rows_ND.shape[1]
    output_TD = rows_ND.new_empty(num_tokens, d_model, dtype=dtype)
    block = min(1024, triton.next_power_of_2(d_model))
    if num_tokens:
        _combine_kernel[(num_tokens, triton.cdiv(d_model, block))](
            *(rows_ND, weights_N, ranks_N, starts, rows.offsets_E[-1:], output_TD),
            D=d_model,
            BLOCK_D=block,
            num_warps=max(1, min(4, block // 256)),
            **_FUSED,
        )
    return output_TD


def _weight_gradient(
    rows: Rows, output_grad: Tensor, inputs: Tensor, like_EOI: Tensor, gather: str | None = None
) -> Tensor:
    """Return the gradient of a weight like `like_EOI`; the side `gather`, "output" or "input", has T rows.

    Without `gather`, both sides have N rows.
    """
    num_experts, width_out, width_in = like_EOI.shape
    gradient_EOI = torch.empty_like(like_EOI, memory_format=torch.contiguous_format)
    tile = rows.tile("up_gradient" if gather == "input" else "down_gradient")
    num_tiles = triton.cdiv(width_out, tile.m) * triton.cdiv(width_in, tile.o)
    _weight_gradient_kernel[(num_experts * num_tiles,)](
        output_grad,
        inputs,
        rows.token_indices_N if gather == "output" else None,
        rows.token_indices_N if gather == "input" else None,
        rows.offsets_E,
        gradient_EOI,
        output_grad.stride(0),
        inputs.stride(0),
        IN=width_in,
        OUT=width_out,
        **tile.options,
        **_product_options(rows.dtype),
    )
    return gradient_EOI


def _bias_gradient(
    rows: Rows, output_grad: Tensor, like_EO: Tensor, weights_N: Tensor | None = None
) -> Tensor:
    """Return the sum of each expert's rows; with weights, the weighted sum of the rows of its tokens."""
    num_experts, width = like_EO.shape
    gradient_EO = torch.empty_like(like_EO, memory_format=torch.contiguous_format)
    block, rows_at_a_time = (16, 16) if knobs.runtime.interpret else (128, 32)
    _bias_gradient_kernel[(num_experts, triton.cdiv(width, block))](
        *(output_grad, rows.token_indices_N, weights_N, rows.offsets_E, gradient_EO),
        output_grad.stride(0),
        OUT=width,
        BLOCK_O=block,
        BLOCK_K=rows_at_a_time,
        num_warps=4,
        **_FUSED,
    )
    return gradient_EO


def _operand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor as kernels multiply it: its last axis contiguous, and rounded for products in tf32."""
    x = x.to(dtype)
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.contiguous()
    if _product_options(dtype)["PRECISION"] != "tf32":
        return x
    x = x.contiguous()
    rounded = torch.empty_like(x)
    _round_kernel[(triton.cdiv(x.numel(), 4096),)](x, rounded, x.numel(), BLOCK=4096, num_warps=8)
    return rounded


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


# ---------------------------------------------------------------------------- torch operators


def _forward(inputs: Inputs, keep: bool) -> tuple[Tensor, Tensor]:
    """Return y_TD and the pre-activations (N, H), with 0 rows if there is no backward pass."""
    x_TD, weights, dtype = inputs.x_TD, inputs.weights, inputs.dtype
    ranks_N, starts = inputs.order
    with torch.cuda.device_of(x_TD):  # Triton launches on the current device
        up_EHD, up_bias_EH, up_a_ERD, up_b_EHR = weights.first
        down_EDF, down_bias_ED, down_a_ERF, down_b_EDR = weights.second
        rows = Rows(inputs.token_indices_N, inputs.offsets_E, dtype)
        x_rows_TD, (_, width, d_model) = _operand(x_TD, dtype), up_EHD.shape
        hidden_NF, tile = rows.empty(weights.d_ff), rows.tile("hidden")
        pre_NH = rows.empty(width) if keep else None
        added_NH = None
        if up_a_ERD is not None and up_b_EHR is not None:
            x_ND = x_rows_TD.index_select(0, rows.token_indices_N)
            added_NH = _adapter(rows, x_ND, _operand(up_a_ERD, dtype), _operand(up_b_EHR, dtype))
        _hidden_kernel[rows.grid(tile, weights.d_ff)](
            *(x_rows_TD, _operand(up_EHD, dtype), _contiguous(up_bias_EH)),
            *(inputs.dropout_NF, rows.token_indices_N),
            added_ptr=added_NH,
            pre_ptr=pre_NH,
            hidden_ptr=hidden_NF,
            x_stride=x_rows_TD.stride(0),
            D=d_model,
            F=weights.d_ff,
            **rows.arguments(tile),
            **_activation(weights),
        )
        y_ND = _product(rows, hidden_NF, _operand(down_EDF, dtype), down_bias_ED)
        if down_a_ERF is not None and down_b_EDR is not None:
            factors = _operand(down_a_ERF, dtype), _operand(down_b_EDR, dtype)
            y_ND += _adapter(rows, hidden_NF, *factors)
        y_TD = _combine(rows, y_ND, inputs.weights_N, ranks_N, starts, x_TD.dtype)
        return y_TD, hidden_NF.new_empty(0, width) if pre_NH is None else pre_NH


def _backward(inputs: Inputs, pre_NH: Tensor, dy_TD: Tensor, wanted: Sequence[bool]) -> Gradients:
    x_TD, weights, dtype = inputs.x_TD, inputs.weights, inputs.dtype
    ranks_N, starts = inputs.order
    with torch.cuda.device_of(x_TD):
        up_EHD, _, up_a_ERD, up_b_EHR = weights.first
        down_EDF, down_bias_ED, down_a_ERF, down_b_EDR = weights.second
        rows = Rows(inputs.token_indices_N, inputs.offsets_E, dtype)
        dy_TD, d_ff = _operand(dy_TD, dtype), weights.d_ff
        d_pre_NH, hidden_NF = rows.empty(pre_NH.shape[1]), rows.empty(d_ff)
        # Each tile of units writes its own column, and the columns are summed afterwards, because the
        # order of atomic additions is random. Uncomputed pairs are 0.
        tile = rows.tile("hidden_gradient")
        num_columns = triton.cdiv(d_ff, tile.o)
        d_weights = dy_TD.new_zeros(len(rows), num_columns, dtype=torch.float32)
        bias_ED = _contiguous(down_bias_ED)
        d_low_NR = added_NF = None
        if down_a_ERF is not None and down_b_EDR is not None:
            dy_ND = dy_TD.index_select(0, rows.token_indices_N)
            d_low_NR = _product(rows, dy_ND, _operand(down_b_EDR, dtype).transpose(1, 2))
            added_NF = _product(rows, d_low_NR, _operand(down_a_ERF, dtype).transpose(1, 2))
            del dy_ND
        _hidden_gradient_kernel[rows.grid(tile, d_ff)](
            *(dy_TD, _operand(down_EDF, dtype), bias_ED, inputs.dropout_NF, rows.token_indices_N),
            weights_ptr=inputs.weights_N,
            added_ptr=added_NF,
            pre_ptr=pre_NH,
            d_pre_ptr=d_pre_NH,
            hidden_ptr=hidden_NF,
            d_weights_ptr=d_weights,
            dy_stride=dy_TD.stride(0),
            d_weights_stride=num_columns,
            D=weights.d_model,
            F=d_ff,
            **rows.arguments(tile),
            **_activation(weights),
        )
        tensors = x_TD, inputs.weights_N, *weights.parameters
        differentiable = zip(DIFFERENTIABLE, tensors, wanted, strict=True)
        like = {name: each for name, each, want in differentiable if want and each is not None}
        grads = _down_gradients(rows, inputs, like, dy_TD, hidden_NF, d_low_NR)
        del hidden_NF, added_NF
        if "weights_N" in like:
            grads["weights_N"] = d_weights.sum(dim=1).to(inputs.weights_N.dtype)
        x_rows_TD = _operand(x_TD, dtype)
        if up_b_EHR is not None:
            d_low_NR = _product(rows, d_pre_NH, _operand(up_b_EHR, dtype).transpose(1, 2))
        grads |= _up_gradients(rows, weights, like, d_pre_NH, x_rows_TD, d_low_NR)
        if "x_TD" in like:
            d_x_ND = _product(rows, d_pre_NH, _operand(up_EHD, dtype).transpose(1, 2))
            if up_a_ERD is not None and d_low_NR is not None:
                d_x_ND += _product(rows, d_low_NR, _operand(up_a_ERD, dtype).transpose(1, 2))
            grads["x_TD"] = _combine(rows, d_x_ND, None, ranks_N, starts, x_TD.dtype)
        return tuple(map(grads.get, DIFFERENTIABLE))


def _up_gradients(
    rows: Rows,
    weights: ExpertWeights,
    like: Mapping[str, Tensor],
    d_pre_NH: Tensor,
    x_rows_TD: Tensor,
    d_low_NR: Tensor | None,
) -> dict[str, Tensor]:
    """Return gradients like the wanted parameters of the first product."""
    grads: dict[str, Tensor] = {}
    if "up_EHD" in like:
        grads["up_EHD"] = _weight_gradient(rows, d_pre_NH, x_rows_TD, like["up_EHD"], "input")
    if "up_bias_EH" in like:
        grads["up_bias_EH"] = _bias_gradient(rows, d_pre_NH, like["up_bias_EH"])
    if "up_a_ERD" in like and d_low_NR is not None:
        grads["up_a_ERD"] = _weight_gradient(rows, d_low_NR, x_rows_TD, like["up_a_ERD"], "input")
    if "up_b_EHR" in like and weights.up_a_ERD is not None:
        x_ND = x_rows_TD.index_select(0, rows.token_indices_N)
        low_NR = _product(rows, x_ND, _operand(weights.up_a_ERD, rows.dtype))
        grads["up_b_EHR"] = _weight_gradient(rows, d_pre_NH, low_NR, like["up_b_EHR"])
    return grads


def _down_gradients(
    rows: Rows,
    inputs: Inputs,
    like: Mapping[str, Tensor],
    dy_TD: Tensor,
    hidden_NF: Tensor,
    d_low_NR: Tensor | None,
) -> dict[str, Tensor]:
    """Return gradients like the wanted parameters of the second product."""
    grads: dict[str, Tensor] = {}
    if "down_EDF" in like:
        grads["down_EDF"] = _weight_gradient(rows, dy_TD, hidden_NF, like["down_EDF"], "output")
    if "down_bias_ED" in like:
        weights_N = inputs.weights_N
        grads["down_bias_ED"] = _bias_gradient(rows, dy_TD, like["down_bias_ED"], weights_N)
    if "down_a_ERF" in like and d_low_NR is not None:
        grads["down_a_ERF"] = _weight_gradient(rows, d_low_NR, hidden_NF, like["down_a_ERF"])
    if "down_b_EDR" in like and inputs.weights.down_a_ERF is not None:
        low_NR = _product(rows, hidden_NF, _operand(inputs.weights.down_a_ERF, rows.dtype))
        grads["down_b_EDR"] = _weight_gradient(rows, dy_TD, low_NR, like["down_b_EDR"], "output")
    return grads


experts, experts_backward = define(
    "moe_ffn::experts", "triton", ["ranks_N", "starts"], _forward, _backward
)
