"""Default widths, and what a matrix costs: the arithmetic behind every comparison."""

from __future__ import annotations


def gated_width(d_model: float, multiple_of: int = 8) -> int:
    """The hidden width at which a gated block has the parameters of a dense one of 4 * d_model.

    Three matrices instead of two, so 2/3 of the width: 8/3 * d_model (Shazeer 2020, section 4).
    """
    return round_width(8 * d_model / 3, multiple_of)


def round_width(width: float, multiple_of: int = 8) -> int:
    """The nearest multiple of `multiple_of`, at least one; products are faster at such widths."""
    return max(multiple_of, round(width / multiple_of) * multiple_of)


def linear_params(d_in: int, d_out: int, bias: bool) -> int:
    return d_in * d_out + (d_out if bias else 0)


def mlp_params(d_model: int, width: int, bias: bool) -> int:
    """Two matrices, up and down."""
    return linear_params(d_model, width, bias) + linear_params(width, d_model, bias)


def gated_params(d_model: int, width: int, bias: bool) -> int:
    """Three matrices, gate, up and down."""
    return linear_params(d_model, width, bias) + mlp_params(d_model, width, bias)


def linear_flops(d_in: int, d_out: int) -> int:
    """Forward FLOPs for one token: a multiply and an add per weight. Training costs three times that."""
    return 2 * d_in * d_out
