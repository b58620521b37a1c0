"""Equal budgets: the hidden widths of a block, solved so that it costs what another block costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic import ValidationError

from moe_ffn.config.base import MAX_COUNT, Config, require_count
from moe_ffn.config.errors import ConfigError, explain
from moe_ffn.config.sizes import Budget, MatchConfig
from moe_ffn.ffn.base import FFNConfig

MAX_MISMATCH = 0.02
"""The largest part of a budget by which a block may miss it."""

_MULTIPLE, _FOR_A_MULTIPLE = 8, 0.005
"""Kernels like widths that are multiples of 8; one is taken where it misses the budget by 0.5 % at most."""

_WORDS: dict[Budget, str] = {
    "total_params": "parameters",
    "active_params": "active parameters",
    "flops_per_token": "FLOPs per token",
}


@dataclass(frozen=True)
class WidthMatch:
    """A hidden width that was solved, and how near the block comes to the budget."""

    options: tuple[str, ...]
    """Dotted paths of the width."""
    budget: Budget
    width: int
    wanted: int
    """The budget of the block to match."""
    got: int
    """The budget of the block with this width."""

    @property
    def mismatch(self) -> float:
        """Fraction of the budget by which the block misses it; above 0 where it costs more."""
        return self.got / self.wanted - 1

    def __str__(self) -> str:
        return (
            f"{', '.join(self.options)}: {self.width} gives {self.got:,} {_WORDS[self.budget]} where "
            f"{self.wanted:,} are wanted ({self.mismatch:+.2%})"
        )


def solve_widths(
    ffn: FFNConfig | Mapping[str, Any] | str, d_model: int, seq_len: int, option: str = ""
) -> tuple[FFNConfig, WidthMatch | None]:
    """The block with a number for each `d_ff: {match: ..., of: ...}` in it, and how near that comes.

        ffn, match = solve_widths(
            {"type": "moe", "experts": {"type": "swiglu", "d_ff": {"match": "active_params", "of": "dense"}}},
            d_model=512,
            seq_len=1024,
        )

    The budgets are what the configs themselves count, of the whole of `ffn` and the whole of the other
    block. Several widths that match the same share one number: the one that misses the budget least, or
    the nearest multiple of 8 where that misses it by at most 0.5 %.

    Args:
        seq_len: tokens of a sequence; only the FLOPs of a soft MoE depend on it.
        option: the path of the block, for messages.

    Returns:
        the block, and None for a match where there was nothing to solve.

    Raises:
        ConfigError: no width comes within 2 % of the budget, or the widths do not match the same; one
            sentence.

    """
    require_count(d_model, "d_model")
    require_count(seq_len, "seq_len")
    try:
        ffn = FFNConfig.model_validate(ffn)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(error))) from error
    found = dict(_matches(ffn, option))
    if not found:
        return ffn, None
    (first, match), *others = found.items()
    for other, its_match in others:
        if its_match != match:
            raise ConfigError(
                f"{other}: must match the same as {first}, since a block has one budget to meet; give both "
                "the same `match` and `of`, or one of them a number"
            )

    def cost(block: FFNConfig) -> int:
        if match.match == "flops_per_token":
            return block.flops_per_token(d_model, seq_len)
        return (
            block.num_params(d_model)
            if match.match == "total_params"
            else block.num_active_params(d_model)
        )

    other_block, _ = solve_widths(cast("FFNConfig", match.of), d_model, seq_len, f"{first}.of")
    wanted = cost(other_block)
    if wanted < 1:
        raise ConfigError(
            f"{first}.of: '{other_block.type}' has no {_WORDS[match.match]} to match; give another block"
        )
    width = _nearest(lambda width: cost(_with_width(ffn, width)), wanted)
    solved = _with_width(ffn, width)
    result = WidthMatch(tuple(found), match.match, width, wanted, cost(solved))
    if abs(result.mismatch) > MAX_MISMATCH:
        raise ConfigError(
            f"{first}: no width gives about {wanted:,} {_WORDS[match.match]}: the nearest, {width}, gives "
            f"{result.got:,} ({result.mismatch:+.1%}, at most {MAX_MISMATCH:.0%} is accepted); match a "
            f"larger block in {first}.of, or give this one fewer experts or a smaller shared expert"
        )
    return solved, result


def _nearest(cost: Callable[[int], int], wanted: int) -> int:
    """The width whose cost is nearest to `wanted`; `cost` must not fall with the width."""
    low, high = 1, 2  # cost(low) <= wanted < cost(high), unless even 1 costs too much
    while high < MAX_COUNT and cost(high) <= wanted:
        low, high = high, min(2 * high, MAX_COUNT)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= wanted else (low, middle)

    def miss(width: int) -> int:
        return abs(cost(width) - wanted)

    below = low // _MULTIPLE * _MULTIPLE
    multiple = min(max(below, _MULTIPLE), below + _MULTIPLE, key=miss)
    return multiple if miss(multiple) <= _FOR_A_MULTIPLE * wanted else min(low, high, key=miss)


def _matches(value: Any, path: str) -> Iterator[tuple[str, MatchConfig]]:
    """Every width in a config that is still to be solved, after its path."""
    if isinstance(value, MatchConfig):
        yield path, value
        return
    for name, item in _items(value):
        yield from _matches(item, f"{path}.{name}" if path else str(name))


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Config | Mapping):
        return list(value.items() if isinstance(value, Mapping) else value)
    return list(enumerate(value)) if isinstance(value, list | tuple) else []


def _with_width(value: Any, width: int) -> Any:
    """A config with `width` in the place of every match."""
    if isinstance(value, MatchConfig):
        return width
    changed = {
        key: new for key, item in _items(value) if (new := _with_width(item, width)) is not item
    }
    if not changed:
        return value
    if isinstance(value, Config):
        return value.model_copy(update=changed)
    if isinstance(value, Mapping):
        return {**value, **changed}
    return type(value)(changed.get(index, item) for index, item in enumerate(value))
