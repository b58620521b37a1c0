"""Default hidden widths, exact fractions, and the parameters and FLOPs of a linear layer."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field, TypeAdapter, WrapValidator
from torch import Tensor

from moe_ffn.config.base import MAX_COUNT, Config, TaggedConfig
from moe_ffn.config.errors import ConfigError

if TYPE_CHECKING:
    FFNConfig = TaggedConfig  # Stand-in for type checkers; `ffn/base.py` resolves the real class.

CostKind = Literal["total_params", "active_params", "flops_per_token"]
"""Cost of a block, router and shared expert included."""


class MatchConfig(Config, frozen=True):
    """Hidden width at which the block costs as much as another block.

    The cost is always that of the layer's whole block, however deep in the config the width is.
    `moe_ffn.ffn.match.solve_widths` replaces this config by a number.
    """

    match: CostKind
    """Cost to make equal: all parameters, those of one token, or forward FLOPs per token."""
    of: FFNConfig
    """Block with the budget to meet."""


def _number_or_match(value: Any, _: object) -> Any:
    # For a wrong number, pydantic would report an error for each member of the union.
    if isinstance(value, Mapping):
        return MatchConfig.model_validate(value)
    return (
        value if value is None or isinstance(value, MatchConfig) else _WIDTH.validate_python(value)
    )


_Width = Annotated[int, Field(strict=True, ge=1, le=MAX_COUNT)]
_WIDTH = TypeAdapter(_Width)

HiddenWidth = Annotated[_Width | MatchConfig | None, WrapValidator(_number_or_match)]
"""Option `d_ff`: a number, a match with another block's budget, or null for a default."""


def given_width(d_ff: int | MatchConfig | None) -> int | None:
    """Return the hidden width, None for a default; ConfigError if `d_ff` is an unsolved match."""
    if isinstance(d_ff, MatchConfig):
        raise ConfigError(
            f"d_ff: matches the {d_ff.match} of '{d_ff.of.type}', but is not solved yet; "
            "`ffn, match = moe_ffn.solve_widths(ffn, d_model, seq_len)` replaces it by a number"
        )
    return d_ff


MAX_SHARE = 10**9
"""Upper bound of a share and of its denominator, so that a share times a number of pairs fits into int64."""

_MAX_DEFAULT_WIDTH = 10 * MAX_COUNT


def share_of(*factors: float, parts: int) -> tuple[int, int]:
    """Return the product of `factors` divided by `parts` as an exact numerator and denominator, from 1 /
    `MAX_SHARE` to `MAX_SHARE`. In floating point 1.1 * 50 is slightly above 55, so that its ceiling is 56.
    """
    if torch.compiler.is_dynamo_compiling():  # floats are symbolic with `dynamic=True`
        from torch.fx.experimental.symbolic_shapes import guard_scalar  # loads SymPy

        factors = tuple([guard_scalar(factor) for factor in factors])
    return _exact_share(factors, parts)


def _exact_share(factors: tuple[float, ...], parts: int) -> tuple[int, int]:
    share = Fraction(1, parts)
    for factor in factors:
        share *= Fraction(factor)
    nearest = share.limit_denominator(MAX_SHARE)
    share = min(max(nearest, Fraction(1, MAX_SHARE)), Fraction(MAX_SHARE))
    return share.numerator, share.denominator


# Dynamo cannot trace fractions. This is `torch.compiler.assume_constant_result` without its slow import.
vars(_exact_share)["_dynamo_marked_constant"] = True

Counts = TypeVar("Counts", int, Tensor)


def ceil_of_share(counts: Counts, share: tuple[int, int]) -> Counts:
    """Return the exact ceil(share * count) of an int or an int64 tensor, without a device sync."""
    numerator, denominator = share
    whole, rest = divmod(numerator, denominator)
    return counts * whole - (-counts * rest // denominator)


def gated_width(d_model: float, multiple_of: int = 8) -> int:
    """Return 8/3 * d_model, at which three matrices have the parameters of a dense block of width 4 * d_model
    (Shazeer 2020, section 4).
    """
    return round_width(8 * d_model / 3, multiple_of)


def round_width(width: float, multiple_of: int = 8) -> int:
    """Round to a positive multiple, for speed; ConfigError if no memory could hold the width."""
    if width > _MAX_DEFAULT_WIDTH:
        raise ConfigError(
            f"d_ff: the default hidden width would be {width:.3g}, too large for any memory; set d_ff, or "
            "raise router.k"
        )
    return max(multiple_of, round(width / multiple_of) * multiple_of)


def linear_params(d_in: int, d_out: int, bias: bool) -> int:
    return d_in * d_out + (d_out if bias else 0)


TRAINING_FLOPS = 3
"""FLOPs of a training step relative to its forward pass; the backward pass costs as much as two of them."""


def linear_flops(d_in: int, d_out: int) -> int:
    """Return the forward FLOPs of one token: a multiplication and an addition per weight."""
    return 2 * d_in * d_out
