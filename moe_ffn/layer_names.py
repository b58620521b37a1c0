"""What the routing of a layer is called, wherever it is kept: `layer_03`, and `layer_03/inner` for a sparse
block inside a mixture of depths.
"""

from __future__ import annotations

import re

_NAME = re.compile(r"layer_(\d{1,9})((?:/inner)*)")


def layer_names(index: int) -> dict[str, str]:
    """What the routings of a layer are called, by their names in `FFNOutput`."""
    return {"routing": f"layer_{index:02d}", "inner_routing": f"layer_{index:02d}/inner"}


def parse_layer(name: str) -> tuple[int, bool]:
    """The number of a layer, and whether the name is of the block inside it."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"a layer is called like 'layer_03' or 'layer_03/inner', got {name!r}")
    return int(match[1]), bool(match[2])


def is_inner(layer: str) -> bool:
    """Whether a name is of a block inside the block of a layer, and not of the whole layer."""
    return layer.endswith("/inner")


def short_name(name: str) -> str:
    """`layer_03` as 3 and `layer_03/inner` as 3 inner; another name as it is."""
    match = _NAME.fullmatch(name)
    return f"{int(match[1])}{match[2].replace('/', ' ')}" if match else name
