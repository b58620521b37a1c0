"""Tile sizes, buffers, grids and arguments of the kernels. Nothing here waits for the device.

T tokens, D model width, E experts, F hidden width, N (token, expert) pairs, H rows of the first
matrix: F, or 2 F where the rows of a gate stand before those of up, I in, O out
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

from moe_ffn.kernels.triton.backward import (
    bias_gradient_kernel,
    hidden_gradient_kernel,
    weight_gradient_kernel,
)
from moe_ffn.kernels.triton.forward import combine_kernel, hidden_kernel, product_kernel

# ------------------------------------------------------------------------------ tile sizes
#
# M rows of a tile, O columns, K what is multiplied away at a time. Each kernel chooses from its list at its
# first call with a pair of widths and a dtype. The lists are short, for every member is compiled and timed
# once; they hold what fits into a Hopper multiprocessor (228 KB of shared memory, 64 K registers) without
# spilling. A test compiles them all.

GROUP = 8
"""Slots of rows that go over the columns together, see `forward.slot_and_column`."""


def _config(
    block_m: int, block_o: int, block_k: int, stages: int, warps: int, **more: int
) -> triton.Config:
    blocks = {"BLOCK_M": block_m, "BLOCK_O": block_o, "BLOCK_K": block_k, **more}
    return triton.Config(blocks, num_stages=stages, num_warps=warps)


HIDDEN = [
    _config(128, 128, 64, 3, 8, GROUP=GROUP),
    _config(128, 64, 64, 4, 4, GROUP=GROUP),
    _config(64, 64, 64, 4, 4, GROUP=GROUP),
]
HIDDEN_GRADIENT = [
    _config(128, 128, 64, 3, 8, GROUP=GROUP),
    _config(128, 64, 64, 4, 8, GROUP=GROUP),
    _config(64, 64, 64, 4, 4, GROUP=GROUP),
]
PRODUCT = [
    _config(128, 256, 64, 3, 8, GROUP=GROUP),
    _config(128, 128, 64, 4, 8, GROUP=GROUP),
    _config(64, 128, 64, 4, 4, GROUP=GROUP),
]
WEIGHT_GRADIENT = [
    _config(128, 256, 64, 3, 8),
    _config(128, 128, 64, 4, 8),
    _config(128, 64, 64, 4, 4),
]


def float32(**more: int) -> triton.Config:
    """One for all kernels.

    The tiles above take twice the shared memory in float32, and the many multiplications of full
    precision take long to compile.
    """
    return _config(64, 64, 32, 3, 4, **more)


INTERPRETED = (16, 16, 16, 1, 1)
"""The smallest there are, so that tests of small layers have several tiles."""

MIN_BLOCK_O = INTERPRETED[1] if knobs.runtime.interpret else 64
"""No kernel's tiles are narrower."""


def tuned(
    kernel: Any, configs: list[triton.Config], key: list[str], reset: list[str] | None = None
) -> Any:
    """`kernel` with the best of `configs`, chosen anew where one of `key` or a dtype changes.

    The number of pairs is not in the key: it changes at every step.
    """
    groups = "GROUP" in configs[0].kwargs
    if knobs.runtime.interpret:
        configs = [_config(*INTERPRETED, **({"GROUP": 2} if groups else {}))]
        return triton.autotune(configs, key=key)(kernel)
    wide = float32(**({"GROUP": GROUP} if groups else {}))

    def for_dtype(
        configs: list[triton.Config], arguments: dict[str, Any], **_: Any
    ) -> list[triton.Config]:
        first = next(iter(arguments.values()))
        return [c for c in configs if (c is wide) == (first.dtype == torch.float32)]

    return triton.autotune(
        [*configs, wide],
        key=key,
        reset_to_zero=reset,
        prune_configs_by={"early_config_prune": for_dtype},
    )(kernel)


_hidden: Any = tuned(hidden_kernel, HIDDEN, ["D", "F"])
_hidden_gradient: Any = tuned(
    hidden_gradient_kernel, HIDDEN_GRADIENT, ["D", "F"], reset=["d_weights_ptr"]
)
_product: Any = tuned(product_kernel, PRODUCT, ["IN", "OUT"])
_weight_gradient: Any = tuned(weight_gradient_kernel, WEIGHT_GRADIENT, ["IN", "OUT"])
_bias_gradient: Any = bias_gradient_kernel
_combine: Any = combine_kernel

