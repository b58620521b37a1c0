"""Feed-forward blocks behind one interface. Each file has the config and the module of one family.

To add a block, add a file to this folder and import its config in this `__init__.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_ffn.config.base import require_count
from moe_ffn.config.process_memory import memory_errors_as_config_errors
from moe_ffn.ffn.base import FFNBlock, FFNConfig
from moe_ffn.ffn.chain_of_experts import ChainOfExpertsConfig
from moe_ffn.ffn.dense import (
    ClampedSwiGLUConfig,
    ConvConfig,
    DenseConfig,
    GatedConfig,
    IdentityConfig,
    SoftCappedSwiGLUConfig,
)
from moe_ffn.ffn.match import WidthMatch, solve_widths
from moe_ffn.ffn.mixture_of_depths import MixtureOfDepthsConfig
from moe_ffn.ffn.moe import MoEConfig
from moe_ffn.ffn.ngram_memory import NgramMemoryConfig
from moe_ffn.ffn.shared_expert import CombineConfig
from moe_ffn.ffn.soft_moe import SoftMoEConfig
from moe_ffn.ffn.wrappers import BiasedConfig, JitteredConfig, NormedConfig
from moe_ffn.ffn.zero_computation import ZeroComputationConfig

__all__ = [
    "BiasedConfig",
    "ChainOfExpertsConfig",
    "ClampedSwiGLUConfig",
    "CombineConfig",
    "ConvConfig",
    "DenseConfig",
    "FFNBlock",
    "FFNConfig",
    "GatedConfig",
    "IdentityConfig",
    "JitteredConfig",
    "MixtureOfDepthsConfig",
    "MoEConfig",
    "NgramMemoryConfig",
    "NormedConfig",
    "SoftCappedSwiGLUConfig",
    "SoftMoEConfig",
    "WidthMatch",
    "ZeroComputationConfig",
    "build_ffn",
    "solve_widths",
]


def build_ffn(config: Mapping[str, Any] | str | FFNConfig, d_model: int) -> FFNBlock:
    """Build a feed-forward block from a mapping, a type name or a config.

        build_ffn({"type": "moe", "num_experts": 8, "router": {"type": "top_k", "k": 2}}, d_model=512)
        build_ffn("swiglu", d_model=512)

    Raises:
        ConfigError: the config has mistakes (one line each, with the key), or the block does not fit into
            memory.

    """
    require_count(d_model, "d_model")
    with memory_errors_as_config_errors("the block"):
        return FFNConfig.checked(config).build(d_model)
