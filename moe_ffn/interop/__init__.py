"""Live models of other libraries: transformers, peft and lm-eval."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_ffn.interop.blocks import block_config, convert_block
    from moe_ffn.interop.routings import watch
    from moe_ffn.interop.swap import swap_ffn
    from moe_ffn.interop.transformers import register

_LAZY = {
    "block_config": "blocks",
    "convert_block": "blocks",
    "register": "transformers",
    "swap_ffn": "swap",
    "watch": "routings",
}
"""Imported on first use: what reads files needs packages that others lack."""

__all__ = [
    "block_config",
    "convert_block",
    "register",
    "swap_ffn",
    "watch",
]


def __dir__() -> list[str]:
    """Every name, those imported on first use too."""
    return sorted({*globals(), *_LAZY})


def __getattr__(name: str) -> Any:
    """One of the names that are imported when they are asked for."""
    if name in _LAZY:
        return getattr(import_module(f"moe_ffn.interop.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
