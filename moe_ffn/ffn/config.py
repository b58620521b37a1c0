"""The feed-forward family: every config by name; torch-free (see `moe_ffn.config`).

To add a family to the package: its config in `dense_config.py` or `sparse_config.py`, its module in a
file of its own beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from moe_ffn.config import require_count
from moe_ffn.errors import ConfigError, explain
from moe_ffn.ffn.base_config import FFNConfig
from moe_ffn.ffn.combine_config import CombineConfig
from moe_ffn.ffn.dense_config import ConvConfig, DenseConfig, GatedConfig, IdentityConfig
from moe_ffn.ffn.sparse_config import (
    CapacityConfig,
    MixtureOfDepthsConfig,
    MoEConfig,
    SoftMoEConfig,
    ZeroComputationConfig,
)

if TYPE_CHECKING:
    from moe_ffn.ffn.base import FFNBlock

__all__ = [
    "CapacityConfig",
    "CombineConfig",
    "ConvConfig",
    "DenseConfig",
    "FFNConfig",
    "GatedConfig",
    "IdentityConfig",
    "MixtureOfDepthsConfig",
    "MoEConfig",
    "SoftMoEConfig",
    "ZeroComputationConfig",
    "build_ffn",
]


def build_ffn(config: Mapping[str, Any] | str | FFNConfig, d_model: int) -> FFNBlock:
    """A feed-forward block from a plain mapping, a type name or a config.

        build_ffn({"type": "moe", "num_experts": 8, "router": {"type": "top_k", "k": 2}}, d_model=512)
        build_ffn("swiglu", d_model=512)

    Raises:
        ConfigError: one line per mistake, naming the key.

    """
    require_count(d_model, "d_model")
    try:
        return FFNConfig.model_validate(config).build(d_model)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(error))) from error