_FUSED = {"enable_fp_fusion": True}
"""A multiplication and an addition in one instruction: said, as Triton's default is about to change."""


# ------------------------------------------------------------------------------- launches


@dataclass(frozen=True)
class Epilogue:
    """What is computed between the two products."""

    activation: str
    gated: bool
    clamp: tuple[float, float] | None
    """(alpha, limit) of a clamped SwiGLU."""

    @classmethod
    def of(
        cls, activation: str, up_EHD: Tensor, down_EDF: Tensor, clamp: list[float] | None
    ) -> Epilogue:
        alpha_and_limit = None if clamp is None else (clamp[0], clamp[1])
        return cls(activation, up_EHD.shape[1] != down_EDF.shape[2], alpha_and_limit)

    @property
    def arguments(self) -> dict[str, Any]:
        alpha, limit = self.clamp or (0.0, 0.0)
        return {
            "alpha": alpha,
            "limit": limit,
            "ACTIVATION": self.activation,
            "GATED": self.gated,
            "CLAMPED": self.clamp is not None,
        }


@dataclass(frozen=True)
class Rows:
    """The pairs, in the plan's order."""

    token_ids_N: Tensor
    offsets_E: Tensor
    dtype: torch.dtype
    """Of everything that has a row per pair."""

    def __len__(self) -> int:
        return self.token_ids_N.shape[0]

    @property
    def num_experts(self) -> int:
        return self.offsets_E.shape[0]

    def empty(self, width: int) -> Tensor:
        return self.offsets_E.new_empty(len(self), width, dtype=self.dtype)

    def grid(self, width: int) -> Callable[[dict[str, Any]], tuple[int]]:
        """As many programs as there can be tiles, whatever the experts' loads are."""

        def programs(meta: dict[str, Any]) -> tuple[int]:
            slots = len(self) // meta["BLOCK_M"] + self.num_experts
            return (slots * triton.cdiv(width, meta["BLOCK_O"]),)

        return programs

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "offsets_ptr": self.offsets_E,
            "E": self.num_experts,
            "E_BLOCK": triton.next_power_of_2(self.num_experts),
            "PRECISION": _precision(),
            **_FUSED,
        }


