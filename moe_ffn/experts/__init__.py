"""WHAT one expert is; all E of a layer are stacked into one weight per matrix. One file per kind.

A new kind is one file in this folder, and one line here.
"""

from moe_ffn.experts.base import Experts, ExpertsConfig
from moe_ffn.experts.gated import ClampedSwiGLUExpertsConfig, GatedExpertsConfig
from moe_ffn.experts.mlp import MLPExpertsConfig

__all__ = [
    "ClampedSwiGLUExpertsConfig",
    "Experts",
    "ExpertsConfig",
    "GatedExpertsConfig",
    "MLPExpertsConfig",
]
