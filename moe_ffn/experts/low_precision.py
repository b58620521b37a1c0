"""Experts whose matrices are rounded to a low precision in every forward pass (fake quantisation).

E experts, O output width, I input width, T tokens, D model width
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from pydantic import model_validator
from torch import Tensor

from moe_ffn.config.errors import ConfigError, Unsupported
from moe_ffn.experts.base import Experts
from moe_ffn.experts.matrices import MatrixExperts, MatrixExpertsConfig
from moe_ffn.experts.wrappers import ExpertsWrapper, ExpertsWrapperConfig
from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.outputs import Plan

# -- formats


def round_to_e2m1_(x: Tensor) -> Tensor:
    """Round to the values of FP4 E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), ties to even."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return x.div_(step).round_().mul_(step).clamp_(-6, 6)


def round_to_e4m3_(x: Tensor) -> Tensor:
    """Round to the values of FP8 E4M3 without infinities, ties to even; larger numbers become 448."""
    return x.copy_(x.clamp_(-448, 448).to(torch.float8_e4m3fn))


def round_to_int_(bits: int) -> Callable[[Tensor], Tensor]:
    """Return a function that rounds to signed integers of so many bits, ties to even."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return lambda x: x.round_().clamp_(low, high)


Scales = tuple[Tensor, Tensor | None]
"""Scale of each block, (..., blocks, 1), and a scale of each matrix that multiplies it, (..., 1, 1, 1)."""


ScaleRule = Callable[[Tensor, Tensor | None], Scales]
"""Function of the largest size in each block, (..., rows, blocks, 1), and in each matrix, (..., 1, 1, 1), or
None if the blocks are all of a matrix; returns the scales."""


def power_of_two_scales(largest_exponent: int) -> ScaleRule:
    """Return the rule of OCP MX 1.0, section 6.3: 2^(floor(log2 of the largest size) - largest_exponent).

    Args:
        largest_exponent: exponent of the largest power of two among the values of an element.
    """

    def scales(largest: Tensor, of_matrix: Tensor | None) -> Scales:
        exponent = torch.frexp(largest).exponent - 1 - largest_exponent
        exponent = exponent.where(largest > 0, -127).clamp(-127, 127)
        scale = torch.ldexp(torch.ones_like(largest), exponent)
        scale = scale.where(largest.isfinite(), torch.nan)  # a diverged run must not look finite
        return scale, None

    return scales


def linear_scales(largest_element: float) -> ScaleRule:
    """Return the rule that maps the largest number of a block to `largest_element`."""
    smallest = torch.finfo(torch.float32).tiny
    return lambda largest, of_matrix: ((largest / largest_element).clamp(min=smallest), None)


def two_level_scales(largest: Tensor, of_matrix: Tensor | None) -> Scales:
    """Return the scales of NVFP4: an E4M3 number for each block, times a float32 number for each matrix."""
    if of_matrix is None:
        of_matrix = largest.amax(dim=(-3, -2), keepdim=True)
    whole = of_matrix / (448 * 6)
    whole = whole.where(whole > 0, 1.0)
    smallest = torch.finfo(torch.float8_e4m3fn).tiny
    return round_to_e4m3_((largest / 6 / whole).clamp(min=smallest)), whole


@dataclass(frozen=True)
class LowPrecision:
    """Format of a matrix: low-precision elements, and a scale for each block of a row."""

    round_: Callable[[Tensor], Tensor]
    """Function that rounds scaled numbers to elements, in place."""
    scales: ScaleRule
    block: int | None
    """Elements of a row that share a scale; None for the whole row."""


Format = Literal["mxfp4", "mxfp8", "nvfp4", "int4", "int8", "fp8"]

FORMATS: dict[Format, LowPrecision] = {
    "mxfp4": LowPrecision(round_to_e2m1_, power_of_two_scales(2), 32),
    "mxfp8": LowPrecision(round_to_e4m3_, power_of_two_scales(8), 32),
    "nvfp4": LowPrecision(round_to_e2m1_, two_level_scales, 16),
    "int4": LowPrecision(round_to_int_(4), linear_scales(7.5), 32),
    "int8": LowPrecision(round_to_int_(8), linear_scales(127.5), 32),
    "fp8": LowPrecision(round_to_e4m3_, linear_scales(448), None),
}
"""Formats by name. MX: OCP Microscaling Formats 1.0; NVFP4: arXiv:2509.25149; integers by group and FP8 by
row: symmetric, as in compressed-tensors."""


def quantize(
    weight: Tensor, name: Format, of_matrix: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the elements of a matrix or of stacked matrices, in blocks, and their scales, in float32.

    Args:
        weight: (..., O, I); I is a multiple of the format's block.
        of_matrix: (..., 1, 1, 1), largest size in the matrix if `weight` holds some of its rows.

    Returns:
        elements (..., O, blocks, block), scales of blocks (..., O, blocks, 1), and scales of matrices
        (..., 1, 1, 1), which only NVFP4 has. Their product is the rounded weight.
    """
    low = FORMATS[name]
    blocks = weight.float().unflatten(-1, (-1, low.block or weight.shape[-1]))
    scales, whole = low.scales(blocks.abs().amax(-1, keepdim=True), of_matrix)
    # Multiplied by a reciprocal, as the NVFP4 kernels do; dividing would round otherwise.
    scaled = blocks / scales if whole is None else blocks * ((1 / whole) / scales)
    return low.round_(scaled), scales, whole


