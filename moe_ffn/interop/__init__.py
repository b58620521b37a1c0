"""Live models of other libraries: transformers and its Trainer, peft and lm-eval."""

from typing import TYPE_CHECKING

from moe_ffn.config import lazy_names

if TYPE_CHECKING:
    from moe_ffn.interop.adapters import fuse_adapters
    from moe_ffn.interop.blocks import block_config, convert_block
    from moe_ffn.interop.replaying import read_experts, replay
    from moe_ffn.interop.routings import watch
    from moe_ffn.interop.swap import swap_ffn
    from moe_ffn.interop.trainer import RoutingCallback
    from moe_ffn.interop.transformers import kernels_in_use, register

_LAZY = {
    "RoutingCallback": "moe_ffn.interop.trainer",
    "block_config": "moe_ffn.interop.blocks",
    "convert_block": "moe_ffn.interop.blocks",
    "fuse_adapters": "moe_ffn.interop.adapters",
    "kernels_in_use": "moe_ffn.interop.transformers",
    "read_experts": "moe_ffn.interop.replaying",
    "register": "moe_ffn.interop.transformers",
    "replay": "moe_ffn.interop.replaying",
    "swap_ffn": "moe_ffn.interop.swap",
    "watch": "moe_ffn.interop.routings",
}
"""Names that are imported on first use, because they need optional packages."""

__all__ = [
    "RoutingCallback",
    "block_config",
    "convert_block",
    "fuse_adapters",
    "kernels_in_use",
    "read_experts",
    "register",
    "replay",
    "swap_ffn",
    "watch",
]


__getattr__, __dir__ = lazy_names(__name__, _LAZY)