def hidden(
    rows: Rows,
    epilogue: Epilogue,
    x_TD: Tensor,
    up_EHD: Tensor,
    bias_EH: Tensor | None,
    dropout_NF: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """(hidden_NF, pre_NH); no rows of `pre` unless they are kept."""
    _, width, d_model = up_EHD.shape
    d_ff = width // 2 if epilogue.gated else width
    hidden_NF = rows.empty(d_ff)
    pre_NH = rows.empty(width) if keep else hidden_NF.new_empty(0, width)
    _hidden[rows.grid(d_ff)](
        x_TD,
        up_EHD,
        bias_EH,
        dropout_NF,
        rows.token_ids_N,
        pre_ptr=pre_NH,
        hidden_ptr=hidden_NF,
        x_stride=x_TD.stride(0),
        D=d_model,
        F=d_ff,
        KEEP=keep,
        HAS_BIAS=bias_EH is not None,
        HAS_DROPOUT=dropout_NF is not None,
        **rows.arguments,
        **epilogue.arguments,
    )
    return hidden_NF, pre_NH


def hidden_gradient(
    rows: Rows,
    epilogue: Epilogue,
    dy_TD: Tensor,
    down_EDF: Tensor,
    bias_ED: Tensor | None,
    dropout_NF: Tensor | None,
    weights_N: Tensor,
    pre_NH: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(d_pre_NH, the weighted hidden units (N, F), the float32 gradient of the routing weights)."""
    _, d_model, d_ff = down_EDF.shape
    d_pre_NH, hidden_NF = rows.empty(pre_NH.shape[1]), rows.empty(d_ff)
    # Each tile of units has a column of its own and they are added up afterwards: atomic additions
    # would come in another order every time. Zero for tiles wider than the narrowest, and for the
    # pairs that are not computed.
    parts = triton.cdiv(d_ff, MIN_BLOCK_O)
    d_weights = dy_TD.new_zeros(len(rows), parts, dtype=torch.float32)
    _hidden_gradient[rows.grid(d_ff)](
        dy_TD,
        down_EDF,
        bias_ED,
        dropout_NF,
        rows.token_ids_N,
        weights_ptr=weights_N,
        pre_ptr=pre_NH,
        d_pre_ptr=d_pre_NH,
        hidden_ptr=hidden_NF,
        d_weights_ptr=d_weights,
        dy_stride=dy_TD.stride(0),
        d_weights_stride=parts,
        D=d_model,
        F=d_ff,
        HAS_BIAS=bias_ED is not None,
        HAS_DROPOUT=dropout_NF is not None,
        **rows.arguments,
        **epilogue.arguments,
    )
    return d_pre_NH, hidden_NF, d_weights.sum(dim=1)


def product(
    rows: Rows, input_NI: Tensor, matrix_EOI: Tensor, bias_EO: Tensor | None = None
) -> Tensor:
    """output_NO; the matrices may be a transposed view."""
    width_in, width_out = input_NI.shape[1], matrix_EOI.shape[1]
    output_NO = rows.empty(width_out)
    _product[rows.grid(width_out)](
        input_NI,
        matrix_EOI,
        bias_EO,
        output_ptr=output_NO,
        out_stride=matrix_EOI.stride(1),
        in_stride=matrix_EOI.stride(2),
        IN=width_in,
        OUT=width_out,
        HAS_BIAS=bias_EO is not None,
        **rows.arguments,
    )
    return output_NO


def weight_gradient(
    rows: Rows, output_grad: Tensor, inputs: Tensor, like_EOI: Tensor, gather: str
) -> Tensor:
    """In the shape and dtype of `like`; `gather` says which of "output" and "input" has T rows."""
    num_experts, width_out, width_in = like_EOI.shape
    gradient_EOI = torch.empty_like(like_EOI, memory_format=torch.contiguous_format)

    def programs(meta: dict[str, Any]) -> tuple[int]:
        tiles = triton.cdiv(width_out, meta["BLOCK_M"]) * triton.cdiv(width_in, meta["BLOCK_O"])
        return (num_experts * tiles,)

    _weight_gradient[programs](
        output_grad,
        inputs,
        rows.token_ids_N,
        rows.offsets_E,
        gradient_EOI,
        output_grad.stride(0),
        inputs.stride(0),
        IN=width_in,
        OUT=width_out,
        GATHER_OUTPUT=gather == "output",
        GATHER_INPUT=gather == "input",
        PRECISION=_precision(),
        **_FUSED,
    )
    return gradient_EOI


def bias_gradient(
    rows: Rows, output_grad: Tensor, like_EO: Tensor, weights_N: Tensor | None = None
) -> Tensor:
    """The sum of each expert's rows; with weights, of the rows of its tokens times their weights."""
    num_experts, width = like_EO.shape
    gradient_EO = torch.empty_like(like_EO, memory_format=torch.contiguous_format)
    block, rows_at_a_time = (16, 16) if knobs.runtime.interpret else (128, 32)
    _bias_gradient[(num_experts, triton.cdiv(width, block))](
        output_grad,
        rows.token_ids_N,
        weights_N,
        rows.offsets_E,
        gradient_EO,
        output_grad.stride(0),
        OUT=width,
        WEIGHTED=weights_N is not None,
        BLOCK_O=block,
        BLOCK_K=rows_at_a_time,
        num_warps=4,
        **_FUSED,
    )
    return gradient_EO


def combine(
    rows: Rows,
    rows_ND: Tensor,
    weights_N: Tensor | None,
    ranks_N: Tensor,
    starts: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """output_TD in `dtype`; `starts` holds where the pairs of each token start in `ranks_N`, and N."""
    num_tokens, d_model = starts.shape[0] - 1, rows_ND.shape[1]
    output_TD = rows_ND.new_empty(num_tokens, d_model, dtype=dtype)
    block = min(1024, triton.next_power_of_2(d_model))
    if num_tokens:
        _combine[(num_tokens, triton.cdiv(d_model, block))](
            rows_ND,
            weights_N,
            ranks_N,
            starts,
            rows.offsets_E[-1:],
            output_TD,
            D=d_model,
            WEIGHTED=weights_N is not None,
            BLOCK_D=block,
            num_warps=max(1, min(4, block // 256)),
            **_FUSED,
        )
    return output_TD


def _precision() -> str:
    """Of products of float32: what torch's own products are allowed."""
    if knobs.runtime.interpret:
        return "interpreted"
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
