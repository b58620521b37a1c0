"""Live models of other libraries: transformers, peft and lm-eval."""

from typing import TYPE_CHECKING

from moe_ffn.config.lazy import lazy_names

if TYPE_CHECKING:
    from moe_ffn.interop.adapters import fuse_adapters
    from moe_ffn.interop.blocks import block_config, convert_block
    from moe_ffn.interop.routings import watch
    from moe_ffn.interop.swap import swap_ffn
    from moe_ffn.interop.transformers import register

_LAZY = {
    "block_config": "moe_ffn.interop.blocks",
    "convert_block": "moe_ffn.interop.blocks",
    "fuse_adapters": "moe_ffn.interop.adapters",
    "register": "moe_ffn.interop.transformers",
    "swap_ffn": "moe_ffn.interop.swap",
    "watch": "moe_ffn.interop.routings",
}
"""Names that are imported on first use, because they need optional packages."""

__all__ = [
    "block_config",
    "convert_block",
    "fuse_adapters",
    "register",
    "swap_ffn",
    "watch",
]


__getattr__, __dir__ = lazy_names(__name__, _LAZY)
