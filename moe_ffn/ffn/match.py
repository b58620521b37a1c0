"""Hidden widths that make a block cost as much as another block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from moe_ffn.config.base import MAX_COUNT, Config, children, require_count
from moe_ffn.config.errors import ConfigError
from moe_ffn.config.sizes import CostKind, MatchConfig
from moe_ffn.ffn.base import FFNConfig

MAX_MISMATCH = 0.02
"""Maximum relative difference between a block's cost and its budget."""

_MULTIPLE, _MULTIPLE_TOLERANCE = 8, 0.005
"""Kernels are faster with multiples of 8, so a multiple is preferred if its cost is within 0.5 %."""

_UNITS: dict[CostKind, str] = {
    "total_params": "parameters",
    "active_params": "active parameters",
    "flops_per_token": "FLOPs per token",
}


@dataclass(frozen=True)
class WidthMatch:
    """A solved hidden width, and the resulting cost of the block."""

    options: tuple[str, ...]
    """Dotted paths of the options with this width."""
    budget: CostKind
    width: int
    wanted: int
    """Cost of the other block."""
    got: int
    """Cost of this block with this width."""

    @property
    def mismatch(self) -> float:
        """Relative difference in cost; above 0 if this block costs more."""
        return self.got / self.wanted - 1

    def __str__(self) -> str:
        return (
            f"{', '.join(self.options)}: {self.width} gives {self.got:,} {_UNITS[self.budget]} where "
            f"{self.wanted:,} are wanted ({self.mismatch:+.2%})"
        )


def solve_widths(
    ffn: FFNConfig | Mapping[str, Any] | str, d_model: int, seq_len: int, option: str = ""
) -> tuple[FFNConfig, WidthMatch | None]:
    """Replace each `d_ff: {match: ..., of: ...}` in a block by a number.

        ffn, match = solve_widths(
            {"type": "moe", "experts": {"type": "swiglu", "d_ff": {"match": "active_params", "of": "dense"}}},
            d_model=512,
            seq_len=1024,
        )

    Costs are those of the whole blocks, as their configs count them. All matched widths of a block get the
    same number: a multiple of 8 if its cost is within 0.5 % of the budget, otherwise the best number.

    Args:
        seq_len: tokens per sequence; only some FLOPs, such as those of a soft MoE, depend on it.
        option: path of the block, for messages.

    Returns:
        The solved block, and its match; None if the block has no width to solve.

    Raises:
        ConfigError: no width comes within 2 % of the budget, or the block's widths match different budgets.

    """
    require_count(d_model, "d_model")
    require_count(seq_len, "seq_len")
    ffn = FFNConfig.checked(ffn)
    matches = dict(_matches(ffn, option))
    if not matches:
        return ffn, None
    (first, match), *others = matches.items()
    for other, other_match in others:
        if other_match != match:
            raise ConfigError(
                f"{other} and {first} have different budgets, but a block has only one; give both the same "
                "`match` and `of`, or set one of them to a number"
            )

    def cost(block: FFNConfig) -> int:
        if match.match == "flops_per_token":
            return block.flops_per_token(d_model, seq_len)
        if match.match == "total_params":
            return block.num_params(d_model)
        return block.num_active_params(d_model)

    other_block, _ = solve_widths(cast("FFNConfig", match.of), d_model, seq_len, f"{first}.of")
    wanted = cost(other_block)
    if wanted < 1:
        raise ConfigError(
            f"{first}.of: '{other_block.type}' has no {_UNITS[match.match]} to match; give another block"
        )
    width = _nearest(lambda width: cost(_with_width(ffn, width)), wanted)
    solved = _with_width(ffn, width)
    result = WidthMatch(tuple(matches), match.match, width, wanted, cost(solved))
    if abs(result.mismatch) > MAX_MISMATCH:
        raise ConfigError(
            f"{first}: no width gives about {wanted:,} {_UNITS[match.match]}: the nearest, {width}, gives "
            f"{result.got:,} ({result.mismatch:+.1%}, at most {MAX_MISMATCH:.0%} is accepted); match a "
            f"larger block in {first}.of, or give this one fewer experts or a smaller shared expert"
        )
    return solved, result


def _nearest(cost: Callable[[int], int], wanted: int) -> int:
    """Return the width whose cost is nearest to `wanted`; `cost` must not decrease with the width."""
    low, high = 1, 2  # cost(low) <= wanted < cost(high), unless even 1 costs too much
    while high < MAX_COUNT and cost(high) <= wanted:
        low, high = high, min(2 * high, MAX_COUNT)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= wanted else (low, middle)

    def error(width: int) -> int:
        return abs(cost(width) - wanted)

    below = low // _MULTIPLE * _MULTIPLE
    multiple = min(max(below, _MULTIPLE), below + _MULTIPLE, key=error)
    return (
        multiple if error(multiple) <= _MULTIPLE_TOLERANCE * wanted else min(low, high, key=error)
    )


def _matches(value: Any, path: str) -> Iterator[tuple[str, MatchConfig]]:
    """Yield (path, match) of every unsolved width in a config."""
    if isinstance(value, MatchConfig):
        yield path, value
        return
    for name, item in children(value):
        yield from _matches(item, f"{path}.{name}" if path else str(name))


def _with_width(value: Any, width: int) -> Any:
    """Return a config with every match replaced by `width`."""
    if isinstance(value, MatchConfig):
        return width
    changed = {
        key: new for key, item in children(value) if (new := _with_width(item, width)) is not item
    }
    if not changed:
        return value
    if isinstance(value, Config):
        return value.model_copy(update=changed)
    if isinstance(value, Mapping):
        return {**value, **changed}
    return type(value)(changed.get(index, item) for index, item in enumerate(value))
