"""Kinds of experts; each weight stacks the E experts of a layer. Each file has related kinds.

To add a kind, add a file to this folder and import its config in this `__init__.py`.
"""

from moe_ffn.experts.base import Experts, ExpertsConfig
from moe_ffn.experts.embeddings import SingleNeuronExpertsConfig, ValueExpertsConfig
from moe_ffn.experts.low_precision import FakeQuantizedExpertsConfig
from moe_ffn.experts.matrices import (
    ClampedSwiGLUExpertsConfig,
    GatedExpertsConfig,
    MLPExpertsConfig,
    SoftCappedSwiGLUExpertsConfig,
)
from moe_ffn.experts.wrappers import (
    InputWeightedExpertsConfig,
    LatentExpertsConfig,
    NormedExpertsConfig,
)

__all__ = [
    "ClampedSwiGLUExpertsConfig",
    "Experts",
    "ExpertsConfig",
    "FakeQuantizedExpertsConfig",
    "GatedExpertsConfig",
    "InputWeightedExpertsConfig",
    "LatentExpertsConfig",
    "MLPExpertsConfig",
    "NormedExpertsConfig",
    "SingleNeuronExpertsConfig",
    "SoftCappedSwiGLUExpertsConfig",
    "ValueExpertsConfig",
]
