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
    from moe_ffn.config import Config, ConfigError
    from moe_ffn.ffn.base import FFNBlock
    from moe_ffn.ffn.config import FFNConfig, build_ffn
    from moe_ffn.model.config import DecoderConfig
    from moe_ffn.model.decoder import Decoder, DecoderOutput
    from moe_ffn.outputs import FFNOutput, Routing, TokenContext

_HOMES = {
    "Config": "config",
    "ConfigError": "config",
    "Decoder": "model.decoder",
    "DecoderConfig": "model.config",
    "DecoderOutput": "model.decoder",
    "FFNBlock": "ffn.base",
    "FFNConfig": "ffn.config",
    "FFNOutput": "outputs",
    "Routing": "outputs",
    "TokenContext": "outputs",
    "build_ffn": "ffn.config",
    "load_balancing_loss": "balancing.losses",
    "router_z_loss": "balancing.losses",
}

__version__ = "0.1.0"

__all__ = [
    "Config",
    "ConfigError",
    "Decoder",
    "DecoderConfig",
    "DecoderOutput",
    "FFNBlock",
    "FFNConfig",
    "FFNOutput",
    "Routing",
    "TokenContext",
    "build_ffn",
    "load_balancing_loss",
    "router_z_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'moe_ffn' has no attribute '{name}'")
    return getattr(import_module(f"moe_ffn.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
