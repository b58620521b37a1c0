"""Names of routings, for custom blocks too.

In a model they begin with the layer: `layer_03`; `layer_03/inner` for a block inside the block of that layer;
`layer_03/round_2` for a later round of a chain of experts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")

OWN_ROUTING = "routing"
"""The key of `FFNOutput.routings` for the block's own router."""
ROUTING_SUFFIX = "(?:/(?:inner|round_[0-9]+))*"
"""Regular expression of the suffixes that a block's routings add to the name of their layer."""

_NAME = re.compile(r"layer_(\d{1,9})((?:/\w+)*)")


def round_name(number: int) -> str:
    """Return the key of `FFNOutput.routings` for a round of a chain of experts: `round_2` for number 1."""
    return f"round_{number + 1}" if number else OWN_ROUTING


def prefix_names(outer: str, values: Mapping[str, Value]) -> dict[str, Value]:
    """Prefix names of an inner block: `routing`, its own, becomes `outer`, and `inner` `outer/inner`."""
    return {
        outer if name == OWN_ROUTING else f"{outer}/{name}": value for name, value in values.items()
    }


def layer_name(index: int) -> str:
    """Return the name of a layer's main routing, such as `layer_03`."""
    return f"layer_{index:02d}"


def layer_number(name: str) -> int:
    """Return the layer index of a routing name."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(
            f"the name of a layer must be like 'layer_03' or 'layer_03/inner', got {name!r}"
        )
    return int(match[1])


def is_inner(name: str) -> bool:
    """Return True for the routing of a block inside another block; a later round is not inside."""
    return any(not part.startswith("round_") for part in name.split("/")[1:])


def short_name(name: str) -> str:
    """Return `3` for `layer_03` and `3 inner` for `layer_03/inner`; return any other name unchanged."""
    match = _NAME.fullmatch(name)
    return f"{int(match[1])}{match[2].replace('/', ' ')}" if match else name