def fake_quantize(x: Tensor, name: Format) -> Tensor:
    """Return `x` rounded to a format, with its shape and dtype; the gradient is that of the identity.

    Bengio et al. 2013 (arXiv:1308.3432), straight-through estimator.

    Args:
        x: (..., rows, width); width is a multiple of the format's block.
    """
    with torch.no_grad():
        elements, scales, whole = quantize(x, name)
        rounded = elements.mul_(scales if whole is None else scales * whole).flatten(-2).to(x.dtype)
    return rounded + (x - x.detach())


_BLOCKS_OF_32 = {"strategy": "group", "group_size": 32}
_TWO_LEVELS = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
_FP4, _FP8 = {"num_bits": 4, "type": "float"}, {"num_bits": 8, "type": "float"}

COMPRESSED: dict[Format, tuple[str, dict[str, Any]]] = {
    "mxfp4": ("mxfp4-pack-quantized", _FP4 | _BLOCKS_OF_32 | {"scale_dtype": "torch.uint8"}),
    "mxfp8": ("mxfp8-quantized", _FP8 | _BLOCKS_OF_32 | {"scale_dtype": "torch.uint8"}),
    "nvfp4": ("nvfp4-pack-quantized", _FP4 | _TWO_LEVELS),
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int"} | _BLOCKS_OF_32),
    "int8": ("pack-quantized", {"num_bits": 8, "type": "int"} | _BLOCKS_OF_32),
    "fp8": ("float-quantized", _FP8 | {"strategy": "channel"}),
}
"""Format -> the name of its layout in compressed-tensors 0.20, and the arguments of its weights there."""


