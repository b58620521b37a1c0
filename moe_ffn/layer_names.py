"""Names of routings: `layer_03`, and `layer_03/inner` for a block inside the block of that layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")

OWN = "routing"
"""What a block calls the routing of its own router in `FFNOutput.routings`."""

_NAME = re.compile(r"layer_(\d{1,9})((?:/\w+)*)")


def layer_name(index: int) -> str:
    """`layer_03`, the name of what the block of a layer calls `routing`."""
    return f"layer_{index:02d}"


def within(outer: str, values: Mapping[str, Value]) -> dict[str, Value]:
    """Values by the names of a block's routings, renamed for what holds the block as `outer`.

    `routing`, the block's own, becomes `outer`; `inner` becomes `outer/inner`.
    """
    return {outer if name == OWN else f"{outer}/{name}": value for name, value in values.items()}


def layer_number(name: str) -> int:
    """The layer that a routing belongs to."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"a layer is called like 'layer_03' or 'layer_03/inner', got {name!r}")
    return int(match[1])


def is_inner(name: str) -> bool:
    """Whether a routing is of a block inside the block of a layer."""
    return "/" in name


def short_name(name: str) -> str:
    """`layer_03` as 3 and `layer_03/inner` as 3 inner; another name as it is."""
    match = _NAME.fullmatch(name)
    return f"{int(match[1])}{match[2].replace('/', ' ')}" if match else name
