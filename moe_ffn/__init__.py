"""Feed-forward blocks for Transformers, dense and sparse, behind one interface.

    from moe_ffn import build_ffn

    ffn = build_ffn({"type": "moe", "num_experts": 8}, d_model=512)
    output = ffn(x)  # output.hidden, output.routing

This module exports the most common names. All blocks, routers and kinds of experts are in `moe_ffn.ffn`,
`moe_ffn.routing` and `moe_ffn.experts`; losses and bias rules are in `moe_ffn.balancing`.
"""

from typing import TYPE_CHECKING

# This must be imported before torch.
from moe_ffn.config import environment  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
from moe_ffn.balancing import load_balancing_loss, router_z_loss
from moe_ffn.config import lazy_names
from moe_ffn.config.errors import ConfigError, install
from moe_ffn.experts import Experts, ExpertsConfig
from moe_ffn.ffn import (
    DenseConfig,
    FFNBlock,
    FFNConfig,
    GatedConfig,
    MoEConfig,
    build_ffn,
    solve_widths,
)
from moe_ffn.outputs import FFNOutput, Routing, TokenContext
from moe_ffn.routing import (
    LinearRouter,
    LinearRouterConfig,
    Router,
    RouterConfig,
    TopKRouterConfig,
    routing_of_pairs,
)

if TYPE_CHECKING:
    from moe_ffn.hf.from_transformers import load_transformers
    from moe_ffn.hf.to_transformers import export_transformers
    from moe_ffn.interop.audit import audit
    from moe_ffn.interop.diff import diff
    from moe_ffn.interop.routings import watch
    from moe_ffn.model.decoder import Decoder, DecoderConfig
    from moe_ffn.model.generate import generate
    from moe_ffn.runs.reader import Run, load_run
    from moe_ffn.runs.train import train
    from moe_ffn.testing import check_ffn, check_router
    from moe_ffn.training.recovery import TrainingError
    from moe_ffn.weights.pretrained import load_pretrained, load_tokenizer, save_pretrained

__version__ = "0.2.0"

__all__ = [
    "ConfigError",
    "Decoder",
    "DecoderConfig",
    "DenseConfig",
    "Experts",
    "ExpertsConfig",
    "FFNBlock",
    "FFNConfig",
    "FFNOutput",
    "GatedConfig",
    "LinearRouter",
    "LinearRouterConfig",
    "MoEConfig",
    "Router",
    "RouterConfig",
    "Routing",
    "Run",
    "TokenContext",
    "TopKRouterConfig",
    "TrainingError",
    "audit",
    "build_ffn",
    "check_ffn",
    "check_router",
    "diff",
    "export_transformers",
    "generate",
    "load_balancing_loss",
    "load_pretrained",
    "load_run",
    "load_tokenizer",
    "load_transformers",
    "router_z_loss",
    "routing_of_pairs",
    "save_pretrained",
    "solve_widths",
    "train",
    "watch",
]

_LAZY = {
    "audit": "moe_ffn.interop.audit",
    "diff": "moe_ffn.interop.diff",
    "export_transformers": "moe_ffn.hf.to_transformers",
    "generate": "moe_ffn.model.generate",
    "load_transformers": "moe_ffn.hf.from_transformers",
    "train": "moe_ffn.runs.train",
    "TrainingError": "moe_ffn.training.recovery",
    "watch": "moe_ffn.interop.routings",
    **dict.fromkeys(("Decoder", "DecoderConfig"), "moe_ffn.model.decoder"),
    **dict.fromkeys(("Run", "load_run"), "moe_ffn.runs.reader"),
    **dict.fromkeys(("check_ffn", "check_router"), "moe_ffn.testing"),
    **dict.fromkeys(
        ("load_pretrained", "load_tokenizer", "save_pretrained"), "moe_ffn.weights.pretrained"
    ),
}
"""Names imported on first use: the layers need no decoder, PyYAML or tokenizers."""

__getattr__, __dir__ = lazy_names(__name__, _LAZY, install=install("train"))