def pack(weight_OI: Tensor, name: Format, of_matrix: Tensor | None = None) -> dict[str, Tensor]:
    """Return the tensors that store a rounded matrix, under the names of compressed-tensors.

    `weight_packed` holds two FP4 numbers in a byte, or four INT8 or eight INT4 numbers in an int32, the first
    in the low bits; other formats store `weight`. `weight_scale` is a biased exponent for MX, E4M3 for NVFP4,
    and float32 otherwise. NVFP4 adds `weight_global_scale`, the reciprocal of the scale of the matrix.

    Args:
        of_matrix: see `quantize`.
    """
    elements, scales, whole = quantize(weight_OI, name, of_matrix)
    elements_OI, scale = elements.flatten(-2), scales.squeeze(-1)
    packed: dict[str, Tensor] = {}
    if name in ("mxfp4", "nvfp4"):
        size = elements_OI.abs()
        index = torch.where(size < 2, 2 * size, torch.where(size < 4, size + 2, size / 2 + 4))
        code = index.to(torch.uint8) | (elements_OI.signbit().to(torch.uint8) << 3)
        packed["weight_packed"] = code[..., ::2] | (code[..., 1::2] << 4)
    elif name in ("int4", "int8"):
        bits = COMPRESSED[name][1]["num_bits"]
        codes = (elements_OI.to(torch.int64) + 2 ** (bits - 1)).unflatten(-1, (-1, 32 // bits))
        words = (codes << torch.arange(0, 32, bits, device=weight_OI.device)).sum(-1)
        packed["weight_packed"] = words.to(torch.int32)
        packed["weight_shape"] = torch.tensor(weight_OI.shape)
    else:
        packed["weight"] = elements_OI.to(torch.float8_e4m3fn)
    if name in ("mxfp4", "mxfp8"):
        scale = (torch.frexp(scale).exponent - 1 + 127).to(torch.uint8)
    packed["weight_scale"] = scale.to(torch.float8_e4m3fn) if name == "nvfp4" else scale
    if whole is not None:
        packed["weight_global_scale"] = 1 / whole.flatten()
    return packed


# -- experts


class FakeQuantizedExpertsConfig(ExpertsWrapperConfig, frozen=True):
    """Experts that compute with rounded matrices, in training and evaluation; gradients pass unrounded.

    Parameters, gradients and the optimizer keep full precision. Router, norms and shared expert are left out,
    and so are biases.
    """

    type: Literal["fake_quantized"] = "fake_quantized"
    format: Format | None = "fp8"
    """Format of the matrices; null: not rounded, to begin with full precision and change it later."""
    inputs: Format | None = None
    """Format of the tokens that the experts read; null: not rounded."""

    @model_validator(mode="after")
    def _require_matrices(self) -> FakeQuantizedExpertsConfig:
        if not isinstance(self.innermost, MatrixExpertsConfig):
            raise ValueError(
                f"type 'fake_quantized' rounds matrices, but experts of type '{self.innermost.type}' have "
                "none; use mlp or swiglu"
            )
        if any(isinstance(inner, FakeQuantizedExpertsConfig) for inner in self.inner_wrappers()):
            raise ValueError("type 'fake_quantized' cannot be inside itself; leave one of them out")
        return self

    def unfit_width(self, d_model: int, experts_per_token: float) -> Unsupported | None:
        width = self.experts.dispatch_width(d_model)
        d_ff = cast("MatrixExpertsConfig", self.innermost).width(width, experts_per_token)
        inner = "d_model" if width == d_model else "the inner width"
        options: list[tuple[str, Format | None, dict[str, int]]] = [
            ("inputs", self.inputs, {inner: width}),
            ("format", self.format, {inner: width, "d_ff": d_ff}),
        ]
        for option, name, widths in options:
            block = None if name is None else FORMATS[name].block
            for label, numbers in widths.items():
                if block is not None and numbers % block:
                    below = numbers // block * block
                    fits = f"{below} or {below + block}" if below else f"{block}"
                    return Unsupported(
                        f"{option} ({name}) scales blocks of {block} numbers, but {label} is {numbers}",
                        f"make it {fits}, or use fp8, which scales whole rows",
                    )
        return super().unfit_width(d_model, experts_per_token)

    def build(self, d_model: int, num_experts: int, experts_per_token: float) -> Experts:
        if unfit := self.unfit_width(d_model, experts_per_token):
            raise ConfigError(f"experts.{unfit}")
        return FakeQuantizedExperts(
            self, self.experts.build(d_model, num_experts, experts_per_token)
        )


def _matrices(experts: Experts) -> list[tuple[str, Tensor]]:
    """Return (name, stacked matrices) of experts, without biases and the weights of wrappers."""
    return [(name, value) for name, value in experts.named_parameters() if value.ndim == 3]


class FakeQuantizedExperts(ExpertsWrapper):
    """Experts that compute with rounded matrices."""

    def __init__(self, config: FakeQuantizedExpertsConfig, experts: Experts) -> None:
        super().__init__(experts)
        self.format: Format | None = config.format
        self.inputs: Format | None = config.inputs
        if config.format is not None:
            # Not in `forward`, where the matrices of a model that is divided over ranks are not gathered yet.
            cast("MatrixExperts", self.innermost).before_products = RoundMatrices(config.format)

    def forward(self, x_TD: Tensor, plan: Plan) -> Tensor:
        return self.experts(self.rounded_input(x_TD), plan)

    def rounded_input(self, x_TD: Tensor) -> Tensor:
        """Return the tokens as the experts read them."""
        if self.inputs is None:
            return x_TD
        return fake_quantize(x_TD.unsqueeze(-2), self.inputs).squeeze(-2)

    def weights(self) -> ExpertWeights | None:
        return self.experts.weights()

    def extra_repr(self) -> str:
        return f"format={self.format}, inputs={self.inputs}"

    def rounded(self) -> dict[str, Tensor]:
        """Return the matrices as they compute, by their names in `experts`."""
        if self.format is None:
            return {}
        return {name: fake_quantize(m, self.format) for name, m in _matrices(self.experts)}


@dataclass(frozen=True)
class RoundMatrices:
    """Function of the weights of experts that rounds their matrices."""

    format: Format

    def __call__(self, weights: ExpertWeights) -> ExpertWeights:
        up_EHD = fake_quantize(weights.up_EHD, self.format)
        return replace(
            weights, up_EHD=up_EHD, down_EDF=fake_quantize(weights.down_EDF, self.format)
        )
