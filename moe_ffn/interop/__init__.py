"""Live models of other libraries: transformers and its Trainer, peft and lm-eval.

routings.py     `watch`: routings of a model while it runs
replaying.py    `replay`: a model that routes as recorded
audit/          checks of a sparse model, for `moe-ffn audit`
diff/           the first place where two models differ, for `moe-ffn diff`
kernels.py      our kernels inside transformers
live_models.py  models and tokenizers of transformers, loaded by it
swap.py         other blocks in a model of transformers
trainer.py      metrics of routing, for its Trainer
adapters.py     experts of peft's LoRA in our kernels
lm_eval.py      our decoders in lm-eval
"""

from typing import TYPE_CHECKING

from moe_ffn.config import lazy_names

if TYPE_CHECKING:
    from moe_ffn.interop.adapters import fuse_adapters
    from moe_ffn.interop.kernels import kernels_in_use, register
    from moe_ffn.interop.replaying import read_experts, replay
    from moe_ffn.interop.routings import watch
    from moe_ffn.interop.swap import swap_ffn
    from moe_ffn.interop.trainer import RoutingCallback

_LAZY = {
    "RoutingCallback": "moe_ffn.interop.trainer",
    "fuse_adapters": "moe_ffn.interop.adapters",
    "kernels_in_use": "moe_ffn.interop.kernels",
    "read_experts": "moe_ffn.interop.replaying",
    "register": "moe_ffn.interop.kernels",
    "replay": "moe_ffn.interop.replaying",
    "swap_ffn": "moe_ffn.interop.swap",
    "watch": "moe_ffn.interop.routings",
}
"""Names that are imported on first use, because they need optional packages."""

__all__ = [
    "RoutingCallback",
    "fuse_adapters",
    "kernels_in_use",
    "read_experts",
    "register",
    "replay",
    "swap_ffn",
    "watch",
]


__getattr__, __dir__ = lazy_names(__name__, _LAZY)
