"""Kinds of experts; each weight stacks the E experts of a layer. Each file has related kinds.

To add a kind, add a file to this folder and import its config in this `__init__.py`.
"""

from moe_ffn.experts.base import Experts as Experts
from moe_ffn.experts.base import ExpertsConfig as ExpertsConfig
from moe_ffn.experts.embeddings import SingleNeuronExpertsConfig as SingleNeuronExpertsConfig
from moe_ffn.experts.embeddings import ValueExpertsConfig as ValueExpertsConfig
from moe_ffn.experts.low_precision import (
    FakeQuantizedExpertsConfig as FakeQuantizedExpertsConfig,
)
from moe_ffn.experts.matrices import ClampedSwiGLUExpertsConfig as ClampedSwiGLUExpertsConfig
from moe_ffn.experts.matrices import GatedExpertsConfig as GatedExpertsConfig
from moe_ffn.experts.matrices import MLPExpertsConfig as MLPExpertsConfig
from moe_ffn.experts.matrices import (
    SoftCappedSwiGLUExpertsConfig as SoftCappedSwiGLUExpertsConfig,
)
from moe_ffn.experts.wrappers import InputWeightedExpertsConfig as InputWeightedExpertsConfig
from moe_ffn.experts.wrappers import LatentExpertsConfig as LatentExpertsConfig
from moe_ffn.experts.wrappers import NormedExpertsConfig as NormedExpertsConfig
