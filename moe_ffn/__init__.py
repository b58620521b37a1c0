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
from moe_ffn.balancing.losses import load_balancing_loss, router_z_loss
from moe_ffn.config.errors import ConfigError
from moe_ffn.config.lazy import lazy_names
from moe_ffn.experts import Experts, ExpertsConfig, GatedExpertsConfig
from moe_ffn.ffn import (
    DenseConfig,
    FFNBlock,
    FFNConfig,
    GatedConfig,
    MixtureOfDepthsConfig,
    MoEConfig,
    SoftMoEConfig,
    build_ffn,
    solve_widths,
)
from moe_ffn.outputs import FFNOutput, Plan, Routing, TokenContext
from moe_ffn.routing import (
    LinearRouter,
    LinearRouterConfig,
    Router,
    RouterConfig,
    TopKRouterConfig,
    routing_of_pairs,
)
from moe_ffn.routing.capacity import CapacityConfig

if TYPE_CHECKING:
    from moe_ffn.cli.train import train
    from moe_ffn.interop.audit import audit
    from moe_ffn.interop.diff import diff
    from moe_ffn.model.decoder import Decoder, DecoderConfig
    from moe_ffn.runs.reader import load_run
    from moe_ffn.training.recovery import TrainingError
    from moe_ffn.weights.pretrained import load_pretrained, load_tokenizer, save_pretrained

__version__ = "0.2.0"

__all__ = [
    "CapacityConfig",
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
    "GatedExpertsConfig",
    "LinearRouter",
    "LinearRouterConfig",
    "MixtureOfDepthsConfig",
    "MoEConfig",
    "Plan",
    "Router",
    "RouterConfig",
    "Routing",
    "SoftMoEConfig",
    "TokenContext",
    "TopKRouterConfig",
    "TrainingError",
    "audit",
    "build_ffn",
    "diff",
    "load_balancing_loss",
    "load_pretrained",
    "load_run",
    "load_tokenizer",
    "router_z_loss",
    "routing_of_pairs",
    "save_pretrained",
    "solve_widths",
    "train",
]

_LAZY = {
    "audit": "moe_ffn.interop.audit",
    **dict.fromkeys(("Decoder", "DecoderConfig"), "moe_ffn.model.decoder"),
    "diff": "moe_ffn.interop.diff",
    "load_run": "moe_ffn.runs.reader",
    "train": "moe_ffn.cli.train",
    "TrainingError": "moe_ffn.training.recovery",
    **dict.fromkeys(
        ("load_pretrained", "load_tokenizer", "save_pretrained"), "moe_ffn.weights.pretrained"
    ),
}
"""Names imported on first use: layers alone need no decoder, PyYAML or tokenizers."""

__getattr__, __dir__ = lazy_names(__name__, _LAZY)
