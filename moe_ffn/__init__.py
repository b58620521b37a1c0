"""Feed-forward blocks for Transformers, dense and sparse, behind one interface.

    from moe_ffn import build_ffn

    ffn = build_ffn({"type": "moe", "num_experts": 8}, d_model=512)
    output = ffn(x)  # output.hidden, output.routing

The public names are below. Each is imported when it is first asked for, so that reading a config
needs no torch and using a block needs neither lightning nor wandb.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_ffn.balancing.losses import load_balancing_loss, router_z_loss
    from moe_ffn.config import Config
    from moe_ffn.errors import ConfigError
    from moe_ffn.experts.base import Experts
    from moe_ffn.experts.config import ExpertsConfig, GatedExpertsConfig, MLPExpertsConfig
    from moe_ffn.ffn.base import FFNBlock
    from moe_ffn.ffn.config import (
        CapacityConfig,
        ConvConfig,
        DenseConfig,
        FFNConfig,
        GatedConfig,
        IdentityConfig,
        MoEConfig,
        build_ffn,
    )
    from moe_ffn.model.config import DecoderConfig
    from moe_ffn.model.decoder import Decoder, DecoderOutput
    from moe_ffn.outputs import FFNOutput, Routing, TokenContext
    from moe_ffn.routing.base import Router
    from moe_ffn.routing.config import RouterConfig, TopKRouterConfig

__version__ = "0.1.0"

_HOMES = {
    "balancing.losses": ("load_balancing_loss", "router_z_loss"),
    "config": ("Config",),
    "errors": ("ConfigError",),
    "experts.base": ("Experts",),
    "experts.config": ("ExpertsConfig", "GatedExpertsConfig", "MLPExpertsConfig"),
    "ffn.base": ("FFNBlock",),
    "ffn.config": (
        "CapacityConfig",
        "ConvConfig",
        "DenseConfig",
        "FFNConfig",
        "GatedConfig",
        "IdentityConfig",
        "MoEConfig",
        "build_ffn",
    ),
    "model.config": ("DecoderConfig",),
    "model.decoder": ("Decoder", "DecoderOutput"),
    "outputs": ("FFNOutput", "Routing", "TokenContext"),
    "routing.base": ("Router",),
    "routing.config": ("RouterConfig", "TopKRouterConfig"),
}
"""Where each public name lives; the same lines as the imports above, which only type checkers run."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "CapacityConfig",
    "Config",
    "ConfigError",
    "ConvConfig",
    "Decoder",
    "DecoderConfig",
    "DecoderOutput",
    "DenseConfig",
    "Experts",
    "ExpertsConfig",
    "FFNBlock",
    "FFNConfig",
    "FFNOutput",
    "GatedConfig",
    "GatedExpertsConfig",
    "IdentityConfig",
    "MLPExpertsConfig",
    "MoEConfig",
    "Router",
    "RouterConfig",
    "Routing",
    "TokenContext",
    "TopKRouterConfig",
    "build_ffn",
    "load_balancing_loss",
    "router_z_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'moe_ffn' has no attribute '{name}'")
    return getattr(import_module(f"moe_ffn.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
