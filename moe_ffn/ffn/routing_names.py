"""Names of routings: of a block's own router, of later rounds, and of the blocks inside another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")

OWN = "routing"
"""The key of `FFNOutput.routings` for the block's own router."""


ROUTING_SUFFIX = "(?:/(?:inner|round_[0-9]+))*"
"""Regular expression of what follows the name of a layer in those of the routings of its block."""


def round_name(number: int) -> str:
    """The key of `FFNOutput.routings` for a round, counted from 0, of a chain of experts: `round_2`."""
    return f"round_{number + 1}" if number else OWN


def within(outer: str, values: Mapping[str, Value]) -> dict[str, Value]:
    """The values of an inner block, by routing name, renamed for the module that holds it as `outer`.

    `routing`, the block's own, becomes `outer`; `inner` becomes `outer/inner`.
    """
    return {outer if name == OWN else f"{outer}/{name}": value for name, value in values.items()}
